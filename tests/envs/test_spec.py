"""Finding simulators, checking their options, choosing evaluation trials; and that none of it imports torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import rlinf.simulators
from rlinf.envs.config import EnvConfig
from rlinf.envs.spec import (
    available_simulators,
    check_setup,
    env_options,
    env_spec,
    eval_trials,
    find_simulator,
    ids_of_task,
    own_simulators,
    unread_keys,
)
from rlinf.errors import UserError
from rlinf.simulators.contract import IdGrid


def test_simulators_are_found_by_file_name() -> None:
    assert {"toy", "metaworld"} <= set(available_simulators())
    assert find_simulator("toy").__name__ == "rlinf.simulators.toy"


def test_missing_files_are_known_before_the_simulator_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    check_setup(EnvConfig(env_type="toy"), "env.train")
    monkeypatch.delenv("MANISKILL_ASSET_DIR", raising=False)
    monkeypatch.setattr("rlinf.simulators.installed.FOLDERS", {"maniskill": ()})
    with pytest.raises(UserError, match=r"^simulator 'maniskill': MANISKILL_ASSET_DIR is not set"):
        check_setup(EnvConfig(env_type="maniskill"), "env.train")


def test_bad_names_and_options_say_what_is_near() -> None:
    with pytest.raises(UserError, match=r"env_type='metawrld' is unknown \(did you mean 'metaworld'\?\)"):
        find_simulator("metawrld")
    with pytest.raises(
        UserError,
        match=r"unknown key env\.eval\.init_params\.image_sise; did you mean env\.eval\.init_params\.image_s",
    ):
        env_options(EnvConfig(env_type="toy", init_params={"image_sise": 3}), "env.eval")
    with pytest.raises(UserError, match=r"env\.train\.init_params\.render='nice' must be 'exact' or 'fast'"):
        env_options(EnvConfig(env_type="metaworld", init_params={"render": "nice"}))
    with pytest.raises(UserError, match=r"env\.train\.init_params\.image_size='big' must be an integer"):
        env_options(EnvConfig(env_type="metaworld", init_params={"image_size": "big"}))
    with pytest.raises(UserError, match=r"env\.train\.task_suite_name: .*did you mean 'metaworld_50'"):
        env_spec(EnvConfig(env_type="metaworld", task_suite_name="metaworld_5"))
    with pytest.raises(UserError, match="camera_heights=480 and camera_widths=320 must be equal"):
        env_spec(EnvConfig(env_type="metaworld", init_params={"camera_heights": 480, "camera_widths": 320}))
    with pytest.raises(UserError, match=r"env\.train\.init_params: image_size=64 and camera_heights=480 must be equal"):
        env_spec(EnvConfig(env_type="metaworld", init_params={"camera_heights": 480, "image_size": 64}))
    for params, size in (({}, 480), ({"image_size": 64}, 64), ({"camera_heights": 96}, 96)):
        assert env_spec(EnvConfig(env_type="metaworld", init_params=params)).image_size == (size, size)


@pytest.mark.parametrize(
    ("suite", "tasks", "trials"),
    [("metaworld_50", 50, 10), ("metaworld_45_ind", 45, 10), ("metaworld_45_ood", 5, 20), ("reach-v3", 1, 500)],
)
def test_metaworld_suites(suite: str, tasks: int, trials: int) -> None:
    spec = env_spec(EnvConfig(env_type="metaworld", task_suite_name=suite))
    assert len(spec.tasks) == tasks
    assert len(spec.reset_ids["eval"]) == tasks * trials
    assert spec.image_size == (480, 480)
    assert spec.tasks[-1] == {"metaworld_45_ood": "hand-insert-v3", "reach-v3": "reach-v3"}.get(
        suite, "window-close-v3"
    )


def test_an_id_means_the_same_task_in_every_suite() -> None:
    one = env_spec(EnvConfig(env_type="metaworld", task_suite_name="door-lock-v3"))
    all_tasks = env_spec(EnvConfig(env_type="metaworld", task_suite_name="metaworld_50"))
    assert ids_of_task(all_tasks, "demo", "door-lock-v3")[:3] == one.reset_ids["demo"][:3]
    with pytest.raises(UserError, match="did you mean 'door-lock-v3'"):
        ids_of_task(all_tasks, "demo", "door-lok-v3")


def test_id_grid_orders() -> None:
    by_task, mixed = IdGrid((0, 3), range(5, 8)), IdGrid((0, 3), range(5, 8), interleaved=True)
    assert list(by_task) == [5, 6, 7, 3_000_005, 3_000_006, 3_000_007]
    assert list(mixed) == [5, 3_000_005, 6, 3_000_006, 7, 3_000_007]
    assert sorted(mixed) == sorted(by_task)
    assert 3_000_006 in mixed
    assert 3_000_008 not in mixed
    assert mixed[-1] == 3_000_007


@pytest.mark.parametrize(
    ("num_trials", "envs", "expected"), [(-1, 4, 1000), (0, 4, 4 * 2 * 3), (0, 4000, 1000), (10, 4, 10)]
)
def test_eval_trials(num_trials: int, envs: int, expected: int) -> None:
    cfg = EnvConfig(
        env_type="toy",
        total_num_envs=envs,
        num_trials=num_trials,
        max_episode_steps=20,
        max_steps_per_rollout_epoch=40,
        rollout_epoch=3,
    )
    trials = eval_trials(cfg, env_spec(cfg))
    assert len(trials) == len(set(trials)) == expected
    assert {t // 1_000_000 for t in trials} == {0, 1}  # both tasks, even in a subset


def test_specs_need_neither_torch_nor_the_simulator() -> None:
    code = (
        "import sys; from rlinf.envs.config import EnvConfig; from rlinf.envs.spec import env_spec;"
        "env_spec(EnvConfig(env_type='metaworld'));"
        "print([m for m in ('torch', 'mujoco', 'metaworld', 'ray') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_simulators_need_nothing_but_numpy_and_python_310() -> None:
    """What a simulator process imports before it makes a scene, in an interpreter that has nothing else installed."""
    code = (
        "import importlib, sys\n"
        "class OnlyNumpy:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name.partition('.')[0] not in (*sys.stdlib_module_names, 'numpy', 'rlinf'):\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, OnlyNumpy())\n"
        f"for name in {[*own_simulators().values(), 'rlinf.simulators.child_program']!r}:\n"
        "    importlib.import_module(name)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    for path in Path(rlinf.simulators.__path__[0]).rglob("*.py"):
        ast.parse(path.read_text(), feature_version=(3, 10))


def test_a_simulator_reads_keys_of_the_block_that_its_options_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = [
        "from dataclasses import dataclass",
        "from rlinf.simulators.toy import Scene, spec",
        "from rlinf.simulators.toy.suite import Options as ToyOptions",
        "@dataclass(frozen=True)",
        "class Options(ToyOptions):",
        "    assets_path: str = '/default'",
        "    def __post_init__(self):",
        "        if not self.assets_path.startswith('/'):",
        "            raise ValueError(f'assets_path={self.assets_path} must be absolute')",
    ]
    (tmp_path / "my_toys").mkdir()
    (tmp_path / "my_toys" / "with_assets.py").write_text("\n".join(source))
    monkeypatch.syspath_prepend(str(tmp_path))

    def block(**keys: Any) -> EnvConfig:
        return EnvConfig(env_type="my_toys.with_assets", **keys)

    assert env_options(block()).assets_path == "/default"
    assert env_options(block(init_params={"assets_path": "/own"})).assets_path == "/own"
    assert env_options(block(assets_path="/block")).assets_path == "/block"
    assert not list(unread_keys(block(assets_path="/block"), "env.train"))
    assert list(unread_keys(block(seeds_path="seeds"), "env.train")) == [
        "env.train.seeds_path='seeds' has no effect on env_type=my_toys.with_assets; read by robotwin"
    ]
    with pytest.raises(UserError, match=r"env\.train\.assets_path: assets_path=data must be absolute"):
        env_options(block(assets_path="data"))
