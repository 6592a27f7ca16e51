"""requirements/install.sh refuses what it does not know before it touches anything."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

import rlinf

ROOT = Path(__file__).parents[2]


def install(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(ROOT / "requirements/install.sh"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd="/")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("embodied --model nothing --env metaworld", "unknown model 'nothing'; available: openpi openvla openvla_oft"),
        (
            "embodied --model openpi --env nothing",
            "unknown env 'nothing'; available: calvin maniskill metaworld robotwin",
        ),
        ("embodied --model openpi", "--env is missing; available: calvin maniskill metaworld robotwin"),
        (
            "embodied --model openvla-oft --env maniskil",
            "unknown env 'maniskil'; available: calvin maniskill metaworld robotwin",
        ),
        (
            "embodied --model nothing --env maniskill_libero",
            "unknown model 'nothing'; available: openpi openvla openvla_oft",
        ),
        ("embodied --model", "--model needs a value"),
        ("embodied --fast", "unknown option '--fast'; see: bash requirements/install.sh -h"),
        ("embodied --model openpi --env robotwin --robotwin-path", "--robotwin-path needs a value"),
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
    for name in ("--model", "--env", "--venv", "--no-root", "--use-mirror", "--dry-run", "openpi", "metaworld"):
        assert name in done.stdout


FILES = ("CALVIN_PATH", "MANISKILL_ASSET_DIR", "ROBOTWIN_PATH", "ROBOTWIN_PYTHON", "ASSETS_PATH")
FAKE_PYTHON = """\
#!{real}
import os, shutil, sys
sys.version_info = ({major}, {minor}, 0)
match sys.argv[1:]:
    case ["-m", "venv", folder]:
        os.makedirs(folder + "/bin")
        shutil.copy(__file__, folder + "/bin/python")
    case ["-c", text]:
        exec(text)
    case ["-V"]:
        print("Python {major}.{minor}.0")
    case _:
        with open(os.environ["CALLS"], "a") as file:
            names = "HF_ENDPOINT", "GIT_CONFIG_KEY_0", "GIT_CONFIG_VALUE_0"
            print(*sys.argv[1:], *(f"{{n}}={{os.environ[n]}}" for n in names if n in os.environ), file=file)
