"""`rlinf sft` on datasets of one's own, without a simulator: dimensions, statistics and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import rlinf
from rlinf.commands import jobs
from rlinf.config.load import load_config
from rlinf.config.schema import Config
from rlinf.demos.writer import DatasetWriter
from rlinf.errors import UserError
from rlinf.models.config import DataShape
from rlinf.simulators.contract import EnvSpec
from rlinf.training.sft import train_sft
from tests.demos.lerobot_files import SIZES, numbers, write_dataset

FEW = ["sft.steps=2", "sft.batch_size=4", "sft.noise_draws=1", "runner.logger.logger_backends=[]"]


def config(folder: Path, *overrides: str, name: str = "own_data_sft") -> Config:
    own = [f"sft.dataset={folder / 'own'}", f"sft.output={folder / 'policy'}", f"runner.logger.log_path={folder}"]
    return load_config(name, [*FEW, *own, *overrides], purpose="sft", devices=[0])


def silent(line: str) -> None:
    """Progress that nobody reads."""


def test_a_policy_has_the_datasets_dimensions_and_statistics(tmp_path: Path):
    write_dataset(tmp_path / "own", "v2.1", video=True)
    lines: list[str] = []
    folder = train_sft(config(tmp_path), on_progress=lines.append)
    assert lines[0] == (
        "dataset: 3 episodes, 17 frames; main <- observation.images.top, wrist_0 <- observation.images.wrist, "
        "state <- observation.state, action <- action"
    )
    record = json.loads((folder / "sft.json").read_text())
    assert (record["layout"], record["fps"], record["robot_type"], record["frames"]) == ("v2.1", 10.0, "so100", 17)
    assert record["cameras"] == {name: list(size) for name, size in SIZES.items()}
    (file,) = folder.rglob("norm_stats.json")
    stats = json.loads(file.read_text())["norm_stats"]
    for key, name in (("state", "observation.state"), ("actions", "action")):
        assert stats[key]["mean"] == pytest.approx(numbers()[name].mean(0).tolist(), abs=1e-5)
        assert stats[key]["std"] == pytest.approx(numbers()[name].std(0).tolist(), abs=1e-5)
    policy = rlinf.load_policy(folder)
    assert (policy.spec.action_dim, policy.spec.state_dim, policy.spec.num_images) == (3, 4, 2)
    zeros = {name: np.zeros((*size, 3), np.uint8) for name, size in SIZES.items()}
    top, wrist = zeros.values()
    actions = policy.act(top, wrist_images=wrist[None], state=np.zeros(4, np.float32), instruction="pick the cube")
    assert actions.shape == (10, 3)


def test_token_policies_learn_from_own_data_too(tmp_path: Path):
    write_dataset(tmp_path / "own", "v3.0", video=False)
    (tmp_path / "oft.yaml").write_text(
        "actor: {model: {model_type: openvla_oft, size: compact, implement_version: official, use_proprio: true, "
        "num_images_in_input: 2, num_action_chunks: 2}}"
    )
    folder = train_sft(config(tmp_path, name=str(tmp_path / "oft.yaml")), on_progress=silent)
    spec = rlinf.load_policy(folder).spec
    assert (spec.action_dim, spec.state_dim, spec.num_images) == (3, 4, 2)


def test_settings_that_do_not_fit_the_dataset(tmp_path: Path):
    write_dataset(tmp_path / "own", "v3.0", video=False)
    for setting, message in (
        ("actor.model.action_dim=7", r"actor\.model\.action_dim=7 must be 3, the action columns of sft\.dataset="),
        ("actor.model.openpi.state_dim=5", r"actor\.model\.openpi\.state_dim=5 must be at most 4, the state columns"),
        ("actor.model.openpi.num_images_in_input=3", r"num_images_in_input=3 must be at most 2, the cameras of"),
    ):
        with pytest.raises(UserError, match=message):
            train_sft(config(tmp_path, setting), on_progress=silent)
    with pytest.raises(UserError, match=r"sft\.eval_interval=5 must be 0: episodes are played in a simulator"):
        config(tmp_path, "sft.eval_interval=5")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["own"]


def test_names_are_mapped_on_the_command_line(tmp_path: Path):
    write_dataset(tmp_path / "own", "v3.0", video=False)
    swapped = "sft.features={observation.images.wrist: main, observation.state: action, action: state}"
    folder = train_sft(config(tmp_path, swapped), on_progress=silent)
    spec = rlinf.load_policy(folder).spec
    assert (spec.action_dim, spec.state_dim, spec.num_images) == (4, 3, 1)


def test_a_refused_command_leaves_the_curve_of_an_earlier_one(tmp_path: Path):
    write_dataset(tmp_path / "own", "v3.0", video=False)
    jobs.sft(config(tmp_path))
    curve = (tmp_path / "sft_log/metrics.jsonl").read_text()
    assert curve
    with pytest.raises(UserError, match=r"policy is not empty; choose another folder, or replace it with --overwrite"):
        jobs.sft(config(tmp_path))
    (tmp_path / "own/meta/info.json").write_text("")
    with pytest.raises(UserError, match="is damaged"):
        jobs.sft(config(tmp_path), overwrite=True)
    assert (tmp_path / "sft_log/metrics.jsonl").read_text() == curve
    assert (tmp_path / "policy/model.safetensors").is_file()


def test_the_log_is_neither_replaced_nor_mixed_with_that_of_another_recipe(tmp_path: Path):
    write_dataset(tmp_path / "own", "v3.0", video=False)
    log = f"runner.logger.log_path={tmp_path / 'lg'}"
    for output in ("lg", "lg/sft_log"):
        with pytest.raises(UserError, match=r"sft\.output=.* holds runner\.logger\.log_path=.*lg/sft_log, which"):
            jobs.sft(config(tmp_path, log, f"sft.output={tmp_path / output}"), overwrite=True)
    inside = [f"sft.output={tmp_path / 'lg/sft'}", f"actor.model.model_path={tmp_path / 'lg/sft'}"]
    jobs.sft(config(tmp_path, log, f"sft.output={tmp_path / 'lg/sft'}"))
    with pytest.raises(UserError, match=r"lg/sft_log holds run .* of own_data_sft, .*, not of other; choose another"):
        jobs.sft(config(tmp_path, log, "runner.logger.experiment_name=other"))
    with pytest.raises(UserError, match=r"sft\.output=.* holds actor\.model\.model_path=.*lg/sft, which would"):
        jobs.sft(config(tmp_path, log, *inside), overwrite=True)


def test_the_log_has_means_and_goes_on_with_a_training_that_does(tmp_path: Path):
    cfg, file = config(tmp_path, "sft.log_interval=2"), tmp_path / "sft_log/metrics.jsonl"

    def log(steps: range, *, resume: bool) -> list[tuple[int, float, float, str]]:
        with jobs.sft_log(cfg, resume=resume) as on_step:
            for step in steps:
                on_step(step, {"train/sft/loss": float(step), "train/sft/grad_norm": 1.0, "train/sft/lr": step / 8})
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        return [(row["step"], row["train/sft/loss"], row["train/sft/lr"], row["run"]) for row in rows]

    first = log(range(1, 6), resume=False)
    run = first[0][-1]
    assert first == [(2, 1.5, 0.25, run), (4, 3.5, 0.5, run), (5, 5.0, 0.625, run)]
    # a checkpoint of step 4 is continued: what came after it goes
    assert log(range(5, 7), resume=True) == [*first[:2], (6, 5.5, 0.75, run)]
    again = log(range(1, 3), resume=False)
    assert [row[:3] for row in again] == [(2, 1.5, 0.25)]
    assert again[0][-1] != run


def test_commands_that_need_a_simulator_say_so():
    for purpose in ("train", "eval", "collect"):
        with pytest.raises(UserError, match="own_data_sft has no simulator"):
            load_config("own_data_sft", purpose=purpose, devices=[0])


def test_a_simulators_recipe_keeps_its_own_dimensions():
    cfg = load_config("calvin_d_d_ppo_compact", purpose="sft", devices=[0])
    assert cfg.actor.model.action_dim == 7
    left = load_config("own_data_sft", purpose="sft", devices=[0]).actor.model
    assert left.action_dim == 0
    fitted = left.for_data(DataShape(action_dim=14, state_dim=14, num_cameras=4)).spec()
    assert (fitted.action_dim, fitted.state_dim, fitted.num_images) == (14, 14, 3)


def test_statistics_of_relative_actions_are_those_of_whole_chunks(tmp_path: Path):
    """Actions that run away from the state: the further into a chunk, the larger; one step alone would tell less."""
    spec = EnvSpec("aloha", ("t",), 14, tuple(f"a{i}" for i in range(14)), "none", 14, (8, 8), {}, 50.0, {}, 2, (8, 8))
    states = np.cumsum(np.full((12, 14), 0.1, np.float32), 0)
    with DatasetWriter(tmp_path / "own", spec) as writer:
        images, wrist = np.zeros((12, 8, 8, 3), np.uint8), np.zeros((12, 2, 8, 8, 3), np.uint8)
        writer.add(images=images, wrist_images=wrist, states=states, actions=states, task="t")
    options = ["actor.model.openpi.config_name=pi0_aloha_robotwin", "actor.model.num_action_chunks=3"]
    folder = train_sft(config(tmp_path, *options), on_progress=silent)
    (file,) = folder.rglob("norm_stats.json")
    mean = json.loads(file.read_text())["norm_stats"]["actions"]["mean"]
    ahead = [min(t + h, 11) - t for t in range(12) for h in range(3)]  # frames between an action and its chunk's state
    assert mean[0] == pytest.approx(0.1 * np.mean(ahead), abs=1e-4)
    assert mean[6] == pytest.approx(
        float(states[np.minimum(np.arange(12)[:, None] + np.arange(3), 11), 6].mean()), abs=1e-4
    )
