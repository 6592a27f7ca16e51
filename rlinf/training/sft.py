"""`rlinf sft`: imitation of a dataset by any policy, with its normalisation statistics."""

from __future__ import annotations

import json
import math
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from rlinf.config.check import policy_spec
from rlinf.config.schema import Config, SftConfig
from rlinf.data.noise import BatchNoise, Noise
from rlinf.data.types import ChunkIndex
from rlinf.demos.dataset import Batch, DemoDataset
from rlinf.demos.hub import find_dataset
from rlinf.demos.probe import Probe
from rlinf.envs.config import NO_SIMULATOR
from rlinf.envs.spec import env_spec, selection_ids
from rlinf.errors import UserError
from rlinf.models.action_path import ActionPath
from rlinf.models.config import ModelConfig
from rlinf.models.policy import Policy, find_policy
from rlinf.progress import report
from rlinf.runtime.stop_signals import stop_on_signals
from rlinf.runtime.worker import limit_threads
from rlinf.storage.atomic_folder import atomic_folder, check_output
from rlinf.training.optim import MasterAdamW, half_cosine
from rlinf.training.sft_checkpoints import Checkpoints, check_unfinished
from rlinf.training.state_readout import StateReadout, check_state_loss

Evaluate = Callable[[Policy], float]
Progress = Callable[[str], None]
OnStep = Callable[[int, dict[str, float]], None]
MAX_BISECTIONS = 8
READ_EVERY = 50  # steps whose metrics are read from a GPU together, or fewer: reading waits for it
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
    on_step: OnStep = lambda step, metrics: None,
    overwrite: bool = False,
    resume: bool = False,
) -> Path:
    """Train `actor.model` on `sft.dataset` and save it to `sft.output`; deterministic by `runner.seed`.

    `evaluate` gives a success rate every `sft.eval_interval` steps; by default the policy plays training layouts. An
    output that is not empty is refused, or replaced in one step at the end with `overwrite`. `resume` goes on from the
    newest checkpoint of an earlier call, where there is one. SIGTERM, SIGHUP and Ctrl-C save the step they come in and
    end the program as they would without that.
    """
    check_settings(cfg, overwrite=overwrite, resume=resume)
    sft, output = cfg.sft, Path(cfg.sft.output)
    limit_threads(cfg)
    start = time.perf_counter()
    data = DemoDataset(find_dataset(sft.dataset, "sft.dataset"), sft.features)
    on_progress(f"dataset: {data.num_episodes} episodes, {len(data)} frames; {data.features.text()}")
    model = fitted_model(cfg, data)
    cfg = replace(cfg, actor=replace(cfg.actor, model=model))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with atomic_folder(output, what=f"sft.output={output}") as folder:  # first, so that a bad path costs no training
        checkpoints = Checkpoints(cfg, data.describe(), resume=resume, warn=on_progress)
        policy = find_policy(model.model_type).build(model, device, seed=cfg.runner.seed + cfg.actor.seed)
        if sft.state_loss:
            check_state_loss(sft, data, policy)
        on_progress(data.keep(device, policy.resize_images))
        policy.fit_statistics(*rows_for_statistics(policy, data))
        with _evaluator(cfg, evaluate) as rate, torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(cfg.runner.seed)  # for LoRA's dropout; everything else draws from `Noise`
            log = _Training(policy, data, cfg, rate, checkpoints, on_progress, on_step).run()
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
    checkpoints.finish()
    return output


def check_settings(cfg: Config, *, overwrite: bool, resume: bool = False, log: Path | None = None) -> None:
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
    check_unfinished(Path(sft.output), overwrite=overwrite, resume=resume)
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


