"""`rlinf`: one entry point, thin. Every command takes a config name (or path) and key=value overrides."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that spin would take the simulators' cores

import typer

from rlinf.commands.completion import complete_recipe, complete_setting
from rlinf.commands.exit_status import DIFFERS, MISTAKE, run_command
from rlinf.errors import UserError
from rlinf.version import __version__

if TYPE_CHECKING:
    from rlinf.config.check import Purpose
    from rlinf.config.schema import Config

app = typer.Typer(
    help="Reinforcement-learning post-training for vision-language-action robot policies.",
    epilog="Exit status: 0 done, 1 a bug in rlinf (the only case with a traceback), 2 a mistake in the command, the "
    "config or the files it names, 3 simulators that keep failing, 4 training that diverged, 5 a process "
    "of the run that died, 6 no space on the disk (the last checkpoint is whole), 7 a replay that "
    "differs from its record, 130 interrupted, 129 and 143 stopped by SIGHUP or SIGTERM (train and sft save the "
    "running step first, also when interrupted). A stdout that cannot be written ends nothing; where it "
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
    best: Annotated[
        bool, typer.Option("--best", help="Of the checkpoints of the run in runner.ckpt_path, evaluate the best one.")
    ] = False,
    selection_trials: Annotated[
        int, typer.Option(min=1, help="With --best: training layouts that each checkpoint plays to be chosen.")
    ] = 32,
) -> None:
    """Play the held-out trials and report success with counts and 95 % intervals."""
    started, settings = time.time(), overrides or []
    settings = [*settings, *(["runner.eval_random=true"] if random else [])]
    if best:
        from rlinf.commands.selection import best_checkpoint

        checkpoint, selection = best_checkpoint(config, settings, selection_trials)
        settings = [*settings, f"runner.ckpt_path={checkpoint}"]
        _evaluate(_load(config, settings, "eval"), config, settings, started, selection)
        return
    _evaluate(_load(config, settings, "eval"), config, overrides or [], started)


def _evaluate(
    cfg: Config, config: str, settings: list[str], started: float, selection: dict[str, Any] | None = None
) -> None:
    """Evaluate, and say what was found and what may follow."""
    from rlinf.commands import jobs, summary

    log, trained = jobs.run_evaluation(cfg, selection), None if cfg.runner.eval_expert else cfg.runner.ckpt_path
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
        numbers=log.evaluations[-1],
        next_command=next_command,
    )


@app.command(
    epilog="Example: rlinf compare logs/a/eval/step_0 logs/b/eval/step_0   or   rlinf compare checkpoints/sft "
    "logs/try/toy_ppo_compact/checkpoints/global_step_2 expert --recipe toy_ppo_compact. Exit status: 0 whatever was "
    "found (comparison.json says it), 2 where protocols differ or nothing can be compared."
)
def compare(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="A B [C ...] [KEY=VALUE ...]",
            help="Policy folders, checkpoints (global_step_N), run folders (their newest), result.json files, or the "
            "words expert and random; settings for those that are played.",
        ),
    ],
    recipe: Annotated[
        str | None,
        typer.Option(
            metavar="CONFIG",
            help="Config to play under; default: that of the run which a policy or result lies in.",
            autocompletion=complete_recipe,
        ),
    ] = None,
    max_pairs: Annotated[
        int | None, typer.Option(min=1, help="Trials after which no more are played; default: the benchmark's.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Draws the order of the trials.")] = 0,
    alpha: Annotated[
        float, typer.Option(help="Share of comparisons of equal policies that may end with a verdict.")
    ] = 0.05,
    output: Annotated[
        Path | None, typer.Option(help="Folder to write, new or empty; default logs/<time>-compare.")
    ] = None,
) -> None:
    """Say which policy is better: the same trials for all, stopped as soon as the answer is known.

    Prints better, worse or not separable with the difference of success rates and its 95 % interval, which hold however
    early it stops; by task where there are enough pairs; a ranking with groups for more than two.
    """
    from rlinf.commands.compare import run_compare
    from rlinf.commands.contestants import split_arguments

    policies, overrides = split_arguments(arguments)
    found = run_compare(
        policies, recipe=recipe, overrides=overrides, max_pairs=max_pairs, seed=seed, alpha=alpha, output=output
    )
    typer.echo(f"comparison: {found.folder}/comparison.json")


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
def sft(
    config: ConfigName,
    overrides: Overrides = None,
    overwrite: Overwrite = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the last checkpoint of a training that was cut, if any.")
    ] = False,
) -> None:
    """Train a policy on demonstrations by imitation: a dataset in LeRobot's layout v3.0 or v2.1."""
    started, settings = time.time(), overrides or []
    cfg = _load(config, settings, "sft")
    from rlinf.commands import jobs, summary
    from rlinf.envs.config import NO_SIMULATOR

    folder = jobs.sft(cfg, overwrite=overwrite, resume=resume)
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


