"""What the documentation shows must be true: commands parse, errors read as printed, links lead somewhere."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from rlinf.commands import compat_page, key_reference, results_page
from rlinf.commands.cli import app
from rlinf.commands.plan_text import describe_plan
from rlinf.config.derived import make_plan
from rlinf.config.load import load_config
from rlinf.errors import UserError
from rlinf.placement.grammar import Slot, place_components
from rlinf.runtime.cluster import make_cluster

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
ON_EIGHT_GPUS = tuple(f"maniskill_{kind}_openvla{oft}" for kind in ("ppo", "grpo") for oft in ("", "oft"))
WRAPPERS = {"run_embodiment.sh": "train", "eval_embodiment.sh": "eval"}
OF_AN_EARLIER_COMMAND = (
    "actor.model.model_path=",
    "actor.model.lora_path=",
    "runner.ckpt_path=",
    "runner.resume_dir=",
)  # made when one follows along


@dataclass(frozen=True)
class Line:
    """One command of a page and what the page says it prints."""

    page: str
    words: tuple[str, ...]
    output: str = ""

    def __str__(self) -> str:
        return f"{self.page}: {' '.join(self.words)[:70]}"


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    """(language, text) of the fenced blocks."""
    yield from re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)


def lines() -> Iterator[Line]:
    """Every command: lines of bash blocks, and `$ ...` of console blocks with the lines below."""
    for page in PAGES:
        for language, text in blocks(page):
            joined = text.replace("\\\n", " ")
            if language == "bash":
                for line in joined.splitlines():
                    if words := shlex.split(line, comments=True):
                        yield Line(page.name, tuple(words))
            if language == "console":
                for command, output in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", joined, re.M):
                    yield Line(page.name, tuple(shlex.split(command)), output.rstrip("\n"))


LINES = list(lines())
SHOWN = [line for line in LINES if line.output]
COMMANDS = {command.name or command.callback.__name__ for command in app.registered_commands}


def as_rlinf(line: Line) -> tuple[str, list[str]] | None:
    """Subcommand and arguments, the wrapper scripts included."""
    if line.words[0] == "rlinf":
        return line.words[1], list(line.words[2:])
    script = Path(line.words[1]).name if line.words[0] == "bash" and len(line.words) > 1 else ""
    return (WRAPPERS[script], list(line.words[2:])) if script in WRAPPERS else None


def machine(name: str, settings: list[str]) -> list[int] | None:
    """Accelerators per node for a recipe; None where the command itself says so."""
    if any("virtual_devices" in setting for setting in settings):
        return None
    published = name in ON_EIGHT_GPUS or (name.startswith("robotwin_") and not name.endswith("_compact"))
    return [8] if published else [0]


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)  # the plan says how many simulator processes that gives


def test_pages_hold_commands() -> None:
    assert {line.page for line in LINES} >= {
        "README.md",
        "quickstart.md",
        "metaworld.md",
        "checkpoints.md",
        "placement.md",
    }


@pytest.mark.parametrize("line", [line for line in LINES if as_rlinf(line) and not line.output], ids=str)
def test_commands_load(line: Line) -> None:
    command, arguments = as_rlinf(line)  # type: ignore[misc]
    assert command in COMMANDS
    if command == "quickstart":
        options = {"--seed", "--output"}
        assert all(word in options for word in arguments if word.startswith("-"))
        load_config("quickstart", [a for a in arguments if "=" in a], purpose="train", devices=[0])
    elif command in ("train", "eval", "plan", "collect", "sft"):
        name, *settings = arguments
        settings = [s for s in settings if not s.startswith(OF_AN_EARLIER_COMMAND) and s not in ("--best", "--random")]
        if command == "eval":
            settings.append("runner.only_eval=true")
        purpose = command if command in ("collect", "sft") else "plan"
        if command == "sft":  # weights are not here
            settings += ["actor.model.size=compact", "actor.model.model_path=null"]
        load_config(name, settings, purpose=purpose, devices=machine(name, settings))
    elif command == "doctor" and arguments:
        assert arguments[0] == "--recipe"
        load_config(arguments[1], [a for a in arguments if "=" in a], purpose="doctor")
    elif command == "bench":
        name, *settings = [word for word in arguments if not word.startswith("-")]
        load_config(name, [s for s in settings if "=" in s], purpose="plan", devices=machine(name, settings))


@pytest.mark.parametrize("line", SHOWN, ids=str)
def test_output_is_as_shown(line: Line) -> None:
    command, (name, *settings) = as_rlinf(line)  # type: ignore[misc]
    try:
        devices = machine(name, settings)
        cfg = load_config(name, settings, purpose=command, devices=devices)  # type: ignore[arg-type]
        plan = make_plan(cfg, devices)
        if command == "train":
            make_cluster(cfg, plan)
        printed = describe_plan(cfg, plan)
    except UserError as error:
        printed = f"error: {error}"
    assert printed == line.output


@pytest.mark.parametrize("line", [line for line in LINES if not as_rlinf(line)], ids=str)
def test_other_commands_name_what_exists(line: Line) -> None:
    first, *rest = line.words
    if first == "make":
        assert re.search(rf"^{rest[0]}:", (ROOT / "Makefile").read_text(), re.M)
    elif first == "bash":
        assert (ROOT / rest[0]).is_file()
        if rest[0] == "requirements/install.sh":
            command = ["bash", *rest, "--dry-run", "--no-root"]
            assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    elif first in ("python", ".venv/bin/python") and not rest[0].startswith("-"):
        assert (ROOT / rest[0]).is_file()
    else:
        known = ("source", "export", "pip", "python", ".venv/bin/python", ".venv/bin/pre-commit", "git", "cd", "docker")
        assert first in known


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in headings(file), f"{page.name} links to {target}"


def headings(page: Path) -> set[str]:
    """Anchors of a page's headings, made as Markdown viewers make them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_config_page_is_current() -> None:
    assert (ROOT / "docs/config.md").read_text(encoding="utf-8") == key_reference.page(), "run `make docs`"


