"""Where the shipped recipes differ from the published ones of the same name, on purpose. Torch-free.

`docs/compat.md` prints these tables, and tests/config/test_published_recipes.py accepts no difference beyond them.
"""

from __future__ import annotations

from typing import NamedTuple


class Difference(NamedTuple):
    """A key whose value here is not the published one."""

    key: str  # `{a,b}` stands for either
    recipes: str  # names, `*` for anything
    published: str
    ours: str
    why: str


DIFFERENCES: tuple[Difference, ...] = (
    Difference(
        "runner.logger.log_path",
        "*",
        "`../results`, or `./logs`",
        "`logs/<time>-<recipe>`",
        "each run has a folder of its own, and the guides open `tensorboard --logdir ./logs`",
    ),
    Difference(
        "rollout.pipeline_stage_num",
        "*",
        "1 in most",
        "`auto`",
        "two stages where the policy has an accelerator: the same episodes and updates, sooner",
    ),
    Difference(
        "env.{train,eval}.video_cfg.video_base_dir",
        "*",
        "below `../results`",
        "below `runner.logger.log_path`",
        "videos lie beside the other files of their run",
    ),
    Difference(
        "env.{train,eval}.init_params.control_mode",
        "maniskill_*",
        "the text `None`",
        "`null`",
        "the same: the controller of `policy_setup`; the text loads too",
    ),
)

NOT_SHIPPED: dict[str, str] = {"robotwin_*": "needs the RoboTwin simulator"}
"""Published recipes that have no namesake here -> why."""
