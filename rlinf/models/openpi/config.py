"""Torch-free description of π0 and π0.5: the keys of `actor.model`, its block `openpi`, and what follows from them.

Letters: D model action columns (actions and state are zero-padded to it), H actions the network denoises at once.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, Self

from rlinf.errors import UserError, did_you_mean
from rlinf.models.config import DataShape, ModelConfig, PolicySpec, Precision, PrecisionName, RunSettings
from rlinf.models.files.lora_settings import LoraSettings
from rlinf.models.openpi.architecture import SIZES, VLM, Architecture
from rlinf.models.openpi.conventions import CONVENTIONS, DataConvention
from rlinf.typed import Within, check_fields

NoiseMethod = Literal["flow_sde", "flow_noise", "flow_cps", "flow_ode"]
Few = Annotated[int, Within(1, 1000)]
Noise = Annotated[float, Within(0, 1000)]
ValueInput = Literal["expert", "vlm", "state"]
STATE_KEY = "actor.model.openpi.state_dim"
ALL_CAMERAS = 3  # main, left wrist, right wrist
LORA_PARTS = ("value_head", "noise_head", "adapters")  # what learns under LoRA


@dataclass(frozen=True, kw_only=True)
class OpenPiOptions:
    """`actor.model.openpi`: the flow policy. A null follows the key of the same name above it, or `config_name`."""

    config_name: str = "pi0_metaworld"
    """Data convention of the checkpoint: prompt, normalisation, cameras, horizon; its first word says π0 or π0.5."""
    num_images_in_input: Annotated[int, Within(1, ALL_CAMERAS)] | None = None
    """Cameras read, main first; null reads all that config_name has."""
    action_chunk: Few | None = None
    """Actions executed per call; must equal actor.model.num_action_chunks."""
    action_env_dim: Few | None = None
    """Action columns the simulator takes; must equal actor.model.action_dim."""
    action_horizon: Few | None = None
    """Actions denoised at once (H); null takes config_name's for `base` and action_chunk for the other sizes."""
    max_token_len: Annotated[int, Within(1, 10**5)] | None = None
    """Prompt slots stored per sample; longer prompts are cut."""
    state_dim: Annotated[int, Within(0, 1000)] | None = None
    """State columns read; null takes config_name's."""
    num_steps: Few | None = None
    """Denoising steps (N)."""
    noise_method: NoiseMethod = "flow_sde"
    """What makes the flow a stochastic policy; flow_ode has no log-prob."""
    noise_level: Noise = 0.5
    """Noise scale a of flow_sde and flow_cps."""
    noise_anneal: bool = False
    """Move noise_level along noise_params with the training step."""
    noise_params: list[Annotated[float, Within(0, 1e6)]] = field(default_factory=lambda: [0.7, 0.3, 400.0])
    """Start, end and number of steps of the annealing."""
    noise_per: Literal["action", "chunk"] = "action"
    """What gets a draw of flow_sde's and flow_cps's noise of its own: every action, or all executed ones together."""
    noise_logvar_range: list[Noise] = field(default_factory=lambda: [0.08, 0.16])
    """Smallest and largest standard deviation (despite the name) of flow_noise."""
    joint_logprob: bool = False
    """Score every denoising step (averaged) instead of one random step."""
    ignore_last: bool = False
    """Never choose the last denoising step."""
    safe_get_logprob: bool = False
    """Score by the negative squared distance instead of the Gaussian log-density."""
    train_expert_only: bool | None = None
    """Freeze the vision-language model and train the action expert alone; null does so for `base` only."""
    add_value_head: bool | None = None
    """Must agree with actor.model.add_value_head when set."""
    detach_critic_input: bool | None = None
    """Keep the critic's gradient out of the network it reads."""
    chunk_critic_input: bool = False
    """Expert critic: average the executed actions' features only."""
    value_after_vlm: bool = False
    """Critic on the pooled vision-language output instead of the expert's."""
    value_vlm_mode: Literal["mean_token", "first_token", "last_token"] = "mean_token"
    """How the vision-language output is pooled (over valid tokens)."""
    value_input: ValueInput | None = None
    """expert, vlm, or state: a small critic on the simulator's privileged state; null follows value_after_vlm."""
    critic_state_dim: Annotated[int, Within(0, 10**5)] = 0
    """Columns of that privileged state; 0 takes the simulator's."""
    use_dsrl: bool = False
    """Must stay false: steering a frozen policy by its noise (DSRL) is not supported."""


