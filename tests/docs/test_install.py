"""requirements/install.sh refuses what it does not know before it touches anything."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def install(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(ROOT / "requirements/install.sh"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd="/")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("embodied --model nothing --env metaworld", "unknown model 'nothing'; available: openpi openvla openvla_oft"),
        ("embodied --model openpi --env nothing", "unknown env 'nothing'; available: calvin maniskill metaworld"),
        ("embodied --model openpi", "--env is missing; available: calvin maniskill metaworld"),
        (
            "embodied --model openvla-oft --env maniskil",
            "unknown env 'maniskil'; available: calvin maniskill metaworld",
        ),
        (
            "embodied --model nothing --env maniskill_libero",
            "unknown model 'nothing'; available: openpi openvla openvla_oft",
        ),
        ("embodied --model", "--model needs a value"),
        ("embodied --fast", "unknown option '--fast'; see: bash requirements/install.sh -h"),
        ("agentic --model openpi --env metaworld", "unknown target 'agentic'; available: embodied"),
    ],
)
def test_a_wrong_name_lists_the_right_ones(arguments: str, message: str) -> None:
    done = install(*arguments.split())
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"install.sh: {message}\n")


@pytest.mark.parametrize("arguments", [(), ("-h",), ("embodied", "--help")])
def test_help(arguments: tuple[str, ...]) -> None:
    done = install(*arguments)
    assert done.returncode == 0
    for name in ("--model", "--env", "--venv", "--no-root", "openpi", "metaworld"):
        assert name in done.stdout


def lay_out(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(ROOT / "requirements/envs/calvin.sh"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | variables)


def git(folder: Path, *arguments: str) -> str:
    person = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    done = subprocess.run(["git", "-C", str(folder), *person, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def repository(folder: Path, *files: str) -> Path:
    """A git repository with one commit that holds these files."""
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "files")
    return folder


def test_calvins_files_are_laid_out_from_two_repositories(tmp_path: Path) -> None:
    conf = "calvin_models/conf"
    simulator = repository(tmp_path / "env", "LICENSE", "conf/scene.yaml", "data/plane/plane.urdf")
    annotations = [f"{conf}/annotations/new_playtable{kind}.yaml" for kind in ("", "_validation")]
    tasks = f"{conf}/callbacks/rollout/tasks/new_playtable_tasks.yaml"
    benchmark = repository(tmp_path / "calvin", "LICENSE", "unused.py", *annotations, tasks)
    folder = tmp_path / "files"
    repos = {"CALVIN_ENV_REPO": str(simulator), "CALVIN_REPO": f"file://{benchmark}"}
    repos["CALVIN_ENV_COMMIT"] = git(simulator, "rev-parse", "HEAD")
    done = lay_out(str(folder), **repos)
    assert done.returncode == 0, done.stderr
    assert f"export CALVIN_PATH={folder}" in done.stdout
    assert sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()) == [
        "LICENSE",
        "conf/scene.yaml",
        "data/plane/plane.urdf",
        "tasks/new_playtable.yaml",
        "tasks/new_playtable_tasks.yaml",
        "tasks/new_playtable_validation.yaml",
    ]
    assert "are in" in lay_out(str(folder), CALVIN_ENV_REPO="/nowhere").stdout  # nothing is fetched again


def test_an_unreachable_repository_is_named_and_leaves_nothing_behind(tmp_path: Path) -> None:
    done = lay_out(str(tmp_path / "files"), CALVIN_ENV_REPO=str(tmp_path / "nowhere"))
    assert done.returncode == 1
    assert f"calvin.sh: cannot clone {tmp_path}/nowhere; set CALVIN_ENV_REPO to a copy of it" in done.stderr
    assert not (tmp_path / "files").exists()
