"""Policy: what workers call on a model, whichever it is, and how a model is found by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, Self

import torch
from torch import nn

from rlinf.data.noise import Noise
from rlinf.data.types import Observation, PolicyEval, PolicyOutput
from rlinf.errors import UserError
from rlinf.models.action_path import ActionPath
from rlinf.models.config import ModelConfig, PolicySpec, own_models
from rlinf.plugins import MODEL, dotted_path, import_attribute

Tensor = torch.Tensor
ImageTokenLoss = Callable[[Tensor], Tensor]  # mean image tokens f32 [B, W] -> a scalar


class Policy(nn.Module):
    """A vision-language-action policy. Workers never ask which one they hold."""

    spec: PolicySpec
    moves_observations: bool = False  # whether predict itself brings what it reads of an observation to its device

    @classmethod
    def build(cls, cfg: ModelConfig, device: torch.device, *, seed: int = 0) -> Self:
        """From `cfg.model_path`, or from random weights drawn from `seed` when there is none."""
        raise NotImplementedError

    @classmethod
    def action_path(cls, cfg: ModelConfig) -> ActionPath:
        """What stands around the network, with the statistics of `cfg.model_path`; for `rlinf doctor --recipe`."""
        raise UserError(f"model {cfg.model_type!r} has no action path to check: its Policy lacks `action_path`")

    def predict(self, obs: Observation, *, mode: Literal["train", "eval"], noise: Noise) -> PolicyOutput:
        """Actions for one chunk; no gradients. `eval` samples deterministically and gives no log-probs."""
        raise NotImplementedError

    def evaluate(
        self, replay: dict[str, Tensor], *, values: bool, entropy: bool, cache: dict[str, Tensor] | None = None
    ) -> PolicyEval:
        """Log-probs (and values, entropy) of stored actions under the current weights, with gradients.

        At unchanged weights it returns predict's numbers. `cache` holds rows of PolicyOutput.cache, where kept.
        """
        raise NotImplementedError

    def value(self, obs: Observation, *, noise: Noise) -> Tensor:
        """Critic value f32 [B, V] without sampling an action; no gradients."""
        raise NotImplementedError

    def sft_loss(
        self,
        obs: Observation,
        actions: Tensor,
        *,
        noise: Noise,
        is_target: Tensor | None = None,
        draws: int = 1,
        image_token_loss: ImageTokenLoss | None = None,
    ) -> Tensor:
        """Imitation loss, a scalar with gradients, for the next `action_horizon` expert actions [B, H, A] in env units.

        Where `is_target`, bool [B, H], is False the episode was over: that action is not learned (None: all are). A
        model that adds noise to its targets averages over `draws` draws per row. `image_token_loss`, a further loss of
        each row's mean image token, is added; only a policy that has an `image_width` takes one.
        """
        raise NotImplementedError

    @property
    def action_horizon(self) -> int:
        """H: actions the network predicts at once, of which the first `spec.num_action_chunks` are executed."""
        return self.spec.num_action_chunks

    def resize_images(self, images: Tensor) -> Tensor:
        """u8 [B, H, W, 3] in the size the network reads, where that changes nothing else; imitation does it once."""
        return images

    @property
    def image_width(self) -> int | None:
        """W of the mean image token that `sft_loss` hands to `image_token_loss`; None: it takes no such loss."""
        return None

    @property
    def relative_actions(self) -> bool:
        """Whether actions are learned relative to the state that a chunk starts from."""
        return False

    def fit_statistics(self, states: Tensor | None, actions: Tensor) -> None:
        """Set the normalisation statistics from data (states [M, S], actions [M, A]); saved beside the weights.

        With `relative_actions`, actions may be [M, H, A]: all that are executed from each state on.
        """
        raise NotImplementedError

    def set_global_step(self, step: int) -> None:
        """Called before each rollout; samplers with an annealed noise level read it."""

    def forget_recordings(self) -> None:
        """Free the memory of recorded kernels; called before the weights leave their device."""

    def save_pretrained(self, folder: Path) -> None:
        """Write config.json, weights as safetensors, normalisation statistics and tokenizer: `build` reads it back."""
        raise NotImplementedError

    def load_pretrained(self, folder: Path) -> None:
        """Take weights and normalisation statistics of a folder that save_pretrained wrote (or a published one)."""
        raise NotImplementedError

    def load_weights(self, file: Path) -> None:
        """Replace the weights by those of one file (.safetensors, or .pt read weights-only), strictly."""
        raise NotImplementedError

    def trainable_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What the optimiser steps and weight sync sends."""
        return ((n, p) for n, p in self.named_parameters() if p.requires_grad)


def find_policy(model_type: str) -> type[Policy]:
    """The `Policy` class of a model."""
    return import_attribute(MODEL, f"{dotted_path(MODEL, model_type, own_models())}.policy.Policy")
