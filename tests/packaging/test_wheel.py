"""A wheel holds all that a run needs: recipes, tokenizer, task tables; it works outside of a checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXTRAS = ("tensorboard", "wandb", "swanlab", "pyarrow", "peft", "av", "PIL", "ray", "metaworld", "mujoco", "gymnasium")
EXTRAS += ("websockets", "msgpack")


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel's content; the packages it needs are those of this interpreter."""
    folder = tmp_path_factory.mktemp("wheel")
    sources = folder / "sources"  # a copy: building leaves files behind, which a later wheel would hold as well
    shutil.copytree(ROOT / "rlinf", sources / "rlinf", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    subprocess.run([*command, str(sources)], check=True)
    (wheel,) = folder.glob("rlinf-*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


def rlinf(unpacked: Path, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command of the wheel as if none of the optional packages were installed."""
    environment = dict(os.environ, PYTHONPATH=str(unpacked), PYTHONSAFEPATH="1")
    start = (
        f"import sys; sys.modules.update(dict.fromkeys({EXTRAS}))\n"
        "import rlinf; from rlinf.commands.cli import main; print(rlinf.__file__); main()"
    )
    return subprocess.run(
        [sys.executable, "-c", start, *arguments], cwd=cwd, env=environment, capture_output=True, text=True
    )


def test_every_recipe_and_table_is_in_the_wheel(unpacked: Path) -> None:
    downloads = ROOT / "rlinf/envs/maniskill"  # where a guide puts assets; no part of the package
    for file in (ROOT / "rlinf").rglob("*"):
        if file.is_file() and "__pycache__" not in file.parts and downloads not in file.parents:
            assert (unpacked / file.relative_to(ROOT)).is_file(), file


def test_it_plans_and_trains_in_an_empty_folder(unpacked: Path, tmp_path: Path) -> None:
    planned = rlinf(unpacked, tmp_path, "plan", "quickstart")
    assert planned.returncode == 0, planned.stderr
    assert planned.stdout.startswith(
        f"{unpacked}/rlinf/__init__.py\nquickstart: openpi compact on handle-press-side-v3"
    )
    trained = rlinf(unpacked, tmp_path, "train", "toy_ppo_compact", "runner.max_steps=1", "runner.logger.log_path=log")
    assert trained.returncode == 0, trained.stderr
    assert len((tmp_path / "log/metrics.jsonl").read_text().splitlines()) == 1
