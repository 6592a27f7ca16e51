"""`rlinf`: one entry point, thin. Every command takes a config name (or path) and key=value overrides."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that spin would take the simulators' cores

import typer

from rlinf.errors import UserError

app = typer.Typer(
    help="Reinforcement-learning post-training for vision-language-action robot policies.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

ConfigName = Annotated[str, typer.Argument(help="Config name under examples/embodiment/config, or a path to a YAML file.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="key=value settings, e.g. runner.max_steps=10")]


@app.command()
def train(config: ConfigName, overrides: Overrides = None) -> None:
    """Fine-tune a policy with reinforcement learning."""
    from rlinf.config.load import load_config
    from rlinf.jobs import train as run

    cfg = load_config(config, overrides or [], purpose="train")
    if cfg.runner.only_eval:
        from rlinf.jobs import evaluate

        evaluate(cfg)
        return
    run(cfg)


@app.command(name="eval")
def evaluate(config: ConfigName, overrides: Overrides = None) -> None:
    """Play the held-out trials and report success with counts and 95 % intervals."""
    from rlinf.config.load import load_config
    from rlinf.jobs import evaluate as run

    run(load_config(config, overrides or [], purpose="eval"))


@app.command()
def collect(config: ConfigName, overrides: Overrides = None) -> None:
    """Make demonstrations with scripted experts (LeRobot v3 layout)."""
    from rlinf.config.load import load_config
    from rlinf.jobs import collect as run

    run(load_config(config, overrides or [], purpose="collect"))


@app.command()
def sft(config: ConfigName, overrides: Overrides = None) -> None:
    """Train a policy on demonstrations by imitation."""
    from rlinf.config.load import load_config
    from rlinf.jobs import sft as run

    run(load_config(config, overrides or [], purpose="sft"))


@app.command()
def plan(config: ConfigName, overrides: Overrides = None) -> None:
    """Show where everything would run, the batch arithmetic and a memory estimate; starts nothing."""
    from rlinf.config.describe import describe_plan
    from rlinf.config.load import load_config
    from rlinf.runtime.placement import make_plan

    cfg = load_config(config, overrides or [], purpose="plan")
    typer.echo(describe_plan(cfg, make_plan(cfg)))


@app.command()
def doctor() -> None:
    """Check Python, torch, rendering (draws a frame) and the installed simulators."""
    from rlinf.doctor import run_checks

    if not run_checks(typer.echo):
        raise typer.Exit(1)


@app.command()
def report(run_dir: Annotated[Path, typer.Argument(help="Folder of a run, the one that holds metrics.jsonl.")]) -> None:
    """Write report.html for a finished or running run."""
    from rlinf.metrics.report import write_report

    if not (run_dir / "metrics.jsonl").is_file():
        raise UserError(f"{run_dir} holds no metrics.jsonl, so it is not a run folder")
    typer.echo(f"report: {write_report(run_dir)}")


@app.command()
def quickstart(
    seed: Annotated[int, typer.Option(help="Root of all randomness.")] = 0,
    output: Annotated[Path | None, typer.Option(help="Run folder; default logs/quickstart-seed<seed>.")] = None,
    overrides: Overrides = None,
) -> None:
    """From nothing to a better policy on two CPU cores: demonstrations, weak imitation, PPO, success before and after."""
    from rlinf.quickstart import run_quickstart

    run_quickstart(seed, output or Path("logs") / f"quickstart-seed{seed}", overrides or [])


def main() -> None:
    """Run a command; a user's mistake is one line and exit status 2, never a traceback."""
    try:
        app(standalone_mode=False)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except (typer.Abort, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except typer.Exit as stop:
        sys.exit(stop.exit_code)
    except Exception as error:
        if type(error).__module__.startswith("click"):  # a wrong command line, in click's own words
            print(f"error: {error}", file=sys.stderr)
            sys.exit(2)
        raise


if __name__ == "__main__":
    main()
