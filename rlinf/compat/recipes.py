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
    Difference(
        "env.{train,eval}.seeds_path",
        "robotwin_*",
        "`rlinf/envs/robotwin/seeds/{train,eval}_seeds.json`",
        "`null`",
        "the same lists, which the simulator brings along; that path stands for them too",
    ),
    Difference(
        "actor.model.unnorm_key",
        "robotwin_*_openvlaoft",
        "`<task>_1k`",
        "`<task>`, as the guide writes it",
        "of the two names the one that the checkpoint has is taken",
    ),
    Difference(
        "algorithm.reward_type",
        "robotwin_*_grpo_openvlaoft",
        "`action_level`",
        "`chunk_level`, as the guide writes it",
        "RoboTwin pays at most once a chunk, at its end; `action_level` loads too",
    ),
    Difference(
        "env.{train,eval}.enable_offload",
        "robotwin_adjust_bottle_*",
        "`false`, beside `env.enable_offload: true`",
        "`true`",
        "the guide recommends it: the simulators' GPU memory is free while the policy learns",
    ),
)
