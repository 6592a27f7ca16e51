"""`rlinf eval --best`: choose a checkpoint of a run by trials that are not those it is then reported on."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlinf.compat.policies import policy_class
from rlinf.config.derived import make_plan
from rlinf.config.load import load_config
from rlinf.demos.probe import Probe
from rlinf.envs.spec import check_setup, env_spec, eval_trials, selection_ids
from rlinf.errors import UserError
from rlinf.metrics.stats import Rate
from rlinf.results.protocol import digest
from rlinf.runtime.local import actor_device
from rlinf.runtime.worker import limit_threads
from rlinf.storage.step_checkpoint import checkpoints_of_run, step_of

KEY = "runner.ckpt_path"


def best_checkpoint(config: str, settings: Sequence[str], trials: int) -> tuple[Path, dict[str, Any]]:
    """The checkpoint of a run with the highest success on training layouts, the latest of equals; and how it was found.

    What it is then reported on, the held-out trials of env.eval, is never played here.
    """
    given = [text.partition("=")[2] for text in settings if text.partition("=")[0].lstrip("+") == KEY]
    if not given:
        raise UserError(f"--best chooses among the checkpoints of a run: name its folder with {KEY}=RUN")
    found = checkpoints_of_run(Path(given[-1]).expanduser())
    if not found:
        raise UserError(f"{KEY}={given[-1]} holds no checkpoints global_step_N to choose from with --best")
    others = [text for text in settings if text.partition("=")[0].lstrip("+") != KEY]
    rates: dict[Path, Rate] = {}
    ids: list[int] = []
    for checkpoint in found:
        cfg = load_config(config, [*others, f"{KEY}={checkpoint}"], purpose="eval")
        if not rates:
            if cfg.runner.eval_expert:
                raise UserError(
                    "--best chooses a checkpoint, but runner.eval_expert=true evaluates the expert; leave one out"
                )
            check_setup(cfg.env.eval, "env.eval")
            limit_threads(cfg)
            spec = env_spec(cfg.env.eval, "env.eval")
            ids = selection_ids(spec, trials, cfg.runner.seed, whole_rounds=True)
            if len(ids) != trials:
                why = "whole rounds of all tasks" if len(ids) > trials else f"all training layouts of {spec.suite}"
                print(f"selection: {len(ids)} trials instead of {trials}: {why}", flush=True)
            if twice := sorted({*ids} & {*eval_trials(cfg.env.eval, spec)}):
                raise UserError(f"suite {spec.suite!r}: the reset ids {twice[:3]} are training layouts and held out")
        model = cfg.actor.model
        device = actor_device(cfg, make_plan(cfg))
        policy = policy_class(model.model_type, cfg.compat).build(model, device, seed=cfg.runner.seed + cfg.actor.seed)
        with Probe(cfg, ids) as probe:
            rates[checkpoint] = probe.play_policy(policy)
        del policy
        gc.collect()  # the next one is loaded before Python would find the cycles that hold this one
        print(f"selection: {checkpoint.name} {rates[checkpoint]} on training layouts", flush=True)
    best = max(found, key=lambda checkpoint: (rates[checkpoint].rate, step_of(str(checkpoint))))
    candidates = [{"step": step_of(str(c)), "path": str(c), "success": asdict(rates[c])} for c in found]
    return best, {"trials": len(ids), "reset_ids": digest(ids), "candidates": candidates}
