"""`rlinf doctor --recipe`: it passes where nothing is wrong, and names each mistake that is made on purpose."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from typer.testing import CliRunner

from rlinf.commands.cli import app
from rlinf.commands.doctor import run_recipe
from rlinf.config.load import load_config
from rlinf.config.schema import Config
from rlinf.demos.collect import collect_demos
from rlinf.demos.dataset import DemoDataset
from rlinf.demos.layout import episode_columns
from rlinf.demos.writer import DatasetWriter
from rlinf.envs.bridge import Bridge
from rlinf.envs.spec import env_spec
from rlinf.errors import UserError
from rlinf.models.openpi.processor import Processor as PiProcessor
from rlinf.models.policy import find_policy
from rlinf.models.prismatic.processor import Processor as TokenProcessor
from tests.demos.arm import STEP

Tensor = torch.Tensor
Frames = dict[str, np.ndarray]  # images, wrist_images, states, actions of an episode
Change = Callable[[Frames], Frames]
ARM = str(Path(__file__).parents[1] / "demos/arm.yaml")
TOKENS = ("~actor.model.openpi", "actor.model.model_type=openvla_oft", "actor.model.num_images_in_input=2")


def check(
    recipe: str = ARM, *overrides: str, dataset: Path | None = None, policy: Path | None = None, episodes: int = 3
) -> tuple[bool, str]:
    """Whether the recipe is healthy, and everything that was said."""
    lines: list[str] = []
    given = None if dataset is None else str(dataset)
    return run_recipe(recipe, overrides, given, policy, episodes, lines.append), "\n".join(lines)


def failures(said: str) -> list[str]:
    return [line for line in said.splitlines() if line.startswith("FAIL")]


def written(source: Path, folder: Path, cfg: Config, change: Change) -> Path:
    """The dataset once more, with each episode changed."""
    data, spec = DemoDataset(source), env_spec(cfg.env.train)
    names, first = ("task_name", "reset_id", "noise_std", "noise_seed"), 0
    with DatasetWriter(folder, spec) as writer:
        for files, extra in zip(data.layout.episodes, episode_columns(data.layout, names), strict=True):
            rows = range(first, first + files.length)
            first += files.length
            obs, (actions, _) = data.observation(rows), data.action_chunks(rows, 1)
            assert obs.states is not None
            frames: Frames = {"images": obs.images.numpy(), "states": obs.states.numpy().copy()}
            frames |= {"actions": actions[:, 0].numpy().copy()}
            if obs.wrist_images is not None:
                frames["wrist_images"] = obs.wrist_images.numpy()
            privileged = None if data.privileged is None else data.privileged[list(rows)].numpy()
            arrays: dict[str, Any] = change(frames)
            writer.add(**arrays, critic_states=privileged, task=obs.task_descriptions, extra=extra)
    return folder


def _some_slow(names: Iterable[str], *slow: str) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slow) if name in slow else name for name in names]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Demonstrations of the arm, as `rlinf collect` writes them, with noise."""
    folder = tmp_path_factory.mktemp("demos") / "arm"
    settings = [f"collect.output={folder}", "collect.episodes_per_task=3", "collect.action_noise=0.2"]
    return collect_demos(load_config(ARM, settings, purpose="collect"), on_progress=lambda line: None)


# ------------------------------------------------------------------ nothing is wrong
def test_it_passes_and_says_what_was_compared():
    result = CliRunner().invoke(app, ["doctor", "--recipe", "toy_ppo_compact", "--episodes", "2"])
    assert result.exit_code == 0, result.output
    for line in (
        "ok    statistics: fitted as `rlinf sft` does",
        "ok    actions: ",
        "ok    replay: 2 of 2 episodes succeed in env.eval's simulator, the expert's own: 2 of 2",
        "ok    pictures: ",
        "ok    state: 2 columns",
    ):
        assert line in result.output


def test_a_dataset_with_noise_is_replayed_with_it(recorded):
    data = DemoDataset(recorded)
    assert all(row["noise_std"] > 0 for row in episode_columns(data.layout, ("noise_std",)))
    healthy, said = check(dataset=recorded)
    assert healthy, said
    assert "ok    dataset's actions: on 3 reset ids the expert does what the dataset says it did" in said
    assert "ok    replay: 3 of 3 episodes succeed" in said


