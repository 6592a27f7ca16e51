"""`make quickstart`: from nothing to a better policy on two CPU cores, with proof.

Demonstrations by the scripted expert, a deliberately weak imitation policy, PPO in the real simulator, and success
before and after on the same held-out layouts in the same mode.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from pathlib import Path

import torch

from rlinf.commands import jobs
from rlinf.commands.run_folders import training_folder
from rlinf.commands.summary import evaluation_command, newest_video, print_summary
from rlinf.config.derived import make_plan
from rlinf.config.load import load_config
from rlinf.config.schema import Config
from rlinf.demos.collect import collect_demos
from rlinf.demos.dataset import DemoDataset
from rlinf.demos.probe import Probe
from rlinf.envs.spec import env_spec, eval_trials
from rlinf.errors import UserError
from rlinf.metrics.console import showing_progress
from rlinf.metrics.report import write_report
from rlinf.metrics.run_log import RunLog
from rlinf.metrics.stats import Rate
from rlinf.runner import Runner
from rlinf.runtime.cluster import check_backend
from rlinf.storage.atomic_folder import first_free, write_file
from rlinf.storage.run_folder import holds_results
from rlinf.training.sft import train_sft

OUTPUTS = "quickstart.json"  # in the job's folder: the dataset and the policy that it makes


def run_quickstart(seed: int, output: Path | None, overrides: list[str]) -> dict:
    """The whole job; everything it writes lies in `output`. Returns what summary.json holds.

    Without one it is logs/quickstart-seed<seed>, and the next free number of it where an earlier job has results.
    """
    folder = output.expanduser() if output is not None else _free_folder(Path("logs") / f"quickstart-seed{seed}")
    own = [
        f"runner.seed={seed}",
        f"runner.logger.log_path={folder}",
        f"collect.output={folder}/demos",
        f"sft.dataset={folder}/demos",
        f"sft.output={folder}/sft",
    ]
    cfg = load_config("quickstart", [*own, *overrides], purpose="quickstart")
    check_backend(make_plan(cfg))
    jobs.check_machine(cfg)
    with training_folder(cfg) as cfg:
        return _run(cfg, seed, folder, overrides)


def _free_folder(folder: Path) -> Path:
    """The folder, or `<folder>-2` and so on where it holds the results of an earlier job."""
    free = first_free(folder, holds_results)
    if free != folder:
        print(f"{folder} holds an earlier quickstart; this one writes to {free}")
    return free


def _run(cfg: Config, seed: int, folder: Path, overrides: list[str]) -> dict:
    """The job itself, in a folder that is its own."""
    started = time.time()
    again = _outputs_to_replace(cfg, folder)
    print("1/4  demonstrations by the scripted expert")
    with showing_progress():
        dataset = collect_demos(cfg, overwrite=_dataset(cfg) in again)
        print("2/4  a weak policy by imitation")
        weak = train_sft(cfg, overwrite=_policy(cfg) in again)
    constant = _constant_action(cfg, dataset)
    print(f"     baseline, the demonstrations' mean action played open-loop: {constant}")
    print("3/4  PPO")
    before, after, reset_ids, checkpoint = _improve(jobs.with_model(cfg, weak))
    summary = {
        "before": asdict(before),
        "after": asdict(after),
        "constant_action": asdict(constant),
        "trials": before.trials,
        "reset_ids": reset_ids,
        "seconds": round(time.time() - started, 1),
        "seed": seed,
        "config": "quickstart",
        "run": cfg.runner.run_id,
    }
    write_file(folder / "summary.json", json.dumps(summary, indent=1))
    report = write_report(folder)
    print("4/4  result")
    print_summary(
        started=started,
        before=f"success {before}",
        after=f"success {after}",
        checkpoint=checkpoint,
        video=newest_video(cfg, started),
        report=report,
        numbers=folder / "summary.json",
        next_command=evaluation_command("quickstart", [f"runner.seed={seed}", *overrides], checkpoint)
        if checkpoint
        else ["rlinf", "report", str(folder)],
    )
    return summary


def _outputs_to_replace(cfg: Config, folder: Path) -> list[Path]:
    """Outputs of an earlier job in this folder that did not reach its end; refuses those that are somebody else's.

    The folder keeps a list of what is the job's own, written before any of it.
    """
    file = folder / OUTPUTS
    own = [Path(path) for path in json.loads(file.read_text(encoding="utf-8"))] if file.is_file() else []
    outputs = {"collect.output": _dataset(cfg), "sft.output": _policy(cfg)}
    for key, path in outputs.items():
        if path not in own and path.is_dir() and any(path.iterdir()):
            raise UserError(f"{key}={path} is not empty, and no quickstart in {folder} made it; choose another folder")
    write_file(file, json.dumps(sorted(map(str, {*own, *outputs.values()}))))
    return own


def _dataset(cfg: Config) -> Path:
    return Path(cfg.collect.output).resolve()


def _policy(cfg: Config) -> Path:
    return Path(cfg.sft.output).resolve()


def _constant_action(cfg: Config, dataset: Path) -> Rate:
    """The honest zero: the demonstrations' mean action, blind, on the first held-out trials."""
    trials = eval_trials(replace(cfg.env.eval, num_trials=32), env_spec(cfg.env.eval))
    with Probe(cfg, trials) as probe:
        return probe.play_constant(torch.as_tensor(DemoDataset(dataset).actions).float().mean(0))


def _improve(cfg: Config) -> tuple[Rate, Rate, list[int], Path | None]:
    """Evaluate, train, evaluate again: one runner, the same trials, the same sampler."""
    log = RunLog(cfg)
    runner = jobs.make_runner(cfg, make_plan(cfg), log)
    try:
        before, ids = _evaluate(runner)
        jobs.train_to_the_end(runner)
        log.finish(runner.global_step)
        after, same_ids = _evaluate(runner)
        assert ids == same_ids
        return before, after, ids, runner.last_checkpoint
    finally:
        runner.close()


def _evaluate(runner: Runner) -> tuple[Rate, list[int]]:
    records = runner.play_trials()
    runner.watch.evaluated(runner.global_step, records, runner.player())
    return Rate.of(r.success_once for r in records), sorted(r.reset_id for r in records)
