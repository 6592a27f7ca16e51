"""`rlinf sft`: imitation of a dataset by any policy, with its normalisation statistics."""

from __future__ import annotations

import copy
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from rlinf.config.schema import Config
from rlinf.data.noise import Noise
from rlinf.data.types import Moment
from rlinf.demos.dataset import DemoDataset
from rlinf.demos.probe import Probe
from rlinf.envs.spec import env_spec
from rlinf.errors import UserError
from rlinf.models.policy import Policy, find_policy

Evaluate = Callable[[Policy], float]


@dataclass
class _Log:
    """What sft.json tells of a run."""

    loss: list[tuple[int, float]] = field(default_factory=list)  # (step, mean since the last entry)
    success: list[tuple[int, float]] = field(default_factory=list)  # (step, success rate on training layouts)
    steps: int = 0  # gradient steps taken, those undone by a step back included
    stopped_at_success: bool = False


def train_sft(
    cfg: Config,
    *,
    evaluate: Evaluate | None = None,
    on_progress: Callable[[str], None] = print,
    on_step: Callable[[int, dict[str, float]], None] = lambda step, metrics: None,
) -> Path:
    """Train `actor.model` on `sft.dataset` and save it to `sft.output`; deterministic by `runner.seed`.

    `evaluate` gives a success rate every `sft.eval_interval` steps; by default the policy plays training layouts.
    """
    sft, output = cfg.sft, Path(cfg.sft.output)
    if sft.stop_at_success is not None and not sft.eval_interval:
        raise UserError(f"sft.stop_at_success={sft.stop_at_success} needs evaluations: set sft.eval_interval")
    if sft.stop_at_most is not None and (sft.stop_at_success is None or sft.stop_at_most <= sft.stop_at_success):
        raise UserError(f"sft.stop_at_most={sft.stop_at_most} must be above sft.stop_at_success={sft.stop_at_success}")
    if output.exists() and not (output / "sft.json").is_file():
        raise UserError(f"sft.output={output} exists and was not made by `rlinf sft`: choose another folder")
    data, start = DemoDataset(sft.dataset), time.perf_counter()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = cfg.actor.model
    policy = find_policy(model.model_type).build(model, device, seed=cfg.runner.seed + cfg.actor.seed)
    policy.fit_statistics(data.states, data.actions)
    with _evaluator(cfg, evaluate) as rate:
        log = _train(policy, data, cfg, rate, on_progress, on_step)
    record = {
        "dataset": str(sft.dataset),
        "episodes": data.num_episodes,
        "frames": len(data),
        "seed": cfg.runner.seed,
        "seconds": round(time.perf_counter() - start, 1),
        "config": asdict(sft),
        **asdict(log),
    }
    _save(policy, output, record)
    return output


class _Trainer:
    """AdamW with linear warm-up on a dataset; can go back to an earlier point."""

    def __init__(self, policy: Policy, data: DemoDataset, cfg: Config) -> None:
        self.policy, self.data, self.cfg = policy, data, cfg
        self.params = [p for _, p in policy.trainable_parameters()]
        self.optimizer = torch.optim.AdamW(self.params, lr=cfg.sft.lr, weight_decay=cfg.sft.weight_decay)
        self.batches = data.row_batches(cfg.sft.batch_size, seed=cfg.runner.seed)
        self.pace = 1.0  # factor on the learning rate

    def step(self, step: int) -> dict[str, float]:
        """One gradient step, the `step`-th from 0; returns its metrics."""
        sft = self.cfg.sft
        lr = sft.lr * self.pace * min(1.0, (step + 1) / max(sft.warmup_steps, 1))
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        loss = self._loss(next(self.batches), step)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(self.params, sft.clip_grad))
        if not math.isfinite(norm):
            raise FloatingPointError(f"the imitation gradient is not finite at step {step}; lower sft.lr={sft.lr}")
        self.optimizer.step()
        return {"train/sft/loss": float(loss.detach()), "train/sft/grad_norm": norm, "train/sft/lr": lr}

    def snapshot(self) -> _Snapshot:
        """The weights and the optimiser as they are."""
        return _Snapshot(copy.deepcopy(self.policy.state_dict()), copy.deepcopy(self.optimizer.state_dict()))

    def restore(self, snapshot: _Snapshot) -> None:
        """Go back to a snapshot; the data order is not rewound."""
        self.policy.load_state_dict(snapshot.weights)
        self.optimizer.load_state_dict(copy.deepcopy(snapshot.optimizer))

    def _loss(self, rows: list[int], step: int) -> torch.Tensor:
        """Mean imitation loss of a batch; every sample meets `noise_draws` draws of (noise, time)."""
        cfg, device = self.cfg, self.params[0].device
        obs, actions = self.data.batch(rows, self.policy.spec.num_action_chunks)
        noise = Noise(
            seed=cfg.runner.seed, at=Moment(step, 0, 0), env_ids=range(len(rows)), device=device, stream="sft"
        )
        return self.policy.sft_loss(obs.to(device), actions.to(device), noise=noise, draws=cfg.sft.noise_draws)


