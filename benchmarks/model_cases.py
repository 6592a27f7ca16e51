"""The model configurations that `models.py` measures, with random weights, and observations for them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import torch

from rlinf.data.noise import Noise
from rlinf.data.types import ChunkIndex, Observation, PolicyOutput
from rlinf.models.config import ModelConfig
from rlinf.models.nn.graphs import Recorder
from rlinf.models.openpi.config import Config as PiConfig
from rlinf.models.openpi.config import OpenPiOptions
from rlinf.models.openvla.config import Config as OpenVlaConfig
from rlinf.models.openvla_oft.config import Config as OftConfig
from rlinf.models.policy import Policy, find_policy
from rlinf.training.optim import VALUE_HEAD

WORD = "the"  # one piece of the bundled tokenizer


@dataclass(frozen=True)
class Case:
    """A model as a recipe uses it."""

    title: str
    prompt: int  # tokens of every instruction
    make: Callable[[str], ModelConfig]  # from the network's size

    def config(self, size: str, **changes: Any) -> ModelConfig:
        """Its configuration; gradient checkpointing is on unless told otherwise, which only updates notice."""
        return replace(self.make(size), **({"gradient_checkpointing": True} | changes))


def _pi(size: str, name: str, columns: int, **options: Any) -> ModelConfig:
    return PiConfig(
        size=size,
        num_action_chunks=5,
        action_dim=columns,
        num_steps=5,
        add_value_head=True,
        openpi=OpenPiOptions(config_name=name, action_horizon=5, train_expert_only=True, **options),
    )


def _robotwin(size: str) -> ModelConfig:
    return OftConfig(
        size=size,
        implement_version="official",
        num_action_chunks=25,
        action_dim=14,
        use_proprio=True,
        proprio_dim=14,
        max_prompt_length=512,
    )


def _maniskill_oft(size: str) -> ModelConfig:
    return OftConfig(
        size=size,
        num_action_chunks=8,
        action_dim=7,
        max_prompt_length=30,
        add_value_head=True,
        value_type="action_level",
    )


CASES = {
    "pi0": Case(
        "π0 MetaWorld, 1 camera, 16 tokens, H=5, N=5",
        16,
        lambda size: _pi(size, "pi0_metaworld", 4, detach_critic_input=True),
    ),
    "pi0_3cam": Case(
        "π0 as upstream, 3 cameras, 48 tokens, H=5, N=5",
        48,
        lambda size: _pi(size, "pi0_metaworld", 4, detach_critic_input=True, num_images_in_input=3),
    ),
    "pi05": Case(
        "π0.5 CALVIN, 2 cameras, 20 tokens, H=5, N=5",
        20,
        lambda size: _pi(size, "pi05_calvin", 7, value_after_vlm=True),
    ),
    "oft": Case("OpenVLA-OFT ManiSkill, K=8, 30 tokens", 30, _maniskill_oft),
    "openvla": Case(
        "OpenVLA ManiSkill, L=287, 7 tokens",
        31,
        lambda size: OpenVlaConfig(size=size, max_prompt_length=31, add_value_head=True),
    ),
    "oft_robotwin": Case("OpenVLA-OFT RoboTwin, 25x14, state, 46 tokens", 46, _robotwin),
}


@dataclass(frozen=True)
class Subject:
    """A case with its policy on a device, and an instruction of the right length."""

    key: str
    cfg: ModelConfig
    policy: Policy
    device: torch.device
    text: str
    prompt: int  # its tokens

    @classmethod
    def build(cls, key: str, size: str, device: torch.device, **changes: Any) -> Self:
        """Random weights, with a critic that is awake: it starts at zero, which would hide differences."""
        cfg = CASES[key].config(size, **changes)
        policy = find_policy(cfg.model_type).build(cfg, device)
        with torch.no_grad():
            for name, parameter in policy.named_parameters():
                if VALUE_HEAD in name and parameter.dim() == 2 and not bool(parameter.any()):
                    parameter.normal_(std=parameter.shape[1] ** -0.5)
        return cls(key, cfg, policy, device, *_instruction(policy, CASES[key].prompt))

    @property
    def recorder(self) -> Recorder:
        """What replays the policy's acting function."""
        return next(value for value in vars(self.policy).values() if isinstance(value, Recorder))

    def observe(self, rows: int, seed: int = 0) -> Observation:
        """Random pictures of the network's own size on the host, states, and one instruction for all."""
        spec, generator = self.policy.spec, torch.Generator().manual_seed(seed)

        def pictures(*shape: int) -> torch.Tensor:
            size = spec.image_size
            return torch.randint(0, 256, (*shape, size, size, 3), dtype=torch.uint8, generator=generator)

        return Observation(
            images=pictures(rows),
            wrist_images=pictures(rows, spec.num_images - 1) if spec.num_images > 1 else None,
            states=torch.randn(rows, spec.state_dim, generator=generator) if spec.state_dim else None,
            task_descriptions=[self.text] * rows,
        )

    def act(self, obs: Observation, mode: Literal["train", "eval"], chunk: int = 0) -> PolicyOutput:
        """A call as the rollout makes it, its noise drawn anew."""
        noise = Noise(seed=0, at=ChunkIndex(0, 0, chunk), env_ids=range(len(obs)), device=self.device)
        return self.policy.predict(obs, mode=mode, noise=noise)


def _instruction(policy: Any, tokens: int) -> tuple[str, int]:
    """An instruction whose prompt has `tokens` tokens, or more where the prompt's own words do, and their number."""
    for words in range(1, tokens + 1):
        text = " ".join([WORD] * words)
        used = policy.processor.tokenizer([text]).longest
        if used >= tokens:
            break
    return text, used


def collect_garbage() -> None:
    """Give the memory of policies that nobody holds any more, and of their recordings, back to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
