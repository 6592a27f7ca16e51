"""A whole training step of a published recipe on one GPU, from random weights where its checkpoint is not there.

    python benchmarks/end_to_end.py [RECIPE] [--steps 1] [--warmup 1] [--json FILE] [key=value ...]

Everything is as the recipe says but the placement, on accelerator 0, and the film, which is off. Of the measured steps
it prints the median seconds of each phase and the share in which the device waits, how the step compares with the sum
of its parts (simulators, policy and update, each counted while it works), samples per second of the update, how many
tasks the simulators built, and the most memory that was held.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch

from rlinf.commands.bench import bench_config, measure, table, with_weights
from rlinf.config.derived import make_plan, rollout_size
from rlinf.config.load import load_config
from rlinf.config.schema import Config

PLACEMENT = "cluster.component_placement={'actor,env,rollout': '0'}"
NO_FILM = "env.train.video_cfg.save_video=false"
PARTS = {"simulators": "time/env/interact", "policy": "time/rollout/generate", "update": "time/actor/run_training"}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="metaworld_50_ppo_openpi")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    cfg = with_weights(load_config(given.recipe, [PLACEMENT, NO_FILM, *given.overrides], purpose="bench"))
    plan, begun = make_plan(cfg), time.time()
    with tempfile.TemporaryDirectory(prefix="rlinf-end-to-end-") as folder:
        steps = measure(bench_config(cfg, given.warmup + given.steps, folder), plan)[given.warmup :]
    median = {name: statistics.median(step[name] for step in steps) for name in steps[0]}
    print("\n".join(table(plan, median, len(steps))))
    for line in findings(cfg, median):
        print(line)
    print(f"{time.time() - begun:.0f} s in all, {plan.stages} stages")
    if given.json is not None:
        result = {"recipe": given.recipe, "overrides": given.overrides, "steps": steps}
        given.json.write_text(json.dumps(result, indent=1))


def findings(cfg: Config, median: dict[str, float]) -> list[str]:
    """What the step comes to, in lines."""
    parts = {name: median[metric] for name, metric in PARTS.items()}
    whole, samples = median["time/step"], rollout_size(cfg) * cfg.algorithm.update_epoch
    rate = samples / parts["update"]
    lines = [
        f"sum of the parts {sum(parts.values()):.1f} s ({', '.join(f'{n} {s:.1f}' for n, s in parts.items())}); "
        f"the step takes {whole / sum(parts.values()):.2f}x of it",
        f"update {rate:.0f} samples/s ({samples} samples)",
        f"tasks built {median.get('env/tasks_built', 0.0):.0f}",
    ]
    if torch.cuda.is_available():
        lines.append(f"most memory held on the device {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
    return lines


if __name__ == "__main__":
    main()
