"""Output folders: complete or absent, one writer at a time, and never lost to a replacement that failed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import SafetensorError

from rlinf.errors import DiskFullError, UserError
from rlinf.storage import atomic_folder as module
from rlinf.storage.atomic_folder import atomic_folder, check_output


def write(final: Path, text: str) -> None:
    with atomic_folder(final) as work:
        (work / "inside").mkdir()
        (work / "inside/file").write_text(text)
        if final.exists():
            assert (final / "inside/file").read_text() == "old"  # there while the new one is made


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("exchange", [True, False])
def test_a_folder_is_replaced_when_the_new_one_is_whole(
    exchange: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    if not exchange:  # a file system that cannot swap two names
        monkeypatch.setattr(module, "_exchange", lambda one, other: False)
    for text in ("old", "new"):
        write(tmp_path / "out", text)
        assert (tmp_path / "out/inside/file").read_text() == text
        assert names(tmp_path) == ["out"]


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), SafetensorError("disk"), KeyboardInterrupt()]
)
def test_a_failure_keeps_the_old_one_and_leaves_nothing(error: BaseException, tmp_path: Path):
    write(tmp_path / "out", "old")

    def fail() -> None:
        with atomic_folder(tmp_path / "out") as work:
            (work / "half").write_text("x")
            raise error

    told = DiskFullError if isinstance(error, OSError) else type(error)
    with pytest.raises(told):
        fail()
    assert names(tmp_path) == ["out"]
    assert (tmp_path / "out/inside/file").read_text() == "old"


def test_the_leftovers_of_a_killed_process_are_no_part_of_the_next(tmp_path: Path):
    code = (
        "import os; from pathlib import Path; from rlinf.storage.atomic_folder import atomic_folder\n"
        f"with atomic_folder(Path({str(tmp_path / 'out')!r})) as work:\n"
        "    (work / 'half').mkdir(); (work / 'half/file').write_text('x'); os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, env=os.environ).returncode == 9
    assert names(tmp_path) == [".tmp-out"]
    write(tmp_path / "out", "new")
    assert names(tmp_path) == ["out"]
    assert names(tmp_path / "out") == ["inside"]


def test_two_writers_never_share_a_folder(tmp_path: Path):
    with atomic_folder(tmp_path / "out", what="sft.output=out") as work:
        (work / "file").write_text("first")
        with (
            pytest.raises(UserError, match=r"sft\.output=out is being written by another process"),
            atomic_folder(tmp_path / "out", what="sft.output=out"),
        ):
            pass
    assert (tmp_path / "out/file").read_text() == "first"


def test_a_link_stays_a_link(tmp_path: Path):
    (tmp_path / "disk").mkdir()
    write(tmp_path / "disk/out", "old")
    (tmp_path / "link").symlink_to(tmp_path / "disk/out")
    write(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "disk/out/inside/file").read_text() == "new"
    assert (names(tmp_path), names(tmp_path / "disk")) == (["disk", "link"], ["out"])


def test_what_is_never_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    (tmp_path / "empty").mkdir()
    check_output(tmp_path / "empty", "OUTPUT", "policy", overwrite=False)
    check_output(tmp_path / "absent", "OUTPUT", "policy", overwrite=False)
    with pytest.raises(UserError, match=r"OUTPUT=.*full is not empty and holds no policy to replace"):
        check_output(tmp_path / "full", "OUTPUT", "policy", overwrite=True)
    for file in ("config.json", "model.safetensors"):
        (tmp_path / "full" / file).touch()
    check_output(tmp_path / "full", "OUTPUT", "policy", overwrite=True)
    with pytest.raises(UserError, match=r"OUTPUT=.*full is not empty and holds no dataset to replace"):
        check_output(tmp_path / "full", "OUTPUT", "dataset", overwrite=True)
    with pytest.raises(UserError, match=r"OUTPUT=.*full is not empty; choose another folder, or replace it with --ov"):
        check_output(tmp_path / "full", "OUTPUT", "policy", overwrite=False)
    with pytest.raises(UserError, match=r"OUTPUT=.*file is a file"):
        check_output(tmp_path / "full/file", "OUTPUT", "policy", overwrite=True)
    with pytest.raises(UserError, match=r"sft\.output=.* holds sft\.dataset=.*full, which would be replaced"):
        check_output(tmp_path, "sft.output", "policy", overwrite=True, inputs={"sft.dataset": tmp_path / "full"})
    (tmp_path / "full/checkpoints").mkdir()
    with pytest.raises(UserError, match=r"OUTPUT=.*full is the folder of a run, which is never replaced"):
        check_output(tmp_path / "full", "OUTPUT", "policy", overwrite=True)
    monkeypatch.chdir(tmp_path / "full")
    with pytest.raises(UserError, match=r"OUTPUT=.* holds the current folder, which would be replaced"):
        check_output(tmp_path, "OUTPUT", "policy", overwrite=True)
