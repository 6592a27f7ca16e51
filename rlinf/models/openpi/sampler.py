"""From a velocity field to a stochastic policy: sampling chains, and scoring stored ones.

Letters: B rows, N denoising steps, H actions, D action columns, W expert width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from rlinf.models.openpi import flow
from rlinf.models.openpi.config import NoiseMethod
from rlinf.models.openpi.heads import NoiseHead
from rlinf.models.openpi.model import PiNet, Prefix

Tensor = torch.Tensor


@dataclass(frozen=True)
class Transition:
    """The Gaussian of one denoising step at x."""

    mean: Tensor  # [B, H, D]
    std: Tensor  # [B, H, D]
    velocity: Tensor  # [B, H, D]
    features: Tensor  # expert output [B, H, W]


@dataclass(frozen=True)
class Chain:
    """A sampled path from noise to actions."""

    x: Tensor  # [B, N + 1, H, D], noise first
    logprobs: Tensor  # [B, H, D]; zeros for the ODE
    features: Tensor  # expert output at every step [B, N, H, W]


@dataclass(frozen=True)
class Score:
    """A stored path under the current weights."""

    logprobs: Tensor  # [B, H, D]
    entropy: Tensor  # [B, H, D]; 0 unless the variance is learned
    features: Tensor  # [B, 1, H, W] for one step, [B, N, H, W] jointly


@dataclass(frozen=True)
class Sampler:
    """One noise method at one noise level."""

    net: PiNet
    method: NoiseMethod
    num_steps: int
    noise_level: float = 0.5
    joint: bool = False
    squared_error: bool = False
    noise_head: NoiseHead | None = None

    def num_choices(self, *, ignore_last: bool) -> int:
        """Steps a single stochastic step may be drawn from; the last one of flow_cps has no noise."""
        return self.num_steps - (ignore_last or self.method == "flow_cps")

    def transition(self, prefix: Prefix, state: Tensor | None, x: Tensor, index: Tensor) -> Transition:
        """The stochastic step `index` i64 [B] at x [B, H, D]."""
        weights = flow.step_weights(self.method, self.num_steps, self.noise_level, x.device)
        features = self.net.suffix(prefix, state, x, weights.t[index])
        velocity = self.net.velocity(features)
        mean = flow.step_mean(weights, x, velocity, index)
        if self.noise_head is None:
            std = weights.std[index][:, None, None].expand_as(mean)
        else:
            std = self.noise_head(features)
        return Transition(mean, std, velocity, features)

    def ode(self, prefix: Prefix, state: Tensor | None, noise: Tensor) -> Chain:
        """The deterministic path from `noise` [B, H, D]."""
        never = torch.full((noise.shape[0],), -1, device=noise.device)
        return self._walk(prefix, state, noise, lambda i: noise, lambda i: never == i)

    def sample(
        self, prefix: Prefix, state: Tensor | None, noise: Tensor, draw: Callable[[int], Tensor], index: Tensor | None
    ) -> Chain:
        """A random path: step `index` i64 [B] is stochastic with draw(i) [B, H, D], the others follow the ODE.

        With `joint`, every step is stochastic and `index` is not read.
        """
        if self.joint:
            everywhere = torch.ones(noise.shape[0], dtype=torch.bool, device=noise.device)
            return self._walk(prefix, state, noise, draw, lambda i: everywhere)
        assert index is not None
        return self._walk(prefix, state, noise, draw, lambda i: index == i)

    def score(self, prefix: Prefix, state: Tensor | None, x: Tensor, index: Tensor | None) -> Score:
        """Log-probs of stored points: x [B, 2, H, D] around step `index` [B], or, jointly, [B, N + 1, H, D]."""
        if not self.joint:
            assert index is not None
            step = self.transition(prefix, state, x[:, 0], index)
            return Score(self._logprob(x[:, 1], step.mean, step.std), self._entropy(step.std), step.features[:, None])
        logprobs, entropy, features = [self._noise_logprob(x[:, 0])], [self._entropy(torch.ones_like(x[:, 0]))], []
        for i in range(self.num_steps):
            step = self.transition(prefix, state, x[:, i], self._index(x, i))
            logprobs.append(self._logprob(x[:, i + 1], step.mean, step.std))
            entropy.append(self._entropy(step.std))
            features.append(step.features)
        # The published joint log-prob is the mean over the initial noise and all steps, not their sum.
        return Score(torch.stack(logprobs).mean(0), torch.stack(entropy).mean(0), torch.stack(features, 1))

    def _walk(
        self,
        prefix: Prefix,
        state: Tensor | None,
        noise: Tensor,
        draw: Callable[[int], Tensor],
        stochastic: Callable[[int], Tensor],
    ) -> Chain:
        ode = flow.step_weights("flow_ode", self.num_steps, 0.0, noise.device)
        xs, features = [noise], []
        logprobs = self._noise_logprob(noise) if self.joint else torch.zeros_like(noise)
        for i in range(self.num_steps):
            x, index = xs[-1], self._index(noise, i)
            step = self.transition(prefix, state, x, index)
            chosen = stochastic(i)[:, None, None]
            mean = torch.where(chosen, step.mean, flow.step_mean(ode, x, step.velocity, index))
            std = torch.where(chosen, step.std, torch.zeros_like(step.std))
            xs.append(mean + std * draw(i))
            logprobs = logprobs + torch.where(chosen, self._logprob(xs[-1], mean, std), torch.zeros_like(x))
            features.append(step.features)
        if self.joint:
            logprobs = logprobs / (self.num_steps + 1)
        return Chain(torch.stack(xs, 1), logprobs, torch.stack(features, 1))

    def _index(self, like: Tensor, i: int) -> Tensor:
        return torch.full((like.shape[0],), i, device=like.device)

    def _logprob(self, x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
        return flow.logprob(x, mean, std, squared_error=self.squared_error)

    def _noise_logprob(self, noise: Tensor) -> Tensor:
        return self._logprob(noise, torch.zeros_like(noise), torch.ones_like(noise))

    def _entropy(self, std: Tensor) -> Tensor:
        return flow.entropy(std) if self.method == "flow_noise" else torch.zeros_like(std)