@app.command(epilog="Example: rlinf doctor --recipe quickstart --dataset data/demos --policy checkpoints/sft")
def doctor(
    overrides: Overrides = None,
    recipe: Annotated[
        str | None,
        typer.Option(metavar="CONFIG", help="Check this config's action path instead.", autocompletion=complete_recipe),
    ] = None,
    dataset: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="With --recipe: its demonstrations; default: the expert plays.")
    ] = None,
    policy: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="With --recipe: whose statistics; default: fitted as by sft.")
    ] = None,
    episodes: Annotated[
        int | None, typer.Option(min=1, max=1000, help="With --recipe: to replay; default 4.", show_default=False)
    ] = None,
) -> None:
    """Check Python, torch, rendering (draws a frame) and the installed simulators.

    With --recipe CONFIG, check the action path instead: demonstrations replayed through the policy's normalisation and
    layout into the simulator must reach the expert's success, and the policy must see what was recorded for it.
    """
    from rlinf.commands.doctor import run_checks, run_recipe

    if recipe is not None:
        healthy = run_recipe(recipe, overrides or [], dataset, policy, episodes or 4, typer.echo)
    else:
        options = {"--dataset": dataset, "--policy": policy, "--episodes": episodes}
        if unused := [*(overrides or []), *(name for name, given in options.items() if given is not None)]:
            raise UserError(f"{unused[0]} needs --recipe CONFIG")
        healthy = run_checks(typer.echo)
    if not healthy:
        raise typer.Exit(MISTAKE)


@app.command(epilog="Example: rlinf report logs/mine logs/other -o both.html")
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, which hold metrics.jsonl.")],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Page to write; default report.html, in the folder of a single run."
        ),
    ] = None,
    live: Annotated[
        bool, typer.Option("--live", help="Serve the page on this machine while the runs train; writes nothing.")
    ] = False,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="With --live: port on 127.0.0.1; 0 takes a free one.")
    ] = 0,
) -> None:
    """Write one page about finished or running runs: success, evaluations, curves, time, videos, config."""
    if live:
        if output is not None:
            raise UserError("--live serves the page and writes no file: leave out --output, or --live")
        from rlinf.metrics.report.live import serve_report

        serve_report(runs, port=port, say=typer.echo)
        return
    if port:
        raise UserError("--port needs --live")
    from rlinf.metrics.report import write_report

    typer.echo(f"report: {write_report(*runs, out=output)}")


@app.command(epilog="Example: rlinf replay logs/try/eval/step_2/result.json#3")
def replay(
    result: Annotated[
        str, typer.Argument(metavar="RESULT", help="result.json or a run folder (its newest), with #17 or #3,17.")
    ],
    task: Annotated[str | None, typer.Option(help="Only episodes of this task.")] = None,
    failures: Annotated[bool, typer.Option("--failures", help="Only episodes that failed, on one sheet.")] = False,
    output: Annotated[Path | None, typer.Option(help="Folder of the video; default replay/ beside the file.")] = None,
    policy: Annotated[Path | None, typer.Option(help="The policy that played, where it was moved.")] = None,
    video: Annotated[bool, typer.Option("--video/--no-video", help="Film the episodes.")] = True,
) -> None:
    """Play episodes of an evaluation again, check them against their records, and film them."""
    from rlinf.commands.replay import run_replay
    from rlinf.metrics.console import showing_progress

    with showing_progress():
        played, file = run_replay(result, task=task, failures=failures, output=output, policy=policy, film=video)
    for episode in played:
        typer.echo(str(episode))
    if file is not None:
        typer.echo(f"video {file}")
    differing = sum(bool(episode.differences) for episode in played)
    typer.echo(f"{len(played) - differing} of {len(played)} as recorded")
    if differing:
        raise typer.Exit(DIFFERS)


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
    precision: Annotated[
        str | None, typer.Option(help="Of the stored weights: bf16 or fp32; default: theirs.", show_default=False)
    ] = None,
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
        folder = export_policy(checkpoint, output, precision=precision, overwrite=overwrite)
        next_command = summary.exported_command(checkpoint, folder)
        summary.print_summary(started=started, policy=folder, next_command=next_command)
        return
    if precision is not None:
        raise UserError("--precision is of a policy's weights: leave it out, or --rollouts")
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


