"""LoRA adapters: attached to a torch network, saved and loaded in the folder layout of peft, merged into the weights.

The only file that imports peft, and only when adapters are asked for. What they are (rank, targets) is decided in
`files.lora_settings`, how an adapted layer computes in `nn.adapted_layers`. Dropout acts in train mode.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rlinf.errors import UserError
from rlinf.models.config import ModelConfig
from rlinf.models.files.lora_settings import CONFIG_FILE, WEIGHTS_FILE, LoraSettings
from rlinf.models.files.tensor_files import read_headers
from rlinf.models.files.weights import PreparedLoad, Rename, plain_name, prepare_load, save_tensors
from rlinf.models.nn.adapted_layers import ADAPTER, add_adapter, effective_weight
from rlinf.models.nn.sizes import Layer

Tensor = torch.Tensor
_OLD_WEIGHTS_FILE = "adapter_model.bin"


def attach(
    net: nn.Module,
    cfg: ModelConfig,
    generator: torch.Generator,
    *,
    frozen: tuple[str, ...] = (),
    rename: Rename = lambda name: name,
) -> None:
    """Give the layers of `net` adapters and freeze everything else; layers whose names start with `frozen` get none.

    Those of an adapter folder that the config names are loaded (`rename` as in `prepare_adapters`). Others follow the
    lora_* keys: A is drawn on the CPU from `generator` and B is zero, so that at first the network is what it was.
    """
    from peft import LoraConfig, inject_adapter_in_model

    settings = LoraSettings.from_config(cfg)
    layers = (layer for layer in _layers(net) if not layer.name.startswith(frozen))
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=[layer.name for layer in settings.select(layers)],
        init_lora_weights="gaussian",
    )
    config._register_custom_module({nn.Linear: _adapted_linear()})  # peft has no public door for a layer of one's own
    inject_adapter_in_model(config, net, ADAPTER, low_cpu_mem_usage=True)
    for module in adapted_layers(net).values():
        device = module.base_layer.weight.device
        down, up = (part[ADAPTER].to(torch.float32).to_empty(device=device) for part in (module.lora_A, module.lora_B))
        nn.init.zeros_(up.weight)
        with torch.no_grad():
            down.weight.copy_(torch.randn(down.weight.shape, generator=generator) / settings.rank)
    if settings.folder is not None:
        prepare_adapters(net, settings.folder, rename=rename).run()


def adapted_layers(net: nn.Module) -> dict[str, Any]:
    """The layers of `net` that carry adapters, by name."""
    return {name: module for name, module in net.named_modules() if "lora_A" in dict(module.named_children())}


def save_adapters(net: nn.Module, folder: Path, base: str | None) -> None:
    """Write the adapters alone as peft does; `base` says where the weights they sit on can be found."""
    config = copy.copy(_config(net))
    config.base_model_name_or_path, config.target_modules = base, sorted(adapted_layers(net))
    config.save_pretrained(str(folder))
    tensors = {f"base_model.model.{name}": tensor for name, tensor in _adapter_tensors(net).items()}
    save_tensors(tensors, folder / WEIGHTS_FILE)


def prepare_adapters(net: nn.Module, folder: Path, *, rename: Rename = lambda name: name) -> PreparedLoad:
    """Check whether the adapters of a peft folder fit those of `net` in rank, scale, names and shapes.

    `rename` maps layers (as `<layer>.weight`) like those of the base.
    """
    settings, config = LoraSettings.from_folder(folder), _config(net)
    for key, name, stored, wanted in (
        ("r", "lora_rank", settings.rank, config.r),
        ("lora_alpha", "lora_alpha", settings.alpha, config.lora_alpha),
    ):
        if stored != wanted:
            raise UserError(f"{folder / CONFIG_FILE}: {key}={stored:g}, but actor.model.{name} is {wanted:g} here")
    file = folder / (WEIGHTS_FILE if (folder / WEIGHTS_FILE).is_file() else _OLD_WEIGHTS_FILE)
    if not file.is_file():
        raise UserError(f"{folder} has {CONFIG_FILE} but no {WEIGHTS_FILE}; the copy is incomplete")
    for name, header in read_headers(file).items():
        if ".lora_A." in name and header.shape and header.shape[0] != settings.rank:
            raise UserError(f"{file}: {name} has rank {header.shape[0]}, {CONFIG_FILE} says r={settings.rank}")
    # peft stores frozen vocabulary tables beside the adapters of one: copies of the base, not needed.
    tables = tuple(name for name in base_state(net) if name.endswith(("embed_tokens.weight", "lm_head.weight")))
    load = prepare_load(_adapter_tensors(net), file, rename=rename, optional=tables)
    if load.missing:
        raise UserError(f"{file} holds no adapters")
    return load


def base_state(net: nn.Module) -> dict[str, Tensor]:
    """The weights under the adapters, by the names they have without them."""
    return {plain_name(name): t for name, t in net.state_dict().items() if ".lora_" not in name}


def merged_state(net: nn.Module) -> dict[str, Tensor]:
    """The weights with their adapters added in fp32, in the dtypes and under the names of the base."""
    merged = {f"{name}.weight": effective_weight(module).detach() for name, module in adapted_layers(net).items()}
    return base_state(net) | merged


@cache
def _adapted_linear() -> type[nn.Module]:
    from peft.tuners.lora import Linear

    class AdaptedLinear(Linear):
        """peft's layer, whose own forward would copy its input to fp32."""

        def forward(self, x: Tensor) -> Tensor:
            return add_adapter(self, x, self.base_layer(x))

    return AdaptedLinear


def _config(net: nn.Module) -> Any:
    """peft's record of what it attached."""
    holder: Any = net
    return holder.peft_config[ADAPTER]


def _adapter_tensors(net: nn.Module) -> dict[str, Tensor]:
    return {
        f"{name}.{part}.weight": layer.get_submodule(part)[ADAPTER].weight
        for name, layer in adapted_layers(net).items()
        for part in ("lora_A", "lora_B")
    }


def _layers(net: nn.Module) -> Iterable[Layer]:
    """Every layer that can be adapted."""
    for name, m in net.named_modules():
        if isinstance(m, nn.Linear | nn.Conv2d):
            yield Layer(name, m.weight[0].numel(), m.weight.shape[0], m.bias is not None, isinstance(m, nn.Linear))
