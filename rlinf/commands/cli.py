"""`rlinf`: one entry point, thin. Every command takes a config name (or path) and key=value overrides."""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that spin would take the simulators' cores

import typer

from rlinf.errors import SimulatorError, UserError, WorkerDiedError

if TYPE_CHECKING:
    from rlinf.config.check import Purpose
    from rlinf.config.schema import Config

UsageError: Any = typer.BadParameter.__mro__[1]  # click's, wherever this typer keeps it
MISTAKE, SIMULATOR, DIVERGED, DIED, INTERRUPTED = 2, 3, 4, 5, 130  # exit statuses
# Optional package -> the extra that brings it.
EXTRAS = {"pyarrow": "datasets", "PIL": "datasets", "av": "video", "peft": "lora"}

app = typer.Typer(
    help="Reinforcement-learning post-training for vision-language-action robot policies.",
    epilog="Exit status: 0 done, 1 a bug in rlinf (the only case with a traceback), 2 a mistake in the command, the "
    "config or the files it names, 3 simulators that keep failing, 4 training that diverged, 5 a process "
    "of the run that died, 130 interrupted, 143 stopped by SIGTERM after saving.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

ConfigName = Annotated[
    str, typer.Argument(metavar="CONFIG", help="A name under examples/embodiment/config, or a path to a YAML file.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Settings that win over the file; ~key removes one."),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace an output that is not empty, once the new one is complete.")
]


@app.command(epilog="Example: rlinf train toy_ppo_compact runner.max_steps=2 runner.logger.log_path=logs/try")
def train(config: ConfigName, overrides: Overrides = None) -> None:
    """Fine-tune a policy with reinforcement learning."""
    cfg = _load(config, overrides, "train")
    from rlinf.commands import jobs

    if cfg.runner.only_eval:
        jobs.evaluate(cfg)
    else:
        jobs.train(cfg)


@app.command(
    name="eval",
    epilog="Example: rlinf eval toy_ppo_compact runner.ckpt_path=logs/try/toy_ppo_compact/checkpoints/global_step_2",
)
def evaluate(config: ConfigName, overrides: Overrides = None) -> None:
    """Play the held-out trials and report success with counts and 95 % intervals."""
    cfg = _load(config, overrides, "eval")
    from rlinf.commands import jobs

    jobs.evaluate(cfg)


@app.command(epilog="Example: rlinf collect quickstart collect.episodes_per_task=10 collect.output=data/demos")
def collect(config: ConfigName, overrides: Overrides = None, overwrite: Overwrite = False) -> None:
    """Make demonstrations with scripted experts (LeRobot v3 layout)."""
    cfg = _load(config, overrides, "collect")
    from rlinf.commands import jobs

    jobs.collect(cfg, overwrite=overwrite)


@app.command(epilog="Example: rlinf sft quickstart sft.dataset=data/demos sft.output=checkpoints/sft")
def sft(config: ConfigName, overrides: Overrides = None, overwrite: Overwrite = False) -> None:
    """Train a policy on demonstrations by imitation: a dataset in LeRobot's layout v3.0 or v2.1."""
    cfg = _load(config, overrides, "sft")
    from rlinf.commands import jobs

    jobs.sft(cfg, overwrite=overwrite)


@app.command(epilog="Example: rlinf plan metaworld_50_ppo_openpi actor.model.size=compact")
def plan(config: ConfigName, overrides: Overrides = None) -> None:
    """Show where everything would run, the batch arithmetic and a memory estimate; starts nothing."""
    from rlinf.commands.plan_text import describe_plan
    from rlinf.config.derived import make_plan

    cfg = _load(config, overrides, "plan")
    typer.echo(describe_plan(cfg, make_plan(cfg)))


@app.command(epilog="Example: rlinf bench toy_ppo_compact rollout.pipeline_stage_num=2 --json bench.json")
def bench(
    config: ConfigName,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(min=1, help="Measured training steps.")] = 3,
    warmup: Annotated[int, typer.Option(min=0, help="Steps before them that do not count.")] = 2,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Where to write every number.")] = None,
) -> None:
    """Train a few steps, show where their time goes and name the bottleneck; keeps nothing."""
    cfg = _load(config, overrides, "train")
    from rlinf.commands.bench import run_bench

    run_bench(cfg, steps=steps, warmup=warmup, output=json)


@app.command()
def doctor() -> None:
    """Check Python, torch, rendering (draws a frame) and the installed simulators."""
    from rlinf.commands.doctor import run_checks

    if not run_checks(typer.echo):
        raise typer.Exit(MISTAKE)


