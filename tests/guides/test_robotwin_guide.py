"""Every line of the RoboTwin guide stands in one table: what it states is checked, or a reason is given why it is not.

Shell lines are checked in test_shell_lines.py, and what the table calls `text` is prose that states nothing to check.
The page lost its layout, so that several statements may share a line; the checks cut them apart.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml

from rlinf.commands.plan_text import describe_plan
from rlinf.config.compose import get
from rlinf.config.derived import make_plan
from rlinf.config.load import load_config
from rlinf.config.schema import Config
from rlinf.envs.spec import env_spec
from rlinf.simulators.robotwin.tasks import UNSUPPORTED, all_tasks
from tests.guides.test_shell_lines import TABLE as SHELL_ROWS
from tests.guides.test_shell_lines import shell_lines
from tests.published import guide

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "examples/embodiment/config"
GUIDE = guide("RL with RoboTwin")
LINES = [line for line in GUIDE.splitlines() if line.strip()]
PAGE = (ROOT / "docs/robotwin.md").read_text(encoding="utf-8")
OFT = "robotwin_place_empty_cup_grpo_openvlaoft"
PI0, PI05 = "robotwin_adjust_bottle_ppo_OpenPI", "robotwin_adjust_bottle_ppo_OpenPI_pi05"
needs_guide = pytest.mark.skipif(not LINES, reason="no guides (seeds beside the golden vectors)")


@dataclass(frozen=True)
class Row:
    """What the lines that match a pattern are, and how they are checked."""

    kind: Literal["shell", "tasks", "shape", "yaml", "keys", "recipes", "results", "claim", "text"]
    pattern: str
    how: str = ""  # the test that checks them, or the reason why none does


TABLE = (
    Row("text", r".*#", "headings"),
    Row("text", r"\d(\.\d)?\.? .*[^#]", "headings"),
    Row("text", r"\w+ Tasks|Tool Use & Interaction Tasks|Handover Tasks -|Hanging & Special Tasks", "headings"),
    Row("text", r"RoboTwinEnv Environment|Option \d: .*|Notes?|\S+ Model Evaluation|Launch Evaluation", "headings"),
    Row("text", r"(Model|Algorithm|Environment|Evaluation Mode) Configuration( Name)?:?|OpenVLA-OFT:|π0:", "headings"),
    Row(
        "text",
        r"This (document|section) .*|The primary objective .*|(Visual|Language|Action|Reinforcement) [CGLU]\w+: .*",
    ),
    Row("text", r"Environment: RLinf framework .*|In RLinf, model evaluation .*|In the environment configuration .*"),
    Row("text", r"Before starting training.*|After (downloading,|selecting).*|RoboTwin Assets are asset files .*"),
    Row("text", r"Please ensure .*|Taking the .*|In any of the configuration .*|Install dependencies directly .*"),
    Row("text", r"For (example, to train|more detailed|π0\+ PPO|OpenPI configurations) .*|π0\.5already provides .*"),
    Row("text", r"The (following configuration|OpenVLA-OFT model currently uses).*|This script will automatically:"),
    Row("text", r"# (If you need|For mainland|Download the model|Method \d|\d\. |Set ROBOT|Start Tensor).*|# or"),
    Row("text", r"RLinf provides a pre-configured .*|After using the Docker image.*|Resource Paths: .*|The Docker .*:"),
    Row("tasks", r"[a-z_]+: [A-Z].*\.[a-z_]+: .*|handover_block: .*", "test_the_tasks_are_the_guides"),
    Row("tasks", r"Task: .* supports 46 tasks.*", "test_the_tasks_are_the_guides"),
    Row("tasks", r"Currently four tasks .*:|place_fan,open_laptop.*", "test_the_tasks_are_the_guides"),
    Row(
        "shape",
        r"(images|wrist_images|states|task_descriptions): .*Type:",
        "test_observations_and_actions",
    ),
    Row(
        "shape",
        r"torch\.Tensor.*Shape:|\[batch_size.*\].*Data Type:|uint8.*|left_wrist_image\) .*",
        "test_observations_and_actions",
    ),
    Row(
        "shape",
        r"float32Description: .*|proprio_dim=14|List\[str\]Length:|batch_sizeDescription: .*",
        "test_observations_and_actions",
    ),
    Row(
        "shape",
        r"Action Space: 14-dim.*|Type:|float32Action Components:|Total: 14 dimensions",
        "test_observations_and_actions",
    ),
    Row(
        "shape",
        r"End-effector 3D position .*|3D rotation .*|Gripper control .*|Joint position .*",
        "14 in all; RoboTwin reads 6 joints and a gripper of each arm, as docs/robotwin.md says",
    ),
    Row("shell", "", "tests/guides/test_shell_lines.py"),
    Row(
        "yaml",
        r"(actor|model|OpenPI|task_config|camera|video_cfg):",
        "test_blocks_are_accepted",
    ),
    Row(
        "yaml",
        r"(model_path|model_type|implement_version|action_dim|use_proprio|proprio_dim|use_film): .*",
        "test_blocks_are_accepted",
    ),
    Row(
        "yaml", r"(num_images_in_input|num_action_chunks|unnorm_key|add_value_head|config_name|detach_critic_input): .*"
    ),
    Row(
        "yaml",
        r"(env/train|env/eval|env_type|assets_path|task_name|step_lim|embodiment|# In env/train/.*): ?.*",
        "test_blocks_are_accepted",
    ),
    Row(
        "yaml",
        r"(head_camera_type|wrist_camera_type|collect_head_camera|collect_wrist_camera): .*",
        "test_blocks_are_accepted",
    ),
    Row("yaml", r"(save_video|info_on_video|video_base_dir): .*", "test_blocks_are_accepted"),
    Row(
        "yaml",
        r"runner\.only_evaltoTrue:runner: .*",
        "test_the_evaluation_block_is_accepted",
    ),
    Row("keys", r"(env|actor|algorithm)\.[\w.*]+: .*", "test_keys_have_the_stated_values"),
    Row("keys", r"\[(piper, piper, 0\.6|aloha-agilex)\]robot embodiment .*", "test_keys_have_the_stated_values"),
    Row("keys", r"In most cases, .* runner\.only_eval .*", "test_the_evaluation_block_is_accepted"),
    Row("recipes", r"examples/embodiment/config/\w+\.yaml.*", "test_shell_lines.py"),
    Row("recipes", r"(place_empty_cup|adjust_bottle)task as an example.*\.yaml", "test_shell_lines.py"),
    Row("recipes", r"OpenVLA-OFT \+ GRPO:", "test_shell_lines.py"),
    Row("results", r".*\|", "test_published_results_are_quoted_with_their_protocol"),
    Row("results", r"All OpenVLA-OFT models are trained under .*", "test_the_recipes_train_under_the_stated_protocol"),
    Row("claim", r"RLinf RoboTwin environment dependencies|Support for OpenVLA-OFT, OpenPI models", "test_docker.py"),
    Row("claim", r"Install (RLinf RoboTwin environment|dependencies for the corresponding).*", "test_install.py"),
    Row("claim", r"Replace the --model .*|# To speed up .*--use-mirror.*", "test_shell_lines.py"),
    Row(
        "claim",
        r"Compatibility patches applied|Apply RoboTwin compatibility patches .*",
        "simulators/robotwin/host.py: no package is edited, the simulator's process mends them as it starts",
    ),
    Row("claim", r"Videos from training and evaluation .*", "test_blocks_are_accepted"),
    Row("claim", r"assets_pathis correct.*|ROBOT_PLATFORMvariable is .*", "tests/config/test_robotwin_recipes.py"),
    Row("claim", r"enable_offload: TrueTask .*|task_configaccording to .*", "test_keys_have_the_stated_values"),
)


@cache
def rows(line: str) -> list[Row]:
    """The rows for a line: that of shell lines, else those whose pattern it matches."""
    if line in SHELL:
        return [row for row in TABLE if row.kind == "shell"]
    return [row for row in TABLE if row.pattern and re.fullmatch(row.pattern, line)]


def _lines_of_commands() -> set[str]:
    """The lines of the guide that hold a command or are part of one."""
    found, inside = set[str](), False
    for line in LINES:
        commands = [c for c in shell_lines(line.removesuffix("\\")) if any(re.match(r.pattern, c) for r in SHELL_ROWS)]
        opens = line.endswith("\\")
        if commands or inside or (opens and shell_lines(line)):
            found.add(line)
        inside = opens
    return found


SHELL = _lines_of_commands()


@needs_guide
def test_every_line_has_one_row() -> None:
    assert [(line[:80], [row.pattern for row in rows(line)]) for line in LINES if len(rows(line)) != 1] == []
    for row in TABLE:
        count = sum(rows(line) == [row] for line in LINES)
        print(f"{count:>3}  {row.kind:<8}{row.pattern[:60]:<62}{row.how}")
        assert count, f"the guide has no line like {row.pattern}"
    counts = {kind: sum(rows(line)[0].kind == kind for line in LINES) for kind in dict.fromkeys(r.kind for r in TABLE)}
    print(len(LINES), "lines:", counts)
    assert sum(counts.values()) == len(LINES) == 315
    assert all(row.how in globals() for row in TABLE if row.how.startswith("test_") and not row.how.endswith(".py"))


@needs_guide
def test_the_tasks_are_the_guides() -> None:
    listed = "\n".join(line for line in LINES if rows(line)[0].kind == "tasks")
    refused = re.search(r"place_fan.*?put_object_cabinet", listed)
    assert refused
    assert set(re.findall(r"[a-z]+_[a-z_]+", refused[0].replace("and", ""))) == set(UNSUPPORTED)
    named = re.findall(r"(?:^|[.\-\s])([a-z][a-z0-9]*_[a-z0-9_]+):", listed.replace(refused[0], ""), re.M)
    assert len(named) == 46
    assert sorted(named) == sorted(all_tasks())


@cache
def loaded(name: str, *overrides: str) -> Config:
    return load_config(name, list(overrides), config_dir=CONFIGS, purpose="plan", devices=[8])


@needs_guide
def test_observations_and_actions() -> None:
    text = "\n".join(line for line in LINES if rows(line)[0].kind == "shape")
    assert "[batch_size, 224, 224, 3]" in text
    assert "[batch_size, num_wrist_images, 224, 224, 3]" in text
    assert "[batch_size, 14]" in text
    spec = env_spec(loaded(OFT).env.train)
    assert (spec.image_size, spec.state_dim, spec.num_wrist_images) == ((224, 224), 14, 0)
    both = env_spec(loaded(OFT, "env.train.task_config.camera.collect_wrist_camera=true").env.train)
    assert (both.wrist_image_size, both.num_wrist_images) == ((224, 224), 2)
    (dims,) = set(re.findall(r"(?:action_dim=|Total: )(\d+)", text))
    assert spec.action_dim == int(dims) == 14
    assert "6 joints" in PAGE


def blocks() -> list[Any]:
    """The YAML blocks of the page, with their indents put back: four of configs, and the fragment of an env."""
    found: list[list[str]] = [[]]
    for line in LINES:
        if rows(line)[0].kind == "yaml" and not line.startswith("runner."):
            if line.startswith(("actor:", "env/train:", "# In env", "video_cfg:")):
                found.append([])
            if not line.startswith("#"):
                found[-1].append(line)
        elif found[-1]:
            found.append([])
    return [yaml.safe_load(_indented(lines)) for lines in found if lines]


def _indented(lines: list[str]) -> str:
    """A key without a value opens a block; `OpenPI` and what follows it lie in `model`, `camera` in `task_config`."""
    text, depth = [], 0
    for line in lines:
        text.append("  " * depth + line)
        depth += line.endswith(":")
    return "\n".join(text)


@needs_guide
def test_blocks_are_accepted(tmp_path: Path) -> None:
    """Pasted at the end of the recipes they are written for, with their values; the fragment in a file of its own."""
    oft, pi0, pi05, choice, fragment, video = blocks()[:6]
    assert choice == {"env/train": "robotwin_place_empty_cup", "env/eval": "robotwin_place_empty_cup"}
    for block, recipe in ((oft, OFT), (pi0, PI0), (pi05, PI05), (choice, OFT), (video, PI0)):
        file = tmp_path / f"{recipe}.yaml"
        own = next(p for p in CONFIGS.glob("*.yaml") if p.stem == recipe.lower())
        file.write_text(own.read_text(encoding="utf-8") + "\n" + yaml.safe_dump(block), encoding="utf-8")
        cfg = loaded.__wrapped__(str(file))
        assert describe_plan(cfg, make_plan(cfg, [8]))
        plain = loaded(recipe)
        if block is video:
            assert cfg.env.train.video_cfg.save_video
            assert cfg.env.train.video_cfg.video_base_dir == f"{cfg.runner.logger.log_path}/video/train"
        else:  # the recipes have the values of the guide
            assert replace(cfg.actor.model, model_path=None) == replace(plain.actor.model, model_path=None)
            assert cfg.env.train.task_config == plain.env.train.task_config
    shipped = yaml.safe_load((CONFIGS / "env/robotwin_place_empty_cup.yaml").read_text())
    assert shipped["defaults"] == ["robotwin"]
    whole = yaml.safe_load((CONFIGS / "env/robotwin.yaml").read_text())
    for key, value in fragment.items():
        if isinstance(value, dict):
            have = whole[key] | shipped[key]
            assert {k: have[k] for k in value} == value
        else:
            assert whole[key] == value
    (tmp_path / "env").mkdir()
    (tmp_path / "env/robotwin_mine.yaml").write_text(yaml.safe_dump(fragment))
    mine = tmp_path / "mine.yaml"
    mine.write_text((CONFIGS / f"{OFT}.yaml").read_text() + "\nenv/train: robotwin_mine\n")
    cfg = loaded(str(mine), "env.train.max_episode_steps=200", "env.train.max_steps_per_rollout_epoch=200")
    assert cfg.env.train.task_config == fragment["task_config"]


@needs_guide
@pytest.mark.parametrize("recipe", [OFT, f"{PI0}_eval", f"{PI05}_eval", PI0, PI05])
def test_the_evaluation_block_is_accepted(recipe: str, tmp_path: Path) -> None:
    """`runner.only_eval: True`, pasted as the guide's block that has lost its line breaks."""
    (line,) = (line for line in LINES if line.startswith("runner.only_eval"))
    words = re.findall(r"(\w+): (\S+(?:, \S+)*)?", line.partition("True:runner: ")[2])
    logger = {"log_path", "project_name", "experiment_name", "logger_backends"}
    values = {key: yaml.safe_load(value) for key, value in words if key != "logger"}
    block: dict[str, Any] = {k: v for k, v in values.items() if k not in logger}
    block["logger"] = {k: v for k, v in values.items() if k in logger}
    assert (block["task_type"], block["max_steps"], block["only_eval"]) == ("embodied", -1, True)
    own = next(p for p in CONFIGS.glob("*.yaml") if p.stem == recipe.lower())
    file = tmp_path / own.name
    file.write_text(own.read_text(encoding="utf-8") + "\n" + yaml.safe_dump({"runner": block}), encoding="utf-8")
    cfg = loaded(str(file))
    assert cfg.runner.only_eval
    assert cfg.runner.logger.experiment_name == "robotwin_grpo_openvlaoft"


