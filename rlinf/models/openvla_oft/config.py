"""Torch-free description of OpenVLA-OFT: a chunk of actions a call, all tokens decoded in parallel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Literal, Self

from rlinf.errors import UserError
from rlinf.models.config import DataShape
from rlinf.models.prismatic.architecture import Parts
from rlinf.models.prismatic.base_config import PrismaticConfig
from rlinf.typed import Within


@dataclass(frozen=True, kw_only=True)
class Config(PrismaticConfig):
    """`actor.model` of OpenVLA-OFT."""

    model_type: str = "openvla_oft"
    implement_version: Literal["rlinf", "official"] = "rlinf"
    """Sequence the checkpoint was trained on: `official` ends it with </s> and may read the state, `rlinf` does not."""
    action_head: Literal["tokens", "l1"] = "tokens"
    """`tokens` is a policy over 256 bins a column; `l1` regresses actions: evaluation and imitation only."""
    proprio_dim: Annotated[int, Within(1, 1000)] = 8
    """State columns read with use_proprio, as one token."""
    use_film: bool = False
    """Condition the vision towers on the instruction."""
    max_prompt_length: Annotated[int, Within(8, 10**5)] = 50
    """Prompt slots stored per sample; longer prompts are cut, with a warning. Sizes below `base` keep at least 64."""

    @classmethod
    def examples(cls) -> tuple[Self, ...]:
        """Both layouts: an action-level critic; state, two cameras, FiLM and flatter sampling; adapters."""
        plain = cls(size="compact", num_action_chunks=3, action_dim=4, add_value_head=True, value_type="action_level")
        official = cls(
            size="compact",
            implement_version="official",
            num_action_chunks=2,
            action_dim=7,
            use_proprio=True,
            proprio_dim=5,
            use_film=True,
            num_images_in_input=2,
            add_value_head=True,
            temperature_train=1.6,
            top_k=50,
        )
        return plain, official, replace(official, is_lora=True, lora_rank=4, lora_alpha=16)

    def left_to_data(self, is_given: Callable[[str], bool]) -> Self:
        """As ModelConfig.left_to_data, the state columns too."""
        block = super().left_to_data(is_given)
        return block if is_given("proprio_dim") else replace(block, proprio_dim=0)

    def for_data(self, data: DataShape) -> Self:
        """This block with a dataset's action and state columns."""
        return replace(super().for_data(data), proprio_dim=self.proprio_dim or data.state_dim)

    @property
    def has_stop_token(self) -> bool:
        """`official` sequences end in </s>."""
        return self.implement_version == "official"

    def parts(self) -> Parts:
        """The optional parts of the network."""
        return Parts(
            proprio_dim=self.proprio_dim if self.use_proprio else 0,
            film=self.use_film,
            regression=(self.num_action_chunks, self.action_dim) if self.action_head == "l1" else None,
        )

    @property
    def statistics_kind(self) -> Literal["q99", "bounds"]:
        """The range in use: `official` checkpoints (RoboTwin) were trained on minimum to maximum."""
        return self.statistics or ("bounds" if self.implement_version == "official" else "q99")

    def without_logprob(self) -> str:
        """The setting that leaves the policy without log-probs."""
        return f"actor.model.action_head={self.action_head}"

    def check(self) -> None:
        """The parts only `official` checkpoints have need that layout."""
        super().check()
        for key, value, wanted in (
            ("use_proprio", "True", self.use_proprio),
            ("action_head", "l1", self.action_head == "l1"),
        ):
            if wanted and self.implement_version != "official":
                raise UserError(
                    f"actor.model.{key}={value} needs actor.model.implement_version=official; "
                    f"`{self.implement_version}` checkpoints have no such part"
                )
