"""metrics.jsonl, resuming, and backends that are missing, broken or there."""

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml

import rlinf.metrics.loggers as loggers
from rlinf.config.schema import LoggerConfig
from rlinf.errors import UserError
from rlinf.metrics.logger_modes import choose_mode
from rlinf.metrics.loggers import JsonlLog, MetricLogger, read_jsonl


def open_logger(folder: Path, *backends: str, resume_step: int | None = None, **keys: Any) -> MetricLogger:
    cfg = LoggerConfig(log_path=str(folder), logger_backends=list(backends), **keys)
    return MetricLogger(cfg, {"runner": {"seed": 3}, "shape": (2, 3)}, resume_step=resume_step)


def log_steps(logger: MetricLogger, first: int, last: int) -> None:
    for step in range(first, last + 1):
        logger.log(step, {"train/actor/policy_loss": 0.1 * step, "env/return": 1 / step})
    logger.close()


def test_a_line_holds_canonical_names_and_aliases(tmp_path: Path) -> None:
    logger = open_logger(tmp_path)
    logger.log(1, {"train/actor/policy_loss": 0.1 + 0.2, "train/actor/grad_norm": math.inf})
    logger.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {
        "step": 1,
        "train/actor/policy_loss": 0.1 + 0.2,
        "train/actor/grad_norm": None,
        "actor/loss": 0.1 + 0.2,
        "actor/grad_norm": None,
    }
    assert yaml.safe_load((tmp_path / "config.yaml").read_text()) == {"runner": {"seed": 3}, "shape": [2, 3]}


def test_a_resumed_file_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    log_steps(open_logger(tmp_path / "whole"), 1, 6)
    log_steps(open_logger(tmp_path / "killed"), 1, 5)
    with (tmp_path / "killed" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "env/ret')  # killed while writing
    log_steps(open_logger(tmp_path / "killed", resume_step=3), 4, 6)
    whole, resumed = (tmp_path / name / "metrics.jsonl" for name in ("whole", "killed"))
    assert resumed.read_bytes() == whole.read_bytes()


def test_resuming_into_an_empty_folder_starts_there(tmp_path: Path) -> None:
    log_steps(open_logger(tmp_path, resume_step=3), 4, 5)
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [4, 5]


@pytest.mark.parametrize("fresh", [None, 0])
def test_a_new_run_keeps_the_old_curves(tmp_path: Path, fresh: int | None) -> None:
    log_steps(open_logger(tmp_path), 1, 3)
    log_steps(open_logger(tmp_path, resume_step=fresh), 1, 2)
    assert len(read_jsonl(tmp_path / "metrics.jsonl")) == 2
    assert len(read_jsonl(tmp_path / "metrics.1.jsonl")) == 3


def test_a_step_is_logged_once(tmp_path: Path) -> None:
    logger = open_logger(tmp_path)
    logger.log(2, {"env/return": 1.0})
    with pytest.raises(ValueError, match="step 2 was logged already"):
        logger.log(2, {"env/return": 1.0})


def test_an_undocumented_metric_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nearest is 'env/return'"):
        open_logger(tmp_path).log(1, {"env/retrun": 1.0})


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "swanlab"])
def test_a_missing_package_names_the_extra(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loggers, "find_spec", lambda package: None)
    with pytest.raises(UserError) as error:
        open_logger(tmp_path, name)
    assert f'-m pip install -c constraints.txt -e ".[{name}]", or take {name} out of the list' in str(error.value)


def test_a_failing_backend_warns_once_and_the_file_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Down:
        note = ""

        def __init__(self, *_: Any) -> None: ...

        def log(self, step: int, metrics: Any) -> None:
            raise ConnectionError("server is away")

        def close(self) -> None:
            raise ConnectionError("still away")

    monkeypatch.setitem(loggers.BACKENDS, "tensorboard", Down)
    logger = open_logger(tmp_path, "tensorboard")
    log_steps(logger, 1, 3)
    text = "logger backend tensorboard failed (server is away); the run goes on, metrics.jsonl is complete"
    assert caplog.messages == [text]
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [1, 2, 3]


