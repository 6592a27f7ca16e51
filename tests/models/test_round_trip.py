"""Every published layout: loads, trains a step with LoRA, saves its adapters, exports, and reloads equal."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlinf.config.schema import OptimConfig
from rlinf.data.noise import Noise
from rlinf.data.types import ChunkIndex, Observation
from rlinf.errors import UserError
from rlinf.models.config import ModelConfig
from rlinf.models.files import lora, policy_folder
from rlinf.models.files.pretrained import PretrainedPolicy
from rlinf.models.files.weights import save_weights
from rlinf.models.openpi.config import Config as OpenPiConfig
from rlinf.models.openpi.config import OpenPiOptions
from rlinf.models.openvla.config import Config as OpenVlaConfig
from rlinf.models.openvla_oft.config import Config as OftConfig
from rlinf.models.policy import find_policy
from rlinf.training.optim import make_optimizer

CPU = torch.device("cpu")
ROWS = 3
Tensors = dict[str, torch.Tensor]
VLM = "paligemma_with_expert.paligemma"
EMBED, TIED = f"{VLM}.model.language_model.embed_tokens.weight", f"{VLM}.lm_head.weight"
UNUSED = "paligemma_with_expert.gemma_expert.lm_head.weight"


# ------------------------------------------------------------------ published layouts, written from our own tensors
def deduplicated(tensors: Tensors, folder: Path) -> None:
    """openpi's export: the tied embedding only as lm_head, and the expert's unused one."""
    tensors[TIED] = tensors.pop(EMBED)
    save_file(tensors | {UNUSED: torch.zeros(3, 2)}, folder / "model.safetensors")


def untied(tensors: Tensors, folder: Path) -> None:
    save_weights(tensors | {TIED: tensors[EMBED].clone()}, folder, max_shard_bytes=100_000)


def lerobot(tensors: Tensors, folder: Path) -> None:
    """Everything below `model.`; π0's time network under π0.5's name."""
    tensors[TIED] = tensors.pop(EMBED)
    renamed = {f"model.{re.sub('^action_time_mlp', 'time_mlp', name)}": t for name, t in tensors.items()}
    save_file(renamed, folder / "model.safetensors")


def old_transformers(tensors: Tensors, folder: Path) -> None:
    """Exports of transformers < 4.52."""
    renamed = {}
    for name, tensor in tensors.items():
        name = name.replace(f"{VLM}.model.language_model.", f"{VLM}.language_model.model.")
        renamed[name.replace(f"{VLM}.model.", f"{VLM}.")] = tensor
    save_file(renamed, folder / "model.safetensors")


def full_weights(tensors: Tensors, folder: Path) -> None:
    """RLinf's own: a pickle with all heads."""
    assert any(name.startswith("value_head.") for name in tensors)
    (folder / "actor/model_state_dict").mkdir(parents=True)
    torch.save(tensors, folder / "actor/model_state_dict/full_weights.pt")


def sharded(tensors: Tensors, folder: Path) -> None:
    """OpenVLA on the hub: shards, with the vision towers' unread last block, final norm and pooling head."""
    extra = {}
    for tower, width in (("featurizer", 64), ("fused_featurizer", 64)):
        prefix = f"vision_backbone.{tower}"
        blocks = {int(m[1]) for name in tensors if (m := re.match(rf"{prefix}\.blocks\.(\d+)\.", name))}
        first, dead = f"{prefix}.blocks.0.", f"{prefix}.blocks.{len(blocks)}."
        extra |= {dead + n.removeprefix(first): t.clone() for n, t in tensors.items() if n.startswith(first)}
        extra |= {f"{prefix}.norm.weight": torch.ones(width), f"{prefix}.norm.bias": torch.ones(width)}
    extra["vision_backbone.fused_featurizer.attn_pool.q.weight"] = torch.ones(64, 64)
    save_weights(tensors | extra, folder, max_shard_bytes=200_000)
    assert len(list(folder.glob("model-*.safetensors"))) > 2


def side_files(tensors: Tensors, folder: Path) -> None:
    """OpenVLA-OFT's fine-tuning: head and projector in files of their own, under DDP names; an older step beside."""
    for part in ("action_head", "proprio_projector"):
        own = {f"module.{n.removeprefix(f'{part}.')}": t for n, t in tensors.items() if n.startswith(f"{part}.")}
        assert own
        torch.save(own, folder / f"{part}--150_checkpoint.pt")
        torch.save({name: t + 1 for name, t in own.items()}, folder / f"{part}--50_checkpoint.pt")
        tensors = {name: t for name, t in tensors.items() if not name.startswith(f"{part}.")}
    sharded(tensors, folder)


