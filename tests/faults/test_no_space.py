"""A disk that is full, and outputs that nobody can write: what is lost, what goes on, what is left behind.

The limit that a shell sets on the size of files (RLIMIT_FSIZE) stands for the full disk: it needs no rights.
"""

from __future__ import annotations

import errno
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from rlinf.commands import jobs
from rlinf.commands.export import export_policy
from rlinf.demos.collect import collect_demos
from rlinf.envs.config import VideoConfig
from rlinf.envs.video import VideoRecorder
from rlinf.errors import DiskFullError, UserError, full_disk, writing
from rlinf.metrics.loggers import JsonlLog, read_jsonl
from rlinf.storage.atomic_folder import atomic_folder, write_file
from rlinf.storage.step_checkpoint import Manifest
from tests.conftest import REPO
from tests.runs import make_runner, toy_config

TINY = ("env.train.total_num_envs=4", "env.train.num_processes=1", "env.train.rollout_epoch=1", "runner.max_epochs=1")
BATCH = ("actor.global_batch_size=16", "actor.micro_batch_size=16", "algorithm.update_epoch=1")


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """No file of this process can grow beyond `size` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a run of one step, in the folder `checkpoints`."""
    runner, _ = jobs.train(toy_config(tmp_path_factory.mktemp("run"), *TINY, *BATCH))
    assert runner.last_checkpoint is not None
    return runner.last_checkpoint


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_a_checkpoint_without_space_leaves_the_last_one_and_nothing_else(tmp_path: Path) -> None:
    runner = make_runner(toy_config(tmp_path, *TINY, *BATCH))
    try:
        runner.train()
        before = files(tmp_path / "toy_ppo_compact")
        runner.global_step = 2
        with files_of_at_most(100_000), pytest.raises(DiskFullError) as error:
            runner.save()
    finally:
        runner.close()
    root = tmp_path / "toy_ppo_compact" / "checkpoints"
    assert str(error.value) == f"checkpoint {root / 'global_step_2'} cannot be written: File too large"
    assert files(tmp_path / "toy_ppo_compact") == before
    assert Manifest.read(root / "global_step_1").step == 1


def test_a_run_that_ends_for_want_of_space_says_where_to_continue(tmp_path: Path) -> None:
    cfg = toy_config(tmp_path, *TINY, *BATCH)
    with files_of_at_most(400_000), pytest.raises(DiskFullError, match=r"File too large; no step was saved yet$"):
        jobs.train(cfg)
    assert files(tmp_path / "toy_ppo_compact") == {"checkpoints"}
    assert (tmp_path / "report.html").stat().st_size > 10_000


def test_an_export_without_space_leaves_nothing(saved: Path, tmp_path: Path) -> None:
    with files_of_at_most(100_000), pytest.raises(DiskFullError, match=r"OUTPUT=.*out cannot be written: File"):
        export_policy(saved, tmp_path / "out")
    assert files(tmp_path) == set()


def test_a_collection_without_space_leaves_nothing(tmp_path: Path) -> None:
    own = [f"collect.output={tmp_path / 'demos'}", "collect.episodes_per_task=8", "env.train.num_processes=1"]
    with files_of_at_most(2_000), pytest.raises(DiskFullError, match=r"collect.output=.* cannot be written: File"):
        collect_demos(toy_config(tmp_path / "log", *own), on_progress=lambda line: None)
    assert files(tmp_path) == set()


def test_metrics_without_space_keep_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = JsonlLog(path, resume_step=None)
    log.write(1, {"env/return": 0.5})
    whole = path.read_bytes()
    with files_of_at_most(len(whole) + 10), pytest.raises(DiskFullError, match=f"{path} cannot be written: File too"):
        log.write(2, {"env/return": 0.5})
    assert path.read_bytes() == whole
    log.write(2, {"env/return": 0.25})  # there is space again
    log.close()
    assert [row["step"] for row in read_jsonl(path)] == [1, 2]


def test_a_full_disk_is_known_by_number_text_or_cause() -> None:
    assert full_disk(OSError(errno.ENOSPC, "x")) == "No space left on device"
    assert full_disk(OSError(errno.EDQUOT, "x")) == "Disk quota exceeded"
    assert full_disk(RuntimeError("I/O error: File too large (os error 27)")) == "File too large"
    assert full_disk(OSError(errno.EACCES, "x")) is None
    wrapped = ValueError("wrapped")
    wrapped.__cause__ = OSError(errno.ENOSPC, "x")
    assert full_disk(wrapped) == "No space left on device"


