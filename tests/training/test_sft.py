"""Imitation with a linear policy on a dataset of known answers."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from rlinf.config.schema import ActorConfig, Config, RunnerConfig, SftConfig
from rlinf.data.noise import Noise
from rlinf.data.types import Observation
from rlinf.demos.writer import DatasetWriter
from rlinf.errors import UserError
from rlinf.models.config import ModelConfig, PolicySpec
from rlinf.models.policy import ImageTokenLoss, Policy
from rlinf.simulators.contract import EnvSpec
from rlinf.training import sft
from rlinf.training.sft import train_sft

CHUNK = 2
SPEC = EnvSpec("test", ("t",), 2, ("x", "y"), "none", 2, (4, 4), {}, 10.0)
WEIGHT = torch.tensor([[0.5, -1.0], [0.25, 0.0]])  # the expert: action = states @ WEIGHT.T


POLICY = PolicySpec(
    action_dim=2,
    num_action_chunks=CHUNK,
    image_size=4,
    num_images=1,
    state_dim=2,
    has_logprob=False,
    has_value=False,
    values_per_chunk=1,
    critic_state_dim=0,
)


@dataclass(frozen=True, kw_only=True)
class LinearConfig(ModelConfig):
    """`actor.model` of the linear policy."""

    model_type: str = "linear"
    action_dim: int = 2

    def spec(self) -> PolicySpec:
        return POLICY


class LinearPolicy(Policy):
    """actions [C, A] = states @ W; regression with noisy inputs, so that equal noise shows."""

    spec = POLICY

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, CHUNK * 2, bias=False)
        self.register_buffer("scale", torch.ones(2))

    @classmethod
    def build(cls, cfg: ModelConfig, device: torch.device, *, seed: int = 0) -> LinearPolicy:
        torch.manual_seed(seed)
        return cls().to(device)

    def fit_statistics(self, states: torch.Tensor | None, actions: torch.Tensor) -> None:
        self.scale = actions.std(0)

    def sft_loss(
        self,
        obs: Observation,
        actions: torch.Tensor,
        *,
        noise: Noise,
        is_target: torch.Tensor | None = None,
        draws: int = 1,
        image_token_loss: ImageTokenLoss | None = None,
    ) -> torch.Tensor:
        assert image_token_loss is None  # never given to a policy without an image width
        states = obs.states[:, None] + 1e-3 * noise.normal((draws, 2))  # [B, draws, 2]
        wanted = (actions / self.scale).flatten(1)[:, None]
        return ((self.linear(states) - wanted) ** 2).mean()

    def save_pretrained(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(self.state_dict(), folder / "model.safetensors")

    def load_pretrained(self, folder: Path) -> None:
        self.load_state_dict(load_file(folder / "model.safetensors"))


@pytest.fixture(autouse=True)
def _use_linear_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sft, "find_policy", lambda model_type: LinearPolicy)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Episodes whose state stands still, so that every action of a chunk is the same."""
    folder, rng = tmp_path_factory.mktemp("data") / "demos", np.random.default_rng(0)
    with DatasetWriter(folder, SPEC) as writer:
        for _ in range(16):
            states = np.repeat(rng.standard_normal((1, 2)).astype(np.float32), 3, 0)
            images = np.zeros((3, 4, 4, 3), np.uint8)
            writer.add(images=images, states=states, actions=states @ WEIGHT.numpy().T, task="t")
    return folder


def config(dataset: Path, output: Path, *, seed: int = 0, **keys) -> Config:
    defaults = {"steps": 300, "batch_size": 16, "lr": 0.05, "warmup_steps": 10, "log_interval": 100}
    return Config(
        runner=RunnerConfig(seed=seed),
        actor=ActorConfig(model=LinearConfig()),
        sft=SftConfig(dataset=str(dataset), output=str(output), **{**defaults, **keys}),
    )


def silent(line: str) -> None:
    """Progress that nobody reads."""


def test_learns_the_expert_in_normalised_units(dataset: Path, tmp_path: Path) -> None:
    folder = train_sft(config(dataset, tmp_path / "sft"), on_progress=silent)
    weights = load_file(folder / "model.safetensors")
    learned = weights["linear.weight"].view(CHUNK, 2, 2) * weights["scale"][:, None]
    assert torch.allclose(learned, WEIGHT.expand(CHUNK, 2, 2), atol=0.02)
    record = json.loads((folder / "sft.json").read_text())
    assert (record["steps"], record["episodes"], record["frames"]) == (300, 16, 48)
    assert [step for step, _ in record["loss"]] == [100, 200, 300]
    assert record["loss"][-1][1] < 1e-3 < record["loss"][0][1]


def test_same_seed_same_weights(dataset: Path, tmp_path: Path) -> None:
    def weights(name: str, seed: int, draws: int = 2) -> torch.Tensor:
        cfg = config(dataset, tmp_path / name, seed=seed, steps=20, noise_draws=draws)
        return load_file(train_sft(cfg, on_progress=silent) / "model.safetensors")["linear.weight"]

    first = weights("a", 0)
    assert torch.equal(first, weights("b", 0))
    assert not torch.equal(first, weights("c", 1))
    assert not torch.equal(first, weights("d", 0, draws=1))


