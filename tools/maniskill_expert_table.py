"""How well ManiSkill's scripted expert does, judged by the benchmark: success per object and in total.

    python tools/maniskill_expert_table.py --trials 100
    python tools/maniskill_expert_table.py --id Carrot-v1 --obj-set test --trials 40
    python tools/maniskill_expert_table.py --id ood --trials 20

Needs SAPIEN, MANISKILL_ASSET_DIR and MS_ASSET_DIR; draws nothing. Episode ids are random ones of the training set, or
of a test set. `ood` is every environment of the out-of-distribution evaluation, one line each.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rlinf.metrics.stats import Rate
from rlinf.simulators.maniskill import Expert, Options
from rlinf.simulators.maniskill.assets import find_assets
from rlinf.simulators.maniskill.cpu.world import World
from rlinf.simulators.maniskill.judge import level
from rlinf.simulators.maniskill.reset_ids import OOD, STRIDE, reset_ids, rows_of
from rlinf.simulators.maniskill.tasks import PREFIX, episode

STEPS = 80


@dataclass
class Played:
    """All that the expert looks at: a world nobody draws."""

    world: World


class Outcome(NamedTuple):
    """One episode."""

    reset_id: int
    object_name: str
    success: bool
    steps: int
    level: float  # of the reward at its end: 1.2 where all went well


def play(rows: Sequence[tuple[str, str]], ids: Sequence[int], noise: float, rng: np.random.Generator) -> list[Outcome]:
    """Every id once, up to success; Gaussian `noise` is added to the actions."""
    assets = find_assets(rows)
    world, found = World(assets), []
    for reset_id in ids:
        row, episode_id = divmod(reset_id, STRIDE)
        world.reset(episode(*rows[row], episode_id))
        expert, played = Expert(Options()), Played(world)
        while world.steps < STEPS and not world.judge.judgement.success:
            world.step(expert.act(played) + noise * rng.standard_normal(7))
        judged, name = world.judge.judgement, assets.objects[world.episode.object.index].name
        found.append(Outcome(reset_id, name, judged.success, world.steps, level("default", judged)))
    return found


def summary(outcomes: Sequence[Outcome]) -> str:
    """Rate, steps of the successes, and how many of them were not paid in full."""
    won = [outcome for outcome in outcomes if outcome.success]
    steps = f", {np.mean([o.steps for o in won]):.1f} steps" if won else ""
    less = [o for o in won if round(o.level, 6) != 1.2]
    unpaid = f", {len(less)} of them paid less than 1.2" if less else ""
    return f"{Rate.of(o.success for o in outcomes)}{steps}{unpaid}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--id", default="Main-v3", help="an id without its common beginning, or ood")
    parser.add_argument("--obj-set", default="train", choices=("train", "test"))
    parser.add_argument("--trials", type=int, default=100, help="episodes of each environment")
    parser.add_argument("--noise", type=float, default=0.0, help="standard deviation of what is added to actions")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = np.random.default_rng(args.seed)
    env_id = args.id if args.id == OOD else PREFIX + args.id.removeprefix(PREFIX)
    rows = rows_of(env_id, args.obj_set)
    if env_id == OOD:
        for number, row in enumerate(rows):
            known = reset_ids(*row, trials_per_task=0)["eval"]
            ids = [number * STRIDE + known[i] for i in rng.choice(len(known), args.trials, replace=False)]
            print(f"{row[0].removeprefix(PREFIX):20} {row[1]:5}", summary(play(rows, ids, args.noise, rng)), flush=True)
        return
    splits = reset_ids(env_id, args.obj_set, trials_per_task=0)
    known = splits["train"] or splits["eval"]
    outcomes = play(rows, [known[i] for i in rng.choice(len(known), args.trials, replace=False)], args.noise, rng)
    by_object = defaultdict(list)
    for outcome in outcomes:
        by_object[outcome.object_name].append(outcome)
    for name, own in sorted(by_object.items()):
        print(f"{name:20}", summary(own))
    print(f"{'all':20}", summary(outcomes))
    for outcome in outcomes:
        if round(outcome.level, 6) != 1.2:
            how = f"paid {outcome.level:.1f}" if outcome.success else "failed"
            print(f"{how}: {outcome.object_name}, id {outcome.reset_id}")


if __name__ == "__main__":
    main()
