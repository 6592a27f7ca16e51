"""RoboTwin's names, and what is refused in one line before anything starts. RoboTwin is not needed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlinf.commands.plan_text import describe_plan
from rlinf.config.check import check_fit, policy_spec
from rlinf.config.derived import make_plan
from rlinf.config.load import load_config
from rlinf.config.schema import Config
from rlinf.envs.spec import check_setup, env_options, env_spec
from rlinf.errors import UserError
from rlinf.simulators.robotwin import protocol
from rlinf.simulators.robotwin.assets import COMMIT, NEEDED, asset_hash, warn_of_commit
from rlinf.simulators.robotwin.suite import SETTINGS, Options
from rlinf.simulators.robotwin.tasks import UNSUPPORTED, all_tasks, task_table

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "examples/embodiment/config"
RECIPES = sorted(path.stem for path in CONFIGS.glob("robotwin_*.yaml"))
OFT = "robotwin_place_empty_cup_grpo_openvlaoft"
VARIABLES = ("ROBOTWIN_PATH", "ASSETS_PATH", "ROBOT_PLATFORM", "ROBOTWIN_PYTHON")


@pytest.fixture(scope="module")
def cfg() -> Config:
    return load_config(OFT, config_dir=CONFIGS, purpose="plan", devices=[8])


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout and assets that look complete, at RoboTwin/ and files/ of the folder that is returned."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("rlinf.simulators.installed.REPOSITORY", tmp_path)
    code, files = tmp_path / "RoboTwin", tmp_path / "files/assets"
    for name in NEEDED:
        path = code / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("") if path.suffix else path.mkdir(exist_ok=True)
    (code / ".git").mkdir()
    (code / ".git/HEAD").write_text(COMMIT)
    for name in ("embodiments/piper/config.yml", "objects/same.json", "objects/objaverse/list.json"):
        (files / name).parent.mkdir(parents=True, exist_ok=True)
        (files / name).write_text('{"item": [1]}')
    (files / "background_texture/unseen").mkdir(parents=True)
    (files / "background_texture/unseen/0.png").write_text("")
    monkeypatch.setenv("ROBOTWIN_PATH", str(code))
    monkeypatch.setenv("ASSETS_PATH", str(files.parent))
    warn_of_commit.cache_clear()
    return tmp_path


def test_46_names_resolve(cfg: Config) -> None:
    """Each gives a shape and disjoint seeds, by either key, without RoboTwin."""
    assert len(all_tasks()) == 46
    for task in all_tasks():
        env = replace(cfg.env.eval, task_config=cfg.env.eval.task_config | {"task_name": task, "step_lim": None})
        spec = env_spec(env, "env.eval")
        assert (spec.tasks, spec.action_dim, spec.state_dim) == ((task,), 14, 14)
        assert spec == env_spec(replace(env, task_suite_name=task), "env.eval")
        splits = {name: set(ids[:1000]) for name, ids in spec.reset_ids.items()}
        assert not (splits["train"] & splits["eval"]) | (splits["demo"] & (splits["train"] | splits["eval"]))
        assert len(splits["eval"]) == 100
    page = (ROOT / "docs/robotwin.md").read_text(encoding="utf-8")
    table = {f"| `{name}` | {row['step_limit']} | {row['description']} |" for name, row in task_table().items()}
    assert [row for row in table if row not in page] == []
    assert [task for task in UNSUPPORTED if f"`{task}`" not in page] == []


@pytest.mark.parametrize("task", sorted(UNSUPPORTED))
def test_four_names_are_refused(task: str) -> None:
    with pytest.raises(UserError) as refused:
        load_config(OFT, [f"env.eval.task_config.task_name={task}"], config_dir=CONFIGS, purpose="plan", devices=[8])
    said = str(refused.value)
    assert said.startswith(f"env.eval.task_config: task_config.task_name='{task}' is not supported: ")
    assert "\n" not in said


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_plans_its_task_and_100_episodes(name: str) -> None:
    """Without anything of RoboTwin on the machine."""
    loaded = load_config(name, config_dir=CONFIGS, purpose="plan", devices=[8])
    assert describe_plan(loaded, make_plan(loaded, [8]))
    (task,) = {env_spec(env).tasks for env in (loaded.env.train, loaded.env.eval)}
    assert name.startswith(f"robotwin_{task[0]}_")
    assert (loaded.env.eval.num_trials, len(env_spec(loaded.env.eval).reset_ids["eval"])) == (-1, 100)
    assert env_spec(loaded.env.train).step_limits == {task[0]: loaded.env.train.max_episode_steps}
    if name.endswith("openvlaoft"):
        assert loaded.actor.model.unnorm_key == task[0]
        assert (loaded.actor.model.model_path or "").endswith(f"-{task[0]}")


Change = Callable[[Path, pytest.MonkeyPatch], Any]
REFUSED: dict[str, tuple[Change, str]] = {
    "no path": (
        lambda machine, patch: patch.delenv("ROBOTWIN_PATH"),
        "ROBOTWIN_PATH is not set and there is no data/robotwin in ",
    ),
    "a path that is no folder": (
        lambda machine, patch: patch.setenv("ROBOTWIN_PATH", "/path/to/RoboTwin"),
        "ROBOTWIN_PATH=/path/to/RoboTwin is not a folder; it should be a checkout of RoboTwin: git clone ",
    ),
    "another branch": (
        lambda machine, patch: (machine / "RoboTwin" / NEEDED[0]).unlink(),
        "holds no robotwin/envs/vector_env.py: it must be RoboTwin's branch RLinf_support",
    ),
    "no assets": (
        lambda machine, patch: patch.delenv("ASSETS_PATH"),
        "holds assets/embodiments: it must be the folder in which RoboTwin's assets/ lies",
    ),
    "assets elsewhere": (
        lambda machine, patch: patch.setenv("ASSETS_PATH", "/nowhere"),
        "ASSETS_PATH=/nowhere holds no assets/embodiments",
    ),
    "no robot": (
        lambda machine, patch: (machine / "files/assets/embodiments/piper/config.yml").unlink(),
        "assets/embodiments/piper/config.yml is missing from assets_path=",
    ),
    "no pictures": (
        lambda machine, patch: (machine / "files/assets/background_texture/unseen/0.png").unlink(),
        "assets/background_texture is missing from assets_path=",
    ),
    "another platform": (
        lambda machine, patch: patch.setenv("ROBOT_PLATFORM", "LIBERO"),
        "ROBOT_PLATFORM=LIBERO must be ALOHA, two arms of seven columns each: export ROBOT_PLATFORM=ALOHA, or unset it",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_missing_is_one_line(
    what: str, cfg: Config, machine: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    env = replace(cfg.env.train, init_params={"render": "fast"}, python="python")
    check_setup(env, "env.train")  # complete
    assert caplog.messages == []
    change, message = REFUSED[what]
    change(machine, monkeypatch)
    with pytest.raises(UserError) as refused:
        check_setup(env, "env.train")
    assert message in str(refused.value)
    assert str(refused.value).startswith("simulator 'robotwin': ")
    assert "\n" not in str(refused.value)


def test_another_commit_is_said_and_played(cfg: Config, machine: Path, caplog: pytest.LogCaptureFixture) -> None:
    (machine / "RoboTwin/.git/HEAD").write_text("f" * 40)
    check_setup(replace(cfg.env.train, init_params={"render": "fast"}, python="python"), "env.train")
    (said,) = (record for record in caplog.records if record.levelno >= logging.WARNING)
    assert said.getMessage() == (
        f"RoboTwin in {machine / 'RoboTwin'} is commit ffffffff, not 0008ae68: results may differ from others'"
    )


def test_a_policy_of_one_arm_is_refused(cfg: Config) -> None:
    policy = replace(policy_spec(cfg), action_dim=7)
    with pytest.raises(UserError, match=r"^actor\.model\.action_dim=7 must be 14 for env\.train \(place_empty_cup\)$"):
        check_fit("env.train", cfg.env.train, policy)


def test_settings_are_robotwins_own() -> None:
    """Easy and Hard by name, in place of what a recipe randomises; what is neither is called custom."""
    fragments = {
        name: yaml.safe_load((CONFIGS / f"env/{name}.yaml").read_text()) for name in ("robotwin", "robotwin_clean")
    }
    hard = fragments["robotwin"]["task_config"]["domain_randomization"]
    assert hard == SETTINGS["demo_randomized"]
    assert hard | fragments["robotwin_clean"]["task_config"]["domain_randomization"] == SETTINGS["demo_clean"]
    for name, values in SETTINGS.items():
        options = Options(setting=name, task_config={"domain_randomization": {"random_light": True}})  # type: ignore[arg-type]
        assert options.task_config["domain_randomization"] == values
        assert protocol(options)["setting"] == name
    assert protocol(Options())["setting"] == "demo_clean"
    assert protocol(Options(task_config={"domain_randomization": {"random_light": True}}))["setting"] == "custom"


def test_a_result_can_be_repeated(cfg: Config, machine: Path) -> None:
    """The protocol names setting, commit, assets, seeds, limits and packages; where things lie is not in it."""
    told = protocol(env_options(cfg.env.eval, "env.eval"))
    assert (told["setting"], told["commit"], told["seeds"]) == ("demo_randomized", COMMIT, "published")
    assert told["step_limits"] == {"place_empty_cup": 200}
    assert told["task_config"]["embodiment"] == ["piper", "piper", 0.6]
    assert str(machine) not in str(told)
    (machine / "files/assets/objects/more.json").write_text("{}")
    asset_hash.cache_clear()
    assert protocol(env_options(cfg.env.eval, "env.eval")) == told | {"assets": asset_hash(machine / "files")}
    assert asset_hash(machine / "files") != told["assets"]


def test_a_list_of_tasks_has_limits_and_episodes_of_each(cfg: Config) -> None:
    tasks = ["click_bell", "handover_block", "stack_blocks_two"]
    block = cfg.env.eval.task_config | {"step_lim": None}
    env = replace(cfg.env.eval, task_suite_name=tasks, task_config=block, max_episode_steps=800)
    spec = env_spec(env, "env.eval")
    assert list(spec.tasks) == tasks
    assert spec.step_limits == {"click_bell": 400, "handover_block": 800, "stack_blocks_two": 800}
    assert len(spec.reset_ids["eval"]) == 3 * 100
    assert len(set(spec.reset_ids["eval"])) == 3 * 100
