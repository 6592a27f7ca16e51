"""Every YAML block of the guides, pasted at the end of every recipe it is written for, gives a plan.

Those of the RoboTwin guide, whose page lost more of its layout, are in test_robotwin_guide.py.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from rlinf.commands.plan_text import describe_plan
from rlinf.config.derived import make_plan
from rlinf.config.load import load_config
from tests.published import guide

CONFIGS = Path(__file__).parents[2] / "examples/embodiment/config"
BLOCKS = ("cluster", "runner", "algorithm", "env", "rollout", "actor")  # of a config's first level
CALVIN = ("calvin_d_d_ppo_openpi", "calvin_d_d_ppo_openpi_pi05", "calvin_abc_d_grpo_openvlaoft")
METAWORLD = ("metaworld_50_ppo_openpi", "metaworld_50_ppo_openpi_pi05", "metaworld_50_grpo_openvlaoft")
MANISKILL = [f"maniskill_{algorithm}_{model}" for algorithm in ("ppo", "grpo") for model in ("openvla", "openvlaoft")]
GUIDES = {  # guide -> its first line, the recipes it names
    "CALVIN": ("RL with CALVIN", CALVIN),
    "CALVIN, Chinese": ("基于CALVIN", CALVIN),
    "MetaWorld": ("RL with MetaWorld", (*METAWORLD, "metaworld_45_ppo_openpi")),
    "ManiSkill": ("RL with ManiSkill", MANISKILL),
}


def blocks(text: str) -> list[str]:
    """The YAML blocks of a guide: those of its code directives, or lines that look like keys, with indents put back."""
    marked = re.findall(r"^\.\. code(?:-block)?:: yaml\n\n((?: +.*\n|\n)+)", text, re.MULTILINE)
    return [textwrap.dedent(block).strip() for block in marked] or list(_unmarked(text.splitlines()))


def _unmarked(lines: list[str]) -> Iterator[str]:
    """Runs of `key: value` lines that begin with a block's name, as a page without its layout has them."""
    found: list[str] = []
    for line in [*lines, ""]:
        opens = re.fullmatch(rf"(?:{'|'.join(BLOCKS)}|video_cfg):", line)
        if (opens or found) and re.fullmatch(r"[a-z_,]+:( \S.*)?", line):
            found.append(line)
        elif found:
            yield _indented(found)
            found = []


def _indented(lines: list[str]) -> str:
    """Keys without a value open a block, within the one before unless they name one of the first level.

    The `eval` and `train` of `env:` hold what follows them; `rollout:` after a placement does not.
    """
    text, depth = [], 0
    for line in lines:
        opens = line.endswith(":")
        if opens and line[:-1] in BLOCKS:
            depth = 0
        text.append("  " * depth + line)
        depth += opens
    return "\n".join(text)


CASES = [
    pytest.param(text, recipe, id=f"{name}-{i}-{recipe}")
    for name, (start, recipes) in GUIDES.items()
    for i, text in enumerate(blocks(guide(start)), 1)
    for recipe in recipes
]
needs_guides = pytest.mark.skipif(not CASES, reason="no guides (seeds beside the golden vectors)")


def test_blocks_of_a_page_without_layout() -> None:
    page = (
        "1. Cluster\ncluster:\nnum_nodes: 1\ncomponent_placement:\nenv: 0-3\nrollout:\npipeline_stage_num: 2\nText.\n"
    )
    page += "env:\neval:\nvideo_cfg:\nsave_video: True\nEnd"
    assert [yaml.safe_load(block) for block in blocks(page)] == [
        {
            "cluster": {"num_nodes": 1, "component_placement": {"env": "0-3"}},
            "rollout": {"pipeline_stage_num": 2},
        },
        {"env": {"eval": {"video_cfg": {"save_video": True}}}},
    ]


@needs_guides
def test_no_block_is_missed() -> None:
    counts = {name: len(blocks(guide(start))) for name, (start, _) in GUIDES.items()}
    print(counts, len(CASES), "cases")
    assert counts == dict.fromkeys(GUIDES, 5)
    assert len(CASES) == 5 * (3 + 3 + 4 + 4)


@needs_guides
@pytest.mark.parametrize(("text", "recipe"), CASES)
def test_a_block_pasted_at_the_end_of_its_recipe(text: str, recipe: str, tmp_path: Path) -> None:
    file = tmp_path / f"{recipe}.yaml"
    file.write_text((CONFIGS / f"{recipe}.yaml").read_text(encoding="utf-8") + f"\n{text}\n", encoding="utf-8")
    given = yaml.safe_load(text)
    devices = [8] * given.get("cluster", {}).get("num_nodes", 1)
    cfg = load_config(str(file), config_dir=CONFIGS, purpose="plan", devices=devices)
    assert describe_plan(cfg, make_plan(cfg, devices))
    if "cluster" in given:
        assert cfg.cluster.component_placement == given["cluster"]["component_placement"]
        assert cfg.rollout.pipeline_stage_num == given.get("rollout", {}).get(
            "pipeline_stage_num", cfg.rollout.pipeline_stage_num
        )
    if "runner" in given:
        assert cfg.runner.logger.logger_backends == given["runner"]["logger"]["logger_backends"]