"""


@dataclass(frozen=True)
class Machine:
    """A copy of requirements/ beside a Python that only writes down what pip is asked for."""

    folder: Path

    def install(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        command = ["bash", str(self.folder / "requirements/install.sh"), "embodied", "--no-root", *arguments]
        own = {"PYTHON": str(self.folder / "python"), "CALLS": str(self.folder / "calls"), **variables}
        env = {k: v for k, v in os.environ.items() if k not in FILES} | own
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd="/", env=env)

    @property
    def calls(self) -> list[str]:
        """The pip calls so far."""
        file = self.folder / "calls"
        return file.read_text().splitlines() if file.exists() else []

    def python(self, minor: int) -> Machine:
        text = FAKE_PYTHON.format(real=sys.executable, major=3, minor=minor)
        (self.folder / "python").write_text(text)
        (self.folder / "python").chmod(0o755)
        return self


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    shutil.copytree(ROOT / "requirements", tmp_path / "repo/requirements")
    return Machine(tmp_path / "repo").python(11)


def files_of_calvin(folder: Path) -> Path:
    """A folder that calvin.sh takes for complete."""
    for name in ("data", "tasks"):
        (folder / name).mkdir(parents=True)
    return folder


PIP = "-m pip install -q --disable-pip-version-check -c constraints.txt"
EXTRAS = "-e .[datasets,video,tensorboard,wandb,swanlab,ray]"


@pytest.mark.parametrize(
    ("model", "env", "tables"),
    [
        ("openpi", "metaworld", "-r requirements/models/openpi.txt -r requirements/envs/metaworld.txt"),
        ("OpenPI", "calvin", "-r requirements/models/openpi.txt -r requirements/envs/calvin.txt"),
        ("openvla-oft", "calvin", "-r requirements/models/openvla_oft.txt -r requirements/envs/calvin.txt"),
        ("openvla", "maniskill_libero", "-r requirements/models/openvla.txt -r requirements/envs/maniskill.txt"),
    ],
)
def test_the_guides_names_install_ray_and_all_loggers(machine: Machine, model: str, env: str, tables: str) -> None:
    files = files_of_calvin(machine.folder.parent / "files")
    for part in ("carrot", "data/robots/widowx", "data/tasks/bridge_v2_real2sim_dataset"):
        (files / part).mkdir(parents=True)
    variables = {"CALVIN_PATH": str(files), "MANISKILL_ASSET_DIR": str(files)}
    done = machine.install("--model", model, "--env", env, **variables)
    assert done.returncode == 0, done.stderr
    assert machine.calls == [f"{PIP} torch", f"{PIP} {EXTRAS} {tables}"]
    link = machine.folder / "data" / {"maniskill_libero": "maniskill"}.get(env, env)
    assert link.is_symlink() == (env != "metaworld")
    assert env == "metaworld" or link.resolve() == files.resolve()


def test_a_second_call_changes_nothing_and_a_real_folder_is_kept(machine: Machine) -> None:
    files = files_of_calvin(machine.folder / "data/calvin")
    for _ in range(2):
        done = machine.install("--model", "openpi", "--env", "calvin", CALVIN_ENV_REPO="/nowhere")
        assert done.returncode == 0, done.stderr
    assert not files.is_symlink()
    elsewhere = files_of_calvin(machine.folder / "elsewhere")
    assert machine.install("--model", "openpi", "--env", "calvin", CALVIN_PATH=str(elsewhere)).returncode == 0
    assert not files.is_symlink()


def test_mirrors_stay_in_the_process(machine: Machine) -> None:
    home = machine.folder / "home"
    home.mkdir()
    files = str(files_of_calvin(machine.folder / "files"))
    arguments = ("--model", "openpi", "--env", "calvin", "--use-mirror")
    done = machine.install(*arguments, CALVIN_PATH=files, HOME=str(home), GITHUB_MIRROR="https://gh.example/")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].startswith("mirrors: https://gh.example/ for GitHub, https://hf-mirror.com for")
    github = "GIT_CONFIG_KEY_0=url.https://gh.example/.insteadOf GIT_CONFIG_VALUE_0=https://github.com/"
    assert all(call.endswith(f"HF_ENDPOINT=https://hf-mirror.com {github}") for call in machine.calls)
    assert list(home.rglob("*")) == []  # neither git's nor pip's configuration


def test_git_follows_such_a_mirror(tmp_path: Path) -> None:
    repository(tmp_path / "mirror/mees/calvin.git", "file")
    mirror = {"GIT_CONFIG_KEY_0": f"url.{tmp_path}/mirror/.insteadOf", "GIT_CONFIG_VALUE_0": "https://github.com/"}
    command = ["git", "ls-remote", "https://github.com/mees/calvin.git", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | mirror | {"GIT_CONFIG_COUNT": "1"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("HEAD\n")


@pytest.mark.parametrize("env", ["calvin", "maniskill_libero", "metaworld", "robotwin"])
def test_a_dry_run_touches_nothing(machine: Machine, env: str) -> None:
    before = sorted(machine.folder.rglob("*"))
    done = machine.install("--model", "openvla-oft", "--env", env, "--use-mirror", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("dry run: nothing was changed\n")
    assert (sorted(machine.folder.rglob("*")), machine.calls) == (before, [])


@pytest.mark.parametrize(
    ("minor", "env", "says"),
    [
        (11, "calvin", ""),
        (12, "calvin", "Python 3.12.0: Bullet's wheels end at Python 3.11, so it is left out; PYTHON=python3.11"),
        (13, "calvin", "Python 3.13.0: Bullet's wheels end at Python 3.11, so it is left out; PYTHON=python3.11"),
        (12, "maniskill", ""),
        (13, "maniskill", "Python 3.13.0: ManiSkill's own package ends at Python 3.12"),
        (12, "robotwin", ""),
        (13, "metaworld", ""),
    ],
)
def test_what_a_newer_python_lacks_is_one_line(machine: Machine, minor: int, env: str, says: str) -> None:
    done = machine.python(minor).install("--model", "openpi", "--env", env, "--dry-run")
    told = [line for line in done.stdout.splitlines() if line.startswith("Python 3.")]
    assert (done.returncode, len(told)) == (0, bool(says)), done.stderr
    assert "".join(told).startswith(says)


def checkout_of_robotwin(folder: Path) -> str:
    """Make a repository that looks like RoboTwin's; returns its commit."""
    repository(folder, "robotwin/envs/vector_env.py")
    git(folder, "branch", "-m", "RLinf_support")
    (folder / "script").mkdir()
    (folder / "script/update_embodiment_config_path.py").write_text("open('assets/embodiments/config.yml', 'w')")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "script")
    return git(folder, "rev-parse", "HEAD")


