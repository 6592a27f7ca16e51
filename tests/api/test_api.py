"""The Python API: docs/api.md runs as it stands, and the names are lazy."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import rlinf
from rlinf.envs.vec import VecEnv
from rlinf.errors import UserError

PAGE = Path(__file__).parents[2] / "docs/api.md"


def test_the_page_runs_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    code = "\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S))
    names: dict = {}
    exec(compile(code, str(PAGE), "exec"), names)
    printed = capsys.readouterr().out
    assert (names["result"].steps, names["result"].checkpoint.name) == (2, "global_step_2")
    assert names["result"].folder == Path("logs/api")
    assert names["evaluation"].success.trials == len(names["evaluation"].episodes) == 16
    assert names["comparison"].standings[0].name == "expert"
    assert names["found"].pairs.count == 16
    assert names["actions"].shape == (2, 2)
    assert names["actions"].dtype == np.float32
    assert "(4, 32, 32, 3) (4,)" in printed
    again = rlinf.load_policy(names["result"].checkpoint)
    first = again.act(names["image"], instruction="reach the red dot", state=np.zeros(2, np.float32))
    assert np.array_equal(first, names["actions"])  # equal seeds and calls
    again.reset()
    batch = again.act(
        np.stack([names["image"]] * 3), instruction="reach the red dot", state=np.zeros((3, 2), np.float32)
    )
    assert batch.shape == (3, 2, 2)
    assert np.abs(batch[0] - first).max() < 1e-5
    with pytest.raises(ValueError, match="2 instructions for 3 images"):
        again.act(np.stack([names["image"]] * 3), instruction=["a", "b"])


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = "import rlinf, sys; print(rlinf.__version__, [m for m in ('torch', 'numpy', 'hydra') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out == f"{rlinf.__version__} []\n"
    assert set(rlinf.__all__) <= set(dir(rlinf))
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        rlinf.trian  # noqa: B018


def test_the_version_is_that_of_the_package() -> None:
    from importlib.metadata import version

    assert rlinf.__version__ == version("rlinf")


def test_environments_by_recipe_name() -> None:
    env = rlinf.make_env("toy_ppo_compact", mode="eval", num_envs=3, overrides=["env.eval.num_trials=3"])
    assert isinstance(env, VecEnv)
    try:
        assert env.reset().obs.images.shape[0] == 3
    finally:
        env.close()


def test_a_gymnasium_episode_restarts_in_the_same_step() -> None:
    envs = rlinf.make_env("toy_ppo_compact", num_envs=2, gymnasium=True, overrides=["env.train.max_episode_steps=3"])
    try:
        observations, infos = envs.reset()
        assert envs.observation_space.contains(observations)
        assert len(infos["task_descriptions"]) == 2
        still = np.zeros((2, 2), np.float32)
        for _ in range(2):
            _, _, terminated, truncated, infos = envs.step(still)
            assert not terminated.any()
            assert not truncated.any()
            assert "final_obs" not in infos
        last, _, _, truncated, infos = envs.step(still)
        assert truncated.all()
        assert infos["_final_obs"].all()
        assert not np.array_equal(infos["final_obs"][0]["states"], last["states"][0])
    finally:
        envs.close()


def test_a_file_is_no_policy(tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_bytes(b"")
    with pytest.raises(UserError, match="is a file; pass the folder"):
        rlinf.load_policy(tmp_path / "x.pt")