def test_stops_at_the_success_asked_for(dataset: Path, tmp_path: Path) -> None:
    rates = iter([0.0, 0.2, 0.3, 0.9])
    cfg = config(dataset, tmp_path / "sft", eval_interval=5, stop_at_success=0.3)
    folder = train_sft(cfg, evaluate=lambda policy: next(rates), on_progress=silent)
    record = json.loads((folder / "sft.json").read_text())
    assert record["success"] == [[5, 0.0], [10, 0.2], [15, 0.3]]
    assert (record["steps"], record["stopped_at_success"]) == (15, True)
    # An earlier result is replaced where asked for; the last loss is that of all steps since the last entry.
    never = replace(cfg, sft=replace(cfg.sft, steps=7))
    folder = train_sft(never, evaluate=lambda policy: 0.0, on_progress=silent, overwrite=True)
    record = json.loads((folder / "sft.json").read_text())
    assert (record["steps"], record["stopped_at_success"], len(record["loss"])) == (7, False, 1)


def test_steps_back_into_the_success_band(dataset: Path, tmp_path: Path) -> None:
    rates, seen = iter([0.1, 0.8, 0.9, 0.15, 0.25]), []
    cfg = config(dataset, tmp_path / "sft", eval_interval=4, stop_at_success=0.2, stop_at_most=0.4)

    def evaluate(policy: LinearPolicy) -> float:
        seen.append(policy.linear.weight.detach().clone())
        return next(rates)

    folder = train_sft(cfg, evaluate=evaluate, on_progress=silent)
    record = json.loads((folder / "sft.json").read_text())
    assert [step for step, _ in record["success"]] == [4, 8, 8, 8, 8]
    assert record["stopped_at_success"]
    below, above, *tried = seen
    for weights, share in zip(tried, (0.5, 0.25, 0.375), strict=True):  # too good, too weak, inside
        assert torch.allclose(weights, below + share * (above - below), atol=1e-6)
    assert torch.equal(load_file(folder / "model.safetensors")["linear.weight"], tried[-1])


def test_a_missed_success_band_is_said_and_the_nearest_weights_are_kept(dataset: Path, tmp_path: Path) -> None:
    """Success jumps from 0.1 to 0.8 somewhere: no weights lie inside, and 0.1 is nearer to the band than 0.8."""
    seen, lines = [], []
    cfg = config(dataset, tmp_path / "sft", eval_interval=4, stop_at_success=0.2, stop_at_most=0.4)

    def evaluate(policy: LinearPolicy) -> float:
        seen.append(policy.linear.weight.detach().clone())
        if len(seen) <= 2:
            return (0.0, 0.8)[len(seen) - 1]
        return 0.1 if share_of_way(seen[-1], seen) < 0.3 else 0.8

    folder = train_sft(cfg, evaluate=evaluate, on_progress=lines.append)
    record = json.loads((folder / "sft.json").read_text())
    assert (record["steps"], record["stopped_at_success"]) == (8, False)
    assert len(record["success"]) == 2 + sft.MAX_BISECTIONS
    kept = load_file(folder / "model.safetensors")["linear.weight"]
    assert share_of_way(kept, seen) == pytest.approx(0.25, abs=1e-4)  # the first of those below, by distance then share
    assert "sft found no weights with a success of 20 to 40 %" in lines[-1]
    assert "keeping those with 10.0 %" in lines[-1]


def share_of_way(weights: torch.Tensor, seen: list[torch.Tensor]) -> float:
    """How far `weights` lie on the way from the first evaluated weights to the second."""
    return float((weights - seen[0]).norm() / (seen[1] - seen[0]).norm())


def test_learning_rate_warms_up(dataset: Path, tmp_path: Path) -> None:
    seen = []
    cfg = config(dataset, tmp_path / "sft", steps=6, warmup_steps=4, lr=0.1)
    train_sft(cfg, on_progress=silent, on_step=lambda step, metrics: seen.append(metrics["train/sft/lr"]))
    assert seen == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1, 0.1])


def test_refusals(dataset: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"sft\.stop_at_success=0\.3 needs evaluations: set sft\.eval_interval"):
        train_sft(config(dataset, tmp_path / "sft", stop_at_success=0.3))
    with pytest.raises(UserError, match=r"sft\.stop_at_most=0\.2 must be above sft\.stop_at_success=0\.3"):
        train_sft(config(dataset, tmp_path / "sft", eval_interval=5, stop_at_success=0.3, stop_at_most=0.2))
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.txt").touch()
    with pytest.raises(UserError, match=r"sft\.output=.*precious is not empty and holds no policy to replace"):
        train_sft(config(dataset, tmp_path / "precious"), overwrite=True)
    assert (tmp_path / "precious" / "thesis.txt").is_file()
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"sft\.output=.*file/sft cannot be written: Not a directory"):
        train_sft(config(dataset, tmp_path / "file" / "sft"))
    with pytest.raises(UserError, match="no dataset at"):
        train_sft(config(tmp_path / "nowhere", tmp_path / "sft"))


