"""docker/Dockerfile: a stage per benchmark with the guides' image names, and switch_env. Images are not built here."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docker/Dockerfile").read_text()
LINES = [" ".join(line.split()) for line in re.sub(r"^#.*\n", "", TEXT, flags=re.M).replace("\\\n", " ").splitlines()]
MODELS = "openvla openvla-oft openpi"
STAGES = ("metaworld", "calvin", "maniskill_libero", "robotwin")


def test_a_stage_per_benchmark_on_one_pinned_base() -> None:
    stages = {name: base for base, name in re.findall(r"^FROM (\S+) AS (\S+)$", TEXT, re.M)}
    assert re.fullmatch(r"python:3\.11-.*", stages.pop("base"))  # the newest that every simulator has packages for
    assert stages == dict.fromkeys(STAGES, "base")


def test_what_is_copied_exists() -> None:
    copied = [line.split()[1:-1] for line in LINES if line.startswith(("COPY", "ADD"))]
    sources = [source for words in copied for source in words if not source.startswith("--")]
    assert {"pyproject.toml", "constraints.txt", "requirements", "rlinf"} <= set(sources)
    assert [source for source in sources if not (ROOT / source).exists()] == []
    ignored = (ROOT / "docker/Dockerfile.dockerignore").read_text().split()
    assert not set(ignored) & set(sources)


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_installs_its_benchmark_for_every_model(stage: str) -> None:
    (line,) = [line for line in LINES if f"--env {stage} " in line]
    (models,) = re.findall(r"for model in ([^;]+);", line)
    assert models == MODELS
    command = ["bash", "requirements/install.sh", "embodied", "--dry-run", "--model", "openpi", "--env", stage]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode == 0
    assert set(models.replace("-", "_").split()) == {
        table.stem for table in (ROOT / "requirements/models").glob("*.txt")
    }


@pytest.mark.parametrize("stage", STAGES)
def test_the_guides_image_names_are_documented(stage: str) -> None:
    page = (ROOT / "docs/installation.md").read_text()
    assert f"--target {stage} -t rlinf/rlinf:agentic-rlinf0.2-{stage} ." in page


def switch(venv: Path, *names: str) -> subprocess.CompletedProcess[str]:
    """Type `source switch_env NAME` with the script on PATH, and print what is active then."""
    line = f"source switch_env {' '.join(names)}; echo status $? python $(command -v python)"
    env = {"PATH": f"{ROOT / 'docker'}:/usr/bin:/bin", "RLINF_VENV": str(venv)}
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True, env=env)


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/activate").write_text(f'PATH="{tmp_path}/bin:$PATH"\n')
    (tmp_path / "bin/python").write_text("")
    (tmp_path / "bin/python").chmod(0o755)
    return tmp_path


@pytest.mark.parametrize("model", ["openvla", "openvla-oft", "openpi", "OpenPI"])
def test_switch_env_activates_the_one_environment(venv: Path, model: str) -> None:
    assert switch(venv, model).stdout.splitlines() == [
        f"switch_env: {venv} is active; one environment serves all models: {MODELS}",
        f"status 0 python {venv}/bin/python",
    ]


@pytest.mark.parametrize(("names", "named"), [(["openvla_aft"], "openvla_aft"), ([], "")])
def test_switch_env_refuses_other_names_with_the_list(venv: Path, names: list[str], named: str) -> None:
    done = switch(venv, *names)
    assert done.stderr == f"switch_env: unknown model '{named}'; available: {MODELS}\n"
    assert done.stdout.startswith("status 1 python")


def test_switch_env_without_an_environment_says_how_to_make_one(tmp_path: Path) -> None:
    done = switch(tmp_path, "openpi")
    assert done.stderr.startswith(f"switch_env: {tmp_path} is not an environment; bash requirements/install.sh")
