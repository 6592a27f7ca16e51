"""The last lines of every command: what came out, where it lies, how long it took, and the next command to paste."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from rlinf.commands.run_folders import run_settings
from rlinf.config.schema import Config
from rlinf.metrics.run_log import RunLog
from rlinf.metrics.stats import Rate
from rlinf.storage.atomic_folder import first_free

# Settings of one command that the next one has no use for: how long it runs, and where it reads and writes.
NEW_LINE = "\n"
KEPT_OF_RUNNER = ("runner.seed", "runner.logger.logger_backends", "runner.logger.experiment_name")


def print_summary(
    *,
    started: float,
    success: object = None,
    training: object = None,
    before: object = None,
    after: object = None,
    dataset: Path | None = None,
    policy: Path | None = None,
    checkpoint: Path | None = None,
    video: Path | None = None,
    report: Path | None = None,
    numbers: Path | None = None,
    next_command: Sequence[str],
) -> None:
    """Print a row for all that a command made. `started`: Unix time when it began; `next_command` word by word."""
    rows = {
        "success": success,
        "training": training,
        "before": before,
        "after": after,
        "dataset": dataset,
        "policy": policy,
        "checkpoint": checkpoint,
        "video": video,
        "report": report,
        "numbers": numbers,
        "seconds": f"{time.time() - started:.1f}",
        "next": shlex.join(next_command),
    }
    print()
    for name, value in rows.items():
        if value is not None:
            print(f"{name:<11} {str(value).replace(NEW_LINE, NEW_LINE + 12 * ' ')}")


def evaluation_command(config: str, overrides: Sequence[str], policy: Path) -> list[str]:
    """Evaluates `policy` under the settings of the command that made it."""
    batches = ["actor.micro_batch_size", "actor.global_batch_size"]
    settings = [text for text in kept(overrides, ["actor.model.model_path", *batches]) if "actor.optim." not in text]
    return ["rlinf", "eval", config, *settings, f"runner.ckpt_path={policy}"]


def training_command(config: str, overrides: Sequence[str], model_path: Path | None = None) -> list[str]:
    """Trains under the same settings, from `model_path` where it is given."""
    if model_path is None:
        return ["rlinf", "train", config, *kept(overrides)]
    start = f"actor.model.model_path={model_path}"
    return ["rlinf", "train", config, *kept(overrides, ["actor.model.model_path"]), start]


def continuing_command(config: str, overrides: Sequence[str]) -> list[str]:
    """Goes on with a run that was stopped: the same command once more."""
    same = [text for text in overrides if text.partition("=")[0].lstrip("+~") != "runner.resume_dir"]
    return ["rlinf", "train", config, *same, "runner.resume_dir=auto"]


def imitation_command(config: str, overrides: Sequence[str], dataset: Path) -> list[str]:
    """Imitates `dataset`."""
    output = first_free(Path("checkpoints") / Path(config).stem)
    return ["rlinf", "sft", config, *kept(overrides), f"sft.dataset={dataset}", f"sft.output={output}"]


def collecting_command(config: str, overrides: Sequence[str]) -> list[str]:
    """Collects demonstrations of the same simulator."""
    return [
        "rlinf",
        "collect",
        config,
        *kept(overrides),
        f"collect.output={first_free(Path('data') / Path(config).stem)}",
    ]


def exported_command(checkpoint: Path, policy: Path) -> list[str]:
    """Evaluates an exported policy under the settings of the run that `checkpoint` is of; without them, opens it."""
    if (found := run_settings(checkpoint)) is None:
        return opening_command(policy)
    log_path = first_free(Path("logs") / f"{policy.name}-eval")
    return ["rlinf", "eval", str(found), f"runner.ckpt_path={policy}", f"runner.logger.log_path={log_path}"]


def opening_command(policy: Path) -> list[str]:
    """Opens a policy that no simulator is known for, and prints what it reads and gives."""
    return ["python", "-c", f"import rlinf; print(rlinf.load_policy({str(policy)!r}).spec)"]


def kept(overrides: Iterable[str], replaced: Sequence[str] = ()) -> list[str]:
    """The settings that the next command shares; `replaced` are keys that it sets itself."""
    names = {text: text.partition("=")[0].lstrip("+~") for text in overrides}
    own = ("runner.", "sft.", "collect.")
    return [t for t, n in names.items() if (n in KEPT_OF_RUNNER or not n.startswith(own)) and n not in replaced]


def newest_video(cfg: Config, started: float) -> Path | None:
    """The last video that was finished since the Unix time `started`."""
    folders = {env.video_cfg.video_base_dir for env in (cfg.env.train, cfg.env.eval) if env.video_cfg.save_video}
    found = [path for folder in folders for path in Path(folder).rglob("*.mp4") if not path.name.endswith(".part.mp4")]
    new = [path for path in found if path.stat().st_mtime >= started]
    return max(new, key=lambda path: path.stat().st_mtime, default=None)


def training_success(log: RunLog) -> str | None:
    """Success of the first and of the last training step of a run, of those in which an episode ended."""
    if not log.training_rates:
        return None
    (first, start), (last, end) = log.training_rates[0], log.training_rates[-1]
    return f"{start}, step {first}" + (f"\n{end}, step {last}" if last > first else "")


def evaluated_success(log: RunLog) -> str | None:
    """Success of the last evaluation of a run."""
    if not log.evaluations:
        return None
    return f"{Rate.of(r.success_once for r in log.last_records)}, evaluation at step {log.last_evaluation}"
