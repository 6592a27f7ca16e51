"""What a GPU records must never wait for the device: nothing inside a policy's recorded functions may go to the host.

Copies of whole tensors cannot be told apart on a CPU; benchmarks/models.py looks for these on a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rlinf.data.noise import Noise
from rlinf.data.types import ChunkIndex, Observation
from rlinf.models.config import ModelConfig, PolicySpec, available_models, find_config
from rlinf.models.nn.graphs import GradientRecorder, Recorder
from rlinf.models.policy import find_policy

aten = torch.ops.aten
CASES = {f"{name}-{i}": cfg for name in available_models() for i, cfg in enumerate(find_config(name).examples())}
RECORDS_IMITATION = {name: cfg for name, cfg in CASES.items() if cfg.model_type == "openpi"}
PROMPTS = ["push the red button", "open it", "put the small blue block on the shelf"]
# Ops that read a value or whose output's shape depends on one, and tensors made from the host's numbers.
WAITS = (
    aten._local_scalar_dense,
    aten.nonzero,
    aten.masked_select,
    aten.equal,
    aten._unique2,
    aten.repeat_interleave.Tensor,
    aten.lift_fresh,
)


class NoHostSync(TorchDispatchMode):
    """Fails where a GPU would have to be waited for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        masks = func.overloadpacket in (aten.index, aten.index_put, aten.index_put_) and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if func in WAITS or func.overloadpacket in WAITS or masks:
            raise AssertionError(f"{func} waits for the device")
        return func(*args, **(kwargs or {}))


def observation(spec: PolicySpec, rows: int) -> Observation:
    g, wrists = torch.Generator().manual_seed(0), spec.num_images - 1

    def pictures(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, (*shape, 3), generator=g, dtype=torch.uint8)

    return Observation(
        images=pictures(rows, 40, 40),
        wrist_images=pictures(rows, wrists, 30, 20) if wrists else None,
        states=torch.randn(rows, spec.state_dim, generator=g) if spec.state_dim else None,
        task_descriptions=PROMPTS[:rows],
        critic_state=torch.randn(rows, spec.critic_state_dim, generator=g) if spec.critic_state_dim else None,
    )


@pytest.mark.parametrize("cfg", CASES.values(), ids=CASES)
@pytest.mark.parametrize("rows", [1, 3])  # alone: a prompt without padding
def test_acting_reads_nothing_back(cfg: ModelConfig, rows: int):
    policy = find_policy(cfg.model_type).build(cfg, torch.device("cpu"))
    recorder = next(value for value in vars(policy).values() if isinstance(value, Recorder))
    function, calls = recorder.function, []

    def watched(given: dict[str, torch.Tensor], **options: Any) -> dict[str, torch.Tensor]:
        calls.append((given, options, function(given, **options)))
        return calls[-1][2]

    recorder.function = watched
    for mode in ("train", "eval"):  # tables that are made once and kept are made here
        noise = Noise(seed=0, at=ChunkIndex(0, 0, 0), env_ids=range(rows))
        policy.predict(observation(policy.spec, rows), mode=mode, noise=noise)
    assert [options["train"] for _, options, _ in calls] == [True, False]
    for given, options, seen in calls:
        with torch.no_grad(), NoHostSync():
            again = function(given, **options)
        assert again.keys() == seen.keys()
        assert all(torch.equal(again[name], seen[name]) for name in seen)


@pytest.mark.parametrize("cfg", RECORDS_IMITATION.values(), ids=RECORDS_IMITATION)
@pytest.mark.parametrize("rows", [1, 3])
def test_imitating_reads_nothing_back(cfg: ModelConfig, rows: int):
    policy = find_policy(cfg.model_type).build(cfg, torch.device("cpu"))
    recorder = next(value for value in vars(policy).values() if isinstance(value, GradientRecorder))
    function, calls = recorder.function, []

    def watched(given: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        calls.append((given, function(given)))
        return calls[-1][1]

    recorder.function = watched
    noise = Noise(seed=0, at=ChunkIndex(0, 0, 0), env_ids=range(rows))
    actions = torch.zeros(rows, policy.spec.num_action_chunks, policy.spec.action_dim)
    policy.sft_loss(observation(policy.spec, rows), actions, noise=noise, draws=2).backward()
    ((given, seen),) = calls
    with NoHostSync():
        again = function(given)
        again[0].backward()
    assert all(torch.equal(a, b) for a, b in zip(again, seen, strict=True))


@pytest.mark.parametrize("cfg", RECORDS_IMITATION.values(), ids=RECORDS_IMITATION)
@pytest.mark.parametrize("rows", [1, 3])
def test_scoring_stored_actions_reads_nothing_back(cfg: ModelConfig, rows: int):
    policy = find_policy(cfg.model_type).build(cfg, torch.device("cpu"))
    *_, recorder = (value for value in vars(policy).values() if isinstance(value, GradientRecorder))
    function, calls = recorder.function, []

    def watched(given: dict[str, torch.Tensor], **options: Any) -> tuple[torch.Tensor, ...]:
        calls.append((given, options, function(given, **options)))
        return calls[-1][2]

    recorder.function = watched
    noise = Noise(seed=0, at=ChunkIndex(0, 0, 0), env_ids=range(rows))
    replay = policy.predict(observation(policy.spec, rows), mode="train", noise=noise).replay
    policy.evaluate(replay, values=False, entropy=True).logprobs.sum().backward()
    ((given, options, seen),) = calls
    with NoHostSync():
        again = function(given, **options)
        again[0].sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(again, seen, strict=True))


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: bool((x > 0).any()),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x + torch.tensor([1.0]),
        lambda x: x.repeat_interleave(torch.arange(3)),
    ],
)
def test_a_wait_is_noticed(wait):
    x = torch.randn(3)
    with pytest.raises(AssertionError, match="waits"), NoHostSync():
        wait(x)
