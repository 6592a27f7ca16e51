"""`sft.state_loss`: a compact π0 imitates and tells, from its image tokens, the simulator's state. M frames."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rlinf.config.schema import ActorConfig, Config, SftConfig
from rlinf.demos.writer import DatasetWriter
from rlinf.errors import UserError
from rlinf.models.config import ModelConfig
from rlinf.models.openpi.config import Config as OpenPi
from rlinf.models.openpi.config import OpenPiOptions
from rlinf.models.openvla.config import Config as OpenVla
from rlinf.simulators import toy
from rlinf.training.sft import train_sft
from rlinf.training.state_readout import StateReadout

CPU = torch.device("cpu")
M = 16
MODEL = OpenPi(size="compact", action_dim=2, num_action_chunks=2, num_steps=2, openpi=OpenPiOptions(state_dim=2))


def write(folder: Path, *, privileged: bool) -> Path:
    """Eight layouts of the toy, two steps of its expert in each; the first column says nothing."""
    spec, options = toy.spec(toy.Options()), toy.Options(image_size=32)
    spec = replace(spec, image_size=(32, 32), critic_state_dim=spec.critic_state_dim + 1 if privileged else 0)
    world, expert = toy.Scene(options), toy.Expert(options)
    with DatasetWriter(folder, spec) as writer:
        for reset_id in spec.reset_ids["demo"][: M // 2]:
            world.reset(reset_id)
            seen, actions = [], []
            for _ in range(2):
                seen.append(world.observe())
                actions.append(expert.act(world))
                world.step_chunk(actions[-1][None], stop_on_success=True, record=False)
            writer.add(
                images=np.stack([o["images"] for o in seen]),
                wrist_images=None,
                states=np.stack([o["states"] for o in seen]),
                actions=np.stack(actions),
                critic_states=np.stack([np.append(np.float32(5.0), o["critic_state"]) for o in seen]),
                task=seen[0]["task_description"],
            )
    return folder


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("data") / "demos", privileged=True)


@pytest.fixture(scope="module")
def blind_dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("data") / "blind", privileged=False)


def train(dataset: Path, output: Path, state_loss: float, *, model: ModelConfig = MODEL, steps: int = 3) -> list[float]:
    """Train on all frames at each step and save; the losses."""
    options = SftConfig(
        dataset=str(dataset), output=str(output), steps=steps, batch_size=M, warmup_steps=1, state_loss=state_loss
    )
    cfg, losses = Config(actor=ActorConfig(model=model), sft=options), []
    on_step = lambda step, m: losses.append(m["train/sft/loss"])  # noqa: E731
    train_sft(cfg, on_progress=lambda line: None, on_step=on_step, overwrite=True)
    return losses


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_readout_starts_at_the_variance_and_drops_columns_that_stand_still():
    states = torch.tensor([[0.0, 7.0, -3.0], [4.0, 7.0, 1.0], [8.0, 7.0, -1.0]])
    readout = StateReadout(2, states, CPU)
    torch.testing.assert_close(readout.targets, torch.tensor([[-1.0, -1.0], [0.0, 1.0], [1.0, 0.0]]))
    tokens = torch.tensor([[2.0, 1.0], [0.0, 1.0]])
    assert readout.loss(torch.randn(3, 2), torch.arange(3)).item() == pytest.approx(
        2 / 3
    )  # (M - 1) / M of unit variances
    with torch.no_grad():
        readout.linear.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 2.0]]))
        readout.linear.bias.copy_(torch.tensor([0.0, -1.0]))
    told = ((2 - 1) ** 2 + (2 - 1 - 0) ** 2 + (0 + 1) ** 2 + (2 - 1 + 1) ** 2) / 4
    assert readout.loss(tokens, torch.tensor([2, 0])).item() == pytest.approx(told)


def test_the_loss_is_imitation_plus_the_weighted_readout(dataset: Path, tmp_path: Path):
    plain = train(dataset, tmp_path / "plain", 0.0, steps=1)
    for weight in (0.5, 3.0):
        losses = train(dataset, tmp_path / "state", weight, steps=1)
        # Nothing is told yet: every moving column costs its variance, 1 where the mean divides by M - 1.
        assert losses[0] == pytest.approx(plain[0] + weight * (M - 1) / M, rel=1e-5)


@pytest.mark.parametrize("model", [MODEL, OpenVla(size="compact", action_dim=2)], ids=lambda model: model.model_type)
def test_the_state_is_learnt_from_the_images(dataset: Path, tmp_path: Path, model: ModelConfig):
    weight = 10.0
    plain, losses = (train(dataset, tmp_path / f"{w}", w, model=model, steps=30) for w in (0.0, weight))
    told = [(both - alone) / weight for both, alone in zip(losses, plain, strict=True)]
    print(f"readout loss about {told[0]:.3f} -> {told[-1]:.3f}")
    assert told[-1] < 0.5 * told[0]


def test_the_saved_folder_is_that_of_plain_imitation(dataset: Path, tmp_path: Path):
    shapes, files, saved = [], [], []
    for state_loss in (0.0, 1.0, 1.0):
        folder = tmp_path / f"sft_{len(saved)}"
        train(dataset, folder, state_loss)
        files.append(sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()))
        saved.append(weights(folder))
        shapes.append({name: (tensor.shape, tensor.dtype) for name, tensor in saved[-1].items()})
        assert json.loads((folder / "sft.json").read_text())["config"]["state_loss"] == state_loss
    plain, first, second = saved
    assert files[0] == files[1]
    assert shapes[0] == shapes[1]
    eyes = [name for name in plain if "vision_tower" in name and name.endswith("weight")]
    assert eyes
    assert not any(torch.equal(plain[name], first[name]) for name in eyes)
    assert all(torch.equal(first[name], second[name]) for name in first)  # same seed, same weights


def test_without_it_the_simulators_state_does_not_matter(dataset: Path, blind_dataset: Path, tmp_path: Path):
    losses = [train(data, tmp_path / data.name, 0.0) for data in (dataset, blind_dataset)]
    assert losses[0] == losses[1]
    with_column, without = weights(tmp_path / dataset.name), weights(tmp_path / blind_dataset.name)
    assert with_column.keys() == without.keys()
    assert all(torch.equal(with_column[name], without[name]) for name in without)


def test_refusals(dataset: Path, blind_dataset: Path, tmp_path: Path):
    with pytest.raises(UserError) as error:
        train(blind_dataset, tmp_path / "sft", 0.5)
    assert str(error.value) == (
        f"sft.state_loss=0.5 needs the simulator's state, which sft.dataset={blind_dataset} does not hold: collect it "
        "again with `rlinf collect`, or set sft.state_loss=0"
    )
    frozen = replace(MODEL, openpi=replace(MODEL.openpi, train_expert_only=True))
    with pytest.raises(UserError) as error:
        train(dataset, tmp_path / "sft", 0.5, model=frozen)
    assert str(error.value) == "sft.state_loss=0.5 must be 0: this policy's image tokens do not learn"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_continued_training_has_the_bits_of_one_that_was_not_cut(dataset: Path, tmp_path: Path):
    """The layer that reads the state goes on too; a low precision keeps its fp32 copies."""
    model = replace(MODEL, precision="bf16", openpi=replace(MODEL.openpi, train_expert_only=False))
    options = SftConfig(
        dataset=str(dataset), output=str(tmp_path / "whole"), steps=4, batch_size=6, warmup_steps=1, state_loss=2.0
    )
    whole = Config(actor=ActorConfig(model=model), sft=options)
    cut = replace(whole, sft=replace(options, output=str(tmp_path / "cut")))

    def stop(step: int, _: dict[str, float]) -> None:
        if step == 2:
            signal.raise_signal(signal.SIGTERM)

    train_sft(whole, on_progress=lambda line: None)
    with pytest.raises(SystemExit):
        train_sft(cut, on_progress=lambda line: None, on_step=stop)
    train_sft(cut, on_progress=lambda line: None, resume=True)
    wanted, found = weights(tmp_path / "whole"), weights(tmp_path / "cut")
    assert any(tensor.dtype == torch.bfloat16 for tensor in wanted.values())
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)
    losses = [json.loads((tmp_path / name / "sft.json").read_text())["loss"] for name in ("whole", "cut")]
    assert losses[0] == losses[1]