@app.command(epilog="Example: rlinf serve logs/try/toy_ppo_compact/checkpoints/global_step_2 --port 8000")
def serve(
    checkpoint: Annotated[Path, typer.Argument(help="global_step_N, a run folder (its newest), or a policy folder.")],
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for every network.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 for a free one.")] = 8000,
    token: Annotated[
        str | None, typer.Option(envvar="RLINF_SERVE_TOKEN", help="What clients must send as their api_key.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda or cuda:1; default the first GPU, if any.", show_default=False)
    ] = None,
    max_batch: Annotated[int, typer.Option(min=1, max=4096, help="Requests that share a policy call.")] = 64,
    window_ms: Annotated[
        float, typer.Option(min=0.0, max=1000.0, help="How long an idle device waits for further requests.")
    ] = 2.0,
    prompt: Annotated[str | None, typer.Option(help="Instruction of requests that have none.")] = None,
    seed: Annotated[int, typer.Option(help="Root of the noise of every connection.")] = 0,
    max_clients: Annotated[int, typer.Option(min=1, max=65536, help="Connections at a time.")] = 256,
    max_message_mb: Annotated[int, typer.Option(min=1, max=1024, help="Largest message, in MiB.")] = 16,
) -> None:
    """Answer observations with actions over websockets, as openpi's server does: openpi-client works as it is."""
    from rlinf.commands.serve import serve_policy

    serve_policy(
        checkpoint,
        host=host,
        port=port,
        token=token,
        device=device,
        max_batch=max_batch,
        window_ms=window_ms,
        prompt=prompt,
        seed=seed,
        max_clients=max_clients,
        max_message_mb=max_message_mb,
    )


@app.command(epilog="Example: rlinf record quickstart logs/quickstart-seed0")
def record(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the row: FOLDER/NAME.json.")],
    runs: Annotated[
        list[Path] | None, typer.Argument(metavar="RUN", help="Folder of a training run; several if continued.")
    ] = None,
    before: Annotated[
        Path | None, typer.Option(metavar="RESULT", help="Evaluation before training; default: the run's own.")
    ] = None,
    after: Annotated[
        Path | None, typer.Option(metavar="RESULT", help="Evaluation after it; default: the run's last.")
    ] = None,
    shipped: Annotated[
        Path | None, typer.Option(metavar="RESULT", help="Evaluation of the policy in FOLDER/checkpoints.")
    ] = None,
    failed: Annotated[str | None, typer.Option(metavar="WHY", help="List the run under what did not work.")] = None,
    note: Annotated[str | None, typer.Option(help="A sentence on the row; default: the recipe's.")] = None,
    command: Annotated[
        list[str] | None, typer.Option(help="What made the policy that the run began with: collect, sft; in order.")
    ] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Replace an earlier run of the same seed.")] = False,
    folder: Annotated[Path, typer.Option(help="Where the rows are.")] = Path("results"),
) -> None:
    """Keep a run's success before and after training as a row of the page of results, seed by seed."""
    from rlinf.commands.record import add_record

    file = add_record(
        name,
        runs or [],
        before=before,
        after=after,
        shipped=shipped,
        failed=failed,
        note=note,
        commands=command or [],
        replaces=replace,
        folder=folder,
    )
    typer.echo(f"record: {file}")


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
    run_command(app)


def _load(config: str, overrides: list[str] | None, purpose: Purpose) -> Config:
    """The checked config; only then are torch and the rest imported, so that a mistake is told within a second."""
    from rlinf.config.load import load_config

    return load_config(config, overrides or [], purpose=purpose)