def test_tensorboard_holds_both_dialects_and_purges_on_resume(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log_steps(open_logger(tmp_path, "tensorboard"), 1, 5)
    log_steps(open_logger(tmp_path, "tensorboard", resume_step=3), 4, 6)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["train/actor/policy_loss", "env/return", "actor/loss"]
    for name in ("train/actor/policy_loss", "actor/loss"):
        points = [(e.step, round(e.value, 6)) for e in events.Scalars(name)]
        assert points == [(step, round(0.1 * step, 6)) for step in range(1, 7)]
    assert (tmp_path / "tensorboard" / "config.yaml").exists()


@pytest.fixture
def no_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user who never logged in anywhere; returns their home."""
    home = tmp_path / "home"
    home.mkdir()
    for variable in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "NETRC"):
        monkeypatch.delenv(variable, raising=False)
    for variable in ("SWANLAB_API_KEY", "SWANLAB_MODE", "SWANLAB_ROOT", "SWANLAB_SAVE_DIR"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home)
    return home


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
def test_wandb_works_offline_and_keeps_its_id(tmp_path: Path) -> None:
    log_steps(open_logger(tmp_path, "wandb", wandb_mode="offline"), 1, 3)
    first = (tmp_path / "wandb" / "run_id").read_text()
    log_steps(open_logger(tmp_path, "wandb", wandb_mode="offline", resume_step=2), 3, 4)
    assert (tmp_path / "wandb" / "run_id").read_text() == first
    assert len(list((tmp_path / "wandb").glob(f"offline-run-*-{first}/run-{first}.wandb"))) >= 1


@pytest.mark.skipif(importlib.util.find_spec("swanlab") is None, reason="swanlab is not installed")
@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
def test_all_three_work_without_a_login_and_say_that_they_are_offline(tmp_path: Path, no_login: Path) -> None:
    logger = open_logger(tmp_path, "tensorboard", "wandb", "swanlab")
    assert [note.split(";")[0] for note in logger.notes] == [
        "wandb: offline, since there is no login on this machine",
        "swanlab: offline, since there is no login on this machine",
    ]
    log_steps(logger, 1, 3)
    assert any((tmp_path / "tensorboard").glob("events.*"))
    assert any((tmp_path / "wandb").glob("offline-run-*"))
    assert any((tmp_path / "swanlab").glob("run-*"))


@pytest.mark.parametrize(
    ("service", "asked", "variables", "file", "mode"),
    [
        ("wandb", "offline", {"WANDB_API_KEY": "x", "WANDB_MODE": "online"}, "", "offline"),
        ("wandb", "auto", {"WANDB_API_KEY": "x", "WANDB_MODE": "disabled"}, "", "disabled"),
        ("wandb", "auto", {"WANDB_API_KEY": "x"}, "", "online"),
        ("wandb", "auto", {}, ".netrc api.wandb.ai", "online"),
        ("wandb", "auto", {"WANDB_BASE_URL": "https://own.example"}, ".netrc api.wandb.ai", "offline"),
        ("wandb", "auto", {}, ".netrc other.example", "offline"),
        ("wandb", "auto", {"SWANLAB_API_KEY": "x"}, "", "offline"),
        ("swanlab", "auto", {"SWANLAB_API_KEY": "x"}, "", "online"),
        ("swanlab", "auto", {}, ".swanlab/.netrc any.example", "online"),
        ("swanlab", "auto", {}, ".netrc any.example", "offline"),
        ("swanlab", "local", {}, "", "local"),
    ],
)
def test_a_mode_is_online_after_a_login_only(
    no_login: Path,
    monkeypatch: pytest.MonkeyPatch,
    service: str,
    asked: str,
    variables: dict[str, str],
    file: str,
    mode: str,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if file:
        name, host = file.split()
        (no_login / name).parent.mkdir(exist_ok=True)
        (no_login / name).write_text(f"machine {host} login user password key\n")
    chosen = choose_mode(service, asked)
    assert chosen.mode == mode
    assert bool(chosen.note) == (asked == "auto" and mode == "offline")


def test_a_server_that_is_away_makes_auto_offline_and_stops_who_asked_for_it(
    no_login: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(mode: str) -> str:
        if mode == "online":
            raise ConnectionError("no route")
        return mode

    monkeypatch.setenv("WANDB_API_KEY", "x")
    run, note = loggers._start("wandb", "auto", init)
    assert (run, note.split(";")[0]) == ("offline", "wandb: offline, since online failed (no route)")
    with pytest.raises(UserError, match="logger backend wandb could not start: no route"):
        loggers._start("wandb", "online", init)


def test_an_evaluation_beside_a_running_log_takes_nothing_from_it(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    training = JsonlLog(path, resume_step=None)
    training.write(1, {"a": 1.0})
    evaluation = JsonlLog(path, resume_step=1, appends=True)
    evaluation.write(1, {"b": 2.0})
    training.write(2, {"a": 3.0})
    assert [row["step"] for row in read_jsonl(path)] == [1, 1, 2]


def test_an_evaluation_leaves_a_line_that_a_running_log_is_writing(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with path.open("ab", buffering=0) as training:
        training.write(b'{"step": 1')
        evaluation = JsonlLog(path, resume_step=1, appends=True)
        training.write(b"}\n")
        evaluation.write(1, {"b": 2.0})
    assert [row["step"] for row in read_jsonl(path)] == [1, 1]


def test_what_is_appended_after_a_cut_line_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "a"')
    JsonlLog(path, resume_step=1, appends=True).write(1, {"b": 2.0})
    assert [row["step"] for row in read_jsonl(path)] == [1, 1]