# ------------------------------------------------------------------ mistakes in a dataset
def absolute(frames: Frames) -> Frames:
    """Positions to go to, in place of steps towards them."""
    actions = frames["actions"].copy()
    actions[:, :3] = frames["states"][:, :3] + STEP * actions[:, :3]
    return frames | {"actions": actions}


def other_gripper(frames: Frames) -> Frames:
    actions = frames["actions"].copy()
    actions[:, 6] *= -1
    return frames | {"actions": actions}


def other_quaternion(frames: Frames) -> Frames:
    states = frames["states"].copy()
    states[:, 3:7] = np.roll(states[:, 3:7], -1, 1)
    return frames | {"states": states}


def reversed_chunks(frames: Frames) -> Frames:
    actions = frames["actions"].copy()
    for first in range(0, len(actions) // 4 * 4, 4):
        actions[first : first + 4] = actions[first : first + 4][::-1].copy()
    return frames | {"actions": actions}


MISTAKEN_DATASETS: dict[str, tuple[Change, tuple[str, ...]]] = {
    "gripper sign": (
        other_gripper,
        ("dataset's actions: gripper (column 6): sign reversed", "replay: 0 of 3 episodes succeed"),
    ),
    "quaternion order": (
        other_quaternion,
        ("state: columns 3 to 6 hold a quaternion in another order: x y z w in the dataset",),
    ),
    "camera flip": (
        lambda f: f | {"images": f["images"][:, ::-1].copy()},
        ("pictures: camera main: the dataset's pictures are flipped vertically (upside down)",),
    ),
    "delta/absolute": (
        absolute,
        tuple(
            f"dataset's actions: {name} (column {i}): absolute: it follows the state's column {i}, so that delta and "
            "absolute actions are mixed up"
            for i, name in enumerate("xyz")
        ),
    ),
    "chunk order": (reversed_chunks, ("the actions of a chunk are in reverse order", "replay: ")),
    "camera order": (
        lambda f: f | {"images": f["wrist_images"][:, 0], "wrist_images": f["images"][:, None]},
        ("camera main: the dataset's pictures are those of camera wrist_0", "camera wrist_0: the dataset's"),
    ),
}


@pytest.mark.parametrize("mistake", _some_slow(MISTAKEN_DATASETS, "camera order"))
def test_a_mistake_in_a_dataset_is_named(mistake, recorded, tmp_path):
    change, lines = MISTAKEN_DATASETS[mistake]
    dataset = written(recorded, tmp_path / "data", load_config(ARM, purpose="doctor"), change)
    healthy, said = check(dataset=dataset)
    assert not healthy
    for line in lines:
        assert any(line in failure for failure in failures(said)), said


# ------------------------------------------------------------------ mistakes of a policy
def saved(folder: Path, overrides: tuple[str, ...], states: Tensor | None, actions: Tensor) -> Path:
    """A policy with statistics of these data."""
    cfg = load_config(ARM, overrides, purpose="doctor").actor.model
    policy = find_policy(cfg.model_type).build(cfg, torch.device("cpu"))
    policy.fit_statistics(states, actions)
    policy.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("overrides", [(), pytest.param(TOKENS, marks=pytest.mark.slow)], ids=["openpi", "tokens"])
def test_statistics_of_another_suite_are_named(overrides, recorded, tmp_path):
    data = DemoDataset(recorded)
    assert data.states is not None
    other = saved(tmp_path, overrides, 0.1 * data.states, 0.02 * data.actions)  # of a robot that is told metres
    healthy, said = check(ARM, *overrides, dataset=recorded, policy=other)
    assert not healthy
    assert "FAIL  statistics: action x (column 0): " in said
    assert "of another suite" in said
    assert ("FAIL  replay: " in said) == (overrides == TOKENS)  # only tokens clip


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [(), TOKENS], ids=["openpi", "tokens"])
def test_a_policys_own_statistics_pass(overrides, recorded, tmp_path):
    data = DemoDataset(recorded)
    healthy, said = check(ARM, *overrides, policy=saved(tmp_path, overrides, data.states, data.actions))
    assert healthy, said
    assert f"ok    statistics: of {tmp_path}" in said


