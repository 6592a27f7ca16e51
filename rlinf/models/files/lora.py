"""LoRA adapters on a plain torch network, in the layout of peft; the only file that imports peft, and only when asked.

An adapted layer keeps its frozen weight as `base_layer` and adds scaling * B A. Adapters are fp32; they compute in the
dtype of their input, so that a bf16 network never makes fp32 copies of its activations. Dropout acts in train mode.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

from rlinf.errors import UserError
from rlinf.models.config import ModelConfig
from rlinf.models.files.adapters import CONFIG_FILE, WEIGHTS_FILE, AdapterSetting, Layer
from rlinf.models.files.tensor_files import read_headers
from rlinf.models.files.weights import Rename, Transfer, plain_name, prepare

Tensor = torch.Tensor
ADAPTER = "default"  # peft's name of the one set of adapters we keep
_OLD_WEIGHTS_FILE = "adapter_model.bin"


def attach(
    net: nn.Module,
    cfg: ModelConfig,
    generator: torch.Generator,
    *,
    frozen: tuple[str, ...] = (),
    rename: Rename = lambda name: name,
) -> None:
    """Give the layers of `net` adapters and freeze everything else; layers below `frozen` get none.

    Those of an adapter folder that the config names are loaded (`rename` as in `prepare_adapters`). Others follow the
    lora_* keys: A is drawn on the CPU from `generator` and B is zero, so that at first the network is what it was.
    """
    from peft import LoraConfig, inject_adapter_in_model

    setting = AdapterSetting.of(cfg)
    chosen = [layer.name for layer in setting.chosen(la for la in _layers(net) if not la.name.startswith(frozen))]
    config = LoraConfig(
        r=setting.rank,
        lora_alpha=setting.alpha,
        lora_dropout=setting.dropout,
        target_modules=chosen,
        init_lora_weights="gaussian",
    )
    config._register_custom_module({nn.Linear: _adapted_linear()})
    inject_adapter_in_model(config, net, ADAPTER, low_cpu_mem_usage=True)
    for module in adapted(net).values():
        device = module.base_layer.weight.device
        down, up = (part[ADAPTER].to(torch.float32).to_empty(device=device) for part in (module.lora_A, module.lora_B))
        nn.init.zeros_(up.weight)
        with torch.no_grad():
            down.weight.copy_(torch.randn(down.weight.shape, generator=generator) / setting.rank)
    if setting.folder is not None:
        load_adapters(net, setting.folder, rename=rename)


def adapted(net: nn.Module) -> dict[str, Any]:
    """The adapted layers by name."""
    return {name: module for name, module in net.named_modules() if "lora_A" in module._modules}


def save_adapters(net: nn.Module, folder: Path, base: str | None) -> None:
    """Write the adapters alone as peft does; `base` says where the weights they sit on can be found."""
    config = copy.copy(_config(net))
    config.base_model_name_or_path, config.target_modules = base, sorted(adapted(net))
    config.save_pretrained(str(folder))
    tensors = {f"base_model.model.{name}": t.detach().contiguous().cpu() for name, t in _adapter_tensors(net).items()}
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})


def load_adapters(net: nn.Module, folder: Path, *, rename: Rename = lambda name: name) -> None:
    """Take the adapters of a peft folder; every name and shape must fit."""
    prepare_adapters(net, folder, rename=rename).run()


def prepare_adapters(net: nn.Module, folder: Path, *, rename: Rename = lambda name: name) -> Transfer:
    """Check such a load without doing it. `rename` maps layers (as `<layer>.weight`) like those of the base."""
    setting = AdapterSetting.read(folder)
    config = _config(net)
    for key, theirs, ours in (("r", setting.rank, config.r), ("lora_alpha", setting.alpha, config.lora_alpha)):
        if theirs != ours:
            name = {"r": "lora_rank"}.get(key, key)
            raise UserError(f"{folder / CONFIG_FILE}: {key}={theirs:g}, but actor.model.{name} is {ours:g} here")
    file = folder / (WEIGHTS_FILE if (folder / WEIGHTS_FILE).is_file() else _OLD_WEIGHTS_FILE)
    if not file.is_file():
        raise UserError(f"{folder} has {CONFIG_FILE} but no {WEIGHTS_FILE}; the copy is incomplete")
    for name, header in read_headers(file).items():
        if ".lora_A." in name and header.shape and header.shape[0] != setting.rank:
            raise UserError(f"{file}: {name} has rank {header.shape[0]}, {CONFIG_FILE} says r={setting.rank}")
    # peft stores frozen vocabulary tables beside the adapters of one: copies of the base that nobody needs.
    tables = tuple(name for name in base_state(net) if name.endswith(("embed_tokens.weight", "lm_head.weight")))
    transfer = prepare(_adapter_tensors(net), file, rename=rename, optional=tables)
    if transfer.missing:
        raise UserError(f"{file} holds no adapters")
    return transfer


def base_state(net: nn.Module) -> dict[str, Tensor]:
    """The weights under the adapters, by the names they have without them."""
    return {plain_name(name): t for name, t in net.state_dict().items() if ".lora_" not in name}


def merged_state(net: nn.Module) -> dict[str, Tensor]:
    """The weights with their adapters added in fp32, in the dtypes and under the names of the base."""
    merged = {f"{name}.weight": effective_weight(module).detach() for name, module in adapted(net).items()}
    return base_state(net) | merged


def linear_rows(module: nn.Module, x: Tensor, first: int, last: int) -> Tensor:
    """Columns [first, last) of `module(x)`, computing only these: [..., in] -> [..., last - first]."""
    rows = slice(first, last)
    if isinstance(module, nn.Linear):
        return F.linear(x, module.weight[rows], None if module.bias is None else module.bias[rows])
    base: Any = module.base_layer
    out = F.linear(x, base.weight[rows], None if base.bias is None else base.bias[rows])
    return _add_adapter(module, x, out, rows)


def effective_weight(module: nn.Module) -> Tensor:
    """The weight a Linear or Conv2d acts with: its own or, where it is adapted, base + scaling * B A (in fp32)."""
    if isinstance(module, nn.Linear | nn.Conv2d):
        return module.weight
    layer: Any = module
    weight = layer.base_layer.weight
    down, up = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight  # [r, in, ...], [out, r, ...]
    delta = layer.scaling[ADAPTER] * (up.flatten(1) @ down.flatten(1))
    return (weight.float() + delta.view(weight.shape)).to(weight.dtype)


def _add_adapter(layer: Any, x: Tensor, out: Tensor, rows: slice = slice(None)) -> Tensor:
    """out + scaling * B A x in the dtype of x, in place: a frozen layer's fresh output is needed by nobody else."""
    hidden = F.linear(layer.lora_dropout[ADAPTER](x), layer.lora_A[ADAPTER].weight.to(x.dtype))
    up = layer.lora_B[ADAPTER].weight[rows].to(x.dtype)
    rows_of_all = out.view(-1, out.shape[-1])
    rows_of_all.addmm_(hidden.flatten(0, -2), up.T, alpha=layer.scaling[ADAPTER])
    return rows_of_all.view_as(out)  # not `out`: hooks on a view older than the change crash torch 2.13


@lru_cache(maxsize=1)
def _adapted_linear() -> type[nn.Module]:
    from peft.tuners.lora import Linear

    class AdaptedLinear(Linear):
        """peft's layer, whose own forward would copy its input to fp32."""

        def forward(self, x: Tensor) -> Tensor:
            return _add_adapter(self, x, self.base_layer(x))

    return AdaptedLinear


def _config(net: nn.Module) -> Any:
    """peft's record of what it attached."""
    holder: Any = net
    return holder.peft_config[ADAPTER]


def _adapter_tensors(net: nn.Module) -> dict[str, Tensor]:
    out = {}
    for name, layer in adapted(net).items():
        out[f"{name}.lora_A.weight"] = layer.lora_A[ADAPTER].weight
        out[f"{name}.lora_B.weight"] = layer.lora_B[ADAPTER].weight
    return out


def _layers(net: nn.Module) -> Iterable[Layer]:
    """Every layer that can be adapted."""
    for name, m in net.named_modules():
        if isinstance(m, nn.Linear | nn.Conv2d):
            yield Layer(name, m.weight[0].numel(), m.weight.shape[0], isinstance(m, nn.Linear))