def test_robotwin_gets_an_environment_of_its_own(machine: Machine) -> None:
    """numpy 1.26 stays out of rlinf's; the second call makes nothing twice, and links lead to what was given."""
    code, assets = machine.folder.parent / "RoboTwin", machine.folder.parent / "files"
    commit = checkout_of_robotwin(code)
    (assets / "assets/embodiments").mkdir(parents=True)
    arguments = ("--model", "openvla-oft", "--env", "robotwin", "--robotwin-path", str(code))
    for _ in range(2):
        done = machine.install(*arguments, ASSETS_PATH=str(assets), ROBOTWIN_COMMIT=commit)
        assert done.returncode == 0, done.stderr
    tables = "-r requirements/models/openvla_oft.txt"
    own = "-m pip install -q --disable-pip-version-check -r requirements/envs/robotwin.txt"
    assert machine.calls == [f"{PIP} torch", f"{PIP} {EXTRAS} {tables}", own] * 2
    data = machine.folder / "data"
    assert (data / "robotwin_venv/bin/python").exists()
    assert (data / "robotwin").resolve() == code
    assert (data / "robotwin_assets").resolve() == assets
    assert "commit" not in done.stdout
    assert git(code, "status", "--short") == ""


def test_a_robotwin_interpreter_of_ones_own_is_left_as_it_is(machine: Machine) -> None:
    code = machine.folder.parent / "RoboTwin"
    checkout_of_robotwin(code)
    own = machine.folder.parent / "mine/bin/python"
    own.parent.mkdir(parents=True)
    shutil.copy(machine.folder / "python", own)
    there = {"ROBOTWIN_PATH": str(code), "ROBOTWIN_PARTS": ""}
    refused = machine.python(13).install("--model", "openpi", "--env", "robotwin", **there)
    assert (refused.returncode, machine.calls) == (1, [])
    assert "mplib 0.2.1 and numpy 1.26 end at Python 3.12" in refused.stderr
    for variables in ({"ROBOTWIN_PYTHON": str(own)}, {}):  # the second call finds it by the link
        done = machine.install("--model", "openpi", "--env", "robotwin", **there, **variables)
        assert done.returncode == 0, done.stderr
        assert f"{variables.get('ROBOTWIN_PYTHON', 'data/robotwin_venv/bin/python')}, which is left" in done.stdout
    assert len(machine.calls) == 2 * 2  # rlinf's
    assert (machine.folder / "data/robotwin_venv").resolve() == own.parents[1]
    assert "it is at commit" in done.stdout  # another one than rlinf is made for


def test_an_older_python_is_refused(machine: Machine) -> None:
    done = machine.python(10).install("--model", "openpi", "--env", "metaworld")
    assert (done.returncode, machine.calls) == (1, [])
    assert done.stderr.endswith("is Python 3.10.0; rlinf needs Python 3.11 or newer\n")


