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
from rlinf.config.derived import make_plan
from rlinf.config.load import load_config
from rlinf.config.schema import Config
from rlinf.demos.collect import collect_demos
from rlinf.demos.dataset import DemoDataset
from rlinf.demos.probe import Probe
from rlinf.envs.spec import env_spec, eval_trials
from rlinf.metrics.report import write_report
from rlinf.metrics.run_log import RunLog
from rlinf.metrics.stats import Rate
from rlinf.runner import Runner
from rlinf.runtime.cluster import check_backend
from rlinf.training.sft import train_sft


def run_quickstart(seed: int, folder: Path, overrides: list[str]) -> dict:
    """The whole job; everything it writes lies in `folder`. Returns what summary.json holds."""
    start = time.perf_counter()
    own = [
        f"runner.seed={seed}",
        f"runner.logger.log_path={folder}",
        f"collect.output={folder}/demos",
        f"sft.dataset={folder}/demos",
        f"sft.output={folder}/sft",
    ]
    cfg = load_config("quickstart", [*own, *overrides], purpose="quickstart")
    check_backend(make_plan(cfg))
    print("1/4  demonstrations by the scripted expert")
    again = (folder / "demos/meta/collect.json").is_file()  # an earlier run's; all of the folder is the job's own
    dataset = collect_demos(cfg, overwrite=again)
    print("2/4  a weak policy by imitation")
    weak = train_sft(cfg, overwrite=(folder / "sft/sft.json").is_file())
    constant = _constant_action(cfg, dataset)
    print(f"     baseline, the demonstrations' mean action played open-loop: {constant}")
    print("3/4  PPO")
    before, after, reset_ids = _improve(jobs.with_model(cfg, weak))
    summary = {
        "before": asdict(before),
        "after": asdict(after),
        "constant_action": asdict(constant),
        "trials": before.trials,
        "reset_ids": reset_ids,
        "seconds": round(time.perf_counter() - start, 1),
        "seed": seed,
        "config": "quickstart",
    }
    (folder / "summary.json").write_text(json.dumps(summary, indent=1))
    report = write_report(folder)
    finished = (v for v in (folder / "video").rglob("*.mp4") if not v.name.endswith(".part.mp4"))
    videos = sorted(finished, key=lambda video: video.stat().st_mtime)
    print("4/4  result")
    print(f"before PPO: success {before}")
    print(f"after PPO:  success {after}")
    print(f"video:   {videos[-1] if videos else 'none'}")
    print(f"report:  {report}")
    print(f"summary: {folder / 'summary.json'}  ({summary['seconds']} s)")
    return summary


def _constant_action(cfg: Config, dataset: Path) -> Rate:
    """The honest zero: the demonstrations' mean action, blind, on the first held-out trials."""
    trials = eval_trials(replace(cfg.env.eval, num_trials=32), env_spec(cfg.env.eval))
    with Probe(cfg, trials) as probe:
        return probe.play_constant(torch.as_tensor(DemoDataset(dataset).actions).float().mean(0))


def _improve(cfg: Config) -> tuple[Rate, Rate, list[int]]:
    """Evaluate, train, evaluate again: one runner, the same trials, the same sampler."""
    runner = Runner(cfg, make_plan(cfg), watch=RunLog(cfg))
    try:
        before, ids = _evaluate(runner)
        jobs.train_to_the_end(runner)
        after, same_ids = _evaluate(runner)
        assert ids == same_ids
        return before, after, ids
    finally:
        runner.close()


def _evaluate(runner: Runner) -> tuple[Rate, list[int]]:
    records = runner.play_trials()
    runner.watch.evaluated(runner.global_step, records)
    return Rate.of(r.success_once for r in records), sorted(r.reset_id for r in records)
