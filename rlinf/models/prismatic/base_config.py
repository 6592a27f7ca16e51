"""Torch-free keys that OpenVLA and OpenVLA-OFT share in `actor.model`, both built on the network named Prismatic."""

from __future__ import annotations

import itertools
import logging
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal, Self

from rlinf.errors import UserError
from rlinf.models.config import ModelConfig, PolicySpec, Precision, PrecisionName, RunSettings
from rlinf.models.files.lora_settings import LoraSettings
from rlinf.models.prismatic.architecture import NUM_BINS, PLAIN, SIZES, Architecture, Parts
from rlinf.typed import Within, check_fields

logger = logging.getLogger(__name__)

SAMPLING = ("temperature_train", "temperature_eval", "top_k")  # keys that rollout.sampling_params sets
SMALL_PROMPT = 64  # slots of the sizes that read with the bundled tokenizer, whose pieces are shorter than Llama-2's


@dataclass(frozen=True, kw_only=True)
class PrismaticConfig(ModelConfig):
    """`actor.model` of a policy over action tokens."""

    precision: PrecisionName | None = None
    """fp32, bf16, or null: bf16 for `base`, else fp32. A run of `compact`, which is made for CPUs, is always fp32."""
    max_prompt_length: Annotated[int, Within(8, 10**5)] = 30
    """Prompt slots stored per sample; longer prompts are cut, with a warning. Sizes below `base` keep at least 64."""
    statistics: Literal["q99", "bounds"] | None = None
    """Range that actions and state are normalised by: 1st to 99th percentile, or minimum to maximum; null: bounds for
    OFT's `implement_version: official`, q99 for every other."""
    temperature_train: Annotated[float, Within(0.001, 100)] = 1.0
    """Set from rollout.sampling_params, over a value given here: divides the logits of the action bins."""
    temperature_eval: Annotated[float, Within(-1, 100)] = 0.0
    """Set from rollout.sampling_params, over a value given here; greedy when <= 0."""
    top_k: Annotated[int, Within(-1, NUM_BINS)] = 0
    """Set from rollout.sampling_params, over a value given here: draw from this many of the 256 bins; <= 0: all."""
    center_crop: bool = False
    """Accepted for compatibility and without effect, as in the published code: neither policy nor simulator crops."""

    def for_run(self, run: RunSettings) -> Self:
        """This block with the sampling parameters and the precision of small runs filled in."""
        self._warn_of_sampling(run)
        return replace(
            super().for_run(run),
            precision="fp32" if self.size == "compact" else self.precision,
            temperature_train=run.temperature_train,
            temperature_eval=run.temperature_eval,
            top_k=run.top_k,
        )

    def _warn_of_sampling(self, run: RunSettings) -> None:
        """Say so when a sampling parameter was set in this block, where it has no effect."""
        for f in fields(self):
            if f.name in SAMPLING and (given := vars(self)[f.name]) not in (f.default, used := vars(run)[f.name]):
                winner = f"rollout.sampling_params.{f.name}={used}"
                logger.warning("actor.model.%s=%s has no effect: %s decides", f.name, given, winner)

    def acting(self) -> dict[str, Any]:
        """See ModelConfig.acting."""
        parts = self.parts()
        return super().acting() | {
            "temperature": max(self.temperature_eval, 0.0),
            "top_k": max(self.top_k, 0),
            "statistics": self.statistics_kind,
            "prompt_slots": self.prompt_slots,
            "stop_token": self.has_stop_token,
            "film": parts.film,
            "head": "tokens" if parts.regression is None else "l1",
        }

    # ------------------------------------------------------------------ parts of the network
    def parts(self) -> Parts:
        """The optional parts of the network."""
        return PLAIN

    @property
    def state_columns(self) -> int:
        """State columns read as one token; 0 when there is none."""
        return self.parts().proprio_dim

    @property
    def regression(self) -> tuple[int, int] | None:
        """Actions and columns of an L1 head; None for a policy over bins."""
        return self.parts().regression

    @property
    def has_stop_token(self) -> bool:
        """Whether </s> follows the action slots, which see it."""
        return False

    def architecture(self) -> Architecture:
        """The network of `size`."""
        if self.size not in SIZES:
            raise UserError(f"actor.model.size={self.size!r} must be one of {', '.join(SIZES)}")
        return SIZES[self.size]

    @property
    def has_critic(self) -> bool:
        """Whether there is a value head; a policy without log-probs has no use for one."""
        return self.add_value_head and self.regression is None

    @property
    def values_per_chunk(self) -> int:
        """Outputs of the value head."""
        return self.num_action_chunks if self.value_type == "action_level" else 1

    def value_hidden(self) -> tuple[int, int]:
        """Hidden widths of the value head."""
        return (512, 128) if self.size == "base" else (128, 64)

    # ------------------------------------------------------------------ derived numbers
    @property
    def prompt_slots(self) -> int:
        """Ids stored per prompt."""
        return self.max_prompt_length if self.size == "base" else max(self.max_prompt_length, SMALL_PROMPT)

    @property
    def num_tokens(self) -> int:
        """Action tokens of one call."""
        return self.num_action_chunks * self.action_dim

    @property
    def statistics_kind(self) -> Literal["q99", "bounds"]:
        """The range in use."""
        return self.statistics or "q99"

    @property
    def default_precision(self) -> Precision:
        """Of the whole network; the value head is fp32."""
        return "bf16" if self.size == "base" else "fp32"

    def num_parameters(self) -> dict[str, int]:
        """Exact parameter counts by part; their sum is what `build` allocates."""
        arch = self.architecture()
        counts = arch.num_parameters(self.parts())
        if self.has_critic:
            widths = (arch.width, *self.value_hidden())
            hidden = sum(a * b + b for a, b in itertools.pairwise(widths))
            counts["value_head"] = hidden + widths[-1] * self.values_per_chunk
        if self.is_lora:
            counts["adapters"] = LoraSettings.from_config(self).num_parameters(arch.layers(self.parts()))
        return counts

    def num_trainable_parameters(self) -> int:
        """Number of parameters that the optimiser steps: all, or adapters and value head."""
        counts = self.num_parameters()
        return sum(n for part, n in counts.items() if not self.is_lora or part in ("adapters", "value_head"))

    def spec(self) -> PolicySpec:
        """The promises of this configuration; raises UserError naming the key when it is impossible."""
        self.check()
        return PolicySpec(
            action_dim=self.action_dim,
            num_action_chunks=self.num_action_chunks,
            image_size=self.architecture().image_size,
            num_images=self.num_images_in_input,
            state_dim=self.state_columns,
            has_logprob=self.regression is None,
            has_value=self.has_critic,
            values_per_chunk=self.values_per_chunk,
            critic_state_dim=0,
            binary_gripper=True,
        )

    def check(self) -> None:
        """Refuse what cannot be built."""
        check_fields(self, "actor.model")
        _ = self.architecture()
