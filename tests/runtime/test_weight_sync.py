"""Weight sync between processes over gloo: what travels, that it arrives bit for bit, and that faults are healed."""

from __future__ import annotations

import hashlib
import logging
import multiprocessing
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from rlinf.config.load import load_config
from rlinf.data.buckets import buckets
from rlinf.models.policy import Policy, find_policy
from rlinf.runtime import weight_sync
from rlinf.runtime.process_group import ProcessGroup, connect, disconnect, join_store, open_store
from rlinf.runtime.weight_sync import Receiver, Sender, checksum
from tests.inside import still_joined

COPIES = 2
ACTOR = COPIES  # its process; those of the copies come before it, as in a plan
MEMBERS = [ACTOR, *range(COPIES)]
PI0, OFT = "toy_ppo_compact", "toy_grpo_openvlaoft_compact"
EXPERT = "actor.model.openpi.train_expert_only=true"
LORA = ("actor.model.is_lora=true", "actor.model.lora_rank=4")


# --------------------------------------------------------------------------- what runs in the processes
def build(name: str, *overrides: str, seed: int = 0, precision: str = "fp32") -> Policy:
    model = replace(load_config(name, [*overrides]).actor.model, precision=precision)
    return find_policy(model.model_type).build(model, torch.device("cpu"), seed=seed)


def member(policy: Policy, group: ProcessGroup) -> Sender | Receiver:
    return Sender(policy, group) if group.rank == 0 else Receiver(policy, group)


def sync(side: Sender | Receiver) -> int:
    """One sync; the sender's bytes."""
    if isinstance(side, Sender):
        return side.send()
    side.receive()
    return 0


def train(policy: Policy, amount: float) -> None:
    """Change every trainable number."""
    with torch.no_grad():
        for i, (_, parameter) in enumerate(policy.trainable_parameters()):
            parameter.add_(amount * (1 + i))


