"""Torch-free description of a model: the `actor.model` block and what a policy promises its workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from rlinf.plugins import MODEL, available, dotted_path, import_attribute
from rlinf.typed import Count, Within

Precision = Literal["fp32", "bf16"]
PrecisionName = Literal["fp32", "32", "bf16", "bf16-mixed"]  # as configs write it


@dataclass(frozen=True)
class PolicySpec:
    """What workers, plan and config checks may know of a policy."""

    action_dim: int  # columns of `PolicyOutput.actions`
    num_action_chunks: int
    image_size: int  # side in pixels of the square images the model reads
    num_images: int  # cameras the model reads (main first, then wrist)
    state_dim: int  # state columns the model reads; 0 when it reads none
    has_logprob: bool  # an L1-regression head has none: RL on it is refused at config check
    has_value: bool
    values_per_chunk: int  # V: 1, or num_action_chunks for an action-level critic
    critic_state_dim: int  # privileged state its critic reads; 0 for none
    images_key: str = "actor.model.num_images_in_input"  # the keys that set num_images and state_dim, for errors
    state_key: str = "actor.model.proprio_dim"
    binary_gripper: bool = False  # a token policy's gripper has no meaningful zero: 0 maps to -1 where a sign is taken


@dataclass(frozen=True)
class DataShape:
    """What a dataset offers a policy that learns from it without a simulator."""

    action_dim: int
    state_dim: int  # 0 for none
    num_cameras: int


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Keys of other blocks of the config that a model must know."""

    critic_state_dim: int = 0  # columns of the simulator's privileged state
    temperature_train: float = 1.0  # rollout.sampling_params: token policies
    temperature_eval: float = 0.0  # greedy when <= 0
    top_k: int = 0  # <= 0 keeps every bin
    gradient_checkpointing: bool = False  # actor.fsdp_config.gradient_checkpointing


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """`actor.model`: keys every model understands; a model's own `Config` (models/<model_type>/config.py) adds some."""

    model_type: str
    """Folder under rlinf/models that implements the policy."""
    model_path: str | None = None
    """Checkpoint folder to start from; null starts from random weights, with a warning; size `base` needs one."""
    size: str = "base"
    """`base` (published), `small` (one GPU), `light` (one GPU, in minutes), `compact` (two CPU cores)."""
    precision: PrecisionName | None = None
    """fp32, bf16, or null to keep the model's own rule."""
    num_action_chunks: Annotated[int, Within(1, 1000)] = 1
    """Actions executed per policy call (C)."""
    action_dim: Annotated[int, Within(1, 1000)] = 7
    """Columns of an action as the policy gives it."""
    use_proprio: bool = False
    """Whether the model reads the robot state."""
    unnorm_key: str | None = None
    """Which action statistics of the checkpoint to un-normalise with."""
    add_value_head: bool = False
    """Whether a critic head is attached; needed by loss_type actor_critic."""
    value_type: Literal["chunk_level", "action_level"] = "chunk_level"
    """One value per chunk, or one per action."""
    is_lora: bool = False
    """Train adapters instead of the weights."""
    lora_rank: Annotated[int, Within(1, 10**4)] = 32
    """Rank of the adapters."""
    lora_alpha: Count | None = None
    """Scale of the adapters is lora_alpha / lora_rank; null takes the rank."""
    lora_dropout: Annotated[float, Within(0, 0.999)] = 0.0
    """Dropout in front of the adapters, in imitation only."""
    lora_targets: str | list[str] = "all-linear"
    """Names (or endings) of the layers that get adapters; `all-linear` adapts every one."""
    lora_path: str | None = None
    """Adapter folder to start from."""
    gradient_checkpointing: bool = False
    """Recompute each block's activations in the backward pass; actor.fsdp_config.gradient_checkpointing sets it too."""
    cuda_graphs: bool = True
    """Replay recorded kernels when acting on a GPU; the numbers are the same, small batches are much faster."""
    policy_setup: str | None = None
    """Robot convention of the checkpoint, e.g. widowx_bridge."""
    num_images_in_input: Annotated[int, Within(1, 16)] = 1
    """Cameras fed to the model: the main one first, then wrist cameras."""

    @classmethod
    def examples(cls) -> tuple[Self, ...]:
        """Compact configurations that cover the model; tests/contracts builds and checks each of them."""
        raise NotImplementedError

    def for_run(self, run: RunSettings) -> Self:
        """This block with what other blocks of the config decide."""
        return replace(self, gradient_checkpointing=self.gradient_checkpointing or run.gradient_checkpointing)

    def left_to_data(self, is_given: Callable[[str], bool]) -> Self:
        """This block for a run without a simulator: dimensions that no file sets are 0, until `for_data` sets them."""
        return self if is_given("action_dim") else replace(self, action_dim=0)

    def for_data(self, data: DataShape) -> Self:
        """This block with a dataset's dimensions in place of those left to it."""
        return replace(self, action_dim=self.action_dim or data.action_dim)

    @property
    def default_precision(self) -> Precision:
        """What the network is stored in where `precision` is null."""
        return "fp32"

    @property
    def stored_precision(self) -> Precision:
        """What the network is stored in; bf16 is refused where there is no GPU."""
        if self.precision is None:
            return self.default_precision
        return "bf16" if self.precision.startswith("bf16") else "fp32"

    def num_parameters(self) -> dict[str, int]:
        """Parameter counts by part."""
        raise NotImplementedError

    def num_trainable_parameters(self) -> int:
        """Number of parameters that the optimiser steps."""
        return sum(self.num_parameters().values())

    def cache_bytes_per_sample(self) -> int:
        """Largest size of one sample's row in the cache of frozen computations; 0 when the model keeps none."""
        return 0

    def acting(self) -> dict[str, Any]:
        """The settings that change the actions of an evaluation, for its protocol; a model adds those of its own."""
        return {
            "model_type": self.model_type,
            "size": self.size,
            "precision": self.stored_precision,
            "chunk": self.num_action_chunks,
            "action_dim": self.action_dim,
            "cameras": self.spec().num_images,
            "image_size": self.spec().image_size,
            "state_dim": self.spec().state_dim,
            "unnorm_key": self.unnorm_key,
            "policy_setup": self.policy_setup,
        }

    def without_logprob(self) -> str:
        """The key (or policy) to name where `spec().has_logprob` is False and RL is refused."""
        return f"actor.model: this {self.model_type} policy"

    def spec(self) -> PolicySpec:
        """The promises of this configuration; raises ValueError naming the key when it is impossible."""
        raise NotImplementedError


def is_placeholder(path: str | None) -> bool:
    """Whether a recipe's `/path/to/...` was left as it is."""
    return path is not None and path.startswith("/path/to")


@cache
def own_models() -> dict[str, str]:
    """The models of rlinf: model_type -> package. Every folder beside this file that declares a Config is one."""
    return {p.parent.name: f"rlinf.models.{p.parent.name}" for p in sorted(Path(__file__).parent.glob("*/config.py"))}


def available_models() -> tuple[str, ...]:
    """Every model_type that needs no dotted path."""
    return available(MODEL, list(own_models()))


def find_config(model_type: str) -> type[ModelConfig]:
    """The `Config` of a model; it imports no torch."""
    return import_attribute(MODEL, f"{dotted_path(MODEL, model_type, own_models())}.config.Config")
