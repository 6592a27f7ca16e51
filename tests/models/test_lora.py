"""LoRA on a plain network: what is adapted, what it computes, and peft's files in and out."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from rlinf.errors import UserError
from rlinf.models.config import ModelConfig
from rlinf.models.files import lora
from rlinf.models.files.lora_settings import LoraSettings
from rlinf.models.files.weights import save_weights
from rlinf.models.nn.adapted_layers import effective_weight, linear_rows
from rlinf.models.nn.sizes import Layer
from tests.weights import load_weights


class Net(nn.Module):
    """A patch embedding, a block and a head, named as published networks name theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 8, 2, stride=2)
        self.block = nn.ModuleDict({"q_proj": nn.Linear(8, 6), "norm": nn.LayerNorm(6)})
        self.lm_head = nn.Linear(6, 5, bias=False)

    def features(self, images: torch.Tensor) -> torch.Tensor:
        weight = effective_weight(self.patch).flatten(1)
        patches = images.unflatten(2, (-1, 2)).unflatten(4, (-1, 2)).permute(0, 2, 4, 1, 3, 5).flatten(3)
        x = nn.functional.linear(patches.flatten(1, 2).to(weight.dtype), weight, self.patch.bias)
        return self.block["norm"](self.block["q_proj"](x))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.features(images))


def config(**keys) -> ModelConfig:
    return ModelConfig(model_type="none", is_lora=True, **({"lora_rank": 2, "lora_alpha": 6} | keys))


def net(seed: int = 0, dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(seed)
    return Net().to(dtype)


def adapted(cfg: ModelConfig | None = None, *, seed: int = 0, awake: bool = True, dtype=torch.float32) -> Net:
    """An adapted net; `awake` gives B numbers too, without which adapters do nothing."""
    out = net(dtype=dtype)
    lora.attach(out, cfg or config(), torch.Generator().manual_seed(seed))
    if awake:
        generator = torch.Generator().manual_seed(seed + 1)
        for layer in lora.adapted_layers(out).values():
            up = layer.lora_B["default"].weight
            up.data.copy_(torch.randn(up.shape, generator=generator))
    return out


@pytest.fixture
def images() -> torch.Tensor:
    return torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(9))


def test_peft_is_imported_only_for_lora():
    code = (
        "import sys; import rlinf.models.files.lora, rlinf.models.openpi.policy, rlinf.workers.actor; "
        "assert not {'peft', 'transformers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_fresh_adapters_change_nothing_and_come_from_the_generator(images):
    before = torch.get_rng_state()
    plain = net()
    state = torch.get_rng_state()
    one, two, other = (adapted(seed=s, awake=False) for s in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    torch.set_rng_state(before)
    assert torch.equal(one(images), plain(images))
    first, same, different = ({n: p for n, p in m.named_parameters() if "lora_A" in n} for m in (one, two, other))
    assert all(torch.equal(p, same[n]) for n, p in first.items())
    assert all(not torch.equal(p, different[n]) for n, p in first.items())
    wide = nn.Sequential(nn.Linear(64, 64))
    lora.attach(wide, config(lora_rank=64), torch.Generator().manual_seed(0))
    big = torch.cat([p.flatten() for p in wide.parameters() if p.requires_grad])
    assert float(big[big != 0].detach().std()) == pytest.approx(1 / 64, rel=0.1)


def test_all_linear_leaves_convolutions_alone_and_only_adapters_learn(images):
    model = adapted()
    assert sorted(lora.adapted_layers(model)) == ["block.q_proj", "lm_head"]
    assert {n for n, p in model.named_parameters() if p.requires_grad} == {
        f"{layer}.lora_{part}.default.weight" for layer in ("block.q_proj", "lm_head") for part in "AB"
    }
    model(images).square().sum().backward()
    assert all((p.grad is not None and bool(p.grad.any())) == p.requires_grad for p in model.parameters())


@pytest.mark.parametrize(
    ("targets", "chosen"),
    [("lm_head", ["lm_head"]), (["q_proj", "patch"], ["block.q_proj", "patch"]), (["block.q_proj"], ["block.q_proj"])],
)
def test_targets(targets, chosen):
    assert sorted(lora.adapted_layers(adapted(config(lora_targets=targets)))) == chosen


def test_frozen_parts_get_none():
    model = net()
    lora.attach(model, config(), torch.Generator(), frozen=("block.",))
    assert sorted(lora.adapted_layers(model)) == ["lm_head"]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"lora_targets": ["q_prj"]},
            r"lora_targets: q_prj names no layer.*mean 'q_proj'\?\); endings: lm_head, patch, q_",
        ),
        ({"lora_targets": ["q_proj", "x"]}, "lora_targets: x names no layer"),
        ({"lora_targets": []}, r"lora_targets=\[\] names no layer; give names or endings, or all-linear"),
        ({"lora_rank": 0}, "lora_rank=0 must be at least 1"),
        ({"lora_rank": 100_000}, "lora_rank=100000 must be at most 6, the full rank of the largest adapted layer"),
        ({"lora_alpha": 0}, "lora_alpha=0 must be positive"),
        ({"lora_dropout": 1.0}, r"lora_dropout=1.0 must lie in \[0, 1\)"),
        ({"lora_path": "nowhere"}, "lora_path=nowhere holds no adapter_config.json"),
    ],
)
def test_refusals(keys, message):
    model = net()
    names = list(model.state_dict())
    with pytest.raises(UserError, match=message):
        lora.attach(model, config(**keys), torch.Generator())
    assert list(model.state_dict()) == names


