"""A run owns its folder: nobody else writes there, nothing of it is lost, and no secret is in it."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from rlinf.commands import jobs
from rlinf.commands.run_folders import evaluation_folder, training_folder
from rlinf.config.load import load_config
from rlinf.config.schema import Config
from rlinf.errors import UserError
from rlinf.metrics.loggers import read_jsonl
from rlinf.metrics.report import write_report
from rlinf.models.files.weights import weight_files
from rlinf.storage import run_folder
from rlinf.storage.atomic_folder import try_lock
from rlinf.storage.provenance import command
from rlinf.storage.redaction import redacted, redacted_command
from rlinf.storage.run_folder import is_locked, locked, read_record, write_record

SMALL = [
    "env.train.total_num_envs=4",
    "env.train.rollout_epoch=1",
    "env.train.num_processes=1",
    "algorithm.update_epoch=1",
    "actor.micro_batch_size=16",
    "actor.global_batch_size=16",
    "env.eval.total_num_envs=4",
    "env.eval.num_trials=4",
    "env.eval.num_processes=1",
    "runner.save_interval=1",
    "runner.max_epochs=2",
]
SECRETS = ["runner.logger.wandb_proxy=http://user:PASSWORD-1@host:1", "runner.logger.project_name=${oc.env:RLINF_TEST}"]
VALUE = "value-of-the-variable"


def config(folder: Path | None = None, *overrides: str, name: str = "toy_ppo_compact", purpose="train") -> Config:
    where = [f"runner.logger.log_path={folder}"] if folder is not None else []
    small = SMALL if name == "toy_ppo_compact" else []
    return load_config(name, [*where, *small, *overrides], purpose=purpose)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps with checkpoints and an evaluation, whose config holds secrets."""
    folder = tmp_path_factory.mktemp("run") / "first"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLINF_TEST", VALUE)
        patch.setattr(sys, "argv", ["rlinf", "train", "toy_ppo_compact", *SECRETS])
        jobs.train(config(folder, *SECRETS, "runner.val_check_interval=2"))
    return folder


@pytest.fixture
def trained(original: Path, tmp_path: Path) -> Path:
    """A copy of that run."""
    return Path(shutil.copytree(original, tmp_path / "copy"))


# ---------------------------------------------------------------- what a run leaves
def test_the_id_of_the_run_is_in_every_file(original: Path) -> None:
    record = read_record(original)
    assert record is not None
    assert {row["run"] for row in read_jsonl(original / "metrics.jsonl")} == {record.id}
    assert json.loads((original / "eval/step_2/result.json").read_text())["run"] == record.id
    for step in (1, 2):
        manifest = original / f"toy_ppo_compact/checkpoints/global_step_{step}/manifest.json"
        assert json.loads(manifest.read_text())["run"] == record.id
    for name in ("config.yaml", "report.html", "metrics.log"):
        assert f"run {record.id}" in (original / name).read_text(), name
    assert not list(original.rglob("run.lock"))


def test_where_a_run_comes_from_is_stored(original: Path) -> None:
    record = read_record(original)
    assert record is not None
    (start,) = record.starts
    assert (record.kind, record.name, record.finished_steps) == ("train", "toy_ppo_compact", 2)
    assert (start["host"], start["pid"]) == (socket.gethostname(), os.getpid())
    assert start["command"].startswith("rlinf train toy_ppo_compact 'runner.logger.wandb_proxy=http://<redacted>@host")
    assert {"torch", "numpy"} <= start["packages"].keys()
    assert re.fullmatch(r"[0-9a-f]{40}(\+changes)?", start["commit"])
    assert isinstance(start["gpus"], list)


def test_no_secret_is_in_any_file(original: Path) -> None:
    files = contents(original)
    assert [name for name, data in files.items() if b"PASSWORD-1" in data or VALUE.encode() in data] == []
    assert b"wandb_proxy: http://<redacted>@host:1" in files["config.yaml"]
    assert b"project_name: ${oc.env:RLINF_TEST}" in files["config.yaml"]


