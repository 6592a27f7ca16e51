"""`rlinf`: one entry point, thin. Every command takes a config name (or path) and key=value overrides."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that spin would take the simulators' cores

import typer

from rlinf.commands.completion import complete_recipe, complete_setting
from rlinf.commands.streams import protect_streams, stdout_fault
from rlinf.errors import DiskFullError, SimulatorError, UserError, WorkerDiedError, full_disk, install_line
from rlinf.version import __version__

if TYPE_CHECKING:
    from rlinf.config.check import Purpose
    from rlinf.config.schema import Config

UsageError: Any = typer.BadParameter.__mro__[1]  # click's, wherever this typer keeps it
MISTAKE, SIMULATOR, DIVERGED, DIED, NO_SPACE, INTERRUPTED, NO_READER = 2, 3, 4, 5, 6, 130, 141  # exit statuses
# Commands whose results are files: a stdout that cannot be written loses none of them, and changes no exit status.
LEAVES_FILES = ("train", "eval", "sft", "collect", "seeds", "export", "quickstart")
# Optional package -> the extra that brings it.
EXTRAS = {"pyarrow": "datasets", "PIL": "datasets", "av": "video", "peft": "lora"}

app = typer.Typer(
    help="Reinforcement-learning post-training for vision-language-action robot policies.",
    epilog="Exit status: 0 done, 1 a bug in rlinf (the only case with a traceback), 2 a mistake in the command, the "
    "config or the files it names, 3 simulators that keep failing, 4 training that diverged, 5 a process "
    "of the run that died, 6 no space on the disk (the last checkpoint is whole), 130 interrupted, 129 and 143 stopped "
    "by SIGHUP or SIGTERM (train saves the running step first). A stdout that cannot be written ends nothing; where it "
    "was all a command had to give, as with plan, the status is 141 for a reader that has left and 6 for a full disk.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

ConfigName = Annotated[
    str,
    typer.Argument(
        metavar="CONFIG",
        help="A name that `rlinf recipes` lists, or a path to a YAML file.",
        autocompletion=complete_recipe,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Settings that win over the file; ~key removes one.",
        autocompletion=complete_setting,
    ),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace an output that is not empty, once the new one is complete.")
]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rlinf {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Take options that stand before a command."""


Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show the table of all metrics after every step.")]


@app.command(epilog="Example: rlinf train toy_ppo_compact runner.max_steps=2 runner.logger.log_path=logs/try")
def train(config: ConfigName, overrides: Overrides = None, verbose: Verbose = False) -> None:
    """Fine-tune a policy with reinforcement learning."""
    started, settings = time.time(), overrides or []
    cfg = _load(config, [*settings, *(["runner.logger.table_interval=1"] if verbose else [])], "train")
    if cfg.runner.only_eval:
        return _evaluate(cfg, config, settings, started)
    from rlinf.commands import jobs, summary

    runner, log = jobs.train(cfg)
    checkpoint = runner.last_checkpoint or runner.resume_from
    if runner.stop_requested:
        next_command = summary.continuing_command(config, [*settings, *(["--verbose"] if verbose else [])])
    elif checkpoint:
        next_command = summary.evaluation_command(config, settings, checkpoint)
    else:
        next_command = ["rlinf", "report", str(log.folder)]
    summary.print_summary(
        started=started,
        success=summary.evaluated_success(log),
        training=summary.training_success(log),
        checkpoint=checkpoint,
        video=summary.newest_video(cfg, started),
        report=log.report,
        next_command=next_command,
    )
    jobs.leave_if_stopped(runner)


@app.command(
    name="eval",
    epilog="Example: rlinf eval toy_ppo_compact runner.ckpt_path=logs/try/toy_ppo_compact/checkpoints/global_step_2",
)
def evaluate(
    config: ConfigName,
    overrides: Overrides = None,
    random: Annotated[bool, typer.Option("--random", help="Evaluate a policy of random weights.")] = False,
) -> None:
    """Play the held-out trials and report success with counts and 95 % intervals."""
    started, settings = time.time(), overrides or []
    cfg = _load(config, [*settings, *(["runner.eval_random=true"] if random else [])], "eval")
    _evaluate(cfg, config, settings, started)


def _evaluate(cfg: Config, config: str, settings: list[str], started: float) -> None:
    """Evaluate, and say what was found and what may follow."""
    from rlinf.commands import jobs, summary

    log, trained = jobs.run_evaluation(cfg), cfg.runner.ckpt_path
    if cfg.runner.eval_expert:
        next_command = summary.collecting_command(config, settings)
    elif trained is not None and Path(trained).expanduser().is_dir():
        from rlinf.storage.atomic_folder import first_free

        output = first_free(Path("checkpoints") / Path(config).stem)
        next_command = ["rlinf", "export", trained, str(output)]
    else:
        next_command = summary.training_command(config, settings)
    summary.print_summary(
        started=started,
        success=summary.evaluated_success(log),
        checkpoint=Path(trained) if trained is not None else None,
        video=summary.newest_video(cfg, started),
        report=log.report,
        next_command=next_command,
    )