# ------------------------------------------------------------------ mistakes of the code
def reversing_gripper(to_env: Callable[[Bridge, Tensor], Tensor]) -> Callable[[Bridge, Tensor], Tensor]:
    def mistaken(bridge: Bridge, actions: Tensor) -> Tensor:
        out = to_env(bridge, actions)
        out[..., -1] *= -1
        return out

    return mistaken


def adding_state(
    decode: Callable[[PiProcessor, Tensor, Tensor], Tensor],
) -> Callable[[PiProcessor, Tensor, Tensor], Tensor]:
    def mistaken(processor: PiProcessor, x: Tensor, state: Tensor) -> Tensor:
        out = decode(processor, x, state)
        out[..., :3] += state[:, None, :3]
        return out

    return mistaken


def column_by_column(
    decode: Callable[[TokenProcessor, Tensor], Tensor],
) -> Callable[[TokenProcessor, Tensor], Tensor]:
    def mistaken(processor: TokenProcessor, bins: Tensor) -> Tensor:
        columns = processor.cfg.action_dim
        return decode(processor, bins.unflatten(1, (columns, -1)).transpose(1, 2).flatten(1))

    return mistaken


MISTAKEN_CODE: dict[str, tuple[Any, str, Callable[[Any], Any], tuple[str, ...], str]] = {
    "gripper sign": (Bridge, "to_env", reversing_gripper, (), "actions: gripper (column 6): sign reversed"),
    "delta/absolute": (
        PiProcessor,
        "decode_actions",
        adding_state,
        (),
        "actions: y (column 1): absolute: the state's column 1 is added to it",
    ),
    "chunk order": (
        TokenProcessor,
        "decode_bins",
        column_by_column,
        TOKENS,
        "all columns: chunk order: action after action is written, column after column is read",
    ),
}


@pytest.mark.parametrize("mistake", _some_slow(MISTAKEN_CODE, "gripper sign"))
def test_a_mistake_of_the_action_path_is_named(mistake, monkeypatch):
    owner, name, change, overrides, line = MISTAKEN_CODE[mistake]
    monkeypatch.setattr(owner, name, change(vars(owner)[name]))
    healthy, said = check(ARM, *overrides)
    assert not healthy
    assert any(line in failure for failure in failures(said)), said
    assert any("FAIL  replay: 0 of 3 episodes succeed" in failure for failure in failures(said)), said


def test_a_camera_that_evaluation_holds_otherwise_is_named():
    healthy, said = check(ARM, "env.eval.init_params.upside_down=true")
    assert not healthy
    assert [line.partition(";")[0] for line in failures(said)] == [
        "FAIL  pictures: camera main: the dataset's pictures are turned by 180 degrees"
    ]


# ------------------------------------------------------------------ what cannot be checked
def test_a_dataset_without_reset_ids_is_checked_without_the_simulator(recorded, tmp_path):
    data = DemoDataset(recorded)
    with DatasetWriter(tmp_path / "own", env_spec(load_config(ARM, purpose="doctor").env.train)) as writer:
        obs, rows = data.observation(range(20)), data.actions[:20].numpy()
        assert obs.states is not None
        assert obs.wrist_images is not None
        images = {"images": obs.images.numpy(), "wrist_images": obs.wrist_images.numpy()}
        writer.add(**images, states=obs.states.numpy(), actions=rows, task="lift the cube")
    healthy, said = check(dataset=tmp_path / "own")
    assert healthy
    assert "--    replay: meta/episodes of the dataset has no column reset_id" in said
    healthy, said = check("own_data_sft", dataset=tmp_path / "own")
    assert healthy
    assert "ok    actions: 2 chunks of 10 come out as they went in" in said
    assert "--    replay: the config has no simulator" in said