def test_a_video_without_space_is_given_up_and_the_next_one_tried(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = VideoRecorder(VideoConfig(save_video=True, video_base_dir=str(tmp_path)), seed=0, control_hz=10)
    noise = np.random.default_rng(0)

    def film(frames: int) -> None:
        for _ in range(frames):
            recorder.write([noise.integers(0, 255, (128, 128, 3), dtype=np.uint8)], [["a line"]])
        recorder.flush()

    with files_of_at_most(4_000):
        film(20)
        film(20)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    film(2)
    assert [path.name for path in tmp_path.rglob("*.mp4")] == ["0.mp4"]
    assert len(caplog.messages) == 1
    assert "File too large" in caplog.messages[0]


def test_a_video_that_has_no_name_yet_is_told_by_its_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    film = VideoConfig(save_video=True, video_base_dir=str(tmp_path / "file/videos"))
    recorder = VideoRecorder(film, seed=0, control_hz=10)
    recorder.write([np.zeros((128, 128, 3), np.uint8)], [["a line"]])
    recorder.flush()
    assert caplog.messages[0].startswith(f"video {tmp_path / 'file/videos/seed_0'} cannot be written (")


def test_neither_video_nor_report_nor_logger_end_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them fail: no folder for the video, a folder in the report's place, no TensorBoard."""
    (tmp_path / "taken").touch()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "report.html").mkdir()
    (tmp_path / "run" / "tensorboard").touch()
    video = ["env.train.video_cfg.save_video=true", f"env.train.video_cfg.video_base_dir={tmp_path / 'taken' / 'here'}"]
    cfg = toy_config(tmp_path / "run", *TINY, *BATCH, *video, "runner.logger.logger_backends=[tensorboard]")
    runner, log = jobs.train(cfg)
    assert runner.last_checkpoint is not None
    assert Manifest.read(runner.last_checkpoint).step == 1
    assert log.report is None
    said = (tmp_path / "run" / "metrics.log").read_text(encoding="utf-8")
    assert "warning: report.html cannot be written (" in said
    assert "report.html exists and is not a report of this run" in said


PRINTS = """
import sys
from rlinf.commands.streams import protect_streams, stdout_fault
protect_streams()
from rich.console import Console
for _ in range(2000):
    print("a line of output")
    Console().print("another line")
fault = stdout_fault()
name = type(fault).__name__ if fault else "written"
open(sys.argv[1], "x").write(name)  # with a closed stdout, this would be descriptor 1 without protection
print("after")
"""


@pytest.mark.parametrize(
    ("shell", "fault", "said"),
    [
        ("| head -c 30", "BrokenPipeError", ""),
        ("2>&1 | head -c 30", "BrokenPipeError", ""),
        (">/dev/full", "OSError", "warning: stdout cannot be written (No space left on device); going on without it\n"),
        (">/dev/full 2>&1", "OSError", ""),
        (">&-", "written", ""),
        (">&- 2>&- <&-", "written", ""),
    ],
)
def test_an_output_that_cannot_be_written_ends_nothing(tmp_path: Path, shell: str, fault: str, said: str) -> None:
    command = f'set -o pipefail; "{sys.executable}" -c "$PROGRAM" "{tmp_path / "done"}" {shell}'
    done = subprocess.run(
        ["bash", "-c", command],
        env={"PROGRAM": PRINTS, "PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, said)
    assert (tmp_path / "done").read_text() == fault


def test_other_reasons_are_told_in_a_line_where_nothing_else_can_have_failed(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"^a result cannot be written: Not a directory$"), writing("a result"):
        write_file(tmp_path / "file" / "result.json", "{}")
    with pytest.raises(DiskFullError, match=r"^x cannot be written: No space left on device$"), writing("x"):
        raise OSError(errno.ENOSPC, "x")
    with pytest.raises(KeyError), writing("x"):
        raise KeyError("a bug")
    with pytest.raises(FileNotFoundError), atomic_folder(tmp_path / "out"):  # of an input, not of the folder
        (tmp_path / "missing").read_text()