@app.command(epilog="Example: rlinf collect quickstart collect.episodes_per_task=10 collect.output=data/demos")
def collect(config: ConfigName, overrides: Overrides = None, overwrite: Overwrite = False) -> None:
    """Make demonstrations with scripted experts (LeRobot v3 layout)."""
    started, settings = time.time(), overrides or []
    cfg = _load(config, settings, "collect")
    from rlinf.commands import jobs, summary

    folder = jobs.collect(cfg, overwrite=overwrite)
    next_command = summary.imitation_command(config, settings, folder)
    summary.print_summary(started=started, dataset=folder, next_command=next_command)


@app.command(
    epilog="Example: rlinf seeds robotwin stack_blocks_two 'task_config.embodiment=[piper, piper, 0.6]' --count 20"
)
def seeds(
    simulator: Annotated[str, typer.Argument(help="Simulator whose expert plans: robotwin.")],
    task: Annotated[str, typer.Argument(help="One of its tasks.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Keys of env.train: python, task_config, ...")
    ] = None,
    count: Annotated[int, typer.Option(min=1, help="Seeds to find for training, and for evaluation.")] = 100,
    split: Annotated[str, typer.Option(help="train, eval, or both.")] = "both",
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Default SIMULATOR_seeds.json.")] = None,
    overwrite: Overwrite = False,
) -> None:
    """Find seeds that the simulator's own expert solves; env.train.seeds_path and env.eval's name the file."""
    from rlinf.commands.seeds import env_block, find_seeds
    from rlinf.metrics.console import showing_progress

    splits = ("train", "eval") if split == "both" else (split,)
    if split not in ("train", "eval", "both"):
        raise UserError(f"--split={split} must be train, eval or both")
    cfg, path = env_block(simulator, task, overrides or []), output or Path(f"{simulator}_seeds.json")
    with showing_progress():
        find_seeds(cfg, splits=splits, count=count, output=path, overwrite=overwrite, on_progress=typer.echo)
    typer.echo(f"use them: env.train.seeds_path={path} env.eval.seeds_path={path}")


@app.command(epilog="Example: rlinf sft quickstart sft.dataset=data/demos sft.output=checkpoints/sft")
def sft(config: ConfigName, overrides: Overrides = None, overwrite: Overwrite = False) -> None:
    """Train a policy on demonstrations by imitation: a dataset in LeRobot's layout v3.0 or v2.1."""
    started, settings = time.time(), overrides or []
    cfg = _load(config, settings, "sft")
    from rlinf.commands import jobs, summary
    from rlinf.envs.config import NO_SIMULATOR

    folder = jobs.sft(cfg, overwrite=overwrite)
    has_simulator = cfg.env.train.env_type != NO_SIMULATOR
    next_command = (
        summary.training_command(config, settings, folder) if has_simulator else summary.opening_command(folder)
    )
    summary.print_summary(started=started, policy=folder, next_command=next_command)


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
    sweep: Annotated[
        bool, typer.Option("--sweep", help="Try stages, processes, micro batch and cache; best to paste.")
    ] = False,
    minutes: Annotated[float, typer.Option(min=0.0, help="Time limit of --sweep.")] = 15.0,
) -> None:
    """Train a few steps, show where their time goes and name the bottleneck; keeps nothing, needs no checkpoint."""
    started, settings = time.time(), overrides or []
    cfg = _load(config, settings, "bench")
    if json is not None and not json.parent.is_dir():
        raise UserError(f"--json={json}: the folder {json.parent} does not exist")
    if sweep:
        if json is not None:
            raise UserError("--sweep prints what it finds: leave --json to a run of its own with the best overrides")
        from rlinf.commands.sweep import run_sweep

        run_sweep(config, settings, cfg, minutes=minutes)
        return
    from rlinf.commands import summary
    from rlinf.commands.bench import run_bench

    run_bench(cfg, steps=steps, warmup=warmup, output=json)
    summary.print_summary(started=started, numbers=json, next_command=summary.training_command(config, settings))