@dataclass(frozen=True)
class Case:
    cfg: ModelConfig
    write: Callable[[Tensors, Path], None]
    heads: bool = True  # whether the layout holds the heads of an RL policy


def cases() -> Iterator[tuple[str, Case]]:
    for name in ("pi0_metaworld", "pi05_metaworld"):
        options = OpenPiOptions(config_name=name, noise_method="flow_noise", train_expert_only=name == "pi05_metaworld")
        shape = {"size": "compact", "action_dim": 4, "num_action_chunks": 2, "num_steps": 2}
        cfg = OpenPiConfig(**shape, add_value_head=True, openpi=options)
        for layout in (deduplicated, untied, lerobot, old_transformers):
            yield f"{name}-{layout.__name__}", Case(cfg, layout, heads=False)
        yield f"{name}-full_weights", Case(cfg, full_weights)
    yield (
        "openvla-sharded",
        Case(OpenVlaConfig(size="compact", action_dim=3, add_value_head=True), sharded, heads=False),
    )
    yield "openvla-full_weights", Case(OpenVlaConfig(size="compact", action_dim=3, add_value_head=True), full_weights)
    oft = OftConfig(size="compact", num_action_chunks=2, action_dim=3)
    yield "oft-sharded", Case(replace(oft, add_value_head=True), sharded, heads=False)
    official = replace(oft, implement_version="official", use_proprio=True, proprio_dim=5, action_head="l1")
    yield "oft-side_files", Case(official, side_files, heads=False)


CASES = dict(cases())


# ------------------------------------------------------------------ helpers
def make(cfg: ModelConfig, seed: int = 0) -> PretrainedPolicy:
    """Random weights, awake heads, statistics of random data."""
    policy = find_policy(cfg.model_type).build(cfg, CPU, seed=seed)
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if name.startswith(policy.heads):
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=g))
    states = torch.randn(64, policy.spec.state_dim, generator=g) if policy.spec.state_dim else None
    policy.fit_statistics(states, torch.randn(64, policy.spec.action_dim, generator=g))
    return policy


def build(cfg: ModelConfig, folder: Path, *, is_lora: bool, seed: int = 7) -> PretrainedPolicy:
    keys = {"model_path": str(folder), "is_lora": is_lora, "lora_rank": 4, "lora_alpha": 8}
    return find_policy(cfg.model_type).build(replace(cfg, **keys), CPU, seed=seed)


def observation(policy: PretrainedPolicy) -> Observation:
    g, spec = torch.Generator().manual_seed(0), policy.spec
    return Observation(
        images=torch.randint(0, 256, (ROWS, 40, 40, 3), generator=g, dtype=torch.uint8),
        wrist_images=None,
        states=torch.randn(ROWS, spec.state_dim, generator=g) if spec.state_dim else None,
        task_descriptions=["push the red button", "open it", "close the drawer"],
        critic_state=None,
    )


def noise() -> Noise:
    return Noise(seed=7, at=ChunkIndex(0, 0, 0), env_ids=range(ROWS))


def actions(policy: PretrainedPolicy) -> torch.Tensor:
    return policy.predict(observation(policy), mode="eval", noise=noise()).actions


def train_a_step(policy: PretrainedPolicy) -> None:
    """One optimiser step on the policy-gradient and value losses; imitation where a head has no log-probs."""
    optimizer = make_optimizer(policy, OptimConfig(lr=1e-2, value_lr=1e-2))
    obs = observation(policy)
    if policy.spec.has_logprob:
        out = policy.predict(obs, mode="train", noise=noise())
        new = policy.evaluate(out.replay, values=True, entropy=False)
        assert gap(new.logprobs, out.logprobs) <= 2e-5
        loss = new.logprobs.mean() + (new.values - 1.0).square().mean()
    else:
        target = torch.zeros(ROWS, policy.spec.num_action_chunks, policy.spec.action_dim)
        loss = policy.sft_loss(obs, target, noise=noise())
    loss.backward()
    optimizer.step()


def gap(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).detach().abs().max())


def copy_of(tensors: Tensors) -> Tensors:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def differing(a: Tensors, b: Tensors) -> set[str]:
    assert a.keys() == b.keys()
    return {name for name, tensor in a.items() if not torch.equal(tensor, b[name])}