@app.command()
def report(run_dir: Annotated[Path, typer.Argument(help="Folder of a run, the one that holds metrics.jsonl.")]) -> None:
    """Write report.html for a finished or running run."""
    from rlinf.metrics.report import write_report

    if not (run_dir / "metrics.jsonl").is_file():
        raise UserError(f"{run_dir} holds no metrics.jsonl, so it is not a run folder")
    typer.echo(f"report: {write_report(run_dir)}")


@app.command(epilog="Example: rlinf export logs/try/toy_ppo_compact/checkpoints/global_step_2 checkpoints/try")
def export(
    checkpoint: Annotated[Path, typer.Argument(help="global_step_N of a run, or a policy folder.")],
    output: Annotated[Path, typer.Argument(help="Folder to write.")],
    overrides: Overrides = None,
    rollouts: Annotated[
        str | None,
        typer.Option(metavar="CONFIG", help="Write episodes of the policy in this config's simulator, as a dataset."),
    ] = None,
    episodes: Annotated[int, typer.Option(min=1, help="With --rollouts: episodes to play.")] = 50,
    successes_only: Annotated[bool, typer.Option("--successes-only", help="With --rollouts: drop failures.")] = False,
    overwrite: Overwrite = False,
) -> None:
    """Write a trained policy as a plain checkpoint: LoRA adapters merged, statistics and tokenizer beside it.

    With --rollouts CONFIG, write what the policy does in that config's simulator instead: a dataset in LeRobot v3
    layout.
    """
    from rlinf.commands.export import export_policy, export_rollouts

    if rollouts is None:
        if overrides or successes_only:
            raise UserError(f"{(overrides or ['--successes-only'])[0]} needs --rollouts CONFIG")
        typer.echo(f"policy: {export_policy(checkpoint, output, overwrite=overwrite)}")
        return
    folder = export_rollouts(
        rollouts,
        overrides or [],
        checkpoint,
        output,
        episodes=episodes,
        successes_only=successes_only,
        overwrite=overwrite,
    )
    typer.echo(f"dataset: {folder}")


@app.command(epilog="Example: rlinf quickstart --seed 1")
def quickstart(
    seed: Annotated[int, typer.Option(help="Root of all randomness.")] = 0,
    output: Annotated[Path | None, typer.Option(help="Run folder; default logs/quickstart-seed<seed>.")] = None,
    overrides: Overrides = None,
) -> None:
    """From nothing to a better policy on two CPU cores: demonstrations, weak imitation, PPO, and the proof."""
    from rlinf.commands.quickstart import run_quickstart

    run_quickstart(seed, output or Path("logs") / f"quickstart-seed{seed}", overrides or [])


def main() -> None:
    """Run a command; what a person can mend is a message and an exit status, never a traceback."""
    logging.addLevelName(logging.WARNING, "warning")
    logging.basicConfig(format="%(levelname)s: %(message)s")
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    try:
        status = app(prog_name="rlinf", standalone_mode=False) or 0
    except UsageError as error:
        status = _refused(error.format_message(), MISTAKE)
    except UserError as error:
        status = _refused(error, MISTAKE)
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        install = f'pip install -c constraints.txt -e ".[{EXTRAS[error.name]}]"'
        status = _refused(f"the Python package {error.name} is not installed: {install}", MISTAKE)
    except SimulatorError as error:
        status = _refused(error, SIMULATOR)
    except FloatingPointError as error:
        status = _refused(error, DIVERGED)
    except WorkerDiedError as error:
        status = _refused(error, DIED)
    except (typer.Abort, KeyboardInterrupt):
        status = INTERRUPTED
    if status == INTERRUPTED:
        print("interrupted", file=sys.stderr)
        _leave_now()
    sys.exit(status)


def _load(config: str, overrides: list[str] | None, purpose: Purpose) -> Config:
    """The checked config; only then are torch and the rest imported, so that a mistake is told within a second."""
    from rlinf.config.load import load_config

    return load_config(config, overrides or [], purpose=purpose)


def _refused(error: object, status: int) -> int:
    """Say why; `rlinf` alone has shown its help and has nothing to add."""
    if text := str(error):
        print(f"error: {text}", file=sys.stderr)
    return status


def _interrupt(*_: Any) -> None:
    """The first Ctrl-C unwinds, and everything is closed on the way; a second one does not wait for that."""
    signal.signal(signal.SIGINT, lambda *_: _leave_now())
    raise KeyboardInterrupt


def _leave_now() -> NoReturn:
    """Without waiting for threads; simulators end by themselves when their parent is gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(INTERRUPTED)