@app.command(epilog="Example: rlinf recipes | grep metaworld")
def recipes() -> None:
    """List every recipe with what it trains, and where."""
    from rlinf.config.recipes import default_config_dir, recipe_sentences

    listed = recipe_sentences(default_config_dir())
    width = max(map(len, listed), default=0)
    for name, sentence in listed.items():
        typer.echo(f"{name:<{width}}  {sentence}".rstrip())


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
    checkpoint: Annotated[Path, typer.Argument(help="global_step_N, a run folder (its newest), or a policy folder.")],
    output: Annotated[Path, typer.Argument(help="Folder to write.")],
    overrides: Overrides = None,
    rollouts: Annotated[
        str | None,
        typer.Option(metavar="CONFIG", help="Write episodes of the policy in this config's simulator, as a dataset."),
    ] = None,
    episodes: Annotated[
        int | None, typer.Option(min=1, help="With --rollouts: episodes to play; default 50.", show_default=False)
    ] = None,
    successes_only: Annotated[bool, typer.Option("--successes-only", help="With --rollouts: drop failures.")] = False,
    overwrite: Overwrite = False,
) -> None:
    """Write a trained policy as a plain checkpoint: LoRA adapters merged, statistics and tokenizer beside it.

    With --rollouts CONFIG, write what the policy does in that config's simulator instead: a dataset in LeRobot v3
    layout.
    """
    started = time.time()
    from rlinf.commands import summary
    from rlinf.commands.export import export_policy, export_rollouts

    if rollouts is None:
        options = {"--successes-only": successes_only, "--episodes": episodes is not None}
        if unused := [*(overrides or []), *(name for name, given in options.items() if given)]:
            raise UserError(f"{unused[0]} needs --rollouts CONFIG")
        folder = export_policy(checkpoint, output, overwrite=overwrite)
        next_command = summary.exported_command(checkpoint, folder)
        summary.print_summary(started=started, policy=folder, next_command=next_command)
        return
    folder = export_rollouts(
        rollouts,
        overrides or [],
        checkpoint,
        output,
        episodes=episodes or 50,
        successes_only=successes_only,
        overwrite=overwrite,
    )
    next_command = summary.imitation_command(rollouts, overrides or [], folder)
    summary.print_summary(started=started, dataset=folder, next_command=next_command)


@app.command(epilog="Example: rlinf quickstart --seed 1")
def quickstart(
    seed: Annotated[int, typer.Option(help="Root of all randomness.")] = 0,
    output: Annotated[Path | None, typer.Option(help="Run folder; default logs/quickstart-seed<seed>.")] = None,
    overrides: Overrides = None,
) -> None:
    """From nothing to a better policy on two CPU cores: demonstrations, weak imitation, PPO, and the proof."""
    from rlinf.commands.quickstart import run_quickstart

    run_quickstart(seed, output, overrides or [])


def main() -> None:
    """Run a command; what a person can mend is a message and an exit status, never a traceback."""
    protect_streams()
    threading.excepthook = partial(_thread_failed, threading.excepthook)
    logging.addLevelName(logging.WARNING, "warning")
    logging.basicConfig(format="%(levelname)s: %(message)s")
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    try:
        status = app(prog_name="rlinf", standalone_mode=False) or 0
    except UsageError as error:
        status = _refused(error.format_message() + _as_setting(error), MISTAKE)
    except UserError as error:
        status = _refused(error, NO_SPACE if full_disk(error) else MISTAKE)
    except DiskFullError as error:
        status = _refused(error, NO_SPACE)
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        install = install_line(EXTRAS[error.name])
        status = _refused(f"the Python package {error.name} is not installed: {install}", MISTAKE)
    except SimulatorError as error:
        status = _refused(error, SIMULATOR)
    except FloatingPointError as error:
        status = _refused(error, DIVERGED)
    except WorkerDiedError as error:
        status = _refused(error, DIED)
    except (typer.Abort, KeyboardInterrupt):
        status = INTERRUPTED
    except Exception as error:
        if (reason := full_disk(error)) is None:
            raise
        status = _refused(f"a file cannot be written: {reason}", NO_SPACE)
    if status == 0 and (fault := stdout_fault()) and sys.argv[1:2] and sys.argv[1] not in LEAVES_FILES:
        status = NO_SPACE if full_disk(fault) else NO_READER
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


def _as_setting(error: Any) -> str:
    """For an option that does not exist, such as --learning_rate: settings are written key=value here."""
    from rlinf.compat.other_names import key_meant

    meant = key_meant(str(getattr(error, "option_name", "")).lstrip("-"))
    return "" if meant is None else f"; settings are written key=value, here {meant}=VALUE"


def _thread_failed(tell: Callable[[threading.ExceptHookArgs], Any], args: threading.ExceptHookArgs) -> None:
    """Say nothing of a logger's thread that found no space: the logger itself fails next, with a warning."""
    if not full_disk(args.exc_value):
        tell(args)


def _interrupt(*_: Any) -> None:
    """The first Ctrl-C unwinds, and everything is closed on the way; a second one does not wait for that."""
    signal.signal(signal.SIGINT, lambda *_: _leave_now())
    raise KeyboardInterrupt


def _leave_now() -> NoReturn:
    """Without waiting for threads; simulators end by themselves when their parent is gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(INTERRUPTED)