class _Trainer:
    """AdamW with linear warm-up. A GPU is not waited for but to read the metrics of many steps at once."""

    def __init__(self, policy: Policy, data: DemoDataset, cfg: Config) -> None:
        self.policy, self.cfg = policy, cfg
        self.params = [p for _, p in policy.trainable_parameters()]
        self.device = self.params[0].device
        groups = [{"params": self.params, "names": [name for name, _ in policy.trainable_parameters()]}]
        self.readout: StateReadout | None = None
        if cfg.sft.state_loss:
            assert data.privileged is not None
            assert policy.image_width is not None
            self.readout = StateReadout(policy.image_width, data.privileged, self.device)
            names, layers = zip(*self.readout.named_parameters(prefix="readout"), strict=True)
            groups.append({"params": list(layers), "names": list(names)})
        self.optimizer = MasterAdamW(groups, lr=cfg.sft.lr, weight_decay=cfg.sft.weight_decay)
        self._unread: list[tuple[int, float, torch.Tensor, torch.Tensor]] = []  # step, lr, loss and gradient norm

    def step(self, step: int, batch: Batch) -> None:
        """One gradient step, the `step`-th from 0."""
        sft = self.cfg.sft
        lr = sft.lr * min(1.0, (step + 1) / max(sft.warmup_steps, 1))
        if sft.lr_scheduler == "cosine":
            lr *= half_cosine(math.pi * step / sft.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        loss = self._loss(batch, step)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.optimizer.param_groups[0]["params"], sft.clip_grad)
        self.optimizer.step()
        self._unread.append((step, lr, loss.detach(), norm))

    @property
    def should_be_read(self) -> bool:
        """Whether metrics are at hand, or have become many."""
        return self.device.type == "cpu" or len(self._unread) >= READ_EVERY

    def read(self) -> list[tuple[int, dict[str, float]]]:
        """Steps, counted from 1, and their metrics since the last call; FloatingPointError where one is not finite."""
        if not self._unread:
            return []
        steps, lrs, losses, norms = zip(*self._unread, strict=True)
        self._unread.clear()
        numbers = torch.stack((torch.stack(losses).float(), torch.stack(norms).float())).tolist()
        out = []
        for step, lr, loss, norm in zip(steps, lrs, *numbers, strict=True):
            if not math.isfinite(norm):
                told = f"the imitation gradient is not finite at step {step}; lower sft.lr={self.cfg.sft.lr}"
                raise FloatingPointError(told)
            out.append((step + 1, {"train/sft/loss": loss, "train/sft/grad_norm": norm, "train/sft/lr": lr}))
        return out

    def tensors(self) -> dict[str, torch.Tensor]:
        """What a checkpoint holds of it beside policy and optimiser."""
        out = {"rng_cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            out["rng_cuda"] = torch.cuda.get_rng_state(self.device)
        return out | ({} if self.readout is None else dict(self.readout.state_dict()))

    def load_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take them back."""
        torch.set_rng_state(tensors["rng_cpu"])
        if self.device.type == "cuda" and "rng_cuda" in tensors:
            torch.cuda.set_rng_state(tensors["rng_cuda"], self.device)
        if self.readout is not None:
            self.readout.load_state_dict({name: tensors[name] for name in self.readout.state_dict()})

    def _loss(self, batch: Batch, step: int) -> torch.Tensor:
        """Mean imitation loss of a batch; every sample is used with `noise_draws` draws of (noise, time)."""
        cfg, readout, rows = self.cfg, self.readout, len(batch.rows)
        noise: Noise
        if self.device.type == "cpu":
            noise = Noise(seed=cfg.runner.seed, at=ChunkIndex(step, 0, 0), env_ids=range(rows), stream="sft")
        else:
            noise = BatchNoise(seed=cfg.runner.seed, step=step, rows=rows, device=self.device)
        state_loss = None if readout is None else (lambda tokens: cfg.sft.state_loss * readout.loss(tokens, batch.rows))
        return self.policy.sft_loss(
            batch.obs,
            batch.actions,
            is_target=batch.is_target,
            noise=noise,
            draws=cfg.sft.noise_draws,
            image_token_loss=state_loss,
        )


class SuccessCheck:
    """Evaluates the policy while it is trained, and decides when its success is where it was asked to be."""

    def __init__(self, policy: Policy, sft: SftConfig, rate: Evaluate, log: SftLog, on_progress: Progress) -> None:
        self.policy, self.sft, self.rate, self.log, self.on_progress = policy, sft, rate, log, on_progress
        self.below, self.below_step = self._weights(), 0  # the last weights below the band sft.stop_at_success..most

    def continue_from(self, below: Mapping[str, torch.Tensor], step: int) -> None:
        """Take the last weights below the band from a checkpoint that has them, of the step they were found at."""
        if below.keys() == self.below.keys():
            self.below_step = step
            for name, weights in self.below.items():
                weights.copy_(below[name])

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


class _Training:
    """Gradient steps, from the first or from those of a checkpoint on; an evaluation that passes ends them."""

    def __init__(
        self,
        policy: Policy,
        data: DemoDataset,
        cfg: Config,
        rate: Evaluate | None,
        checkpoints: Checkpoints,
        on_progress: Progress,
        on_step: OnStep,
    ) -> None:
        self.policy, self.data, self.cfg, self.checkpoints = policy, data, cfg, checkpoints
        self.on_progress, self.on_step = on_progress, on_step
        self.log, self.trainer = SftLog(), _Trainer(policy, data, cfg)
        self.check = SuccessCheck(policy, cfg.sft, rate, self.log, on_progress) if rate is not None else None
        self.recent: list[float] = []  # losses since the log's last entry
        self.stop_signal: signal.Signals | None = None
        if checkpoints.found is not None:
            self._load()

    def run(self) -> SftLog:
        """All steps that are left; a signal saves the step that it comes in and ends the program."""
        sft, log, passed = self.cfg.sft, self.log, False
        self.policy.train()
        batches = self.data.batches(
            sft.batch_size, self.policy.action_horizon, seed=self.cfg.runner.seed, first=log.steps
        )
        with stop_on_signals(self._request_stop), closing(batches):
            while log.steps < sft.steps and not passed:
                self.trainer.step(log.steps, next(batches))
                log.steps += 1
                report("imitation", log.steps, sft.steps)
                logs = log.steps % sft.log_interval == 0 or log.steps == sft.steps
                evaluates = self.check is not None and log.steps % sft.eval_interval == 0
                saves = sft.save_interval > 0 and log.steps % sft.save_interval == 0
                if logs or evaluates or saves or self.trainer.should_be_read:
                    self._read()
                if logs:
                    log.loss.append((log.steps, sum(self.recent) / len(self.recent)))
                    self.on_progress(f"sft step {log.steps}/{sft.steps}  loss {log.loss[-1][1]:.4f}")
                    self.recent = []
                if evaluates:
                    assert self.check is not None
                    passed = self.check.passed()
                stops = self.stop_signal is not None
                if (saves or stops) and log.steps < sft.steps and not passed:
                    self._read()
                    self._save()
                    if stops:
                        self._leave()
        self.policy.eval()
        return log

    def _read(self) -> None:
        for step, metrics in self.trainer.read():
            self.recent.append(metrics["train/sft/loss"])
            self.on_step(step, metrics)

    def _request_stop(self, number: signal.Signals) -> None:
        self.stop_signal = self.stop_signal or number

    def _save(self) -> None:
        """Save everything that the next step depends on."""
        progress: dict[str, Any] = {"log": asdict(self.log), "recent": self.recent}
        below = {} if self.check is None else self.check.below
        if self.check is not None:
            progress["below_step"] = self.check.below_step
        self.checkpoints.save(
            self.log.steps,
            self.policy,
            self.trainer.optimizer,
            tensors=self.trainer.tensors(),
            below=below,
            progress=progress,
        )

    def _load(self) -> None:
        """Take over what `_save` wrote."""
        progress, tensors, below = self.checkpoints.load(self.policy, self.trainer.optimizer)
        self.trainer.load_tensors(tensors)
        self.recent = progress["recent"]
        for name, value in progress["log"].items():
            setattr(self.log, name, [tuple(entry) for entry in value] if isinstance(value, list) else value)
        if self.check is not None:
            self.check.continue_from(below, progress.get("below_step", 0))
        self.on_progress(f"continues after step {self.log.steps}, from {self.checkpoints.found}")

    def _leave(self) -> None:
        """End the program as the signal would have."""
        assert self.stop_signal is not None
        self.on_progress(f"stopped after step {self.log.steps}, saved in {self.checkpoints.found}; --resume continues")
        if self.stop_signal == signal.SIGINT:
            raise KeyboardInterrupt
        sys.exit(128 + self.stop_signal)  # as a shell reports a process that the signal has ended


@contextmanager
def _evaluator(cfg: Config, evaluate: Evaluate | None) -> Iterator[Evaluate | None]:
    """The given evaluation, or play on `sft.eval_trials` training layouts; None when `eval_interval` is 0."""
    if not cfg.sft.eval_interval:
        yield None
    elif evaluate is not None:
        yield evaluate
    else:
        train, count = cfg.env.train, cfg.sft.eval_trials
        ids = selection_ids(env_spec(train), count, cfg.runner.seed)
        if isinstance(train.task_suite_name, list):  # env.eval may play others
            listed = replace(cfg.env.eval, task_suite_name=train.task_suite_name, init_params=train.init_params)
            cfg = replace(cfg, env=replace(cfg.env, eval=listed))
        with Probe(cfg, ids) as probe:
            yield lambda policy: probe.play_policy(policy).rate