def test_a_refused_run_leaves_nothing_behind(dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(cfg: ModelConfig, device: torch.device, *, seed: int = 0) -> LinearPolicy:
        raise UserError("no such weights")

    monkeypatch.setattr(LinearPolicy, "build", build)
    with pytest.raises(UserError, match="no such weights"):
        train_sft(config(dataset, tmp_path / "sft"), on_progress=silent)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("most", "kept"), [(None, set()), (0.5, {"linear.weight"})])
def test_only_a_band_keeps_weights_and_only_those_that_move(most: float | None, kept: set[str]) -> None:
    options = SftConfig(dataset="", output="", stop_at_success=0.3, stop_at_most=most)
    check = sft.SuccessCheck(LinearPolicy(), options, lambda policy: 0.0, sft.SftLog(), silent)
    assert check.below.keys() == kept


def stop_at(step: int, number: signal.Signals) -> Callable[[int, dict[str, float]], None]:
    """Send this process a signal once a step is done."""

    def on_step(done: int, metrics: dict[str, float]) -> None:
        if done == step:
            signal.raise_signal(number)

    return on_step


def read(folder: Path) -> tuple[dict[str, torch.Tensor], dict]:
    record = json.loads((folder / "sft.json").read_text())
    return load_file(folder / "model.safetensors"), {k: record[k] for k in ("loss", "success", "steps")}


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGINT, None)])
def test_a_signal_saves_and_resume_gives_the_bits_of_an_uninterrupted_training(
    dataset: Path, tmp_path: Path, number: signal.Signals, status: int | None
) -> None:
    options = {"steps": 40, "log_interval": 8, "eval_interval": 10, "stop_at_success": 0.9, "stop_at_most": 0.95}
    options |= {"lr_scheduler": "cosine", "save_interval": 15}

    def evaluate(policy: LinearPolicy) -> float:
        return float(policy.linear.weight.detach().abs().clamp(max=1).mean()) / 2

    whole = train_sft(config(dataset, tmp_path / "whole", **options), evaluate=evaluate, on_progress=silent)
    cut, lines = config(dataset, tmp_path / "cut", **options), []
    with pytest.raises(KeyboardInterrupt if status is None else SystemExit) as left:
        train_sft(cut, evaluate=evaluate, on_progress=lines.append, on_step=stop_at(21, number))
    assert status in (None, getattr(left.value, "code", None))
    assert not (tmp_path / "cut").exists()
    kept = tmp_path / "cut-checkpoints"
    assert [p.name for p in kept.iterdir()] == ["global_step_21"]  # the newest alone, sft.keep_checkpoints=1
    assert lines[-1] == f"stopped after step 21, saved in {kept / 'global_step_21'}; --resume continues"
    with pytest.raises(UserError, match=r"global_step_21 is of an earlier training; continue it with --resume"):
        train_sft(cut, on_progress=silent)
    other = replace(cut, sft=replace(cut.sft, batch_size=8))
    with pytest.raises(UserError, match=r"other settings: sft\.batch_size is 8, there 16; take those"):
        train_sft(other, evaluate=evaluate, on_progress=silent, resume=True)
    seen: list[int] = []
    resumed = train_sft(
        cut, evaluate=evaluate, on_progress=silent, on_step=lambda step, _: seen.append(step), resume=True
    )
    assert seen == list(range(22, 41))
    assert not kept.exists()
    (weights, told), (again, told_again) = read(whole), read(resumed)
    assert told == told_again
    assert all(torch.equal(again[name], weights[name]) for name in weights)
    with pytest.raises(UserError, match=r"cut is finished: nothing is left to continue"):
        train_sft(cut, on_progress=silent, resume=True)


def test_a_damaged_checkpoint_gives_way_to_the_one_before_and_all_are_kept_where_asked(
    dataset: Path, tmp_path: Path
) -> None:
    cfg = config(dataset, tmp_path / "sft", steps=12, save_interval=4, keep_checkpoints=0)
    with pytest.raises(KeyboardInterrupt):
        train_sft(cfg, on_progress=silent, on_step=stop_at(9, signal.SIGINT))
    kept = tmp_path / "sft-checkpoints"
    (kept / "global_step_9/actor/optimizer.safetensors").write_bytes(b"")
    lines: list[str] = []
    train_sft(cfg, on_progress=lines.append, resume=True)
    assert any("optimizer.safetensors is corrupt" in line for line in lines)
    assert any("continues after step 8" in line for line in lines)
    assert {p.name for p in kept.iterdir()} == {"global_step_4", "global_step_8", "global_step_9"}
    plain = train_sft(config(dataset, tmp_path / "plain", steps=12), on_progress=silent)
    assert torch.equal(read(plain)[0]["linear.weight"], read(tmp_path / "sft")[0]["linear.weight"])
    with pytest.raises(UserError, match="--resume continues a training and --overwrite begins anew"):
        train_sft(cfg, on_progress=silent, resume=True, overwrite=True)
    train_sft(cfg, on_progress=silent, overwrite=True)
    assert {p.name for p in kept.iterdir()} == {"global_step_4", "global_step_8"}
