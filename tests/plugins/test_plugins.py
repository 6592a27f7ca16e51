"""A simulator, a model and an advantage estimator outside of the package, named by path or entry point, train."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
START = (
    "import sys; from rlinf.commands.cli import main; main()"  # as the console script: no working folder on the path
)


def rlinf(*arguments: str, cwd: Path = HERE, path: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ, PYTHONSAFEPATH="1")
    if path is not None:
        environment["PYTHONPATH"] = os.pathsep.join([path, *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-c", START, *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)


def metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_things_of_another_package_train_two_steps(tmp_path: Path) -> None:
    run = rlinf("train", "kitchen.yaml", f"runner.logger.log_path={tmp_path}")
    assert run.returncode == 0, run.stderr
    logged = metrics(tmp_path)
    assert [row["step"] for row in logged] == [1, 2]
    assert logged[-1]["train/actor/optimizer_steps"] == 2
    largest = 3 * logged[0]["rollout/advantages_max"]  # a return less the mean of three others
    assert largest > 0
    assert largest == pytest.approx(round(largest), abs=1e-5)
    assert {"warm", "hot"} == {
        row["task"] for row in json.loads((tmp_path / "eval/step_2/result.json").read_text())["episodes"]
    }
    assert list(tmp_path.glob("*/checkpoints/global_step_2/actor/model/model.safetensors"))


def test_entry_points_give_them_short_names(tmp_path: Path) -> None:
    info = tmp_path / "my_lab-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my_lab\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[rlinf.simulators]\nkitchen = my_lab.envs.kitchen\n"
        "[rlinf.models]\nlinear = my_lab.models.linear\n"
        "[rlinf.advantages]\nleave_one_out = my_lab.estimators:leave_one_out\n"
    )
    names = ["env.train.env_type=kitchen", "env.eval.env_type=kitchen", "actor.model.model_type=linear"]
    run = rlinf(
        "train",
        str(HERE / "kitchen.yaml"),
        *names,
        "algorithm.adv_type=leave_one_out",
        f"runner.logger.log_path={tmp_path / 'log'}",
        cwd=tmp_path,
        path=os.pathsep.join([str(tmp_path), str(HERE)]),
    )
    assert run.returncode == 0, run.stderr
    assert len(metrics(tmp_path / "log")) == 2


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        (
            "env.train.env_type=my_lab.envs.kitchn",
            "env.train.env_type=my_lab.envs.kitchn: Python finds no module my_lab.envs.kitchn; install its "
            "package, or start "
            "rlinf in the folder that holds it",
        ),
        (
            "env.train.env_type=my_lab.estimators",
            "env_type=my_lab.estimators: module my_lab.estimators lacks Options, spec, Scene",
        ),
        (
            "algorithm.adv_type=my_lab.estimators.leave_one_uot",
            "algorithm.adv_type=my_lab.estimators.leave_one_uot: module my_lab.estimators has no "
            "leave_one_uot (did you mean "
            "'leave_one_out'?)",
        ),
        ("algorithm.group_size=1", "which compares group members"),
        (
            "env.train.init_params.pwer=1",
            "unknown key env.train.init_params.pwer; did you mean env.train.init_params.power?",
        ),
        ("actor.model.model_type=my_lab.models", "Python finds no module my_lab.models.config"),
    ],
)
def test_mistakes_are_one_line(setting: str, line: str) -> None:
    both = [setting, "env.train.group_size=1"] if setting.startswith("algorithm.group") else [setting]
    run = rlinf("plan", "kitchen.yaml", *both)
    assert run.returncode == 2
    assert line in run.stderr.replace("\n", "")
    assert "Traceback" not in run.stderr
