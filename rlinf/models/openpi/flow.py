"""The sampler's mathematics: how one denoising step becomes a Gaussian, and what its log-probability is.

Notation: N steps, times t_i = 1 - i / N (t = 1 is noise), δ = 1 / N, a = noise level, v the velocity at (x, t_i).
Every step is x' = μ + σ ε with μ = w0 x̂0 + w1 x̂1, where x̂0 = x - t v is the predicted action and x̂1 = x + (1 - t) v
the predicted noise; the methods differ in w0, w1 and σ only.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F

from rlinf.models.openpi.config import NoiseMethod

Tensor = torch.Tensor


class Weights(NamedTuple):
    """Per step i: time t_i, weights of x̂0 and x̂1, standard deviation; f32 [N] each."""

    t: Tensor
    w0: Tensor
    w1: Tensor
    std: Tensor

    def at(self, index: Tensor | slice) -> Weights:
        """Those of steps i64 [B], or of the one step of a slice, to be multiplied with [B, H, D]."""
        return Weights(*(c[index][:, None, None] for c in self))

    def where(self, chosen: Tensor, other: Weights) -> Weights:
        """Per row and step [B, N]: these where bool `chosen`, else those of another table."""
        return Weights(*(torch.where(chosen, a, b) for a, b in zip(self, other, strict=True)))


def timesteps(num_steps: int) -> Tensor:
    """t_0 = 1 down to t_N = 0, f32 [N + 1]."""
    return torch.cat((torch.linspace(1.0, 1.0 / num_steps, num_steps), torch.zeros(1)))


@cache  # never dropped: recorded kernels keep its address
def step_weights(method: NoiseMethod, num_steps: int, noise_level: float, device: torch.device | str) -> Weights:
    """The table of one sampler. flow_noise has the ODE's mean; its σ comes from a network."""
    t = timesteps(num_steps).double()
    t, t_next = t[:-1], t[1:]
    delta = t - t_next
    w0, w1, std = 1 - t_next, t_next, torch.zeros_like(t)
    if method == "flow_sde":
        tau = torch.cat((t_next[:1], t[1:]))  # t_0 = 1 would divide by zero
        s = noise_level * torch.sqrt(t / (1 - tau))
        w1, std = t_next - s**2 * delta / (2 * t), s * torch.sqrt(delta)
    elif method == "flow_cps":
        w1, std = t_next * math.cos(math.pi * noise_level / 2), t_next * math.sin(math.pi * noise_level / 2)
    return Weights(*(x.float().to(device) for x in (t, w0, w1, std)))


def step_mean(w: Weights, x: Tensor, v: Tensor) -> Tensor:
    """μ of x, v [B, H, D] with the weights of their steps (`Weights.at`)."""
    return (x - w.t * v) * w.w0 + (x + (1 - w.t) * v) * w.w1


def logprob(x: Tensor, mean: Tensor, std: Tensor, *, squared_error: bool = False) -> Tensor:
    """Elementwise Gaussian log-density, 0 where σ = 0; with `squared_error`, -(x - μ)² instead."""
    if squared_error:
        return -((x - mean) ** 2)
    sigma, fixed = _positive(std)
    density = -torch.log(sigma) - 0.5 * math.log(2 * math.pi) - 0.5 * ((x - mean) / sigma) ** 2
    return torch.where(fixed, torch.zeros_like(density), density)


def logprob_together(x: Tensor, mean: Tensor, std: Tensor, count: int) -> Tensor:
    """Log-density of the one draw that the first `count` actions of x [B, H, D] share, a part of it at each of them.

    The draw is read from the mean of x - μ over these actions, so that only a change of the mean of their μ changes it.
    Its parts add up to the log-density of a single action; later actions have 0.
    """
    gap = (x - mean)[:, :count].mean(1, keepdim=True)
    density = logprob(gap, torch.zeros_like(gap), std[:, :1])
    return F.pad((density / count).expand(-1, count, -1), (0, 0, 0, x.shape[1] - count))


def entropy(std: Tensor) -> Tensor:
    """Elementwise Gaussian entropy ½ ln(2πe σ²); a deterministic entry counts as σ = 1, a constant."""
    return 0.5 * torch.log(2 * math.pi * math.e * _positive(std)[0] ** 2)


def _positive(std: Tensor) -> tuple[Tensor, Tensor]:
    fixed = std == 0
    return torch.where(fixed, torch.ones_like(std), std), fixed


def annealed_noise_level(step: int, start: float, end: float, steps: float) -> float:
    """Noise level after `step` training steps on the straight line from start to end."""
    return start + (end - start) * min(step, steps) / steps


def beta_time(u: Tensor) -> Tensor:
    """Training times: Beta(1.5, 1) scaled to [0.001, 1], by inversion of uniform u."""
    return u ** (2.0 / 3.0) * 0.999 + 0.001
