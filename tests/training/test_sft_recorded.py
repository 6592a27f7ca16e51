"""Imitation on a GPU: recorded passes learn what plain ones do, and it does not matter where images are kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rlinf.config.schema import ActorConfig, Config, SftConfig
from rlinf.demos.dataset import DemoDataset
from rlinf.demos.writer import DatasetWriter
from rlinf.models.openpi.config import Config as OpenPi
from rlinf.models.openpi.config import OpenPiOptions
from rlinf.simulators.contract import EnvSpec
from rlinf.training.sft import train_sft

SPEC = EnvSpec("test", ("t",), 2, ("x", "y"), "none", 2, (32, 32), {}, 10.0, critic_state_dim=3)
MODEL = OpenPi(size="compact", action_dim=2, num_action_chunks=2, num_steps=2, openpi=OpenPiOptions(state_dim=2))
STEPS = 24


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, rng = tmp_path_factory.mktemp("data") / "demos", np.random.default_rng(0)
    with DatasetWriter(folder, SPEC) as writer:
        for number in range(12):
            writer.add(
                images=rng.integers(0, 256, (8, 32, 32, 3), dtype=np.uint8),
                states=rng.standard_normal((8, 2)).astype(np.float32),
                actions=rng.uniform(-1, 1, (8, 2)).astype(np.float32),
                critic_states=rng.standard_normal((8, 3)).astype(np.float32),
                task=("push", "pull the red lever", "open the drawer that is nearest to the door")[number % 3],
            )
    return folder


def train(dataset: Path, output: Path, *, precision: str = "fp32", recorded: bool = True) -> list[float]:
    """Losses of all steps."""
    model = replace(MODEL, precision=precision, cuda_graphs=recorded)
    options = SftConfig(dataset=str(dataset), output=str(output), steps=STEPS, batch_size=16, state_loss=1.0)
    losses: list[float] = []
    train_sft(
        Config(actor=ActorConfig(model=model), sft=options),
        on_progress=lambda line: None,
        on_step=lambda step, metrics: losses.append(metrics["train/sft/loss"]),
    )
    return losses


@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-3), ("bf16", 3e-2)])
def test_recorded_losses_are_those_of_plain_passes(
    dataset: Path, tmp_path: Path, precision: str, tolerance: float
) -> None:
    recorded = train(dataset, tmp_path / "recorded", precision=precision)
    plain = train(dataset, tmp_path / "plain", precision=precision, recorded=False)
    assert recorded == pytest.approx(plain, rel=tolerance)
    again = train(dataset, tmp_path / "again", precision=precision)
    assert again[0] == recorded[0]
    assert again == pytest.approx(recorded, rel=tolerance)  # some gradients add up in any order


@pytest.mark.gpu
@pytest.mark.parametrize("host_bytes", [None, 0], ids=["pinned", "decoded"])
def test_images_that_do_not_fit_on_the_device_are_learnt_from_all_the_same(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host_bytes: int | None
) -> None:
    kept, keep = train(dataset, tmp_path / "kept"), DemoDataset.keep

    def bounded(self: DemoDataset, device: torch.device, resize: Callable[[torch.Tensor], torch.Tensor]) -> str:
        where = keep(self, device, resize, device_bytes=0, host_bytes=host_bytes)
        assert self.needs_host
        return where

    monkeypatch.setattr(DemoDataset, "keep", bounded)
    losses = train(dataset, tmp_path / "elsewhere")
    assert losses[0] == kept[0]
    assert losses == pytest.approx(kept, rel=1e-3)
