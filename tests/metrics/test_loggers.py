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
from rlinf.metrics.loggers import MetricLogger, read_jsonl


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
    assert f'pip install "rlinf[{name}]"' in str(error.value)


def test_a_failing_backend_warns_once_and_the_file_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Down:
        def __init__(self, *_: Any) -> None: ...

        def log(self, step: int, metrics: Any) -> None:
            raise ConnectionError("server is away")

        def close(self) -> None:
            raise ConnectionError("still away")

    monkeypatch.setitem(loggers.BACKENDS, "tensorboard", Down)
    logger = open_logger(tmp_path, "tensorboard")
    with pytest.warns(UserWarning, match="tensorboard failed .server is away.; training goes on") as caught:
        log_steps(logger, 1, 3)
    assert len(caught) == 1
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


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
def test_wandb_works_offline_and_keeps_its_id(tmp_path: Path) -> None:
    log_steps(open_logger(tmp_path, "wandb"), 1, 3)
    first = (tmp_path / "wandb" / "run_id").read_text()
    log_steps(open_logger(tmp_path, "wandb", resume_step=2), 3, 4)
    assert (tmp_path / "wandb" / "run_id").read_text() == first
    assert len(list((tmp_path / "wandb").glob(f"offline-run-*-{first}/run-{first}.wandb"))) >= 1


@pytest.mark.skipif(importlib.util.find_spec("swanlab") is None, reason="swanlab is not installed")
def test_swanlab_works_offline(tmp_path: Path) -> None:
    log_steps(open_logger(tmp_path, "swanlab", swanlab_mode="offline"), 1, 3)
    assert any((tmp_path / "swanlab").glob("run-*"))
