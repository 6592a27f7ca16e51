"""TensorStruct: one implementation of cat, slice and map for every message."""

import pytest
import torch

from rlinf.data.struct import num_bytes
from rlinf.data.types import EnvStep, Observation


def observation(n: int, start: int = 0) -> Observation:
    rows = torch.arange(start, start + n)
    return Observation(
        images=rows.to(torch.uint8)[:, None, None, None].expand(n, 2, 2, 3),
        wrist_images=None,
        states=rows.float()[:, None],
        task_descriptions=[f"task {i}" for i in rows.tolist()],
    )


def env_step(n: int, start: int = 0, final: list[int] | None = None) -> EnvStep:
    flags = torch.zeros(n, 3, dtype=torch.bool)
    return EnvStep(
        obs=observation(n, start),
        rewards=torch.arange(start, start + n).float()[:, None].expand(n, 3),
        terminated=flags,
        truncated=flags,
        valid=~flags,
        lost=flags[:, 0],
        final_obs=observation(len(final), 100) if final else None,
        final_rows=torch.tensor(final) if final else None,
    )


def test_cat_and_slice_are_inverse():
    parts = [observation(2), observation(3, 2)]
    joined = Observation.cat(parts)
    assert len(joined) == 5
    assert joined.wrist_images is None
    assert joined[2:5].task_descriptions == ["task 2", "task 3", "task 4"]
    assert torch.equal(joined[2:5].states, parts[1].states)


@pytest.mark.parametrize("index", [[0, 2], torch.tensor([0, 2]), torch.tensor([True, False, True])])
def test_rows_by_list_index_and_mask_agree(index):
    rows = observation(3)[index]
    assert rows.task_descriptions == ["task 0", "task 2"]
    assert rows.states.flatten().tolist() == [0.0, 2.0]


def test_joining_none_with_a_value_is_refused():
    with_wrist = Observation(torch.zeros(1, 2, 2, 3), torch.zeros(1, 1, 2, 2, 3), None, ["x"])
    with pytest.raises(ValueError, match="cannot join None"):
        Observation.cat([with_wrist, observation(1)])


def test_finished_episodes_follow_their_rows():
    step = EnvStep.cat([env_step(2, 0, final=[1]), env_step(3, 2, final=[0, 2])])
    assert step.final_rows.tolist() == [1, 2, 4]
    part = step[2:5]
    assert part.final_rows.tolist() == [0, 2]
    assert len(part.final_obs) == 2
    assert step[0:1].final_rows is None


def test_num_bytes_counts_every_tensor():
    assert num_bytes(observation(4)) == 4 * 12 + 4 * 4
