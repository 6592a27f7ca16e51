"""`rlinf sft`: imitation of a dataset by any policy, with its normalisation statistics."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from torch import nn

from rlinf.config.check import policy_spec
from rlinf.config.schema import Config, SftConfig
from rlinf.data.noise import Noise
from rlinf.data.types import ChunkIndex
from rlinf.demos.dataset import DemoDataset
from rlinf.demos.hub import find_dataset
from rlinf.demos.probe import Probe
from rlinf.envs.config import NO_SIMULATOR
from rlinf.envs.spec import env_spec
from rlinf.errors import UserError
from rlinf.models.action_path import ActionPath
from rlinf.models.config import ModelConfig
from rlinf.models.policy import Policy, find_policy
from rlinf.progress import report
from rlinf.runtime.worker import limit_threads
from rlinf.storage.atomic_folder import atomic_folder, check_output
from rlinf.training.optim import MasterAdamW, half_cosine

Evaluate = Callable[[Policy], float]
Progress = Callable[[str], None]
MAX_BISECTIONS = 8
MAX_CHUNK_VALUES = 1 << 25  # numbers that statistics of relative actions are computed from; more are thinned out


@dataclass
class SftLog:
    """What sft.json tells of a run."""

    loss: list[tuple[int, float]] = field(default_factory=list)  # (step, mean since the last entry)
    success: list[tuple[int, float]] = field(default_factory=list)  # (step, success rate on training layouts)
    steps: int = 0
    stopped_at_success: bool = False  # the success asked for was reached: within the band, where there is one


def train_sft(
    cfg: Config,
    *,
    evaluate: Evaluate | None = None,
    on_progress: Progress = print,
    on_step: Callable[[int, dict[str, float]], None] = lambda step, metrics: None,
    overwrite: bool = False,
) -> Path:
    """Train `actor.model` on `sft.dataset` and save it to `sft.output`; deterministic by `runner.seed`.

    `evaluate` gives a success rate every `sft.eval_interval` steps; by default the policy plays training layouts. An
    output that is not empty is refused, or replaced in one step at the end with `overwrite`.
    """
    check_settings(cfg, overwrite=overwrite)
    sft, output = cfg.sft, Path(cfg.sft.output)
    limit_threads(cfg)
    start = time.perf_counter()
    data = DemoDataset(find_dataset(sft.dataset, "sft.dataset"), sft.features)
    on_progress(f"dataset: {data.num_episodes} episodes, {len(data)} frames; {data.features.text()}")
    model = fitted_model(cfg, data)
    cfg = replace(cfg, actor=replace(cfg.actor, model=model))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with atomic_folder(output, what=f"sft.output={output}") as folder:  # first, so that a bad path costs no training
        policy = find_policy(model.model_type).build(model, device, seed=cfg.runner.seed + cfg.actor.seed)
        if sft.state_loss:
            _check_state_loss(sft, data, policy)
        data.keep(device, policy.resize_images)
        policy.fit_statistics(*rows_for_statistics(policy, data))
        with _evaluator(cfg, evaluate) as rate, torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(cfg.runner.seed)  # for LoRA's dropout; everything else draws from `Noise`
            log = _train(policy, data, cfg, rate, on_progress, on_step)
        policy.save_pretrained(folder)
        record = {
            "dataset": str(sft.dataset),
            **data.describe(),
            "seed": cfg.runner.seed,
            "seconds": round(time.perf_counter() - start, 1),
            "config": asdict(sft),
            **asdict(log),
        }
        (folder / "sft.json").write_text(json.dumps(record, indent=1))
    return output


def check_settings(cfg: Config, *, overwrite: bool, log: Path | None = None) -> None:
    """Refuse an evaluation that cannot be, and an output that holds something to keep; `log` is the log's folder."""
    sft = cfg.sft
    if sft.stop_at_success is not None and not sft.eval_interval:
        raise UserError(f"sft.stop_at_success={sft.stop_at_success} needs evaluations: set sft.eval_interval")
    if sft.stop_at_most is not None and (sft.stop_at_success is None or sft.stop_at_most <= sft.stop_at_success):
        raise UserError(f"sft.stop_at_most={sft.stop_at_most} must be above sft.stop_at_success={sft.stop_at_success}")
    inputs = {
        "sft.dataset": sft.dataset,
        "actor.model.model_path": cfg.actor.model.model_path,
        "runner.logger.log_path": log,
    }
    given = {name: path for name, path in inputs.items() if path}
    check_output(Path(sft.output), "sft.output", "policy", overwrite=overwrite, inputs=given)