def test_noise_that_nobody_recorded_is_not_replayed(recorded, tmp_path):
    cfg = load_config(ARM, purpose="doctor")
    old = written(recorded, tmp_path / "old", cfg, lambda frames: frames)
    data = DemoDataset(old)
    episodes = old / "meta/episodes/chunk-000/file-000.parquet"
    pq.write_table(pq.read_table(episodes).drop_columns(["noise_seed"]), episodes)
    assert episode_columns(data.layout, ("noise_seed",)) == [{}, {}, {}]
    healthy, said = check(dataset=old)
    assert healthy
    assert "--    replay: the dataset was collected with action noise by a version that did not record it" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--dataset", "data"), "--dataset needs --recipe CONFIG"),
        (("--episodes", "2"), "--episodes needs --recipe CONFIG"),
        (("--recipe", "own_data_sft"), "the config has no simulator whose expert could play"),
        (("--recipe", "toy_ppo_compact", "--dataset", "no/such/folder/here"), "no/such/folder/here"),
        (
            ("--recipe", "toy_ppo_compact", "--policy", "no/such/policy"),
            "--policy=no/such/policy does not exist; expected the folder of a run, of its checkpoint",
        ),
        (("--recipe", "toy_ppo_compact", "--policy", "random"), "--policy=random is a run folder without a checkpoint"),
        (
            ("--recipe", "toy_ppo_compact", "--policy", "randon"),
            "--policy=randon does not exist (did you mean 'random'?)",
        ),
        (("--recipe", "toy_ppo_compact", "runner.ckpt_path=randon"), "runner.ckpt_path=randon does not exist (did"),
        (("--recipe", "toy_ppo_compakt"), "did you mean"),
    ],
)
def test_what_is_asked_for_must_be_there(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "random").mkdir()
    (tmp_path / "random/metrics.jsonl").touch()
    error = CliRunner().invoke(app, ["doctor", *arguments]).exception
    assert isinstance(error, UserError)
    assert message in str(error)


def test_demonstrations_of_another_suite_are_refused(recorded, tmp_path):
    cfg = load_config(ARM, purpose="doctor")
    data = DemoDataset(recorded)
    with DatasetWriter(tmp_path / "other", env_spec(cfg.env.train)) as writer:
        obs = data.observation(range(8))
        assert obs.states is not None
        assert obs.wrist_images is not None
        writer.add(
            images=obs.images.numpy(),
            wrist_images=obs.wrist_images.numpy(),
            states=obs.states.numpy(),
            actions=data.actions[:8].numpy(),
            task="lift the cube",
            extra={"reset_id": 7_000_000, "noise_std": 0.0, "noise_seed": 0},
        )
    with pytest.raises(UserError, match="reset id 7000000 belongs to neither lift nor lift"):
        check(dataset=tmp_path / "other")


# ------------------------------------------------------------------ the real simulators
REAL = {
    "quickstart": None,
    "calvin_d_d_ppo_compact": "calvin_path",
    "maniskill_ppo_compact": "maniskill_path",
    "toy_ppo_openvla_compact": None,
    "toy_grpo_openvlaoft_compact": None,
}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", REAL)
def test_it_passes_for_every_simulator_with_an_expert(recipe, request):
    if (files := REAL[recipe]) is not None:
        request.getfixturevalue(files)
    healthy, said = check(recipe, episodes=4)
    assert healthy, said
    assert "ok    replay: 4 of 4 episodes succeed in env.eval's simulator, the expert's own: 4 of 4" in said


@pytest.mark.slow
def test_mistakes_in_demonstrations_of_maniskill_are_named(maniskill_path, tmp_path):
    settings = [f"collect.output={tmp_path / 'right'}", "collect.episodes_per_task=2", "collect.action_noise=0"]
    cfg = load_config("maniskill_ppo_compact", settings, purpose="collect")
    cfg = replace(cfg, collect=replace(cfg.collect, tasks=cfg.collect.tasks[:1]))
    right = collect_demos(cfg, on_progress=lambda line: None)

    def turn_quaternion(frames: Frames) -> Frames:
        states = frames["states"].copy()
        states[:, 11:15] = np.roll(states[:, 11:15], -1, 1)
        return frames | {"states": states}

    for name, change, line in (
        ("gripper", other_gripper, "dataset's actions: gripper (column 6): sign reversed"),
        ("quaternion", turn_quaternion, "state: columns 11 to 14 hold a quaternion in another order"),
        ("camera", lambda f: f | {"images": f["images"][:, :, ::-1].copy()}, "flipped horizontally (mirrored)"),
    ):
        healthy, said = check("maniskill_ppo_compact", dataset=written(right, tmp_path / name, cfg, change), episodes=2)
        assert not healthy
        assert any(line in failure for failure in failures(said)), said
