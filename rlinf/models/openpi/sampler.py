"""From a velocity field to a stochastic policy: sampling chains, and scoring stored ones.

Letters: B rows, N denoising steps, H actions, D action columns, W expert width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from rlinf.models.nn.graphs import kept
from rlinf.models.openpi import flow
from rlinf.models.openpi.config import NoiseMethod
from rlinf.models.openpi.heads import NoiseHead
from rlinf.models.openpi.model import PiNet, Prefix, Times

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
    """A path from noise to actions, and what the network gave at each of its steps."""

    x: Tensor  # [B, N + 1, H, D], noise first
    velocity: Tensor  # [B, N, H, D]
    std: Tensor | None  # [B, N, H, D], where it is learned
    features: Tensor  # expert output [B, N, H, W]


@dataclass(frozen=True)
class Score:
    """A stored path under the current weights."""

    logprobs: Tensor  # [B, H, D]
    entropy: Tensor  # [B, H, D]; 0 unless the variance is learned
    features: Tensor  # [B, 1, H, W] for one step, [B, N, H, W] jointly


@dataclass(frozen=True)
class Sampler:
    """Samples and scores denoising paths by one noise method at one noise level."""

    net: PiNet
    method: NoiseMethod
    num_steps: int  # N
    noise_level: float = 0.5
    joint: bool = False  # every step is stochastic and scored, not one of them
    squared_error: bool = False  # score by -(x - mean)² instead of the log-density
    together: int | None = None  # how many actions get one draw of noise, and are scored together; None: each its own
    noise_head: NoiseHead | None = None  # the standard deviation of flow_noise
    table: flow.Weights | None = None  # where given, instead of the one of method, num_steps and noise_level

    def num_choices(self, *, ignore_last: bool) -> int:
        """How many steps, from the first on, the stochastic one is drawn from; the last of flow_cps has no noise."""
        return self.num_steps - (ignore_last or self.method == "flow_cps")

    def times(self, device: torch.device) -> Times:
        """What the network reads of this schedule's N times."""
        return self.net.times_of(kept(self.net.embed_schedule, self.num_steps, device))

    def transition(
        self, prefix: Prefix, state: Tensor | None, x: Tensor, index: Tensor | slice, times: Times
    ) -> Transition:
        """The stochastic step at x [B, H, D]: one `index` i64 [B] per row, or a slice of one step for all rows."""
        weights = self.weights(x.device).at(index)
        features = self.net.suffix(prefix, state, x, times.at(index))
        velocity = self.net.velocity(features)
        mean = flow.step_mean(weights, x, velocity)
        std = weights.std.expand_as(mean) if self.noise_head is None else self.noise_head(features)
        return Transition(mean, std, velocity, features)

    @torch.no_grad()
    def ode(self, prefix: Prefix, state: Tensor | None, noise: Tensor, *, steps: int | None = None) -> Chain:
        """The deterministic path from `noise` [B, H, D], or its first `steps` steps."""
        weights = flow.step_weights("flow_ode", self.num_steps, 0.0, noise.device)
        return self._walk(prefix, state, noise, flow.Weights(*(c[:steps].expand(len(noise), -1) for c in weights)))

    @torch.no_grad()
    def end(self, prefix: Prefix, state: Tensor | None, noise: Tensor) -> Tensor:
        """Where the deterministic path from `noise` ends, [B, H, D]: the x of `ode` without the rest of it."""
        times, prefix = self.times(noise.device), prefix.with_room(len(self.net.suffix_starts()))
        tokens, x = self.net.noisy_tokens(state, times, len(noise)), noise
        for i in range(self.num_steps):
            features = self.net.features(prefix, tokens(x, i), times.at(slice(i, i + 1)))
            x = self.net.moved(x, features, -1 / self.num_steps)  # what step_mean gives with the ODE's weights
        return x

    @torch.no_grad()
    def sample(
        self, prefix: Prefix, state: Tensor | None, noise: Tensor, draw: Callable[[int], Tensor], index: Tensor | None
    ) -> Chain:
        """A random path: step `index` i64 [B] is stochastic with draw(i) [B, H or 1, D], the others follow the ODE.

        With `joint`, every step is stochastic and `index` is not read.
        """
        n, device = self.num_steps, noise.device
        mine, ode = self.weights(device), flow.step_weights("flow_ode", n, 0.0, device)
        if self.joint:
            chosen = torch.ones(len(noise), n, dtype=torch.bool, device=device)
        else:
            assert index is not None
            chosen = index[:, None] == torch.arange(n, device=device)
        return self._walk(prefix, state, noise, mine.where(chosen, ode), chosen, draw)

    def logprobs(self, chain: Chain, index: Tensor | None) -> Tensor:
        """Log-prob [B, H, D] of a sampled path: of its stochastic step `index` i64 [B], or jointly of all steps."""
        if not self.joint:
            assert index is not None
            return self._step_logprob(chain, index)
        steps = [self._step_logprob(chain, slice(i, i + 1)) for i in range(self.num_steps)]
        # The published joint log-prob is the mean over the initial noise and all steps, not their sum.
        return torch.stack([self._noise_logprob(chain.x[:, 0]), *steps]).mean(0)

    def score(self, prefix: Prefix, state: Tensor | None, x: Tensor, index: Tensor | None) -> Score:
        """Log-probs of stored points: x [B, 2, H, D] around step `index` [B], or, jointly, [B, N + 1, H, D]."""
        times = self.times(x.device)
        if not self.joint:
            assert index is not None
            step = self.transition(prefix, state, x[:, 0], index, times)
            return Score(self._logprob(x[:, 1], step.mean, step.std), self._entropy(step.std), step.features[:, None])
        logprobs, entropy, features = [self._noise_logprob(x[:, 0])], [self._entropy(torch.ones_like(x[:, 0]))], []
        for i in range(self.num_steps):
            step = self.transition(prefix, state, x[:, i], slice(i, i + 1), times)
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
        weights: flow.Weights,
        chosen: Tensor | None = None,
        draw: Callable[[int], Tensor] | None = None,
    ) -> Chain:
        """Denoise with weights [B, n] of the first n steps; rows add noise at their `chosen` steps, bool [B, n]."""
        times, prefix = self.times(noise.device), prefix.with_room(len(self.net.suffix_starts()))
        tokens = self.net.noisy_tokens(state, times, len(noise))
        xs, velocities, stds, features = [noise], [], [], []
        for i in range(weights.t.shape[1]):
            step = flow.Weights(*(c[:, i, None, None] for c in weights))
            features.append(self.net.features(prefix, tokens(xs[-1], i), times.at(slice(i, i + 1))).float())
            velocities.append(self.net.velocity(features[-1]))
            x, std = flow.step_mean(step, xs[-1], velocities[-1]), step.std
            if self.noise_head is not None:
                std = self.noise_head(features[-1])
                stds.append(std)
            if draw is not None and chosen is not None:
                used = std if self.noise_head is None else std * chosen[:, i, None, None]
                x = torch.addcmul(x, used, draw(i))
            xs.append(x)
        learned = torch.stack(stds, 1) if stds else None
        return Chain(torch.stack(xs, 1), torch.stack(velocities, 1), learned, torch.stack(features, 1))

    def _step_logprob(self, chain: Chain, index: Tensor | slice) -> Tensor:
        """Log-prob [B, H, D] of one step of a sampled path: a step per row i64 [B], or a slice of one for all."""
        weights = self.weights(chain.x.device).at(index)

        def pick(steps: Tensor, offset: int = 0) -> Tensor:
            if isinstance(index, slice):
                return steps[:, index.start + offset]
            return steps[torch.arange(len(steps), device=steps.device), index + offset]

        mean = flow.step_mean(weights, pick(chain.x), pick(chain.velocity))
        std = weights.std.expand_as(mean) if chain.std is None else pick(chain.std)
        return self._logprob(pick(chain.x, 1), mean, std)

    def weights(self, device: torch.device) -> flow.Weights:
        """Per-step weights of this sampler."""
        if self.table is not None:
            return self.table
        return flow.step_weights(self.method, self.num_steps, self.noise_level, device)

    def _logprob(self, x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
        if self.together is not None:
            return flow.logprob_together(x, mean, std, self.together)
        return flow.logprob(x, mean, std, squared_error=self.squared_error)

    def _noise_logprob(self, noise: Tensor) -> Tensor:
        return self._logprob(noise, torch.zeros_like(noise), torch.ones_like(noise))

    def _entropy(self, std: Tensor) -> Tensor:
        return flow.entropy(std) if self.method == "flow_noise" else torch.zeros_like(std)
