"""Actions as 256 bins and as vocabulary ids."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlinf.models.prismatic import actions
from rlinf.models.prismatic.constants import ACTION_END, NUM_BINS


def test_published_rule_in_numpy():
    edges = np.linspace(-1, 1, 256)
    centres = (edges[:-1] + edges[1:]) / 2
    values = np.concatenate((np.random.default_rng(0).uniform(-1.3, 1.3, 4000), edges, edges + 1e-12, edges - 1e-12))
    ids = ACTION_END - np.digitize(np.clip(values, -1, 1), edges)
    bins = actions.encode(torch.from_numpy(values))
    assert actions.to_tokens(bins, ACTION_END).tolist() == ids.tolist()
    decoded = centres[np.clip(ACTION_END - ids - 1, 0, 254)].astype(np.float32)
    assert actions.decode(bins).numpy().tolist() == decoded.tolist()


def test_order_and_the_shared_value():
    values = actions.decode(torch.arange(NUM_BINS))
    assert values.dtype == torch.float32
    assert values[0] == values[1] == pytest.approx(1 - 1 / 255)
    assert values[-1] == pytest.approx(-1 + 1 / 255)
    assert (values[1:-1] > values[2:]).all()  # a higher id is a lower value
    assert (actions.encode(values)[1:] == torch.arange(1, NUM_BINS)).all()
    assert actions.encode(values)[0] == 1
    ends = actions.encode(torch.tensor([[5.0, 1.0], [-1.0, -7.0]]))
    assert ends.tolist() == [[0, 0], [255, 255]]
    assert ends.dtype == torch.int64


@pytest.mark.parametrize("end", [ACTION_END, 1256])
def test_tokens_lie_below_their_end(end):
    bins = torch.arange(NUM_BINS)
    tokens = actions.to_tokens(bins, end)
    assert (tokens.min(), tokens.max()) == (end - 256, end - 1)
    assert torch.equal(actions.to_bins(tokens, end), bins)


def test_rounding_error_is_half_a_bin():
    x = torch.linspace(-1, 1, 10001)
    assert (actions.decode(actions.encode(x)) - x).abs().max() <= 1 / 255 + 1e-6
