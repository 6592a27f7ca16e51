"""Scenes stepped together, as on a GPU: the protocol on the toy, ManiSkill's batch on a double of its environment."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from rlinf.data.types import EnvStep, Observation
from rlinf.envs import fleet
from rlinf.envs.config import EnvConfig
from rlinf.envs.spec import env_spec, eval_trials
from rlinf.envs.vec import VecEnv
from rlinf.errors import UserError
from rlinf.simulators.child_program import BatchWorker
from rlinf.simulators.contract import EnvSpec
from rlinf.simulators.maniskill import Batch, Options
from rlinf.simulators.maniskill.tasks import PREFIX, Episode, episode

MAIN = PREFIX + "Main-v3"
CHUNK, NUM_ENVS = 4, 4
Make = Callable[..., VecEnv]


class DriftingEnv:
    """A double of `gpu.environment.PutOnPlate`: one number per env that every step moves, asked for or not."""

    device = torch.device("cpu")

    def __init__(self, num_envs: int) -> None:
        self.num_envs, self.looks, self.closed = num_envs, 0, False
        self.episodes: list[Episode] = [episode(MAIN, "train", 0)] * num_envs
        self.x = torch.zeros(num_envs)
        self.elapsed, self.grasps = torch.zeros((2, num_envs), dtype=torch.int32)
        self.grasped, self.held = torch.zeros((2, num_envs), dtype=torch.bool)

    def reset(self, *, options: dict[str, Any]) -> None:
        for row, episode_id in zip(options["env_idx"].tolist(), options["episode_id"].tolist(), strict=True):
            self.episodes[row] = episode(MAIN, "train", episode_id)
            self.x[row] = (episode_id % 97) / 400
            for memory in (self.elapsed, self.grasps, self.grasped, self.held):
                memory[row] = 0

    def advance(self, actions: torch.Tensor) -> dict[str, torch.Tensor]:
        self.x = self.x + 0.01 + 0.1 * actions[:, 0]
        self.elapsed = self.elapsed + 1
        closed = actions[:, 6] < 0
        self.grasps = (self.grasps + 1) * closed
        self.grasped = self.grasped | closed
        self.held = self.held | (self.grasps >= 5)
        judged = {"success": self.x > 0.5, "is_src_obj_grasped": self.grasped, "consecutive_grasp": self.held}
        distances = {f"{name}_dist": self.x * k for k, name in enumerate(("gripper_carrot", "gripper_plate"))}
        return judged | {"src_on_target": self.x > 0.5, "carrot_plate_dist": self.x} | distances

    def look(self) -> dict[str, torch.Tensor]:
        self.looks += 1
        images = (self.x * 200).clamp(0, 255).to(torch.uint8)[:, None, None, None].expand(-1, 2, 3, 3)
        critic = torch.stack([self.x, self.grasps.float(), self.elapsed.float()], 1)
        return {"images": images, "states": self.x[:, None].expand(-1, 8), "critic_state": critic}

    def get_language_instruction(self) -> list[str]:
        return [f"put {e.object.index} on {e.plate.index}" for e in self.episodes]

    def snapshot(self, rows: Sequence[int]) -> dict[str, torch.Tensor]:
        ids = torch.tensor([e.episode_id for e in self.episodes])
        return {name: value[list(rows)] for name, value in ({"episode_id": ids} | self._memory()).items()}

    def restore(self, rows: Sequence[int], saved: dict[str, torch.Tensor]) -> None:
        for row, episode_id in zip(rows, saved["episode_id"].tolist(), strict=True):
            self.episodes[row] = episode(MAIN, "train", episode_id)
        for name, memory in self._memory().items():
            memory[list(rows)] = saved[name]

    def close(self) -> None:
        self.closed = True

    def _memory(self) -> dict[str, torch.Tensor]:
        flags = {"grasped": self.grasped, "held": self.held}
        return {"actors/x": self.x, "elapsed": self.elapsed, "grasps": self.grasps} | flags


def batch_of(env: DriftingEnv) -> Batch:
    return Batch(Options(), env.num_envs, env)


class LocalProcess:
    """A simulator process that is none: the child's commands on a batch of doubles, and messages still as JSON."""

    def __init__(self, *_: Any, shared: fleet.SharedArrays, **__: Any) -> None:
        self.env = DriftingEnv(NUM_ENVS)  # the process plays some of the rows
        self.worker = BatchWorker(batch_of(self.env), shared.arrays)

    def close(self) -> None:
        self.worker.close()