def test_secrets_are_told_by_names_and_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = {"hub_token": "abc", "max_token_len": 5, "tokenizer": "a/b", "x": ["hf_" + "a" * 20], "url": "http://h/a@b"}
    tree["proxy"] = "http://u:PASS@ss99@h:1/a@b"
    hidden = {"hub_token": "<redacted>", "max_token_len": 5, "tokenizer": "a/b", "x": ["<redacted>"]}
    assert redacted(tree) == hidden | {"url": "http://h/a@b", "proxy": "http://<redacted>@h:1/a@b"}
    assert redacted_command(["a.b.api_key=1", "a.steps=2"]) == ["a.b.api_key=<redacted>", "a.steps=2"]
    monkeypatch.setattr(sys, "argv", ["/venv/bin/rlinf", "eval", "x y"])
    assert command() == "rlinf eval 'x y'"


# ---------------------------------------------------------------- which folder
def test_each_run_gets_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with training_folder(config()) as one, training_folder(config()) as two, evaluation_folder(config()) as three:
        folders = [Path(cfg.runner.logger.log_path) for cfg in (one, two, three)]
        assert len({*folders}) == len({cfg.runner.run_id for cfg in (one, two, three)}) == 3
        assert all(re.fullmatch(r"logs/\d{8}-\d{6}(-\d)?-toy_ppo_compact", str(f)) and f.is_dir() for f in folders)
        assert one.env.train.video_cfg.video_base_dir == f"{folders[0]}/video/train"
    assert list((tmp_path / "logs").iterdir()) == []  # nothing was written, so nothing is left


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ["runner.seed=77"],
            "holds run ID of toy_ppo_compact, begun TIME: continue it with runner.resume_dir=auto, or",
        ),
        ([], "holds run ID of toy_ppo_compact, begun TIME: continue it with runner.resume_dir=auto, or"),
        (["runner.seed=77", "runner.resume_dir=auto"], "with other settings: runner.seed is 77, there 0; choose"),
        (["runner.seed=77", "runner.resume_dir=GIVEN"], "with other settings: runner.seed is 77, there 0; choose"),
        (["runner.logger.experiment_name=x", "runner.resume_dir=auto"], "experiment_name is x, there toy_ppo_compact"),
    ],
)
def test_a_folder_of_another_run_is_refused_and_stays_as_it_was(
    overrides: Sequence[str], line: str, trained: Path
) -> None:
    before = contents(trained)
    given = str(trained / "toy_ppo_compact/checkpoints/global_step_2")
    cfg = config(trained, *[o.replace("GIVEN", given) for o in overrides])
    with pytest.raises(UserError) as error:
        jobs.train(cfg)
    record = read_record(trained)
    assert record is not None
    assert line in str(error.value).replace(record.id, "ID").replace(record.created, "TIME")
    assert contents(trained) == before


def test_another_recipe_is_refused(trained: Path) -> None:
    other = config(trained, name="toy_grpo_compact")
    for refused in (
        lambda: jobs.train(other),
        lambda: jobs.train(replace(other, runner=replace(other.runner, resume_dir="auto"))),
        lambda: jobs.evaluate(config(trained, "runner.eval_random=true", name="toy_grpo_compact", purpose="eval")),
    ):
        with pytest.raises(UserError, match="of toy_ppo_compact"):
            refused()


def test_a_run_that_did_nothing_leaves_its_folder_free(tmp_path: Path, trained: Path) -> None:
    (tmp_path / "new").mkdir()
    shutil.copy(trained / "run.json", tmp_path / "new")
    (tmp_path / "new/metrics.jsonl").touch()
    with training_folder(config(tmp_path / "new", "runner.seed=77")) as cfg:
        assert cfg.runner.run_id != json.loads((trained / "run.json").read_text())["id"]


def test_results_without_a_record_are_nobodys(trained: Path) -> None:
    (trained / "run.json").unlink()
    for refused in (training_folder(config(trained, "runner.resume_dir=auto")), evaluation_folder(config(trained))):
        with pytest.raises(UserError, match=r"without run\.json; choose another"), refused:
            pass