def test_placement_table() -> None:
    rows = re.findall(r"^\| `(.+?)` \| ([\d, ]+) \| (.+?) \|$", (ROOT / "docs/placement.md").read_text(), re.M)
    assert len(rows) == 12
    for value, accelerators, processes in rows:
        devices = [int(n) for n in accelerators.split(",")]
        slots = place_components({"env,rollout,actor": value}, devices)["env"]
        assert " ".join(map(written, slots)) == processes, value


def written(slot: Slot) -> str:
    return f"{slot.node}:{'+'.join(map(str, slot.devices)) or 'cpu'}"


def test_placement_example_of_node_groups() -> None:
    (text,) = (t for lang, t in blocks(ROOT / "docs/placement.md") if lang == "yaml" and "node_groups" in t)
    cluster = yaml.safe_load(text)["cluster"]
    slots = place_components(cluster["component_placement"], [2, 1, 2], cluster["node_groups"])
    assert " ".join(map(written, slots["env"])) == "0:0 0:1"
    assert " ".join(map(written, slots["actor"])) == "1:0 2:0"


def test_the_tables_of_the_compatibility_page_are_current() -> None:
    text = (ROOT / "docs/compat.md").read_text(encoding="utf-8")
    assert compat_page.filled(text) == text, "run `make docs`"


def test_the_page_of_results_is_current() -> None:
    files = results_page.make_page(ROOT / "results", ROOT / "docs")
    assert set((ROOT / "docs" / results_page.CURVES).iterdir()) < files.keys()
    assert [path for path, text in files.items() if path.read_text(encoding="utf-8") != text] == [], "run `make docs`"


def test_pre_commit_runs_every_tool_of_make_lint() -> None:
    lint = re.search(r"^lint:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert lint is not None
    tools = set(re.findall(r"\$\(VENV\)/bin/([\w-]+)", lint.group(1)))
    hooks = set(re.findall(r"entry: \.venv/bin/([\w-]+)", (ROOT / ".pre-commit-config.yaml").read_text()))
    assert tools == hooks