@pytest.mark.parametrize("env", ["calvin", "maniskill", "metaworld"])
def test_the_tables_and_the_extras_of_the_package_agree(env: str) -> None:
    """`pip install -e '.[calvin]'` and install.sh bring the same packages."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    lines = (ROOT / f"requirements/envs/{env}.txt").read_text().splitlines()
    table = [line.replace('"', "'") for line in lines if line and not line.startswith("#")]
    assert sorted(table) == sorted(project[env])


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


def make(machine: Machine, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`make ARGUMENTS` in the copy, where nothing but the versions is real; `rlinf` ends at once."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        if not (machine.folder / name).exists():
            shutil.copy2(ROOT / name, machine.folder)
    for name in ("system.sh", "vulkan.sh"):
        (machine.folder / "requirements" / name).write_text("exit 0\n")
    program = machine.folder / ".venv/bin/rlinf"
    (machine.folder / "rlinf").write_text("#!/bin/sh\n")
    (machine.folder / "rlinf").chmod(0o755)
    command = ["make", *arguments, f"PYTHON={machine.folder}/python", "VENV=.venv"]
    outside = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}  # of `make test`
    env = {**outside, "CALLS": str(machine.folder / "calls")}
    program.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(machine.folder / "rlinf", program)
    python = machine.folder / ".venv/bin/python"
    shutil.copy(machine.folder / "python", python)
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=machine.folder, env=env)


LIGHT, ALL = "-e .[quickstart]", "-e .[metaworld,calvin,maniskill,ray,dev]"


def extras(machine: Machine) -> list[str]:
    """What make asked pip for so far, apart from torch."""
    return [call[call.index("-e ") :] for call in machine.calls if "-e " in call]


def test_make_quickstart_installs_the_least_and_never_takes_anything_away(machine: Machine) -> None:
    assert make(machine, "quickstart").returncode == 0
    assert make(machine, "quickstart").returncode == 0
    assert extras(machine) == [LIGHT]  # once
    assert make(machine, "setup").returncode == 0
    assert make(machine, "setup").returncode == 0
    assert make(machine, "quickstart").returncode == 0
    assert extras(machine) == [LIGHT, ALL]
    later = (machine.folder / ".venv/.installed").stat().st_mtime + 10
    os.utime(machine.folder / "constraints.txt", (later, later))
    assert make(machine, "quickstart").returncode == 0
    assert extras(machine) == [LIGHT, ALL, ALL]  # what is there is renewed as a whole


def test_the_extra_of_the_quickstart_holds_what_it_uses_and_no_other_simulator() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert project["quickstart"] == ["rlinf[metaworld,datasets,video,tensorboard]"]


@pytest.mark.parametrize("target", ["quickstart", "setup", "test"])
def test_make_refuses_an_older_python_first_and_in_one_line(machine: Machine, target: str) -> None:
    done = make(machine.python(10), target)
    line, *rest = done.stderr.splitlines()
    assert (done.returncode, machine.calls, done.stdout) == (2, [], "")
    assert line.startswith("rlinf needs Python 3.11 or newer; .venv/bin/python is 3.10.0: name another with PYTHON=")
    assert all(text.startswith("make: ***") for text in rest)


def test_importing_with_an_older_python_is_one_line_too() -> None:
    code = "import sys; sys.version_info = (3, 9, 2); import rlinf.commands.cli"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.returncode, done.stderr) == (1, f"rlinf needs Python 3.11 or newer; {sys.executable} is 3.9.2\n")


def test_everyone_names_the_same_least_python() -> None:
    least = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"].removeprefix(">=")
    assert least == ".".join(map(str, rlinf.LEAST_PYTHON))
    assert f"rlinf needs Python {least} or newer" in (ROOT / "requirements/install.sh").read_text()


def robotwin(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(ROOT / "requirements/envs/robotwin.sh"), *arguments]
    env = {k: v for k, v in os.environ.items() if k not in FILES} | variables
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env)


def test_robotwin_is_cloned_at_its_commit_and_its_assets_are_unpacked(tmp_path: Path) -> None:
    commit = checkout_of_robotwin(tmp_path / "remote")
    (tmp_path / "remote/later").write_text("")
    git(tmp_path / "remote", "add", ".")
    git(tmp_path / "remote", "commit", "-qm", "later")
    for part in ("embodiments", "objects"):
        (tmp_path / part).mkdir()
        (tmp_path / part / "file").write_text(part)
        shutil.make_archive(str(tmp_path / "zips" / part), "zip", tmp_path, part)
    folder = tmp_path / "here"
    variables = {"ROBOTWIN_REPO": str(tmp_path / "remote"), "ROBOTWIN_COMMIT": commit}
    variables |= {"ROBOTWIN_ASSETS": str(tmp_path / "zips"), "ROBOTWIN_PARTS": "embodiments objects"}
    done = robotwin(str(folder), **variables)
    assert done.returncode == 0, done.stderr
    assert (git(folder, "rev-parse", "HEAD"), (folder / "later").exists()) == (commit, False)
    assert sorted(p.name for p in (folder / "assets").iterdir()) == ["embodiments", "objects"]
    assert (folder / "assets/embodiments/config.yml").exists()  # as RoboTwin's own script lays it out
    assert done.stdout.endswith(f"tell rlinf where it is:  export ROBOTWIN_PATH={folder}\n")
    again = robotwin(str(folder), **variables | {"ROBOTWIN_ASSETS": "/nowhere", "ROBOTWIN_REPO": "/nowhere"})
    assert (again.returncode, again.stderr) == (0, "")


def test_what_robotwin_lacks_is_said(tmp_path: Path) -> None:
    commit = checkout_of_robotwin(tmp_path / "remote")
    folder, there = str(tmp_path / "here"), {"ROBOTWIN_REPO": str(tmp_path / "remote"), "ROBOTWIN_COMMIT": commit}
    done = robotwin(folder, ROBOTWIN_REPO=str(tmp_path / "nothing"))
    assert done.returncode == 1
    assert done.stderr.endswith("set ROBOTWIN_PATH to a checkout, or ROBOTWIN_REPO to a copy\n")
    assert not (tmp_path / "here").exists()
    (tmp_path / "zips").mkdir()
    without = robotwin(folder, **there, ROBOTWIN_ASSETS=str(tmp_path / "zips"))
    assert without.returncode == 0  # the rest of an installation stands
    assert "cannot fetch embodiments.zip" in without.stderr
    assert "set ASSETS_PATH to a folder that holds assets/embodiments" in without.stderr
    wrong = robotwin(folder, **there, ASSETS_PATH=str(tmp_path))
    assert (wrong.returncode, "holds no assets/embodiments" in wrong.stderr) == (1, True)
    other = robotwin(str(tmp_path / "zips/.."), **there)
    assert (other.returncode, "is not a checkout of RoboTwin's branch RLinf_support" in other.stderr) == (1, True)