def test_a_command_that_is_refused_touches_nothing(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a folder of its own, nor that of the run it would have continued."""
    monkeypatch.chdir(trained)
    monkeypatch.delenv("CALVIN_PATH", raising=False)
    before = contents(trained)
    for where in (None, trained):
        for purpose in ("train", "eval"):
            cfg = config(where, "runner.resume_dir=auto", name="calvin_d_d_ppo_compact", purpose="train")
            cfg = replace(cfg, runner=replace(cfg.runner, only_eval=purpose == "eval", val_check_interval=-1))
            with pytest.raises(UserError, match="CALVIN_PATH"):
                (jobs.train if purpose == "train" else jobs.evaluate)(cfg)
    assert contents(trained) == before


# ---------------------------------------------------------------- resume_dir: auto
def runs(folder: Path, original: Path) -> None:
    """logs/ with four runs of one recipe, the second of which is unfinished, the last of another seed."""
    for number, (seed, finished) in enumerate([(0, 0), (0, 1), (0, 2), (5, 0)]):
        path = folder / f"logs/2026010{number}-000000-toy_ppo_compact"
        shutil.copytree(original, path)
        record = read_record(path)
        assert record is not None
        changed = {"config_hash": "other", "settings": record.settings | {"runner.seed": 5}} if seed else {}
        write_record(path, replace(record, created=f"2026010{number}", finished_steps=finished, **changed))


def test_auto_continues_the_newest_unfinished_run_of_the_same_config(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    runs(tmp_path, original)
    auto = config(None, "runner.resume_dir=auto")
    with training_folder(auto) as cfg:
        assert cfg.runner.logger.log_path == "logs/20260101-000000-toy_ppo_compact"
        record = read_record(original)
        assert record is not None
        assert cfg.runner.run_id == record.id
        with training_folder(auto) as other:  # that one is being continued
            assert other.runner.logger.log_path == "logs/20260100-000000-toy_ppo_compact"
    longer = config(None, "runner.resume_dir=auto", "runner.max_epochs=9")
    with training_folder(longer) as cfg:
        assert cfg.runner.logger.log_path == "logs/20260102-000000-toy_ppo_compact"
    with training_folder(config(None, "runner.resume_dir=auto", "runner.seed=9")) as cfg:
        assert not cfg.runner.logger.log_path.startswith("logs/2026010")
    assert "finds no unfinished run of these settings" in caplog.text


def test_a_named_checkpoint_is_continued_where_its_run_wrote(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    runs(tmp_path, original)
    run = "logs/20260102-000000-toy_ppo_compact"
    for named in (run, f"{run}/toy_ppo_compact/checkpoints/global_step_2"):
        with training_folder(config(None, f"runner.resume_dir={named}")) as cfg:
            assert cfg.runner.logger.log_path == run
            assert cfg.runner.resume_dir == f"{run}/toy_ppo_compact/checkpoints/global_step_2"
    with training_folder(config(None, f"runner.resume_dir={run}", "runner.seed=1")) as cfg:
        assert not cfg.runner.logger.log_path.startswith("logs/2026010")
    with training_folder(config(Path("branch"), f"runner.resume_dir={run}")) as cfg:
        assert cfg.runner.logger.log_path == "branch"


def test_a_run_folder_stands_for_the_checkpoint_it_saved_last(trained: Path) -> None:
    first, stale = (trained / f"toy_ppo_compact/checkpoints/global_step_{step}" for step in (1, 2))
    manifest = json.loads((stale / "manifest.json").read_text())
    (stale / "manifest.json").write_text(json.dumps(manifest | {"saved_at": 1.0}))
    with training_folder(config(trained, f"runner.resume_dir={trained}")) as cfg:
        assert cfg.runner.resume_dir == str(first)


def test_auto_skips_a_damaged_record(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    runs(tmp_path, original)
    damaged = Path("logs/20260101-000000-toy_ppo_compact")
    (damaged / "run.json").write_text("{")
    with training_folder(config(None, "runner.resume_dir=auto")) as cfg:
        assert cfg.runner.logger.log_path == "logs/20260100-000000-toy_ppo_compact"
    assert f"runner.resume_dir=auto skips {damaged}: its run.json cannot be read" in caplog.text


def test_a_run_may_be_named_through_a_link(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(trained)
    for log_path, wanted in ((tmp_path / "link", trained), (trained, tmp_path / "link")):
        step = wanted / "toy_ppo_compact/checkpoints/global_step_2"
        with training_folder(config(log_path, f"runner.resume_dir={step}")) as cfg:
            assert cfg.runner.run_id == json.loads((trained / "run.json").read_text())["id"]


def test_the_folder_of_an_evaluation_is_not_offered_for_continuing(trained: Path) -> None:
    record = read_record(trained)
    assert record is not None
    write_record(trained, replace(record, kind="eval"))
    with pytest.raises(UserError, match="with `rlinf eval`; choose another"):
        training_folder(config(trained)).__enter__()


# ---------------------------------------------------------------- the lock
def test_a_folder_in_use_is_refused_and_its_holder_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["rlinf", "train", "first"])
    with (
        training_folder(config(tmp_path)),
        pytest.raises(UserError, match=rf"is in use by pid {os.getpid()} on \S+ since \S+ \(rlinf train first\)"),
        training_folder(config(tmp_path, "runner.seed=1")),
    ):
        pass
    with training_folder(config(tmp_path, "runner.seed=1")):
        pass


def test_who_looks_at_the_lock_keeps_nobody_from_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "LOOKING_SECONDS", 60.0)
    assert not is_locked(tmp_path)
    (tmp_path / "run.lock").touch()  # left by a process that is gone
    looking = os.open(tmp_path / "run.lock", os.O_RDONLY)
    assert try_lock(looking, shared=True)
    assert not is_locked(tmp_path)  # two may look at once
    timer = threading.Timer(0.05, os.close, [looking])
    timer.start()
    with locked(tmp_path, pytest.fail):
        assert is_locked(tmp_path)
    timer.join()


def test_the_lock_of_a_dead_process_is_taken_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    holder = {"pid": gone.pid, "host": socket.gethostname(), "command": "rlinf train x", "at": "noon"}
    (tmp_path / "run.lock").write_text(json.dumps(holder))
    with caplog.at_level(logging.WARNING), training_folder(config(tmp_path)):
        pass
    (line,) = [m for m in caplog.messages if "run.lock" in m]
    assert line.endswith(f"was left by pid {gone.pid} on {socket.gethostname()} since noon (rlinf train x), which is "
                         "gone; taken over")  # fmt: skip
    (tmp_path / "run.lock").write_text(json.dumps(holder | {"host": "elsewhere"}))  # its processes cannot be seen
    with pytest.raises(UserError, match=r"on elsewhere since noon .*; if that run is over, delete "):
        training_folder(config(tmp_path)).__enter__()


# ---------------------------------------------------------------- damaged files
def test_damaged_logs_neither_stop_a_resumed_run_nor_its_report(
    trained: Path, caplog: pytest.LogCaptureFixture
) -> None:
    evaluation = trained / "eval/step_2/result.json"
    evaluation.write_text(evaluation.read_text()[:100])
    with (trained / "metrics.jsonl").open("a") as file:
        file.write('x\n[1]\n{"step": "<script>"}\n')
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLINF_TEST", VALUE)
        runner, _ = jobs.train(config(trained, *SECRETS, "runner.resume_dir=auto", "runner.max_epochs=3"))
    assert runner.global_step == 3
    assert [row["step"] for row in read_jsonl(trained / "metrics.jsonl")] == [1, 2, 3]
    assert f"left out of the report: {evaluation} is damaged" in caplog.text
    assert f"{trained / 'metrics.jsonl'}: line 3 is left out" in caplog.text
    record = read_record(trained)
    assert record is not None
    assert (len(record.starts), record.finished_steps) == (2, 3)


@pytest.mark.parametrize("text", ["[]", "{}", '{"step": 1, "episodes": [1]}', '{"step": "<b>", "episodes": []}'])
def test_what_is_no_evaluation_is_left_out_of_the_report(text: str, trained: Path) -> None:
    (trained / "eval/step_9").mkdir()
    (trained / "eval/step_9/result.json").write_text(text)
    assert "step_9" not in write_report(trained).read_text()


# ---------------------------------------------------------------- paths that lead elsewhere
@pytest.mark.parametrize("name", ["../../../x", "/elsewhere/x", "..", "a/../b", "''", ".", "a/b/c"])
def test_an_experiment_stays_below_its_log_path(name: str) -> None:
    with pytest.raises(UserError, match="must name a folder below"):
        config(None, f"runner.logger.experiment_name={name}")


@pytest.mark.parametrize("shard", ["/etc/passwd", "../other.safetensors"])
def test_an_index_names_shards_of_its_own_folder(shard: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": shard}}))
    with pytest.raises(UserError, match="shards must lie in its own folder"):
        weight_files(tmp_path)
