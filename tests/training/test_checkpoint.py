"""A checkpoint is complete or absent."""

import json
import re
from contextlib import suppress
from pathlib import Path

import pytest

from rlinf.config.load import load_config
from rlinf.errors import UserError
from rlinf.storage import atomic_folder
from rlinf.storage.step_checkpoint import Manifest, config_hash, find_resume, new_checkpoint, sha256


def save(root, step, keep=0, text="weights", config_hash="h", run=""):
    with new_checkpoint(root, step, config_hash=config_hash, keep=keep, run=run) as folder:
        (folder / "actor").mkdir()
        (folder / "actor" / "w.bin").write_text(text)
        (folder / "runner.json").write_text(json.dumps({"step": step, "env": []}))
    return root / f"global_step_{step}"


def rewrite(folder, **keys):
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def reseal(folder, text):
    """Another runner.json under a manifest that agrees with it; None for none at all."""
    files = Manifest.parse(folder).files
    (folder / "runner.json").unlink()
    del files["runner.json"]
    if text is not None:
        (folder / "runner.json").write_text(text)
        files["runner.json"] = sha256(folder / "runner.json")
    rewrite(folder, files=files)


def test_manifest_lists_every_file(tmp_path):
    folder = save(tmp_path, 3)
    assert folder.name == "global_step_3"
    manifest = Manifest.read(folder)
    assert (manifest.step, list(manifest.files)) == (3, ["actor/w.bin", "runner.json"])


def test_an_interrupted_write_leaves_the_last_one_in_charge(tmp_path):
    save(tmp_path, 1)
    with suppress(OSError), new_checkpoint(tmp_path, 2, config_hash="h") as folder:
        (folder / "half").write_text("x")
        raise OSError("disk full")
    assert [path.name for path in tmp_path.iterdir()] == ["global_step_1"]
    assert find_resume(tmp_path, "auto", "h", print).name == "global_step_1"
    (tmp_path / ".tmp-global_step_7").mkdir()  # of a run that was killed
    save(tmp_path, 2)
    assert not list(tmp_path.glob(".tmp-*"))


def test_auto_falls_back_past_a_corrupt_one_and_says_so(tmp_path):
    save(tmp_path, 1)
    newest = save(tmp_path, 10)
    (newest / "actor" / "w.bin").write_text("flipped")
    warnings = []
    assert find_resume(tmp_path, "auto", "h", warnings.append).name == "global_step_1"
    assert "actor/w.bin is corrupt" in warnings[0]


def test_auto_takes_what_the_same_config_saved_last(tmp_path):
    save(tmp_path, 10)  # of an earlier run, which a new one in the same folder did not continue
    save(tmp_path, 20, config_hash="other")
    save(tmp_path, 2)
    warnings = []
    assert find_resume(tmp_path, "auto", "h", warnings.append).name == "global_step_2"
    assert warnings == [
        f"runner.resume_dir=auto skips global_step_20 in {tmp_path}, saved by another run or under other settings of "
        "what is learnt and how; name one to continue from it all the same"
    ]
    assert find_resume(tmp_path, "auto", "third", print) is None
    assert find_resume(tmp_path, str(tmp_path / "global_step_20"), "h", print).name == "global_step_20"


@pytest.mark.parametrize(
    ("more", "same"),
    [
        (
            ["runner.max_epochs=9", "runner.save_interval=3", "runner.logger.log_path=x", "cluster.torch_threads=2"],
            True,
        ),
        (["actor.micro_batch_size=16", "actor.optim.total_training_steps=50", "env.eval.num_trials=8"], True),
        (["env.train.enable_offload=true", "env.train.num_processes=2", "actor.model.model_path=/some/where"], True),
        (["env.train.step_deadline_s=300"], True),
        (["runner.weight_sync_interval=2"], False),
        (["runner.seed=1"], False),
        (["actor.optim.lr=1e-5"], False),
        (["algorithm.gamma=0.9"], False),
        (["env.train.task_suite_name=toy_red"], False),
        (["actor.model.num_steps=2"], False),
    ],
)
def test_what_tells_runs_apart(more, same):
    one, two = (load_config("toy_ppo_compact", changes, purpose="plan", devices=[0]) for changes in ([], more))
    assert (config_hash(one) == config_hash(two)) is same


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "actor/w.bin").write_text("no"), "actor/w.bin is corrupt"),
        (lambda f: (f / "actor/w.bin").unlink(), "actor/w.bin is missing"),
        (lambda f: (f / "manifest.json").unlink(), "manifest.json is missing"),
        (lambda f: (f / "manifest.json").write_text("{"), "manifest.json cannot be read"),
        (lambda f: (f / "manifest.json").write_bytes(b"\xff\xfe"), "manifest.json cannot be read"),
        (lambda f: rewrite(f, files=None), "manifest.json cannot be read (files must be an object of checksums)"),
        (lambda f: rewrite(f, files={"actor/w.bin": 3}), "manifest.json cannot be read (files must be an object"),
        (lambda f: rewrite(f, files={}), "manifest.json cannot be read (it lists no files)"),
        (lambda f: rewrite(f, step=7), "manifest.json cannot be read (its step is 7)"),
        (lambda f: rewrite(f, saved_at="noon"), "manifest.json cannot be read (saved_at must be a number)"),
        (lambda f: reseal(f, None), "runner.json is missing"),
        (lambda f: reseal(f, '{"step": 1'), "runner.json cannot be read"),
        (lambda f: reseal(f, '{"step": 2, "env": []}'), "runner.json cannot be read (its step is another"),
        (lambda f: reseal(f, "[]"), "runner.json cannot be read"),
    ],
)
def test_a_damaged_folder_named_outright_is_refused(tmp_path, damage, message):
    folder = save(tmp_path, 1)
    damage(folder)
    with pytest.raises(UserError, match=re.escape(message)):
        find_resume(tmp_path, str(folder), "h", print)
    assert find_resume(tmp_path, "auto", "h", lambda text: None) is None