def run_locally(messages: Mapping[LocalProcess, Mapping[str, Any]], deadline_s: float) -> dict[LocalProcess, Any]:
    answers = {}
    for process, message in messages.items():
        answers[process] = json.loads(json.dumps(process.worker.run(json.loads(json.dumps(message)))))
        assert not answers[process]["failed"]
    return answers


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """VecEnv over doubles: all in one batch, or each in a process of its own."""
    monkeypatch.setattr(fleet, "SimProcess", LocalProcess)
    monkeypatch.setattr(fleet, "start_all", lambda processes: None)
    monkeypatch.setattr(fleet, "exchange", run_locally)
    open_envs: list[VecEnv] = []

    def build(batched: bool, *, mode: Any = "train", **settings: Any) -> VecEnv:
        spec = EnvSpec(
            suite=MAIN,
            tasks=(MAIN,),
            action_dim=7,
            action_names=tuple("xyzrpwg"),
            gripper="binary_pm1",
            state_dim=8,
            image_size=(2, 3),
            reset_ids={"train": range(100_000, 800_000), "demo": (), "eval": range(1000)},
            control_hz=5.0,
            critic_state_dim=3,
            batched=batched,
        )
        cfg = EnvConfig(
            env_type="toy",
            total_num_envs=NUM_ENVS,
            max_episode_steps=10,
            num_processes=NUM_ENVS,
            num_trials=6,
            **settings,
        )
        trials = eval_trials(cfg, spec) if mode == "eval" else None
        arguments = {"env_ids": range(NUM_ENVS), "mode": mode, "chunk_size": CHUNK, "seed": 0, "trials": trials}
        env = VecEnv(cfg, spec, critic_state=True, **arguments)  # type: ignore[arg-type]
        open_envs.append(env)
        return env

    yield build
    for env in open_envs:
        env.close()


def random_chunk(seed: int) -> torch.Tensor:
    return torch.rand(NUM_ENVS, CHUNK, 7, generator=torch.Generator().manual_seed(seed)) * 2 - 0.8


