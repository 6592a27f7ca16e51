"""The scripts that set ManiSkill up: the Vulkan driver out of apt's own archive, and the assets."""

from __future__ import annotations

import json
import os
import subprocess
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VULKAN = ROOT / "requirements/vulkan.sh"

DEB822 = """\
Types: deb
URIs: http://archive.example/security
Suites: bookworm-security
Components: main
Signed-By: /usr/share/keyrings/a.gpg

Types: deb deb-src
Enabled: no
URIs: http://off.example/debian
Suites: bookworm

Types: deb deb-src
# a comment
URIs: http://archive.example/debian
Suites: bookworm bookworm-updates
Components: main
Signed-By:
 -----BEGIN PGP PUBLIC KEY BLOCK-----
 .
 abc
"""
DEB822_BACKPORTS = """\
Types: deb
URIs: http://archive.example/debian
Suites: bookworm-backports
Components: main
Signed-By:
 -----BEGIN PGP PUBLIC KEY BLOCK-----
 .
 abc
"""
ONE_LINE = """\
# deb http://comment.example/debian bookworm main
deb cdrom:[Debian 12]/ bookworm main
deb-src http://archive.example/debian bookworm main
deb http://archive.example/security bookworm-security main
deb [arch=amd64 signed-by=/k.gpg] http://archive.example/debian bookworm main contrib
deb http://second.example/debian bookworm main
"""
ONE_LINE_BACKPORTS = "deb [arch=amd64 signed-by=/k.gpg] http://archive.example/debian bookworm-backports main contrib\n"


