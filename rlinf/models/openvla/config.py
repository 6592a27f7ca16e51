"""Torch-free description of OpenVLA: one action a call, its tokens decoded one after another."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from rlinf.errors import UserError
from rlinf.models.prismatic.base_config import PrismaticConfig


@dataclass(frozen=True, kw_only=True)
class Config(PrismaticConfig):
    """`actor.model` of OpenVLA."""

    model_type: str = "openvla"

    @classmethod
    def examples(cls) -> tuple[Self, ...]:
        """Plain sampling with a critic; flatter sampling among the best bins; adapters."""
        plain = cls(size="compact", action_dim=3, add_value_head=True)
        return (
            plain,
            replace(plain, action_dim=7, temperature_train=1.6, top_k=50, add_value_head=False),
            replace(plain, is_lora=True, lora_rank=4, lora_alpha=16),
        )

    def check(self) -> None:
        """One action a call, one camera, no state: what the published network reads and gives."""
        super().check()
        for key, value, wanted, can in (
            ("num_action_chunks", self.num_action_chunks, 1, "decodes chunks of actions"),
            ("num_images_in_input", self.num_images_in_input, 1, "reads several cameras"),
            ("use_proprio", self.use_proprio, False, "reads states"),
        ):
            if value != wanted:
                raise UserError(f"actor.model.{key}={value} must be {wanted} for model_type openvla; openvla_oft {can}")
