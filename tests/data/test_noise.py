"""Noise is keyed: an env draws the same numbers in any batch, order or process."""

import torch

from rlinf.data.noise import BatchNoise, Noise
from rlinf.data.types import ChunkIndex


def draw(env_ids, **changes):
    key = {"seed": 0, "at": ChunkIndex(step=3, epoch=1, chunk=2), "stream": "train"} | changes
    return Noise(env_ids=env_ids, **key).normal((4, 2))


def test_rows_do_not_depend_on_the_batch():
    whole = draw([0, 1, 2, 3])
    assert torch.equal(draw([2]), whole[2:3])
    assert torch.equal(draw([3, 1]), whole[[3, 1]])


def test_every_part_of_the_key_changes_the_numbers():
    base = draw([5])
    others = [
        draw([6]),
        draw([5], seed=1),
        draw([5], stream="eval"),
        *(draw([5], at=ChunkIndex(*at)) for at in [(4, 1, 2), (3, 2, 2), (3, 1, 3)]),
    ]
    assert all(not torch.equal(base, other) for other in others)


def test_draws_continue_a_stream_and_have_the_right_moments():
    noise = Noise(seed=0, at=ChunkIndex(0, 0, 0), env_ids=range(64))
    first, second = noise.normal((500,)), noise.normal((500,))
    assert not torch.equal(first, second)
    assert abs(float(first.mean())) < 0.02
    assert abs(float(first.std()) - 1) < 0.02
    assert set(noise.integers(3, (50,)).flatten().tolist()) == {0, 1, 2}


def test_noise_of_a_batch_depends_on_seed_and_step_alone():
    def drawn(seed: int, step: int) -> torch.Tensor:
        return BatchNoise(seed=seed, step=step, rows=64, device=torch.device("cpu")).normal((500,))

    first = drawn(0, 3)
    assert first.shape == (64, 500)
    assert abs(float(first.mean())) < 0.02
    assert torch.equal(first, drawn(0, 3))
    assert not torch.equal(first, drawn(1, 3))
    assert not torch.equal(first, drawn(0, 4))
    noise = BatchNoise(seed=0, step=0, rows=4, device=torch.device("cpu"))
    assert len(noise) == 4
    assert set(noise.integers(3, (50,)).flatten().tolist()) == {0, 1, 2}
    assert 0 <= float(noise.uniform((100,)).min()) < 0.05