def bash(script: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run lines with the functions of vulkan.sh at hand."""
    command = ["bash", "-c", f"source '{VULKAN}'; nvidia=/nowhere; {script}"]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | variables)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"debian.sources": DEB822}, DEB822_BACKPORTS),
        ({"sources.list": ONE_LINE}, ONE_LINE_BACKPORTS),
        ({"sources.list": "", "debian.sources": DEB822}, DEB822_BACKPORTS),
        ({"sources.list": ONE_LINE, "debian.sources": DEB822}, ONE_LINE_BACKPORTS),
        ({"sources.list": "deb http://archive.example/debian trixie main\n"}, ""),
    ],
)
def test_backports_come_from_the_archive_that_apt_already_uses(
    tmp_path: Path, files: dict[str, str], expected: str
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    paths = " ".join(f"'{tmp_path / name}'" for name in ("absent.list", *files))
    done = bash(f"source_of_suite bookworm bookworm-backports {paths}")
    assert (done.returncode, done.stdout, done.stderr) == (0, expected, "")


@pytest.mark.parametrize(
    ("version", "new_enough"),
    [("22.3.6-1+deb12u2", False), ("24.2.8-1ubuntu1~24.04.1", False), ("24.3.0-1", True), ("25.0.7-2~bpo12+1", True)],
)
def test_versions_compare(version: str, new_enough: bool) -> None:
    assert (bash(f"at_least '{version}' $least").returncode == 0) == new_enough


def fake_machine(folder: Path, *, installed: str, offered: str, user: int = 0, lacking: str = "") -> dict[str, str]:
    """A PATH whose apt and dpkg only pretend, on a bookworm whose backports offer one version."""
    programs = {
        "id": f'[ "$1" = -u ] && echo {user} || echo person',
        "dpkg-query": f"echo '{'installed ' + installed if installed else 'not-installed'}'",
        "apt-get": 'echo "apt-get $*" >>"$CALLS"; case "$*" in *download*) touch driver.deb ;; esac',
        "dpkg-deb": f"if [ $1 = -f ]; then echo '{offered}'; else mkdir $3/usr && touch $3/usr/libvulkan_lvp.so; fi",
        "ldd": f"echo 'libLLVM-15.so.1 => {lacking or '/usr/lib/libLLVM-15.so.1'}'",
    }
    (folder / "bin").mkdir()
    for name, body in programs.items():
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / "bin" / name).chmod(0o755)
    (folder / "etc/apt/sources.list.d").mkdir(parents=True)
    (folder / "etc/os-release").write_text("VERSION_CODENAME=bookworm\n")
    (folder / "etc/apt/sources.list.d/debian.sources").write_text(DEB822)
    return {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "CALLS": str(folder / "calls")}


def test_an_old_mesa_is_passed_over_for_the_backports(tmp_path: Path) -> None:
    machine = fake_machine(tmp_path, installed="22.3.6-1+deb12u2", offered="25.0.7-2~bpo12+1", user=1000)
    done = bash(f"etc={tmp_path}/etc; main {tmp_path}/venv", **machine)
    driver = tmp_path / "venv/vulkan/libvulkan_lvp.so"
    assert (done.returncode, driver.is_file()) == (0, True), done.stderr
    assert f"ManiSkill draws with {driver}" in done.stderr
    icd = json.loads((tmp_path / "venv/vulkan/lvp_icd.json").read_text())
    assert icd["ICD"]["library_path"] == str(driver)
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == 2
    assert all("Dir::Etc::sourceparts=- " in call and "Dir::State::lists=" in call for call in calls)
    assert calls[1].endswith("download mesa-vulkan-drivers/bookworm-backports")

    again = bash(f"etc={tmp_path}/etc; main {tmp_path}/venv", **machine)
    assert (again.returncode, again.stderr) == (0, "")
    assert (tmp_path / "calls").read_text().splitlines() == calls  # nothing was asked twice


WITHOUT = ", so ManiSkill and RoboTwin cannot draw on this machine's CPU (everything else works)"


@pytest.mark.parametrize(
    ("machine", "lines"),
    [
        (
            {"installed": "", "offered": "25.0.7", "user": 1000},
            [
                f"mesa-vulkan-drivers is missing{WITHOUT}",
                "  sudo apt-get install -y --no-install-recommends libvulkan1 mesa-vulkan-drivers",
                "  bash requirements/vulkan.sh VENV",
            ],
        ),
        (
            {"installed": "22.3.6-1", "offered": "22.3.6-1"},
            [
                "Mesa 22.3.6-1 is older than 24.3; taking the driver of the backports",
                "bookworm-backports is no newer",
                f"the backports of this release bring no Mesa 24.3{WITHOUT}",
                "  VK_ICD_FILENAMES=FILE names the ICD file of a newer Mesa from elsewhere (Debian 13 has one), or:",
                "  bash requirements/vulkan.sh VENV",
            ],
        ),
        (
            {"installed": "22.3.6-1", "offered": "25.0.7", "lacking": "not found"},
            [
                "Mesa 22.3.6-1 is older than 24.3; taking the driver of the backports",
                f"VENV/vulkan/libvulkan_lvp.so lacks libLLVM-15.so.1{WITHOUT}",
                "  sudo apt-get install -y --no-install-recommends libvulkan1 mesa-vulkan-drivers",
                "  bash requirements/vulkan.sh VENV",
            ],
        ),
    ],
)
def test_what_cannot_be_done_is_said_and_stops_nothing(
    tmp_path: Path, machine: dict[str, str | int], lines: list[str]
) -> None:
    variables = fake_machine(tmp_path, **machine)  # type: ignore[arg-type]
    done = bash(f"etc={tmp_path}/etc; main {tmp_path}/venv", **variables)
    assert done.returncode == 0
    assert done.stderr.replace(f"{tmp_path}/venv", "VENV").splitlines() == [f"vulkan.sh: {line}" for line in lines]
    assert not (tmp_path / "venv/vulkan/lvp_icd.json").exists()


def test_a_machine_with_an_nvidia_driver_is_left_alone(tmp_path: Path) -> None:
    machine = fake_machine(tmp_path, installed="", offered="")
    done = bash(f"nvidia={tmp_path}; main {tmp_path}/venv", **machine)
    assert (done.returncode, done.stderr, (tmp_path / "calls").exists()) == (0, "", False)


# ---------------------------------------------------------------- assets
def lay_out(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(ROOT / "requirements/envs/maniskill.sh"), str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | variables)


def write(folder: Path, *files: str) -> Path:
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return folder


@pytest.fixture
def copies(tmp_path: Path) -> dict[str, str]:
    """Local copies of the three things the script fetches; the bridge scene as the zip file it is published as."""
    stage = "bridge_v2_real2sim_dataset/stages/bridge_table_1_v1.glb"
    with zipfile.ZipFile(tmp_path / "bridge.zip", "w") as archive:
        archive.writestr(stage, "table")
    return {
        "MANISKILL_ASSETS": str(write(tmp_path / "assets", "carrot/more_carrot/model_db.json", "README.md")),
        "WIDOWX_REPO": str(write(tmp_path / "robot", "wx250s.urdf", "meshes_wx250s/a.stl")),
        "BRIDGE_ASSETS": str(tmp_path / "bridge.zip"),
    }


def test_the_assets_are_laid_out_from_local_copies(tmp_path: Path, copies: dict[str, str]) -> None:
    folder = tmp_path / "files"
    done = lay_out(folder, **copies)
    assert done.returncode == 0, done.stderr
    assert f"export MANISKILL_ASSET_DIR={folder} MS_ASSET_DIR={folder}" in done.stdout
    assert sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()) == [
        "carrot/more_carrot/model_db.json",
        "data/robots/widowx/meshes_wx250s/a.stl",
        "data/robots/widowx/wx250s.urdf",
        "data/tasks/bridge_v2_real2sim_dataset/stages/bridge_table_1_v1.glb",
    ]
    again = lay_out(folder, MANISKILL_ASSETS="/nowhere", WIDOWX_REPO="/nowhere", BRIDGE_ASSETS="/nowhere")
    assert again.returncode == 0  # nothing is fetched again
    assert "from /nowhere" not in again.stdout


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("WIDOWX_REPO", "/nowhere", "cannot clone /nowhere at v0.2.0; set WIDOWX_REPO to a copy of it"),
        ("MANISKILL_ASSETS", "{tmp}", "{tmp}/carrot holds no more_carrot/model_db.json; it is not a copy of what"),
        ("BRIDGE_ASSETS", "{tmp}/robot", "{tmp}/robot holds no stages/bridge_table_1_v1.glb; it is not a copy of what"),
    ],
)
def test_what_is_missing_is_named_and_no_half_part_stays(
    tmp_path: Path, copies: dict[str, str], variable: str, value: str, message: str
) -> None:
    folder = tmp_path / "files"
    done = lay_out(folder, **copies | {variable: value.format(tmp=tmp_path)})
    assert done.returncode == 1
    assert f"maniskill.sh: {message.format(tmp=tmp_path)}" in done.stderr
    assert not list(folder.rglob("*.part"))
    assert lay_out(folder, **copies).returncode == 0  # the next try goes on from there


def test_without_the_hubs_command_the_way_out_is_named(tmp_path: Path, copies: dict[str, str]) -> None:
    done = lay_out(tmp_path / "files", **copies | {"MANISKILL_ASSETS": "a/b", "PATH": "/usr/bin:/bin"})
    assert done.returncode == 1
    assert "the command hf was not found; pip install huggingface_hub, or set MANISKILL_ASSETS to a copy" in done.stderr