@dataclass(frozen=True, kw_only=True)
class Config(ModelConfig):
    """`actor.model` of π0 and π0.5."""

    model_type: str = "openpi"
    precision: PrecisionName | None = None
    """fp32, bf16, or null: bf16 for `base`, else fp32. A run of `compact`, which is made for CPUs, is always fp32."""
    num_images_in_input: Annotated[int, Within(0, ALL_CAMERAS)] = 0
    """Cameras read; 0 leaves it to openpi.num_images_in_input."""
    use_proprio: bool = True
    """Accepted for compatibility; openpi.config_name says whether the state is read."""
    num_steps: Few | None = None
    """Denoising steps; openpi.num_steps wins."""
    openpi: OpenPiOptions = field(default_factory=OpenPiOptions)
    """The flow policy."""

    @classmethod
    def examples(cls) -> tuple[Self, ...]:
        """π0 with everything learning, π0.5 with a frozen VLM and a critic on it, two cameras; and LoRA."""
        rows = (
            OpenPiOptions(config_name="pi0_metaworld", train_expert_only=False),
            OpenPiOptions(config_name="pi05_metaworld", train_expert_only=True, value_after_vlm=True),
            OpenPiOptions(config_name="pi0_calvin", noise_method="flow_noise", joint_logprob=True),
        )
        plain = cls(size="compact", num_action_chunks=3, num_steps=3, add_value_head=True)
        full = [replace(plain, action_dim=CONVENTIONS[row.config_name].action_dim, openpi=row) for row in rows]
        return *full, *(replace(cfg, is_lora=True, lora_rank=4, lora_alpha=16) for cfg in full[:2])

    def for_run(self, run: RunSettings) -> Self:
        """This block with the simulator's privileged state and the precision of small runs."""
        options, is_bf16 = self.openpi, self.stored_precision == "bf16"
        if self.value_input == "state" and not options.critic_state_dim:
            options = replace(options, critic_state_dim=run.critic_state_dim)
        precision = "fp32" if self.size == "compact" and is_bf16 else self.precision
        return replace(super().for_run(run), openpi=options, precision=precision)

    def for_data(self, data: DataShape) -> Self:
        """This block with a dataset's action columns, and its state columns and cameras where no file sets them."""
        options = self.openpi
        if not self.action_dim:
            options = replace(options, action_env_dim=None)  # which follows action_dim in the shipped model blocks
        if options.state_dim is None:
            options = replace(options, state_dim=data.state_dim)
        if not self.num_images_in_input and options.num_images_in_input is None:
            options = replace(options, num_images_in_input=min(data.num_cameras, ALL_CAMERAS))
        return replace(super().for_data(data), openpi=options)

    @property
    def convention(self) -> DataConvention:
        """The row of `config_name`."""
        name = self.openpi.config_name
        if name not in CONVENTIONS:
            near, known = did_you_mean(name, CONVENTIONS), ", ".join(CONVENTIONS)
            raise UserError(f"actor.model.openpi.config_name={name!r} is unknown{near}; available: {known}")
        return CONVENTIONS[name]

    @property
    def denoise_steps(self) -> int:
        """N: openpi.num_steps, else num_steps, else 4 (π0) or 5 (π0.5)."""
        return self.openpi.num_steps or self.num_steps or (5 if self.convention.pi05 else 4)

    @property
    def num_cameras(self) -> int:
        """Cameras the network reads; absent ones are never computed."""
        return self.openpi.num_images_in_input or self.num_images_in_input or self.convention.cameras

    @property
    def images_key(self) -> str:
        """The key `num_cameras` comes from, or would have to be set."""
        top = self.num_images_in_input and not self.openpi.num_images_in_input
        return f"actor.model.{'' if top else 'openpi.'}num_images_in_input"

    @property
    def state_dim(self) -> int:
        """State columns the policy reads; 0 for a π0.5 without state."""
        if self.convention.pi05 and not self.convention.discrete_state:
            return 0
        return self.convention.state_dim if self.openpi.state_dim is None else self.openpi.state_dim

    @property
    def freeze_vlm(self) -> bool:
        """Whether only the expert and the heads learn."""
        frozen = self.openpi.train_expert_only
        return self.size == "base" if frozen is None else frozen

    @property
    def value_input(self) -> ValueInput | None:
        """What the critic reads; None without a critic."""
        if not self.add_value_head:
            return None
        return self.openpi.value_input or ("vlm" if self.openpi.value_after_vlm else "expert")

    @property
    def default_precision(self) -> Precision:
        """Of the network, with the published fp32 exceptions in bf16; the heads are fp32."""
        return "bf16" if self.size == "base" else "fp32"

    def acting(self) -> dict[str, Any]:
        """See ModelConfig.acting."""
        arch = self.architecture()
        return super().acting() | {
            "config_name": self.openpi.config_name,
            "denoise_steps": self.denoise_steps,
            "action_horizon": arch.action_horizon,
            "max_token_len": arch.max_token_len,
        }

    def architecture(self) -> Architecture:
        """The network of `size` for this convention."""
        if self.size not in SIZES:
            raise UserError(f"actor.model.size={self.size!r} must be one of {', '.join(SIZES)}")
        row, base = self.convention, self.size == "base"
        sizes = SIZES[self.size]
        columns = max(sizes.action_dim, self.action_dim, self.state_dim)
        prompt = row.max_token_len if base or row.discrete_state else 48
        return replace(
            sizes,
            pi05=row.pi05,
            action_dim=columns if base else -(-columns // 8) * 8,
            action_horizon=self.openpi.action_horizon or (row.action_horizon if base else self.num_action_chunks),
            max_token_len=self.openpi.max_token_len or prompt,
        )

    def value_hidden(self) -> tuple[int, ...]:
        """Hidden widths of the critic."""
        if self.value_input == "state":
            return (128, 128)
        return self.convention.value_hidden if self.size == "base" else (128, 64)

    def value_width(self) -> int:
        """Columns the critic's first layer reads; of a state, each is read at two scales too, as sine and cosine."""
        if self.value_input == "state":
            return 5 * self.openpi.critic_state_dim
        arch = self.architecture()
        return arch.vlm_width if self.value_input == "vlm" else arch.expert_width

    def noise_hidden(self) -> tuple[int, int]:
        """Hidden widths of flow_noise's variance network."""
        return (128, 64) if self.size == "base" else (64, 32)

    def num_parameters(self) -> dict[str, int]:
        """Exact parameter counts by part; their sum is what `build` allocates."""
        arch = self.architecture()
        counts = arch.num_parameters()
        if self.value_input is not None:
            widths = (self.value_width(), *self.value_hidden(), 1)
            counts["value_head"] = _mlp_parameters(widths) + (2 * widths[1] if self.value_input == "state" else 0)
        if self.openpi.noise_method == "flow_noise":
            counts["noise_head"] = _mlp_parameters((arch.expert_width, *self.noise_hidden(), arch.action_dim))
        if self.is_lora:
            frozen = (VLM,) if self.freeze_vlm else ()
            layers = (layer for layer in arch.layers() if not layer.name.startswith(frozen))
            counts["adapters"] = LoraSettings.from_config(self).num_parameters(layers)
        return counts

    def num_trainable_parameters(self) -> int:
        """Number of parameters that the optimiser steps."""
        if self.is_lora:
            return sum(n for part, n in self.num_parameters().items() if part in LORA_PARTS)
        frozen = ("vision", "projector", "embedding", "language") if self.freeze_vlm else ()
        return sum(n for part, n in self.num_parameters().items() if part not in frozen)

    def cache_bytes_per_sample(self) -> int:
        """One row of prefix keys and values (and the pooled output a VLM critic reads); 0 while the VLM learns."""
        if not self.freeze_vlm:
            return 0
        arch = self.architecture()
        tokens = self.num_cameras * arch.image_tokens + arch.max_token_len
        numbers = 2 * arch.depth * arch.num_kv_heads * arch.head_dim * tokens
        pooled = 4 * arch.vlm_width if self.value_input == "vlm" else 0
        return numbers * (2 if self.stored_precision == "bf16" else 4) + pooled

    def spec(self) -> PolicySpec:
        """The promises of this configuration; raises UserError naming the key when it is impossible."""
        self._check()
        return PolicySpec(
            action_dim=self.action_dim,
            num_action_chunks=self.num_action_chunks,
            image_size=self.architecture().image_size,
            num_images=self.num_cameras,
            state_dim=self.state_dim,
            has_logprob=self._without_noise() is None,
            has_value=self.value_input is not None,
            values_per_chunk=1,
            critic_state_dim=self.openpi.critic_state_dim if self.value_input == "state" else 0,
            images_key=self.images_key,
            state_key=STATE_KEY,
        )

    def without_logprob(self) -> str:
        """The setting that leaves the policy without log-probs."""
        return f"actor.model.openpi.{self._without_noise()}"

    def _without_noise(self) -> str | None:
        """The setting that makes actions deterministic, if any: they have no log-prob then."""
        options = self.openpi
        if options.noise_method == "flow_ode":
            return "noise_method=flow_ode"
        if options.noise_method == "flow_noise":
            return None
        if options.noise_anneal:
            return f"noise_params={options.noise_params}" if 0 in options.noise_params[:2] else None
        return None if options.noise_level else f"noise_level={options.noise_level}"

    def _check(self) -> None:
        """Refuse what cannot be built."""
        check_fields(self, "actor.model")
        check_fields(self.openpi, "actor.model.openpi")
        options, arch, prefix = self.openpi, self.architecture(), "actor.model"
        above = {
            "action_chunk": "num_action_chunks",
            "action_env_dim": "action_dim",
            "add_value_head": "add_value_head",
        }
        for key, top in above.items():
            own, wanted = vars(options)[key], vars(self)[top]
            if own not in (None, wanted):
                raise UserError(f"{prefix}.openpi.{key}={own} must equal {prefix}.{top}={wanted}")
        if self.num_action_chunks > arch.action_horizon:
            raise UserError(
                f"{prefix}.num_action_chunks={self.num_action_chunks} must be at most the action horizon "
                f"{arch.action_horizon} of {options.config_name}"
            )
        if self.state_dim < 1 and (not self.convention.pi05 or self.convention.discrete_state):
            raise UserError(f"{STATE_KEY}={self.state_dim} must be at least 1: {options.config_name} reads it")
        if self.denoise_steps < (2 if options.noise_method == "flow_cps" or options.ignore_last else 1):
            raise UserError(f"{prefix}.openpi.num_steps={self.denoise_steps} leaves no stochastic step; raise it")
        if options.use_dsrl:
            raise UserError(f"{prefix}.openpi.use_dsrl=True is not supported; set it to False")
        if self.value_type != "chunk_level":
            raise UserError(f"{prefix}.value_type={self.value_type} must be chunk_level for model_type openpi")
        self._check_noise()

    def _check_noise(self) -> None:
        """Refuse numbers that would divide by zero or give no standard deviation."""
        options, prefix = self.openpi, "actor.model.openpi"
        if len(options.noise_params) != 3 or len(options.noise_logvar_range) != 2:
            raise UserError(f"{prefix}.noise_params needs 3 numbers and noise_logvar_range 2")
        if options.noise_anneal and options.noise_params[2] == 0:
            raise UserError(f"{prefix}.noise_params={options.noise_params} must end with a positive number of steps")
        if options.noise_per == "chunk":
            for key, value in (("joint_logprob", True), ("safe_get_logprob", True), ("noise_method", "flow_noise")):
                if vars(options)[key] == value:
                    raise UserError(f"{prefix}.{key}={value} scores every action by itself; set noise_per to action")
        low, high = options.noise_logvar_range
        if options.noise_method == "flow_noise" and not 0 < low <= high:
            raise UserError(
                f"{prefix}.noise_logvar_range={options.noise_logvar_range} must be two positive standard deviations, "
                "the smaller one first"
            )


def _mlp_parameters(widths: tuple[int, ...]) -> int:
    return sum(a * b + b for a, b in itertools.pairwise(widths))