def everything(policy: Policy) -> str:
    """Digest of all parameters and buffers, every bit."""
    digest = hashlib.sha256()
    for tensor in [*policy.parameters(), *policy.buffers()]:
        digest.update(tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def places(policy: Policy) -> list[int]:
    return [tensor.data_ptr() for tensor in [*policy.parameters(), *policy.buffers()]]


def two_syncs(group: ProcessGroup, name: str, *overrides: str, precision: str = "fp32") -> dict[str, Any]:
    """Weights as built, then weights that the actor has trained."""
    policy = build(name, *overrides, precision=precision)
    side, before = member(policy, group), (places(policy), still_joined(policy))
    first = sync(side)
    if group.rank == 0:
        train(policy, 0.01)
    return {
        "bytes": [first, sync(side)],
        "trainable": sum(p.nbytes for _, p in policy.trainable_parameters()),
        "all": everything(policy),
        "in place": (places(policy), still_joined(policy)) == before,
    }


def missed_sync(group: ProcessGroup) -> dict[str, Any]:
    """Copy 1 has lost what a sync brought."""
    policy = build(PI0, EXPERT)
    side = member(policy, group)
    if group.rank == 0:
        train(policy, 0.01)
    sync(side)
    if group.rank == 2:
        train(policy, -0.01)
    log = Log()
    return {"bytes": sync(side), "log": log.lines, "all": everything(policy)}


def damaged_copy(group: ProcessGroup, name: str, *overrides: str) -> dict[str, Any]:
    """A frozen parameter and a buffer of one copy were overwritten."""
    policy = build(name, *overrides)
    side = member(policy, group)
    sync(side)
    if group.rank == 2:
        frozen = next(p for p in policy.parameters() if not p.requires_grad)
        next(policy.buffers()).add_(1)
        with torch.no_grad():
            frozen.add_(1)
    log = Log()
    sent = sync(side)
    return {"bytes": sent, "log": log.lines, "all": everything(policy), "next": sync(side)}


def other_weights(group: ProcessGroup, *, loaded: bool) -> dict[str, Any]:
    """The actor was built from other weights than the copies, or has loaded some, frozen ones included."""
    policy = build(PI0, EXPERT, seed=7 if group.rank == 0 and not loaded else 0)
    side = member(policy, group)
    if isinstance(side, Sender) and loaded:
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.add_(0.5)
        side.has_loaded = True
    log = Log()
    return {"bytes": sync(side), "log": log.lines, "all": everything(policy), "next": sync(side)}


class Deaf(Receiver):
    """A copy that loses everything it is sent."""

    def _transfer(self, *, full: bool) -> int:
        kept = {name: tensor.detach().clone() for name, tensor in self._tensors().items()}
        moved = super()._transfer(full=full)
        with torch.no_grad():
            for name, tensor in self._tensors().items():
                tensor.copy_(kept[name])
        return moved


def deaf_copy(group: ProcessGroup) -> str:
    policy = build(PI0, EXPERT)
    if group.rank == 0:
        train(policy, 0.5)
    try:
        sync(Deaf(policy, group) if group.rank == 2 else member(policy, group))
    except RuntimeError as error:
        return str(error)
    return "no error"


def another_model(group: ProcessGroup) -> str:
    policy = build(PI0, *([EXPERT] if group.rank == 1 else []))
    try:
        sync(member(policy, group))
    except ValueError as error:
        return str(error)
    return "no error"


class Log(logging.Handler):
    """What weight sync says from now on."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        logging.getLogger(weight_sync.__name__).addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def serve(index: int, port: int, pipe: Any) -> None:
    """Run scenarios as member `index` of one group until told to stop."""
    torch.set_num_threads(1)
    store = join_store("127.0.0.1", port)
    groups = {"actor": [ACTOR], "sync": MEMBERS}
    group = connect(store, index, 1 + COPIES, groups, torch.device("cpu"))["sync"]
    weight_sync.BUCKET_BYTES = 100_000  # parameters of a compact model lie across several
    while (work := pipe.recv()) is not None:
        scenario, args, kwargs = work
        pipe.send(scenario(group, *args, **kwargs))
    disconnect()


# --------------------------------------------------------------------------- the tests
Run = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """run(scenario, ...): the results of the actor and of each copy."""
    _store, port = open_store("127.0.0.1")
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for index in range(1 + COPIES):
        here, there = context.Pipe()
        processes.append(context.Process(target=serve, args=(index, port, there), daemon=True))
        processes[-1].start()
        there.close()  # a process that dies is then seen to be gone
        pipes.append(here)

    def run(scenario: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        for pipe in pipes:
            pipe.send((scenario, args, kwargs))
        results = [pipe.recv() for pipe in pipes]
        return [results[member] for member in MEMBERS]

    yield run
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send(None)
        process.join()


MODELS = {
    "pi0, everything trains": (PI0, (), 1.0),
    "pi0, the expert trains": (PI0, (EXPERT,), 0.9),
    "pi0 with LoRA": (PI0, LORA, 0.5),
    "OFT with LoRA": (OFT, LORA, 0.5),
    "OFT": (OFT, (), 1.0),
}


LONG = ("pi0, everything trains", "OFT")  # before a release only


@pytest.mark.parametrize(
    "model", [pytest.param(name, marks=pytest.mark.slow) if name in LONG else name for name in MODELS]
)
def test_exactly_the_trainable_bytes_travel_and_arrive_in_place(run, model):
    name, overrides, at_most = MODELS[model]
    actor, *copies = run(two_syncs, name, *overrides)
    whole = sum(t.nbytes for t in build(name, *overrides).parameters())
    wanted = 4 * load_config(name, [*overrides]).actor.model.num_trainable_parameters()
    print(f"{model}: {actor['bytes'][1]} bytes of {whole}")
    assert actor["bytes"] == [wanted, wanted]
    assert actor["trainable"] == wanted <= at_most * whole
    for copy in copies:
        assert copy["all"] == actor["all"]
        assert copy["in place"]


def test_bf16_parameters_travel_as_bf16(run):
    actor, *copies = run(two_syncs, PI0, precision="bf16")
    sizes = [p.element_size() for _, p in build(PI0, precision="bf16").trainable_parameters()]
    assert set(sizes) == {2, 4}
    assert actor["bytes"] == [actor["trainable"]] * 2
    assert [copy["all"] for copy in copies] == [actor["all"]] * COPIES


def test_a_copy_that_missed_a_sync_is_made_whole_by_the_next(run):
    actor, *copies = run(missed_sync)
    assert actor["log"] == []
    assert actor["bytes"] == sum(p.nbytes for _, p in build(PI0, EXPERT).trainable_parameters())
    assert [copy["all"] for copy in copies] == [actor["all"]] * COPIES


@pytest.mark.parametrize("model", [(PI0, EXPERT), (OFT, *LORA)], ids=["pi0", "OFT"])
def test_a_damaged_copy_is_found_and_healed(run, model):
    actor, *copies = run(damaged_copy, *model)
    (line,) = actor["log"]
    assert line.startswith("weight sync: rollout copy 1 has another ")
    assert actor["bytes"] > 2 * actor["next"]  # trainable ones, then all of them
    assert [copy["all"] for copy in copies] == [actor["all"]] * COPIES


@pytest.mark.parametrize("loaded", [False, True], ids=["built differently", "loaded a checkpoint"])
def test_other_frozen_weights_and_a_loaded_checkpoint_make_it_a_full_sync(run, loaded):
    policy = build(PI0, EXPERT)
    whole = sum(t.nbytes for t in [*policy.parameters(), *policy.buffers()])
    trainable = sum(p.nbytes for _, p in policy.trainable_parameters())
    actor, *copies = run(other_weights, loaded=loaded)
    assert [copy["all"] for copy in copies] == [actor["all"]] * COPIES
    assert actor["bytes"] == (whole if loaded else trainable + whole)
    assert actor["next"] == trainable
    assert ["has another net." in line for line in actor["log"]] == ([] if loaded else [True])
    assert copies[0]["log"] == []


def test_a_copy_that_stays_wrong_ends_the_run_with_the_name(run):
    for message in run(deaf_copy):
        assert message.startswith("weight sync: rollout copy 1 has another net.")
        assert message.endswith("than the actor, although everything has been sent")


def test_another_model_is_refused_by_everybody(run):
    for message in run(another_model):
        assert "torch.float32 trained where that of rollout copy 0 has net." in message
        assert message.endswith("torch.float32; every process must run the same code with the same config")


def test_nobody_to_send_to_means_no_bytes():
    sender = Sender(build(PI0), ProcessGroup())
    assert sender.send() == 0


def test_a_checksum_does_not_tie_memory_down():
    x = torch.arange(10.0)
    checksum(x)
    assert x.untyped_storage().resizable()


def test_buckets_cut_everywhere():
    spans = [[tuple(span) for span in bucket] for bucket in buckets([3, 0, 7, 2], 4)]
    assert spans == [[(0, 0, 3), (2, 0, 1)], [(2, 1, 5)], [(2, 5, 7), (3, 0, 2)]]


def test_checksums_sample_large_tensors_and_see_every_number_of_small_ones():
    small, large = torch.arange(1000.0), torch.zeros(5000)
    for i in (0, 1, 999):
        changed = small.clone()
        changed[i] = -0.0 if i == 0 else changed[i] + 1
        assert checksum(changed) != checksum(small)
    assert checksum(large + 1) != checksum(large)
    assert checksum(torch.zeros(0)) == checksum(torch.zeros(0, dtype=torch.bool))