@dataclass(frozen=True)
class _Snapshot:
    weights: dict[str, torch.Tensor]
    optimizer: dict[str, Any]


def _train(
    policy: Policy,
    data: DemoDataset,
    cfg: Config,
    rate: Evaluate | None,
    on_progress: Callable[[str], None],
    on_step: Callable[[int, dict[str, float]], None],
) -> _Log:
    """Gradient steps with an evaluation every `eval_interval`.

    With a success band (stop_at_success, stop_at_most) training ends inside it; above it, it goes back to the last
    point below and continues half as fast, because success jumps within a few steps.
    """
    sft, log, trainer = cfg.sft, _Log(), _Trainer(policy, data, cfg)
    recent: list[float] = []
    below: _Snapshot | None = None
    interval = next_evaluation = sft.eval_interval
    policy.train()
    while log.steps < sft.steps and not log.stopped_at_success:
        metrics = trainer.step(log.steps)
        recent.append(metrics["train/sft/loss"])
        log.steps += 1
        on_step(log.steps, metrics)
        if log.steps % sft.log_interval == 0 or log.steps == sft.steps:
            log.loss.append((log.steps, sum(recent) / len(recent)))
            on_progress(f"sft step {log.steps}/{sft.steps}  loss {log.loss[-1][1]:.4f}")
            recent = []
        if rate is None or log.steps < next_evaluation:
            continue
        policy.eval()
        success = rate(policy)
        policy.train()
        log.success.append((log.steps, success))
        on_progress(f"sft step {log.steps}/{sft.steps}  success {100 * success:.1f} % on training layouts")
        if sft.stop_at_most is not None and success > sft.stop_at_most and below is not None:
            trainer.restore(below)
            trainer.pace, interval = trainer.pace / 2, max(interval // 2, 1)
        elif sft.stop_at_success is not None and success >= sft.stop_at_success:
            log.stopped_at_success = True
        elif sft.stop_at_most is not None:
            below = trainer.snapshot()
        next_evaluation = log.steps + interval
    policy.eval()
    return log


@contextmanager
def _evaluator(cfg: Config, evaluate: Evaluate | None) -> Iterator[Evaluate | None]:
    """The given evaluation, or play on `sft.eval_trials` training layouts; None when `eval_interval` is 0."""
    if not cfg.sft.eval_interval:
        yield None
    elif evaluate is not None:
        yield evaluate
    else:
        ids, count = env_spec(cfg.env.train).reset_ids["train"], cfg.sft.eval_trials
        first = cfg.runner.seed * count
        with Probe(cfg, [ids[(first + i) % len(ids)] for i in range(count)]) as probe:
            yield lambda policy: probe.play_policy(policy).rate


def _save(policy: Policy, output: Path, record: dict[str, Any]) -> None:
    """Write the policy under a temporary name, then put it in place of an earlier one."""
    work = output.with_name(f".tmp-{output.name}")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    policy.save_pretrained(work)
    (work / "sft.json").write_text(json.dumps(record, indent=1))
    if output.exists():
        shutil.rmtree(output)
    work.rename(output)
