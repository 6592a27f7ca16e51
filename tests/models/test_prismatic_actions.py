"""Actions as 256 bins and as vocabulary ids."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlinf.models.prismatic import action_bins
from rlinf.models.prismatic.architecture import BASE, NUM_BINS, SIZES


def test_published_rule_in_numpy():
    edges = np.linspace(-1, 1, 256)
    centres = (edges[:-1] + edges[1:]) / 2
    values = np.concatenate((np.random.default_rng(0).uniform(-1.3, 1.3, 4000), edges, edges + 1e-12, edges - 1e-12))
    ids = BASE.action_end - np.digitize(np.clip(values, -1, 1), edges)
    bins = action_bins.encode(torch.from_numpy(values))
    assert (bins + BASE.action_begin).tolist() == ids.tolist()
    decoded = centres[np.clip(BASE.action_end - ids - 1, 0, 254)].astype(np.float32)
    assert action_bins.decode(bins).numpy().tolist() == decoded.tolist()


def test_order_and_the_shared_value():
    values = action_bins.decode(torch.arange(NUM_BINS))
    assert values.dtype == torch.float32
    assert values[0] == values[1] == pytest.approx(1 - 1 / 255)
    assert values[-1] == pytest.approx(-1 + 1 / 255)
    assert (values[1:-1] > values[2:]).all()  # a higher id is a lower value
    assert (action_bins.encode(values)[1:] == torch.arange(1, NUM_BINS)).all()
    assert action_bins.encode(values)[0] == 1
    ends = action_bins.encode(torch.tensor([[5.0, 1.0], [-1.0, -7.0]]))
    assert ends.tolist() == [[0, 0], [255, 255]]
    assert ends.dtype == torch.int64


def test_tokens_end_before_the_rest_of_the_vocabulary():
    ends = {name: (arch.action_begin, arch.action_begin + NUM_BINS) for name, arch in SIZES.items()}
    assert ends == {"base": (31744, 32000), "small": (1000, 1256), "light": (1000, 1256), "compact": (1000, 1256)}


def test_rounding_error_is_half_a_bin():
    x = torch.linspace(-1, 1, 10001)
    assert (action_bins.decode(action_bins.encode(x)) - x).abs().max() <= 1 / 255 + 1e-6
