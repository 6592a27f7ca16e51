"""Every shell line of the CALVIN (English and Chinese), MetaWorld, ManiSkill and RoboTwin guides stands in one table.

The lines are read from the guides when the tests run; a line that no row of the table describes fails. A row says how
the line is checked: `run` types it, small where it trains; `dry` goes as far as a machine without network can; `listed`
gives the reason why it cannot be tried here. Lines that a guide comments out for some readers count like the others.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from rlinf.config.load import load_config
from rlinf.simulators.contract import SetupError
from rlinf.simulators.robotwin.assets import NEEDED, check_platform
from tests.conftest import TEST_DATA

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "examples/embodiment/config"
SEEDS = Path(os.environ.get("RLINF_GUIDES_DIR", TEST_DATA.parent / "seeds"))
GUIDES = {"000": "calvin", "001": "calvin, Chinese", "002": "metaworld", "003": "robotwin", "004": "maniskill"}
FIRST_WORDS = (
    r"git|cd|docker|source|bash|hf|pip|export|tensorboard|python3?|sh|make|ray|conda|uv|modelscope|wget|curl|sudo|apt|apt-get|"
    r"unzip|tar|mkdir|ln|cp|mv|wandb|swanlab|rlinf|huggingface-cli|docker\.1ms\.run"
)
LOST_BREAKS = (  # where the page of the RoboTwin guide has no line break between a command and what follows it
    r"(?<=openvla-oft)(?=OpenPI\()",
    r"(?<=\$PYTHONPATH)(?=GPU Memory)",
    r"(?<=ALOHA) (?=export)",
    r"(?<=/path/to/RoboTwin) (?=bash)",
)
HUB, MODEL = r"https://huggingface\.co/", r"(RLinf|gen-robot)/[\w-]+"
NO_HUB = "fetches gigabytes from the hub"


@dataclass(frozen=True)
class Row:
    """How the lines that match a pattern are checked."""

    kind: Literal["run", "dry", "listed"]
    pattern: str
    how: str  # the function that checks them, or the reason that they are only listed


TABLE = (
    Row("run", r"git clone https://(ghfast\.top/)?github\.com/RLinf/RLinf\.git", "clone"),
    Row("run", r"cd RLinf", "clone"),
    Row("run", r"cd <path_to_RLinf>/rlinf/envs/maniskill", "assets_folder"),
    Row("run", r"source switch_env [\w-]+", "switch_env"),
    Row("run", r"source \.venv/bin/activate", "activate"),
    Row("run", r"export HF_ENDPOINT=\S+", "export"),
    Row("run", r"git clone https://github\.com/RoboTwin-Platform/RoboTwin\.git -b RLinf_support", "robotwin_clone"),
    Row("run", r"export ROBOTWIN_PATH=/path/to/RoboTwin", "robotwin_clone"),
    Row("run", r"export ROBOT_PLATFORM=ALOHA", "platform"),
    Row("run", r"bash examples/embodiment/run_embodiment\.sh [a-z]\w+", "train"),
    Row("run", r"tensorboard --logdir \./logs --port 6006", "tensorboard"),
    Row("dry", r"bash requirements/install\.sh embodied --model [\w-]+ --env \w+", "install"),
    Row("dry", r"bash examples/embodiment/(run|eval)_embodiment\.sh CHOSEN_CONFIG", "chosen_config"),
    Row("dry", r"docker run .* rlinf/rlinf:agentic-rlinf0\.[12]-\w+", "image"),
    Row("dry", r"pip install huggingface-hub", "hub_client"),
    Row(
        "listed",
        r"docker\.1ms\.run/rlinf/rlinf:agentic-rlinf0\.[12]-\w+",
        "a mirror of images; ours are built",
    ),
    Row("listed", r"git lfs install", "writes the user's git configuration; only the clones below need it"),
    Row("listed", rf"git clone {HUB}{MODEL}", NO_HUB),
    Row("listed", rf"hf download {MODEL} --local-dir [\w-]+", NO_HUB),
    Row("listed", r"bash script/_download_assets\.sh", "RoboTwin's own; fetches 16 GB from the hub"),
    Row("listed", r"export PYTHONPATH=/opt/robotwin:\$PYTHONPATH", "ROBOTWIN_PATH is enough"),
    Row("listed", r"hf download --repo-type dataset RLinf/maniskill_assets --local-dir \./assets", NO_HUB),
)


@dataclass(frozen=True)
class Line:
    """One shell line of a guide, with its continuations joined."""

    guide: str
    text: str

    def __str__(self) -> str:
        return f"{self.guide}: {self.text[:70]}"

    @property
    def rows(self) -> list[Row]:
        return [row for row in TABLE if re.fullmatch(row.pattern, self.text)]


def shell_lines(text: str) -> list[str]:
    """The commands of a guide, also those behind a `# `. Some guides are pages without markup: first words tell."""
    joined = re.sub(r"\\\n\s*", " ", text)
    for lost in LOST_BREAKS:
        joined = re.sub(lost, "\n", joined)
    found = re.findall(rf"^\s*(?:# )?((?:{FIRST_WORDS})[ /].*)$", joined, re.M)
    return [" ".join(line.split()) for line in found]


def read(number: str) -> str:
    """The text of a guide, or nothing where the guides are absent."""
    return "".join(path.read_text(encoding="utf-8") for path in SEEDS.glob(f"{number}_*.txt"))


LINES = [Line(name, text) for number, name in GUIDES.items() for text in shell_lines(read(number))]
needs_guides = pytest.mark.skipif(not LINES, reason=f"no guides at {SEEDS} (set RLINF_GUIDES_DIR)")


def having(how: str) -> list[str]:
    """The distinct lines that a check is for."""
    return sorted({line.text for line in LINES if any(row.how == how for row in line.rows)})


@needs_guides
def test_every_line_has_one_row() -> None:
    assert [str(line) for line in LINES if len(line.rows) != 1] == []
    kinds = Counter(line.rows[0].kind for line in LINES)
    for row in TABLE:
        count = sum(line.rows == [row] for line in LINES)
        print(f"{row.kind:<7}{count:>3}  {row.pattern}  ({row.how})")
        assert count, f"no guide has a line like {row.pattern}"
    print(dict(kinds), "of", len(LINES))
    assert Counter(line.guide for line in LINES) == {
        "calvin": 22,
        "calvin, Chinese": 17,
        "metaworld": 22,
        "robotwin": 33,
        "maniskill": 20,
    }
    assert kinds == {"run": 58, "dry": 23, "listed": 33}


@needs_guides
def test_nothing_in_a_code_block_is_passed_over() -> None:
    """The Chinese guide marks its blocks, so what the first words find can be compared with them."""
    text = read("001")
    blocks = re.findall(r"^\.\. code:: bash\n\n((?:(?:   .*)?\n)+)", text, re.M)
    inside = [line for block in blocks for line in block.splitlines() if line.strip() and "# " not in line]
    assert len(inside) == 19  # continuations count one by one
    assert set(shell_lines("\n".join(inside))) <= set(shell_lines(text))
    joined = re.sub(r"\\\n\s*", " ", "\n".join(inside)).splitlines()
    assert len(shell_lines("\n".join(inside))) == len(joined)


def bash(script: str, folder: Path = ROOT, **variables: str) -> str:
    """What a script prints; it must succeed."""
    env = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    done = subprocess.run(["bash", "-ec", script], cwd=folder, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


# ---------------------------------------------------------------- run


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a checkout")
@pytest.mark.parametrize("line", [line for line in having("clone") if line.startswith("git")])
def test_the_clone_lines_give_a_checkout(line: str, tmp_path: Path) -> None:
    address = line.split()[-1]
    local = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": f"url.{ROOT}.insteadOf", "GIT_CONFIG_VALUE_0": address}
    assert bash(f"{line}\ncd RLinf\nls requirements/install.sh", tmp_path, **local).endswith(
        "requirements/install.sh\n"
    )


@pytest.mark.parametrize("line", having("assets_folder"))
def test_the_folder_for_assets_exists_and_is_looked_at(line: str) -> None:
    folder = Path(bash(f"{line.replace('<path_to_RLinf>', str(ROOT))}\npwd").strip())
    from rlinf.simulators.installed import FOLDERS

    assert f"{folder.relative_to(ROOT)}/assets" in FOLDERS["maniskill"]


@pytest.mark.parametrize("line", having("switch_env"))
def test_switch_env_takes_every_model_of_the_guides(line: str, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/activate").write_text("activated=yes\n")
    path = f"{ROOT / 'docker'}:{os.environ['PATH']}"
    assert bash(f"{line}\necho $activated", PATH=path, RLINF_VENV=str(tmp_path)).endswith("\nyes\n")


@pytest.mark.parametrize("line", having("activate"))
def test_the_environment_is_activated(line: str) -> None:
    if not (ROOT / ".venv/bin/activate").exists():
        pytest.skip("no .venv here")
    assert bash(f"{line}\ncommand -v rlinf").endswith("/.venv/bin/rlinf\n")


@pytest.mark.parametrize("line", having("export"))
def test_the_endpoint_of_the_hub_reaches_what_fetches_from_it(line: str) -> None:
    endpoint = line.partition("=")[2]
    install = "bash requirements/install.sh embodied --model openvla --env maniskill --no-root --use-mirror --dry-run"
    assert f"{endpoint} for Hugging Face" in bash(f"{line}\n{install}")


@pytest.mark.parametrize("line", [line for line in having("robotwin_clone") if line.startswith("git")])
def test_the_clone_of_robotwin_is_found_by_its_variable(line: str, tmp_path: Path) -> None:
    """As typed, the variable names a folder that is not there, which is said; with the clone's, it is found."""
    (export,) = (line for line in having("robotwin_clone") if line.startswith("export"))
    remote = tmp_path / "remote"
    for name in NEEDED:
        (remote / name / "file" if not Path(name).suffix else remote / name).parent.mkdir(parents=True, exist_ok=True)
        (remote / name / "file" if not Path(name).suffix else remote / name).write_text("")
    author = "-c user.name=a -c user.email=a@b.c"
    bash(f"git init -q -b RLinf_support\ngit add .\ngit {author} commit -qm files", remote)
    address = line.split()[2]
    local = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": f"url.{remote}.insteadOf", "GIT_CONFIG_VALUE_0": address}
    find = f"{sys.executable} -c 'from rlinf.simulators.robotwin.assets import find_checkout as f; print(f(None))'"
    there = export.replace("/path/to/RoboTwin", str(tmp_path / "RoboTwin"))
    assert bash(f"{line} -q\n{there}\n{find}", tmp_path, **local) == f"{tmp_path}/RoboTwin\n"
    as_typed = bash(f"{export}\n{find} 2>&1 || true")
    assert as_typed.splitlines()[-1].endswith(
        "ROBOTWIN_PATH=/path/to/RoboTwin is not a folder; it should be a checkout of RoboTwin: " + line
    )