def assert_equal(a: Observation, b: Observation) -> None:
    assert a.task_descriptions == b.task_descriptions
    for name in ("images", "states", "critic_state"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name


def assert_steps_equal(a: EnvStep, b: EnvStep) -> None:
    assert_equal(a.obs, b.obs)
    for name in ("rewards", "terminated", "truncated", "valid", "lost"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name
    assert (a.final_obs is None) == (b.final_obs is None)
    if a.final_obs is not None and b.final_obs is not None:
        assert_equal(a.final_obs, b.final_obs)


@pytest.mark.parametrize("auto_reset", [False, True])
@pytest.mark.parametrize("ignore", [False, True])
def test_a_batch_plays_what_single_scenes_play(make: Make, auto_reset: bool, ignore: bool) -> None:
    settings = {"auto_reset": auto_reset, "ignore_terminations": ignore, "group_size": 2}
    together, apart = make(True, **settings), make(False, **settings)
    assert (len(together._fleet.rows), len(apart._fleet.rows)) == (1, NUM_ENVS)
    assert_steps_equal(together.reset(), apart.reset())
    ended = 0
    for seed in range(6):
        steps = [env.chunk_step(random_chunk(seed)) for env in (together, apart)]
        assert_steps_equal(*steps)
        assert together.drain_episodes() == apart.drain_episodes()
        ended += int((steps[0].terminated | steps[0].truncated).sum())
    assert ended >= (8 if auto_reset else NUM_ENVS)
    first = together.reset().obs
    assert_equal(first, apart.reset().obs)
    assert_equal(first[[0, 2]], first[[1, 3]])  # members of a group


def test_trials_of_an_evaluation_are_those_of_single_scenes(make: Make) -> None:
    records = []
    for batched in (True, False):
        env = make(batched, mode="eval")
        env.reset()
        for seed in range(100):
            if env.done:
                break
            env.chunk_step(random_chunk(seed))
        records.append(env.drain_episodes())
    assert records[0] == records[1]
    assert len(records[0]) == 6


def test_a_saved_batch_continues_whatever_the_rows_did(make: Make) -> None:
    """Saved when some rows have ended and the others went on; loaded where scenes are alone."""
    together = make(True, enable_offload=True)
    together.reset()
    steps = [together.chunk_step(random_chunk(seed)) for seed in range(2)]
    waiting = ~steps[-1].valid.all(1)
    assert waiting.any()
    assert not waiting.all()
    saved = json.loads(json.dumps(together.state()))
    straight = together.chunk_step(random_chunk(7))
    apart = make(False)
    assert_equal(apart.load_state(saved).obs, steps[-1].obs)
    assert_steps_equal(apart.chunk_step(random_chunk(7)), straight)
    again = make(True)
    again.load_state(saved)
    again.offload()
    assert not again._fleet.running
    again.onload()
    assert_steps_equal(again.chunk_step(random_chunk(7)), straight)


def test_a_row_that_stands_is_neither_moved_nor_drawn_again() -> None:
    env = DriftingEnv(3)
    batch = batch_of(env)
    batch.reset([0, 1, 2], [5, 6, 7])
    still = batch.get_state([2])
    actions = np.zeros((2, CHUNK, 7), np.float32)
    results = batch.step_chunk([0, 1], actions, [4, 2], stop_on_success=False, record=[False, False])
    assert [r.steps for r in results] == [4, 2]
    assert env.looks == 1  # row 1 where it ended
    seen = batch.observe([0, 1])
    assert env.looks == 2
    assert seen[0]["states"][0] == pytest.approx(5 / 400 + 0.04)
    assert seen[1]["states"][0] == pytest.approx(6 / 400 + 0.02)
    assert batch.get_state([2]) == still
    assert env.x[2] > 7 / 400 + 0.03  # though the simulator moved it
    batch.step_chunk([1, 2], actions, [4, 4], stop_on_success=False, record=[False, False])
    assert [s["states"][0] for s in batch.observe([1, 2])] == pytest.approx([6 / 400 + 0.06, 7 / 400 + 0.04])


def test_a_chunk_pays_levels_and_stops_at_success() -> None:
    env = DriftingEnv(2)
    batch = batch_of(env)
    batch.reset([0, 1], [0, 0])
    actions = np.zeros((2, 6, 7), np.float32)
    actions[0, :, 0], actions[0, :, 6] = 1.0, -1.0  # row 0 closes its hand and is there after five steps
    one, other = batch.step_chunk([0, 1], actions, [6, 6], stop_on_success=True, record=[True, False])
    assert one.rewards.tolist() == pytest.approx([0.1, 0.1, 0.1, 0.1, 1.2, 0.0])
    assert (one.steps, one.success.tolist()) == (5, [False] * 4 + [True, False])
    assert one.info["consecutive_grasp"] == 1.0
    assert set(one.info) == {"is_src_obj_grasped", "consecutive_grasp", "src_on_target"} | {
        f"{name}_dist" for name in ("gripper_carrot", "gripper_plate", "carrot_plate")
    }
    assert len(one.frames) == 5
    assert one.frames[0].shape == (2, 3, 3)
    assert (other.steps, other.rewards.sum(), other.frames) == (6, 0.0, [])


def test_without_a_gpu_the_error_names_the_way_out() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    cfg = EnvConfig(env_type="maniskill", init_params={"sim_backend": "gpu"})
    env = VecEnv(cfg, env_spec(cfg), env_ids=range(2), mode="train", chunk_size=CHUNK, seed=0)
    with pytest.raises(UserError, match="sim_backend: cpu does not"):
        env.reset()


@pytest.fixture
def toys() -> Iterator[Make]:
    """VecEnv of toys in real processes, one batch or one by one."""
    open_envs: list[VecEnv] = []

    def build(batched: bool, **init_params: Any) -> VecEnv:
        params = {"batched": batched, **init_params}
        cfg = EnvConfig(total_num_envs=4, max_episode_steps=12, auto_reset=True, num_processes=2, init_params=params)
        env = VecEnv(cfg, env_spec(cfg), env_ids=range(4), mode="train", chunk_size=CHUNK, seed=0, critic_state=True)
        open_envs.append(env)
        return env

    yield build
    for env in open_envs:
        env.close()


def test_the_child_speaks_to_a_batch_as_to_scenes(toys: Make) -> None:
    together, apart = toys(True), toys(False)
    assert_steps_equal(together.reset(), apart.reset())
    assert (len(together._fleet.pids()), len(apart._fleet.pids())) == (1, 2)
    for seed in range(4):
        steps = [env.chunk_step(random_chunk(seed)[..., :2]) for env in (together, apart)]
        assert_steps_equal(*steps)
    saved = together.state()
    assert saved == apart.state()
    together.offload()
    together.onload()
    assert_steps_equal(*(env.chunk_step(random_chunk(9)[..., :2]) for env in (together, apart)))


@pytest.mark.parametrize(("fault", "lost"), [("raise", 4), ("nan", 1)])
def test_an_exception_costs_the_batch_and_a_broken_number_its_row(
    toys: Make, tmp_path: Any, fault: str, lost: int
) -> None:
    env = toys(True, fault=fault, fault_file=str(tmp_path / "fault"))
    env.reset()
    step = env.chunk_step(torch.zeros(4, CHUNK, 2))
    assert int(step.lost.sum()) == lost
    assert env.num_restarts == 1
    assert env.chunk_step(torch.zeros(4, CHUNK, 2)).valid.all()