def test_rows_and_weights_are_those_of_the_layer(images):
    model = adapted(config(lora_targets=["patch", "q_proj", "lm_head"]))
    x = model.features(images)
    torch.testing.assert_close(linear_rows(model.lm_head, x, 1, 4), model.lm_head(x)[..., 1:4], rtol=0, atol=1e-6)
    plain = model.lm_head.base_layer
    torch.testing.assert_close(linear_rows(plain, x, 1, 4), plain(x)[..., 1:4], rtol=0, atol=1e-6)
    delta = 3.0 * model.lm_head.lora_B["default"].weight @ model.lm_head.lora_A["default"].weight
    torch.testing.assert_close(effective_weight(model.lm_head), plain.weight + delta, rtol=0, atol=1e-6)
    convolution = nn.functional.conv2d(images, effective_weight(model.patch), model.patch.bias, stride=2)
    torch.testing.assert_close(model.patch(images), convolution, rtol=0, atol=1e-5)  # peft's own two convolutions


def test_bf16_base_with_fp32_adapters(images):
    model = adapted(dtype=torch.bfloat16)
    assert {p.dtype for n, p in model.named_parameters() if "lora" in n} == {torch.float32}
    out = model(images).detach()
    assert out.dtype == torch.bfloat16
    merged = net(dtype=torch.bfloat16)
    merged.load_state_dict(lora.merged_state(model))
    assert float((out - merged(images).detach()).abs().max()) <= 0.02 * float(out.abs().max())  # bf16 has 8 bits
    x = model.features(images)
    assert torch.equal(linear_rows(model.lm_head, x, 0, 5), model.lm_head(x))


def test_dropout_acts_in_train_mode_only(images):
    model = adapted(config(lora_dropout=0.5))
    model.eval()
    assert torch.equal(model(images), model(images))
    model.train()
    assert not torch.equal(model(images), model(images))


def test_merged_and_base_states(images):
    model, plain = adapted(config(lora_targets=["patch", "q_proj", "lm_head"])), net()
    base, merged = lora.base_state(model), lora.merged_state(model)
    assert base.keys() == merged.keys() == plain.state_dict().keys()
    assert all(torch.equal(t, base[n]) for n, t in plain.state_dict().items())
    changed = {n for n in merged if not torch.equal(merged[n], base[n])}
    assert changed == {"patch.weight", "block.q_proj.weight", "lm_head.weight"}
    plain.load_state_dict(merged)
    torch.testing.assert_close(plain(images), model(images), rtol=0, atol=1e-5)


def test_weights_load_under_the_adapters(tmp_path, images):
    want = net(seed=3)
    save_weights(want.state_dict(), tmp_path)
    model = adapted(awake=False)
    kept = {n: p.clone() for n, p in model.named_parameters() if "lora" in n}
    load_weights(model, tmp_path)
    assert torch.equal(model(images), want(images))
    assert all(torch.equal(p, kept[n]) for n, p in model.named_parameters() if "lora" in n)


def test_saved_adapters_are_what_peft_reads_and_writes(tmp_path, images):
    from peft import PeftModel

    model = adapted(config(lora_targets=["patch", "q_proj", "lm_head"]))
    lora.save_adapters(model, tmp_path, "some/base")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    names = {f"base_model.model.{la}.lora_{p}.weight" for la in ("patch", "block.q_proj", "lm_head") for p in "AB"}
    assert load_file(tmp_path / "adapter_model.safetensors").keys() == names
    theirs = PeftModel.from_pretrained(net(), str(tmp_path))
    merged, ours = theirs.merge_and_unload().state_dict(), lora.merged_state(model)
    assert merged.keys() == ours.keys()
    for name, tensor in merged.items():
        torch.testing.assert_close(tensor, ours[name], rtol=0, atol=1e-6)
    again = adapted(config(lora_path=str(tmp_path), model_path="base", lora_rank=9), seed=5)  # the folder's rank wins
    for name, layer in lora.adapted_layers(again).items():
        layer.lora_B["default"].weight.data.zero_()
        assert name in lora.adapted_layers(model)
    lora.prepare_adapters(again, tmp_path).run()
    assert torch.equal(again(images), model(images))