@pytest.mark.parametrize("line", having("platform"))
def test_the_platform_is_read(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROBOT_PLATFORM", line.partition("=")[2])
    check_platform()
    monkeypatch.setenv("ROBOT_PLATFORM", "LIBERO")
    with pytest.raises(SetupError, match="ROBOT_PLATFORM=LIBERO must be ALOHA"):
        check_platform()


SMALL = ["actor.model.size=compact", "actor.model.precision=fp32", "runner.max_steps=1", "runner.val_check_interval=-1"]
HERE = ['cluster.component_placement={"actor,env,rollout":all}', "rollout.pipeline_stage_num=1"]
ROBOTWIN = [
    "env.train.group_size=2",
    "algorithm.group_size=2",
    "env.train.task_config.task_name=stack_blocks_two",
    "env.train.task_config.embodiment=[piper, piper, 0.6]",
    "env.train.init_params.setting=demo_clean",
    "env.train.max_episode_steps=50",
    "env.train.max_steps_per_rollout_epoch=50",
    "env.train.init_params.render=fast",
    "env.train.rollout_epoch=1",
    "env.train.video_cfg.save_video=false",
    "actor.micro_batch_size=2",
    "actor.global_batch_size=2",
    "algorithm.filter_rewards=false",
]
SMALL_RUNS = {
    "calvin_d_d_ppo_openpi_pi05": [
        "env.train.max_episode_steps=10",
        "env.train.max_steps_per_rollout_epoch=10",
        "env.train.init_params={image_size: 64, wrist_image_size: 64, render: fast}",
        "env.train.rollout_epoch=1",
        "env.train.video_cfg.save_video=false",
        "actor.micro_batch_size=2",
        "actor.global_batch_size=4",
    ],
    "metaworld_50_ppo_openpi": [
        "env.train.max_episode_steps=10",
        "env.train.max_steps_per_rollout_epoch=10",
        "env.train.init_params={image_size: 64, render: fast}",
        "env.train.rollout_epoch=1",
        "actor.micro_batch_size=2",
        "actor.global_batch_size=4",
    ],
    "robotwin_place_empty_cup_grpo_openvlaoft": ROBOTWIN,
    "robotwin_adjust_bottle_ppo_OpenPI_pi05": ROBOTWIN,
    "maniskill_ppo_openvla": [
        "env.train.max_episode_steps=4",
        "env.train.max_steps_per_rollout_epoch=4",
        "env.train.init_params.sim_backend=cpu",
        "actor.micro_batch_size=4",
        "actor.global_batch_size=8",
    ],
}


@pytest.mark.parametrize(
    "line",
    [pytest.param(line, marks=() if "metaworld" in line else pytest.mark.slow) for line in having("train")],
)
def test_the_launch_lines_train(line: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """The line as typed, with settings behind it that make the model compact and the rollout short."""
    recipe = line.split()[-1]
    simulator = recipe.partition("_")[0]
    if simulator != "metaworld":
        request.getfixturevalue(f"{simulator}_path")
    settings = [*SMALL, *HERE, "env.train.total_num_envs=2", *SMALL_RUNS[recipe]]
    quoted = " ".join(f"'{setting}'" for setting in settings)
    bash(f"{line} {quoted}", LOG_DIR=str(tmp_path), VIRTUAL_ENV=sys.prefix)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1
    assert any((tmp_path / "tensorboard").glob("events.*"))
    assert (tmp_path / "run_embodiment.log").stat().st_size > 0


@pytest.mark.parametrize("line", having("tensorboard"))
def test_tensorboard_serves_the_logs(line: str, tmp_path: Path) -> None:
    """A free port instead of 6006, which someone may use."""
    program = Path(sys.executable).parent / "tensorboard"
    if not program.exists():
        pytest.skip("tensorboard is not installed")
    (tmp_path / "logs").mkdir()
    command = [str(program), *line.split()[1:], "--port", "0"]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as server:
        try:
            assert any("http://" in said for said in printed(server))
        finally:
            server.terminate()


def printed(server: subprocess.Popen[str]) -> Iterator[str]:
    assert server.stderr is not None
    yield from server.stderr


# ---------------------------------------------------------------- dry


@pytest.mark.parametrize("mirror", ["", " --use-mirror"])
@pytest.mark.parametrize("line", having("install"))
def test_the_install_lines_are_understood(line: str, mirror: str) -> None:
    said = bash(f"{line}{mirror} --dry-run")
    assert said.endswith("dry run: nothing was changed\n")
    assert said.startswith("mirrors: ") == bool(mirror)
    assert "[datasets\\,video\\,tensorboard\\,wandb\\,swanlab\\,ray]".replace("[", "\\[").replace("]", "\\]") in said


@needs_guides
def test_every_recipe_of_the_guides_can_be_chosen() -> None:
    """`CHOSEN_CONFIG` stands for one of the files that the guide names."""
    named = {name for number in GUIDES for name in re.findall(r"config/(\w+)\.yaml", read(number))}
    assert len(named) == 16
    for name in sorted(named):
        devices = [1 if name.startswith(("calvin", "metaworld")) else 8]
        by_path = name != name.lower()  # the path that the guide gives, with its capitals
        load_config(f"{CONFIGS}/{name}.yaml" if by_path else name, purpose="plan", devices=devices)


@pytest.mark.parametrize("line", having("image"))
def test_the_images_have_a_stage(line: str) -> None:
    stage = line.rpartition("-")[2]
    assert re.search(rf"^FROM base AS {stage}$", (ROOT / "docker/Dockerfile").read_text(), re.M)
    assert f"rlinf/rlinf:agentic-rlinf0.2-{stage}" in (ROOT / "docs/installation.md").read_text()
    assert "-v .:/workspace/RLinf" in line
    assert "WORKDIR /workspace/RLinf" in (ROOT / "docker/Dockerfile").read_text()


def test_the_hubs_client_is_there_already() -> None:
    """`pip install huggingface-hub` changes nothing after install.sh: the pin is in constraints.txt, `hf` on PATH."""
    assert "huggingface_hub==" in (ROOT / "constraints.txt").read_text()
    pytest.importorskip("huggingface_hub")
    assert shutil.which("hf", path=str(Path(sys.executable).parent))