def fitted_model(cfg: Config, data: DemoDataset) -> ModelConfig:
    """The model to train, with the dataset's dimensions where there is no simulator; it must fit the dataset."""
    model, shape, dataset = cfg.actor.model, data.shape, f"sft.dataset={cfg.sft.dataset}"
    if cfg.env.train.env_type == NO_SIMULATOR:
        model = model.for_data(shape)
    if model.action_dim != shape.action_dim:
        raise UserError(
            f"actor.model.action_dim={model.action_dim} must be {shape.action_dim}, the action columns of {dataset}; "
            f"set actor.model.action_dim={shape.action_dim}"
        )
    policy = policy_spec(replace(cfg, actor=replace(cfg.actor, model=model)))
    for key, reads, has, what in (
        (policy.images_key, policy.num_images, shape.num_cameras, "cameras"),
        (policy.state_key, policy.state_dim, shape.state_dim, "state columns"),
    ):
        if reads > has:
            raise UserError(f"{key}={reads} must be at most {has}, the {what} of {dataset}")
    data.use_cameras(policy.num_images)
    return model


def rows_for_statistics(policy: Policy | ActionPath, data: DemoDataset) -> tuple[torch.Tensor | None, torch.Tensor]:
    """States and actions to normalise by: whole chunks where actions are relative, as openpi does."""
    if not policy.relative_actions:
        return data.states, data.actions
    horizon, columns = policy.action_horizon, data.actions.shape[1]
    rows = range(0, len(data), 1 + len(data) * horizon * columns // MAX_CHUNK_VALUES)
    return None if data.states is None else data.states[list(rows)], data.action_chunks(rows, horizon)[0]


def _check_state_loss(sft: SftConfig, data: DemoDataset, policy: Policy) -> None:
    """Refuse a dataset without a simulator state that changes, and a policy whose image tokens do not learn."""
    if data.privileged is None:
        raise UserError(
            f"sft.state_loss={sft.state_loss} needs the simulator's state, which sft.dataset={sft.dataset} does not "
            "hold: collect it again with `rlinf collect`, or set sft.state_loss=0"
        )
    if not _changing(data.privileged).any():
        raise UserError(f"sft.state_loss={sft.state_loss}: the simulator's state never changes in {sft.dataset}")
    if policy.image_width is None:
        raise UserError(f"sft.state_loss={sft.state_loss} must be 0: only openpi policies that learn to see take it")


def _changing(states: torch.Tensor) -> torch.Tensor:
    """Which columns of f32 [M, K] change, bool [K]."""
    return states.std(0) > 1e-4


class StateReadout(nn.Module):
    """A linear layer that predicts the simulator's privileged state from the mean image token."""

    def __init__(self, width: int, states: torch.Tensor, device: torch.device) -> None:
        super().__init__()
        states = states[:, _changing(states)]
        self.targets = ((states - states.mean(0)) / states.std(0)).to(device)  # f32 [M, columns]
        self.linear = nn.Linear(width, self.targets.shape[1], device=device)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def loss(self, image_tokens: torch.Tensor, rows: list[int]) -> torch.Tensor:
        """Mean squared error of the normalised columns, of mean image tokens [B, W] at those frames."""
        return (self.linear(image_tokens) - self.targets[rows]).square().mean()


class _Trainer:
    """AdamW with linear warm-up on a dataset."""

    def __init__(self, policy: Policy, data: DemoDataset, cfg: Config) -> None:
        self.policy, self.data, self.cfg = policy, data, cfg
        self.params = [p for _, p in policy.trainable_parameters()]
        groups = [{"params": self.params}]
        self.readout: StateReadout | None = None
        if cfg.sft.state_loss:
            assert data.privileged is not None
            assert policy.image_width is not None
            self.readout = StateReadout(policy.image_width, data.privileged, self.params[0].device)
            groups.append({"params": list(self.readout.parameters())})
        self.optimizer = MasterAdamW(groups, lr=cfg.sft.lr, weight_decay=cfg.sft.weight_decay)
        self.batches = data.row_batches(cfg.sft.batch_size, seed=cfg.runner.seed)

    def step(self, step: int) -> dict[str, float]:
        """One gradient step, the `step`-th from 0; returns its metrics."""
        sft = self.cfg.sft
        lr = sft.lr * min(1.0, (step + 1) / max(sft.warmup_steps, 1))
        if sft.lr_scheduler == "cosine":
            lr *= half_cosine(math.pi * step / sft.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        loss = self._loss(next(self.batches), step)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(self.optimizer.param_groups[0]["params"], sft.clip_grad))
        if not math.isfinite(norm):
            raise FloatingPointError(f"the imitation gradient is not finite at step {step}; lower sft.lr={sft.lr}")
        self.optimizer.step()
        return {"train/sft/loss": float(loss.detach()), "train/sft/grad_norm": norm, "train/sft/lr": lr}

    def _loss(self, rows: list[int], step: int) -> torch.Tensor:
        """Mean imitation loss of a batch; every sample is used with `noise_draws` draws of (noise, time)."""
        cfg, device, readout = self.cfg, self.params[0].device, self.readout
        obs, actions, is_target = self.data.batch(rows, self.policy.action_horizon)
        noise = Noise(
            seed=cfg.runner.seed, at=ChunkIndex(step, 0, 0), env_ids=range(len(rows)), device=device, stream="sft"
        )
        state_loss = None if readout is None else (lambda tokens: cfg.sft.state_loss * readout.loss(tokens, rows))
        return self.policy.sft_loss(
            obs.to(device),
            actions.to(device),
            is_target=is_target.to(device),
            noise=noise,
            draws=cfg.sft.noise_draws,
            image_token_loss=state_loss,
        )


class SuccessCheck:
    """Evaluates the policy while it is trained, and decides when its success is where it was asked to be."""

    def __init__(self, policy: Policy, sft: SftConfig, rate: Evaluate, log: SftLog, on_progress: Progress) -> None:
        self.policy, self.sft, self.rate, self.log, self.on_progress = policy, sft, rate, log, on_progress
        self.below, self.below_step = self._weights(), 0  # the last weights below the band sft.stop_at_success..most

    def passed(self) -> bool:
        """Evaluate the policy; True once training can stop. `log.stopped_at_success` says whether it is good enough."""
        low, high = self.sft.stop_at_success, self.sft.stop_at_most
        success = self._evaluate(f"sft step {self.log.steps}/{self.sft.steps}")
        if low is None or success < low:
            self.below, self.below_step = self._weights(), self.log.steps
            return False
        self.log.stopped_at_success = high is None or success <= high or self._interpolate_back(low, high, success)
        return True

    def _interpolate_back(self, low: float, high: float, success: float) -> bool:
        """Bisect the straight line from the last weights below the band to the current ones, which are above it.

        Success jumps within a few gradient steps but hardly along the line, so some point of it should lie inside. If
        none of those tried does, the policy keeps the weights whose success came nearest to the band: returns False.
        """
        above, left, right = self._weights(), 0.0, 1.0

        def move_to(share: float) -> None:
            with torch.no_grad():
                for name, parameter in self.policy.trainable_parameters():
                    parameter.copy_(torch.lerp(self.below[name], above[name], share))

        tried = [(success - high, 1.0, success)]  # distance to the band, share of the way, success
        for _ in range(MAX_BISECTIONS):
            middle = (left + right) / 2
            move_to(middle)
            success = self._evaluate(
                f"sft success is above {100 * high:.0f} %: weights {100 * middle:.1f} % of the way from step "
                f"{self.below_step} to step {self.log.steps}"
            )
            if low <= success <= high:
                return True
            tried.append((max(low - success, success - high), middle, success))
            left, right = (left, middle) if success > high else (middle, right)
        _, nearest, success = min(tried)
        move_to(nearest)
        self.on_progress(
            f"sft found no weights with a success of {100 * low:.0f} to {100 * high:.0f} % (sft.stop_at_success, "
            f"sft.stop_at_most): keeping those with {100 * success:.1f} %; a wider band or more sft.eval_trials help"
        )
        return False

    def _evaluate(self, what: str) -> float:
        self.policy.eval()
        success = self.rate(self.policy)
        self.policy.train()
        self.log.success.append((self.log.steps, success))
        self.on_progress(f"{what}  success {100 * success:.1f} % on training layouts")
        return success

    def _weights(self) -> dict[str, torch.Tensor]:
        """A copy of the trainable weights; nothing without sft.stop_at_most, for nothing is interpolated then."""
        if self.sft.stop_at_most is None:
            return {}
        return {name: p.detach().clone() for name, p in self.policy.trainable_parameters()}


def _train(
    policy: Policy,
    data: DemoDataset,
    cfg: Config,
    rate: Evaluate | None,
    on_progress: Progress,
    on_step: Callable[[int, dict[str, float]], None],
) -> SftLog:
    """Gradient steps, with an evaluation every `eval_interval`; one that passes ends them."""
    sft, log, trainer = cfg.sft, SftLog(), _Trainer(policy, data, cfg)
    check = SuccessCheck(policy, sft, rate, log, on_progress) if rate is not None else None
    recent: list[float] = []
    policy.train()
    stopped = False
    while log.steps < sft.steps and not stopped:
        metrics = trainer.step(log.steps)
        recent.append(metrics["train/sft/loss"])
        log.steps += 1
        on_step(log.steps, metrics)
        report("imitation", log.steps, sft.steps)
        if log.steps % sft.log_interval == 0 or log.steps == sft.steps:
            log.loss.append((log.steps, sum(recent) / len(recent)))
            on_progress(f"sft step {log.steps}/{sft.steps}  loss {log.loss[-1][1]:.4f}")
            recent = []
        if check is not None and log.steps % sft.eval_interval == 0:
            stopped = check.passed()
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
        train, count = cfg.env.train, cfg.sft.eval_trials
        ids, first = env_spec(train).reset_ids["train"], cfg.runner.seed * count
        if isinstance(train.task_suite_name, list):  # env.eval may play others
            listed = replace(cfg.env.eval, task_suite_name=train.task_suite_name, init_params=train.init_params)
            cfg = replace(cfg, env=replace(cfg.env, eval=listed))
        with Probe(cfg, [ids[(first + i) % len(ids)] for i in range(count)]) as probe:
            yield lambda policy: probe.play_policy(policy).rate