def test_adapters_written_by_peft_are_loaded(tmp_path, images):
    from peft import LoraConfig, get_peft_model

    theirs = get_peft_model(net(), LoraConfig(r=3, lora_alpha=4, target_modules=["q_proj", "lm_head"]))
    for name, parameter in theirs.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about vocabulary tables, which it cannot find in a plain network
        theirs.save_pretrained(str(tmp_path))
    _retensor(tmp_path, lambda t: t.update({"base_model.model.lm_head.base_layer.weight": torch.zeros(5, 6)}))
    ours = adapted(config(lora_path=str(tmp_path), model_path="base"), awake=False)
    weights = theirs.merge_and_unload().state_dict()
    for name, tensor in lora.merged_state(ours).items():
        torch.testing.assert_close(tensor, weights[name], rtol=0, atol=1e-6)


def _edit(folder: Path, **keys) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def _retensor(folder: Path, change) -> None:
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


A = "base_model.model.lm_head.lora_A.weight"
SPOILED = {
    "rank": (lambda f: _retensor(f, lambda t: t.update({A: torch.zeros(4, 6)})), f"{A} has rank 4, .* says r=2"),
    "shape": (lambda f: _retensor(f, lambda t: t.update({A: torch.zeros(2, 7)})), r"shape \[2, 7\], the model expects"),
    "missing": (lambda f: _retensor(f, lambda t: t.pop(A)), "only a part of the LoRA adapters: lm_head.lora_A.weight"),
    "foreign": (lambda f: _retensor(f, lambda t: t.update({"x.weight": torch.zeros(1)})), "does not have: x.weight"),
    "another rank": (lambda f: _edit(f, r=4), "r=4, but actor.model.lora_rank is 2 here"),
    "another scale": (lambda f: _edit(f, lora_alpha=5), "lora_alpha=5, but actor.model.lora_alpha is 6 here"),
    "dora": (lambda f: _edit(f, use_dora=True), "use_dora=True is not supported; only plain LoRA is"),
    "another method": (lambda f: _edit(f, peft_type="IA3"), "peft_type='IA3' is not supported"),
    "no rank": (lambda f: _edit(f, r=None), "adapter_config.json: r=None must be a whole number of at least 1"),
    "rank 0": (lambda f: _edit(f, r=0), "adapter_config.json: r=0 must be a whole number"),
    "negative rank": (lambda f: _edit(f, r=-3), "r=-3 must be a whole number"),
    "rank in words": (lambda f: _edit(f, r="2"), "r=2 must be a whole number"),
    "rank true": (lambda f: _edit(f, r=True), "r=True must be a whole number"),
    "scale in words": (lambda f: _edit(f, lora_alpha="x"), "lora_alpha=x must be a positive number"),
    "no scale": (lambda f: _edit(f, lora_alpha=None), "lora_alpha=None must be a positive number"),
    "dropout": (lambda f: _edit(f, lora_dropout="x"), r"lora_dropout=x must be a number in \[0, 1\)"),
    "no targets": (lambda f: _edit(f, target_modules=None), "target_modules=None must be a list of layer names"),
    "a number for targets": (lambda f: _edit(f, target_modules=5), "target_modules=5 must be a list"),
    "numbers for targets": (lambda f: _edit(f, target_modules=[1, 2]), r"target_modules=\[1, 2\] must be a list"),
    "bad pattern": (lambda f: _edit(f, target_modules="(["), r"target_modules=\(\[ must be .* or a regular expression"),
    "no weights": (lambda f: (f / "adapter_model.safetensors").unlink(), "no adapter_model.safetensors"),
    "no json": (lambda f: (f / "adapter_config.json").write_text("{"), "adapter_config.json is not valid JSON"),
}


@pytest.mark.parametrize("case", SPOILED)
def test_spoiled_adapters_change_nothing(case, tmp_path):
    spoil, message = SPOILED[case]
    model = adapted()
    lora.save_adapters(adapted(seed=4), tmp_path, None)
    spoil(tmp_path)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    with pytest.raises(UserError, match=message):
        lora.prepare_adapters(model, tmp_path)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())


def test_parameter_counts():
    layers = [Layer("a.q_proj", 10, 6), Layer("lm_head", 6, 5), Layer("patch", 12, 8, linear=False)]
    setting = LoraSettings.from_config(config())
    assert setting.num_parameters(layers) == 2 * (16 + 11)
    assert LoraSettings.from_config(config(lora_targets=["patch"])).num_parameters(layers) == 2 * 20


def test_lora_path_needs_one_plain_base(tmp_path):
    lora.save_adapters(adapted(), tmp_path, "some/base")
    with pytest.raises(UserError, match=r"lora_path=.* needs the weights under its adapters: .*recorded: some/base"):
        LoraSettings.from_config(config(lora_path=str(tmp_path)))
    with pytest.raises(UserError, match=r"model_path=.* holds adapters already, and actor.model.lora_path=.* names"):
        LoraSettings.from_config(config(lora_path=str(tmp_path), model_path=str(tmp_path)))


def test_foreign_targets_are_listed_in_short(tmp_path):
    lora.save_adapters(adapted(), tmp_path, None)
    _edit(tmp_path, target_modules=[f"layer{i}" for i in range(300)])
    with pytest.raises(UserError, match=r"target_modules: layer0, layer1, layer2, layer3 and 296 more names no layer"):
        LoraSettings.from_folder(tmp_path).select([Layer("lm_head", 6, 5)])