@pytest.fixture(params=CASES)
def case(request) -> Case:
    return CASES[request.param]


def publish(case: Case, folder: Path) -> PretrainedPolicy:
    """The policy whose weights now lie in `folder` in the layout of `case`."""
    source = make(case.cfg)
    source.export(folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    case.write({n: t for n, t in tensors.items() if case.heads or not n.startswith(source.heads)}, folder)
    return source


# ------------------------------------------------------------------ the round trip
def test_round_trip(case: Case, tmp_path: Path):
    source = publish(case, tmp_path / "published")
    policy = build(case.cfg, tmp_path / "published", is_lora=True)
    base = copy_of(lora.base_state(policy.net))
    assert differing(base, source.net.state_dict()) == set()
    fresh_heads = not case.heads and policy.spec.has_value
    assert bool(differing(policy._head_tensors(), source._head_tensors())) == fresh_heads
    assert gap(actions(policy), actions(source)) <= 1e-5

    adapters = copy_of(lora._adapter_tensors(policy.net))
    heads = copy_of(policy._head_tensors())
    train_a_step(policy)
    moved = differing(lora._adapter_tensors(policy.net), adapters)
    assert len([name for name in moved if ".lora_B." in name]) >= len(adapters) // 4
    assert differing(lora.base_state(policy.net), base) == set()
    assert bool(differing(policy._head_tensors(), heads)) == bool(heads)

    policy.save_pretrained(tmp_path / "adapters")
    stored = {p.name for p in (tmp_path / "adapters").glob("*.safetensors")}
    assert stored == {"adapter_model.safetensors"} | ({"heads.safetensors"} if heads else set())
    again = build(case.cfg, tmp_path / "adapters", is_lora=True, seed=8)
    assert differing(again.state_dict(), policy.state_dict()) == set()
    assert torch.equal(actions(again), actions(policy))

    policy.export(tmp_path / "merged")
    plain = build(case.cfg, tmp_path / "merged", is_lora=False, seed=9)
    assert not [
        name for name in load_file(tmp_path / "merged/model.safetensors") if "lora_" in name or "base_l" in name
    ]
    assert differing(plain.net.state_dict(), lora.merged_state(policy.net)) == set()
    assert differing(plain._head_tensors(), policy._head_tensors()) == set()
    assert gap(actions(plain), actions(policy)) <= 1e-5
    assert gap(actions(plain), actions(source)) > 0
    if policy.spec.has_logprob:
        replay = policy.predict(observation(policy), mode="train", noise=noise()).replay
        ours, theirs = (p.evaluate(replay, values=True, entropy=False) for p in (policy, plain))
        gaps = gap(ours.logprobs, theirs.logprobs), gap(ours.values, theirs.values)
        print(f"merged against adapters: max |Δ log-prob| {gaps[0]:.1e}, |Δ value| {gaps[1]:.1e}")
        assert max(gaps) <= 1e-5
    assert not [p for p in tmp_path.rglob("*") if p.suffix in (".pt", ".bin") and "published" not in p.parts]


# ------------------------------------------------------------------ rules of adapter folders
PI = CASES["pi0_metaworld-deduplicated"]


@pytest.fixture
def trained(tmp_path: Path) -> PretrainedPolicy:
    publish(PI, tmp_path / "published")
    policy = build(PI.cfg, tmp_path / "published", is_lora=True)
    train_a_step(policy)
    policy.save_pretrained(tmp_path / "adapters")
    return policy


def test_a_base_without_a_folder_is_saved_too(tmp_path: Path):
    policy = make(replace(PI.cfg, is_lora=True, lora_rank=4, lora_alpha=8))
    train_a_step(policy)
    policy.save_pretrained(tmp_path / "first")
    assert json.loads((tmp_path / "first/adapter_config.json").read_text())["base_model_name_or_path"] is None
    assert differing(load_file(tmp_path / "first/model.safetensors"), lora.base_state(policy.net)) == set()
    second = build(PI.cfg, tmp_path / "first", is_lora=True)
    shutil.rmtree(tmp_path / "first")  # as pruning does
    second.save_pretrained(tmp_path / "second")
    third = build(PI.cfg, tmp_path / "second", is_lora=True)
    assert differing(third.state_dict(), policy.state_dict()) == set()


def test_a_vanished_base(trained: PretrainedPolicy, tmp_path: Path):
    (tmp_path / "published").rename(tmp_path / "moved")
    with pytest.raises(UserError, match=r"base_model_name_or_path=.*published is not a folder here, and the adapters"):
        build(PI.cfg, tmp_path / "adapters", is_lora=True)
    cfg = replace(PI.cfg, lora_path=str(tmp_path / "adapters"))
    again = build(cfg, tmp_path / "moved", is_lora=True)
    assert torch.equal(actions(again), actions(trained))


def test_a_resumed_run_keeps_the_base_it_has(trained: PretrainedPolicy, tmp_path: Path):
    (tmp_path / "published/model.safetensors").write_bytes(b"damaged while the run stood still")
    want = copy_of(trained.state_dict())
    train_a_step(trained)
    trained.load_pretrained(tmp_path / "adapters")
    assert differing(trained.state_dict(), want) == set()


def test_adapters_need_lora_or_an_export(trained: PretrainedPolicy, tmp_path: Path):
    with pytest.raises(UserError, match=r"adapters holds LoRA adapters: set actor.model.is_lora=True, or merge them"):
        build(PI.cfg, tmp_path / "adapters", is_lora=False)


def test_adapters_of_another_rank(trained: PretrainedPolicy, tmp_path: Path):
    other = make(replace(PI.cfg, is_lora=True, lora_rank=2))
    before = copy_of(other.state_dict())
    with pytest.raises(UserError, match=r"r=4, but actor.model.lora_rank is 2 here"):
        other.load_pretrained(tmp_path / "adapters")
    assert differing(other.state_dict(), before) == set()


def test_adapters_on_frozen_layers(trained: PretrainedPolicy, tmp_path: Path):
    cfg = replace(PI.cfg, openpi=replace(PI.cfg.openpi, train_expert_only=True))
    with pytest.raises(UserError, match=r"does not have: .*paligemma.*; here these layers are frozen, or not among"):
        build(cfg, tmp_path / "adapters", is_lora=True)


def test_a_damaged_adapter_folder_changes_nothing(trained: PretrainedPolicy, tmp_path: Path):
    file = tmp_path / "adapters/adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    other = make(replace(PI.cfg, is_lora=True, lora_rank=4, lora_alpha=8), seed=3)
    before = copy_of(other.state_dict())
    with pytest.raises(UserError, match=r"adapter_model.safetensors cannot be read as safetensors .*cut off"):
        other.load_pretrained(tmp_path / "adapters")
    assert differing(other.state_dict(), before) == set()


def test_a_published_lora_run_with_peft_names(trained: PretrainedPolicy, tmp_path: Path):
    """full_weights.pt of a LoRA run holds base, adapters and heads under peft's names."""
    tensors = {}
    for name, tensor in trained.state_dict().items():
        tensors[name.replace("net.", "base_model.model.", 1)] = tensor
    (tmp_path / "published/model.safetensors").unlink()
    full_weights(tensors, tmp_path / "published")
    again = build(PI.cfg, tmp_path / "published", is_lora=True)
    assert differing(again.state_dict(), trained.state_dict()) == set()
    with pytest.raises(UserError, match=r"does not have: .*lora_A.*set actor.model.is_lora=True"):
        build(PI.cfg, tmp_path / "published", is_lora=False)


def test_published_openvla_adapters(tmp_path: Path):
    """A hub repository of adapters: endings as targets, layers we never compute, a copy of the vocabulary table."""
    case, folder = CASES["openvla-sharded"], tmp_path / "adapters"
    publish(case, tmp_path / "published")
    vision, language = ["proj", "qkv", "fc1", "fc2", "fc3"], ["q_proj", "k_proj", "v_proj", "o_proj", "lm_head"]
    cfg = replace(case.cfg, lora_targets=[*vision, *language])
    policy = build(cfg, tmp_path / "published", is_lora=True)
    assert "vision_backbone.featurizer.patch_embed.proj" in lora.adapted_layers(policy.net)
    train_a_step(policy)
    folder.mkdir()
    lora.save_adapters(policy.net, folder, "hub/base")
    content = json.loads((folder / "adapter_config.json").read_text())
    content["target_modules"] = [*vision, *language, "q", "kv"]
    (folder / "adapter_config.json").write_text(json.dumps(content))
    tensors = load_file(folder / "adapter_model.safetensors")
    first = "base_model.model.vision_backbone.featurizer.blocks.0."
    tensors |= {n.replace(".blocks.0.", ".blocks.1."): t.clone() for n, t in tensors.items() if n.startswith(first)}
    tensors["base_model.model.vision_backbone.fused_featurizer.attn_pool.q.lora_A.weight"] = torch.zeros(4, 64)
    tensors["base_model.model.language_model.lm_head.base_layer.weight"] = torch.zeros(1280, 64)
    save_file(tensors, folder / "adapter_model.safetensors")
    again = build(replace(case.cfg, lora_path=str(folder)), tmp_path / "published", is_lora=True)
    assert differing(again.net.state_dict(), policy.net.state_dict()) == set()
    assert again.cfg.num_trainable_parameters() == sum(p.numel() for _, p in again.trainable_parameters())
    assert again.base_folder == tmp_path / "published"


# ------------------------------------------------------------------ the base of adapters
def _final(work: Path) -> Path:
    """Put a finished temporary folder in place of the one it is named after, as a run does."""
    final = work.with_name(work.name.removeprefix(".tmp-"))
    shutil.rmtree(final, ignore_errors=True)
    return work.rename(final)


@pytest.mark.parametrize(
    ("base", "work", "inside"),
    [
        ("checkpoints/global_step_1/actor/model", "checkpoints/.tmp-global_step_1", "actor/model"),  # replaced
        ("checkpoints/global_step_1/actor/model", "checkpoints/.tmp-global_step_2", "actor/model"),  # may be pruned
        ("sft", ".tmp-sft", "."),
    ],
)
def test_a_base_that_saving_deletes_is_saved_too(base: str, work: str, inside: str, tmp_path: Path):
    publish(PI, tmp_path / base)
    policy = build(PI.cfg, tmp_path / base, is_lora=True)
    train_a_step(policy)
    policy.save_pretrained(tmp_path / work / inside)
    final = _final(tmp_path / work) / inside
    if work.endswith("global_step_2"):
        shutil.rmtree(tmp_path / "checkpoints/global_step_1")
    assert json.loads((final / "adapter_config.json").read_text())["base_model_name_or_path"] is None
    again = build(PI.cfg, final, is_lora=True)
    assert differing(again.state_dict(), policy.state_dict()) == set()


def test_a_changed_base_is_refused(trained: PretrainedPolicy, tmp_path: Path):
    files = json.loads((tmp_path / "adapters/base.json").read_text())["files"]
    assert files.keys() == {"model.safetensors"}
    build(PI.cfg, tmp_path / "adapters", is_lora=True)
    shutil.rmtree(tmp_path / "published")
    publish(PI, tmp_path / "published")
    build(PI.cfg, tmp_path / "adapters", is_lora=True)  # the same bytes
    file = tmp_path / "published/model.safetensors"
    tensors = load_file(file)
    tensors["action_in_proj.bias"][0] += 1.0
    save_file(tensors, file)
    with pytest.raises(
        UserError, match=r"adapters of the base .*published, which has changed .*: the numbers of model"
    ):
        build(PI.cfg, tmp_path / "adapters", is_lora=True)
    with pytest.warns(UserWarning, match=r"lora_path=.*adapters was trained on the base .*published, not on .*numbers"):
        build(replace(PI.cfg, lora_path=str(tmp_path / "adapters")), tmp_path / "published", is_lora=True)


def test_lora_path_brings_heads_and_statistics(trained: PretrainedPolicy, tmp_path: Path):
    trained.fit_statistics(torch.randn(64, trained.spec.state_dim), 5.0 * torch.randn(64, trained.spec.action_dim))
    trained.save_pretrained(tmp_path / "adapters")
    cfg = replace(PI.cfg, lora_path=str(tmp_path / "adapters"))
    again = build(cfg, tmp_path / "published", is_lora=True)
    assert differing(again.state_dict(), trained.state_dict()) == set()
    assert torch.equal(again.processor.action_stats.std, trained.processor.action_stats.std)
    assert torch.equal(actions(again), actions(trained))
    (tmp_path / "published").rename(tmp_path / "moved")  # the same weights elsewhere: no warning
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build(cfg, tmp_path / "moved", is_lora=True)


def test_large_files_are_sampled(tmp_path: Path):
    file = tmp_path / "model.safetensors"
    size = 9 << 20
    for position, seen in ((0, True), (size - 1, True), (size // 2, True), (size // 2 - 1, False)):
        file.write_bytes(bytes(size))
        before = policy_folder.fingerprint([file])
        with file.open("r+b") as stream:
            stream.seek(position)
            stream.write(b"x")
        assert (policy_folder.fingerprint([file]) != before) is seen
    assert policy_folder.fingerprint_difference(before, {}) == "model.safetensors is gone"
