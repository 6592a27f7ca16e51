"""What every simulator must hold; those under rlinf/simulators and installed ones are found by name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import pytest
import torch

from rlinf.data.types import EnvStep, Observation
from rlinf.envs.config import EnvConfig
from rlinf.envs.spec import available_simulators, env_spec, find_simulator
from rlinf.envs.vec import VecEnv
from rlinf.errors import UserError

CHEAP = {  # used where the simulator has such options
    "image_size": 48,
    "render": "fast",
    "task_config": {"task_name": "stack_blocks_two", "embodiment": ["piper", "piper", 0.6]},
}
NUM_ENVS, GROUP, CHUNK = 4, 2, 3


@dataclass
class Pair:
    """The same four envs in two processes and in one."""

    apart: VecEnv
    together: VecEnv


def make_env(env_type: str, *, num_processes: int) -> VecEnv:
    options = {f.name for f in fields(find_simulator(env_type).Options)}
    cfg = EnvConfig(
        env_type=env_type,
        total_num_envs=NUM_ENVS,
        group_size=GROUP,
        max_episode_steps=4 * CHUNK,
        num_processes=num_processes,
        use_ordered_reset_state_ids=True,
        init_params={k: v for k, v in CHEAP.items() if k in options},
    )
    spec = env_spec(cfg)
    two = spec.reset_ids["train"][: NUM_ENVS // GROUP]  # in order: every reset plays the same ones
    spec = replace(spec, reset_ids={**spec.reset_ids, "train": two})
    critic = spec.critic_state_dim > 0
    return VecEnv(cfg, spec, env_ids=range(NUM_ENVS), mode="train", chunk_size=CHUNK, seed=3, critic_state=critic)


@pytest.fixture(scope="module", params=available_simulators())
def envs(request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = Pair(make_env(request.param, num_processes=2), make_env(request.param, num_processes=1))
    try:
        pair.apart.reset()
    except UserError as error:
        pytest.skip(str(error))
    yield pair
    pair.apart.close()
    pair.together.close()


def actions(env: VecEnv, seed: int) -> torch.Tensor:
    shape = (NUM_ENVS, CHUNK, env.spec.action_dim)
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def assert_equal(a: Observation, b: Observation) -> None:
    assert a.task_descriptions == b.task_descriptions
    for name in ("images", "wrist_images", "states", "critic_state"):
        x, y = getattr(a, name), getattr(b, name)
        assert (x is None) == (y is None), name
        assert x is None or torch.equal(x, y), name


def assert_steps_equal(a: EnvStep, b: EnvStep) -> None:
    assert_equal(a.obs, b.obs)
    for name in ("rewards", "terminated", "truncated", "valid", "lost"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name


def test_an_id_is_the_same_pixels_again_and_in_another_process(envs: Pair) -> None:
    first = envs.apart.reset()
    for seed in range(2):
        envs.apart.chunk_step(actions(envs.apart, seed))
    assert_equal(envs.apart.reset().obs, first.obs)
    assert_equal(envs.together.reset().obs, first.obs)


def test_members_of_a_group_start_from_the_same_state(envs: Pair) -> None:
    obs = envs.apart.reset().obs
    assert_equal(obs[[0, 2]], obs[[1, 3]])
    assert not torch.equal(obs.images[0], obs.images[2])


def test_equal_actions_keep_a_group_equal(envs: Pair) -> None:
    envs.apart.reset()
    same = actions(envs.apart, 0)[[0, 0, 2, 2]]
    for _ in range(2):
        step = envs.apart.chunk_step(same)
    assert_equal(step.obs[[0, 2]], step.obs[[1, 3]])


def test_shapes_and_types_are_those_of_the_spec(envs: Pair) -> None:
    spec, step = envs.apart.spec, envs.apart.reset()
    assert step.obs.images.shape == (NUM_ENVS, *spec.image_size, 3)
    assert step.obs.images.dtype == torch.uint8
    assert step.obs.images.float().std() > 1  # not blank
    if spec.state_dim:
        assert step.obs.states is not None
        assert step.obs.states.shape == (NUM_ENVS, spec.state_dim)
        assert step.obs.states.dtype == torch.float32
    if spec.num_wrist_images:
        assert step.obs.wrist_images is not None
        assert step.obs.wrist_images.shape == (NUM_ENVS, spec.num_wrist_images, *spec.wrist_image_size, 3)
    if spec.critic_state_dim:
        assert step.obs.critic_state is not None
        assert step.obs.critic_state.shape == (NUM_ENVS, spec.critic_input_dim)
    assert step.rewards.shape == (NUM_ENVS, CHUNK)
    assert step.rewards.dtype == torch.float32
    assert len(spec.action_names) == spec.action_dim
    assert all(step.obs.task_descriptions)


def test_a_saved_state_continues_bit_for_bit_in_other_processes(envs: Pair) -> None:
    envs.apart.reset()
    envs.apart.chunk_step(actions(envs.apart, 0))
    saved = envs.apart.state()
    straight = [envs.apart.chunk_step(actions(envs.apart, seed)) for seed in (1, 2)]
    envs.together.load_state(saved)
    resumed = [envs.together.chunk_step(actions(envs.together, seed)) for seed in (1, 2)]
    for a, b in zip(straight, resumed, strict=True):
        assert_steps_equal(a, b)


def test_training_demonstration_and_evaluation_ids_are_disjoint(envs: Pair) -> None:
    ids = env_spec(envs.apart.cfg).reset_ids
    assert set(ids) == {"train", "demo", "eval"}
    for name, own in ids.items():
        sample = [own[i] for i in range(0, len(own), max(1, len(own) // 500))]
        assert len(set(sample)) == len(sample)
        for other in set(ids) - {name}:
            assert not any(i in ids[other] for i in sample)