KEY = re.compile(r'((?:env|actor|algorithm|fsdp)\.[\w.*]+): ?(\[.*?\]|"\w+"|\w+?(?=and|:))')


@needs_guide
@pytest.mark.parametrize("recipe", [OFT, PI0, PI05])
def test_keys_have_the_stated_values(recipe: str) -> None:
    """`key: value` of the sections on OpenVLA-OFT, and on π0 and π0.5."""
    at = next(i for i, line in enumerate(LINES) if line.startswith("π0and π0.5Key"))
    own = [line for i, line in enumerate(LINES) if rows(line)[0].kind == "keys" and (i < at) == (recipe == OFT)]
    if recipe == OFT:
        own = [line for line in own if "center_crop" not in line]
    stated = [pair for line in own for pair in KEY.findall(line)]
    cfg = loaded(recipe)
    checked = 0
    for key, text in stated:
        if text in ("Task", "Robot", "Camera") or key == "algorithm.n_chunk_steps":
            continue  # names of blocks, and a key that has no effect (docs/compat.md)
        if key.endswith("config_name") and ("pi05" in text) != (recipe == PI05):
            continue
        paths = [key.replace("OpenPI", "openpi").replace("fsdp.", "actor.fsdp_config.")]
        if "*" in key:
            paths = [paths[0].replace("*", mode) for mode in ("train", "eval")]
        for path in paths:
            assert get(asdict(cfg), path) == yaml.safe_load(text), path
            checked += 1
    assert checked >= (8 if recipe == OFT else 14)
    assert cfg.env.train.enable_offload  # recommended at the end of the guide
    robots = ["piper", "piper", 0.6] if recipe == OFT else ["aloha-agilex"]
    assert cfg.env.train.task_config["embodiment"] == cfg.env.eval.task_config["embodiment"] == robots


@needs_guide
def test_published_results_are_quoted_with_their_protocol() -> None:
    """The numbers of the guide stand in docs/robotwin.md, which says under which settings they were measured."""
    numbers = [line.strip("| +") for line in LINES if rows(line)[0].kind == "results" and "%" in line]
    assert len(numbers) == 9
    for number in numbers:
        assert number.removesuffix("%") in PAGE, number
    assert "demo_randomized" in PAGE
    assert "demo_clean" in PAGE


@needs_guide
def test_the_recipes_train_under_the_stated_protocol() -> None:
    randomised = {"random_background", "cluttered_table", "random_light"}
    for recipe, hard in ((OFT, True), (PI0, False), (PI05, False)):
        settings = loaded(recipe).env.train.task_config["domain_randomization"]
        assert {settings[key] for key in randomised} == {hard}