def test_what_is_no_folder_is_passed_over_and_replaced(tmp_path):
    save(tmp_path, 1)
    (tmp_path / "global_step_2").write_text("a file")
    (tmp_path / "global_step_3").symlink_to("nowhere")
    assert find_resume(tmp_path, "auto", "h", print).name == "global_step_1"
    for step in (2, 3):
        with pytest.raises(UserError, match="is not a folder; there: global_step_1"):
            find_resume(tmp_path, str(tmp_path / f"global_step_{step}"), "h", print)
    for step in (2, 3):
        save(tmp_path, step)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["global_step_1", "global_step_2", "global_step_3"]
    assert find_resume(tmp_path, "auto", "h", print).name == "global_step_3"


def test_a_crash_between_the_renames_loses_neither_copy(tmp_path, monkeypatch):
    save(tmp_path, 1, text="first")
    rename = Path.rename

    def crash(path, target):
        if path.name == ".tmp-global_step_1":
            raise KeyboardInterrupt  # the old one has made room, the new one has not come
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", crash)
    monkeypatch.setattr(atomic_folder, "_exchange", lambda one, other: False)  # a file system that cannot swap names
    with suppress(KeyboardInterrupt):
        save(tmp_path, 1, text="second")
    assert (tmp_path / "global_step_1" / "actor" / "w.bin").read_text() == "first"
    monkeypatch.undo()
    (tmp_path / "global_step_1").rename(tmp_path / ".old-global_step_1")  # the same, by a power cut
    assert find_resume(tmp_path, "auto", "h", print).name == "global_step_1"
    assert [p.name for p in tmp_path.iterdir()] == ["global_step_1"]


def test_auto_takes_checkpoints_of_its_own_run_only(tmp_path):
    save(tmp_path, 1, run="a")
    save(tmp_path, 2, run="b")
    assert find_resume(tmp_path, "auto", "h", print, run="a").name == "global_step_1"


def test_missing_folder_lists_what_is_there(tmp_path):
    save(tmp_path, 1)
    with pytest.raises(UserError, match="does not exist; there: global_step_1"):
        find_resume(tmp_path, str(tmp_path / "global_step_7"), "h", print)


def test_keep_last_k_by_number(tmp_path):
    for step in (2, 9, 10):
        save(tmp_path, step, keep=2)
    assert sorted(p.name for p in tmp_path.glob("global_step_*")) == ["global_step_10", "global_step_9"]


def test_a_run_with_other_settings_deletes_nothing(tmp_path):
    for step in (10, 20, 30):
        save(tmp_path, step, keep=1, text="other", config_hash="other")
        save(tmp_path, step, keep=1, text="other", config_hash="other")  # the same run again replaces its own
    save(tmp_path, 30, keep=1)
    save(tmp_path, 40, keep=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["earlier_1_global_step_30", "global_step_40"]
    assert Manifest.read(tmp_path / "earlier_1_global_step_30").config_hash == "other"


def test_keep_never_takes_the_one_just_saved(tmp_path):
    save(tmp_path, 10)  # of an earlier run; a later one went back to step 2
    save(tmp_path, 2)
    save(tmp_path, 3, keep=1)
    assert sorted(p.name for p in tmp_path.glob("global_step_*")) == ["global_step_10", "global_step_3"]


def test_nothing_but_json_and_listed_files(tmp_path):
    folder = save(tmp_path, 1)
    assert "torch" in json.loads((folder / "manifest.json").read_text())["versions"]
