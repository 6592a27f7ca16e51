"""Observation in, model inputs out; model actions in, simulator actions out.

Letters: B rows, n cameras, S state columns, C actions executed, H denoised, A columns, D padded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from rlinf.data.types import Observation
from rlinf.errors import UserError
from rlinf.models.action_path import Normal, Seen
from rlinf.models.images import resize_with_pad
from rlinf.models.inputs import Prompts, camera_images, state_columns
from rlinf.models.openpi import transforms
from rlinf.models.openpi.architecture import Architecture
from rlinf.models.openpi.config import STATE_KEY, Config
from rlinf.models.openpi.prompts import PromptTokenizer
from rlinf.models.openpi.statistics import GAUSSIAN_Q99, Statistics, load_statistics, save_statistics

Tensor = torch.Tensor
STATE_STD_FLOOR = 0.01  # smallest deviation when statistics are fitted: columns that hardly move stay small


@dataclass(frozen=True)
class Inputs:
    """One batch as the network reads it."""

    images: Tensor  # u8 [B, n, size, size, 3]
    prompts: Prompts
    state: Tensor | None  # f32 [B, D] normalised and padded; π0 only
    raw_state: Tensor | None  # f32 [B, S] un-normalised, in π's convention

    def to(self, device: torch.device) -> Inputs:
        """The same on a device."""
        state, raw = (None if x is None else x.to(device, non_blocking=True) for x in (self.state, self.raw_state))
        return Inputs(self.images.to(device, non_blocking=True), self.prompts.to(device), state, raw)


class Processor(nn.Module):
    """Between a simulator and the network: statistics, tokenizer and the robot's convention.

    What it returns lies on the device of the statistics, but for `read`. It is an `ActionPath`.
    """

    clips = False

    def __init__(self, cfg: Config, arch: Architecture, tokenizer: PromptTokenizer) -> None:
        super().__init__()
        self.cfg, self.arch, self.row = cfg, arch, cfg.convention
        self.tokenizer = tokenizer
        self.state_stats = Statistics.identity(cfg.state_dim)
        self.action_stats = Statistics.identity(cfg.action_dim)

    @property
    def device(self) -> torch.device:
        """Where inputs and actions are computed."""
        return self.action_stats.mean.device

    def encode(self, obs: Observation) -> Inputs:
        """Resize, normalise, tokenise."""
        return self.read(obs).to(self.device)

    def read(self, obs: Observation) -> Inputs:
        """`encode`, each part where it is: prompts are made on the host, states and pictures stay where they lie.

        Pictures that must be resized come to the device, as that is work.
        """
        state = self._state(obs, None if obs.states is None else obs.states.device)
        normal = None
        if state is not None:
            normal = self.state_stats.normalize(state, quantile=self.row.quantile_norm)
        prompts = self.tokenizer(obs.task_descriptions, normal if self.row.discrete_state else None)
        padded = None if normal is None or self.row.pi05 else F.pad(normal, (0, self.arch.action_dim - normal.shape[1]))
        cameras = [obs.images] if obs.wrist_images is None else [obs.images, obs.wrist_images]
        fits = all(pictures.shape[-3:-1] == (self.arch.image_size,) * 2 for pictures in cameras)
        return Inputs(self.encode_images(obs, obs.images.device if fits else None), prompts, padded, state)

    def encode_images(self, obs: Observation, device: torch.device | None = None) -> Tensor:
        """Every camera at the model's resolution, u8 [B, n, size, size, 3], on the device of the statistics or this."""
        count, to_size = self.cfg.num_cameras, partial(resize_with_pad, size=self.arch.image_size)
        return camera_images(obs, count, to_size, device or self.device, key=self.cfg.images_key)

    def encode_actions(self, actions: Tensor, state: Tensor | None) -> Tensor:
        """Simulator actions f32 [B, 1..H, A] -> normalised f32 [B, H, D], 0 where padded; the last action fills H."""
        horizon = self.arch.action_horizon
        if not 1 <= actions.shape[1] <= horizon or actions.shape[2] != self.cfg.action_dim:
            raise ValueError(f"actions {list(actions.shape)} must be [B, 1..{horizon}, {self.cfg.action_dim}]")
        actions = torch.cat((actions, actions[:, -1:].expand(-1, horizon - actions.shape[1], -1)), 1)
        normal = self.action_stats.normalize(self._to_model(actions, state), quantile=self.row.quantile_norm)
        return F.pad(normal, (0, self.arch.action_dim - normal.shape[2]))

    def decode_actions(self, x: Tensor, state: Tensor | None) -> Tensor:
        """Denoised f32 [B, H, D] -> simulator actions f32 [B, C, A]."""
        return self.to_simulator(self.unnormalize_actions(x), state)

    def unnormalize_actions(self, x: Tensor) -> Tensor:
        """Denoised f32 [B, H, D] -> the executed actions in π's convention, f32 [B, C, A or more]."""
        columns = max(self.cfg.action_dim, len(self.row.delta_mask))
        executed = x[:, : self.cfg.num_action_chunks, :columns]
        return self.action_stats.unnormalize(executed, quantile=self.row.quantile_norm)

    def to_simulator(self, actions: Tensor, state: Tensor | None) -> Tensor:
        """Un-normalised actions f32 [B, C, A or more] -> simulator actions f32 [B, C, A]."""
        if self.row.delta_mask:
            assert state is not None
            actions = transforms.shift_by_state(actions, state, self.row.delta_mask, 1.0)
        actions = actions[..., : self.cfg.action_dim]
        return transforms.aloha_actions(actions) if self.row.adapt_to_pi else actions

    def fit(self, states: Tensor | None, actions: Tensor) -> None:
        """Statistics of a data set: states [M, S], actions [M, A] row by row, or [M, H, A] chunk by chunk."""
        if states is not None and self.row.adapt_to_pi:
            states = transforms.aloha_state(states)
        if states is not None and self.cfg.state_dim:
            states = states[:, : self.cfg.state_dim]
            self.state_stats = Statistics.fit(states, floor=STATE_STD_FLOOR).to(self.device)
        chunks = actions if actions.dim() == 3 else actions[:, None]
        relative = self._to_model(chunks, states).flatten(0, 1)
        self.action_stats = Statistics.fit(relative, floor=self.row.action_std_floor).to(self.device)

    # ------------------------------------------------------------------ the action path, without the network
    @property
    def action_horizon(self) -> int:
        """H of the architecture."""
        return self.arch.action_horizon

    @property
    def relative_actions(self) -> bool:
        """Whether config_name stores actions relative to the state."""
        return bool(self.row.delta_mask)

    def seen(self, obs: Observation) -> Seen:
        """See ActionPath.seen."""
        return Seen(self.encode_images(obs), self._state(obs))

    def targets(self, obs: Observation, actions: Tensor) -> Tensor:
        """See ActionPath.targets: normalised actions f32 [B, H, D]."""
        return self.encode_actions(actions.to(self.device), self._state(obs))

    def actions(self, obs: Observation, targets: Tensor) -> Tensor:
        """See ActionPath.actions."""
        return self.decode_actions(targets, self._state(obs))

    def normal(self, obs: Observation, actions: Tensor) -> Normal:
        """See ActionPath.normal; of mean and deviation, the range is that of a Gaussian's 1 % and 99 % quantile."""
        unit = 1.0 if self.row.quantile_norm else GAUSSIAN_Q99
        state = self._state(obs)
        normal = None if state is None else self.state_stats.normalize(state, quantile=self.row.quantile_norm) / unit
        return Normal(normal, self.targets(obs, actions)[..., : self.cfg.action_dim] / unit)

    def resolution(self) -> Tensor:
        """See ActionPath.resolution."""
        return torch.zeros(self.cfg.action_dim, dtype=torch.float64)

    # ------------------------------------------------------------------ files
    def prepare(self, folder: Path) -> Callable[[], None]:
        """Check the statistics of a checkpoint; the function returned takes over the columns that are read."""
        stats = load_statistics(folder, self.row.asset_id, quantile=self.row.quantile_norm)
        for key, columns in (("state", self.cfg.state_dim), ("actions", self.cfg.action_dim)):
            if (have := stats[key].mean.shape[0]) < columns:
                name = self.cfg.openpi.config_name
                raise UserError(f"norm_stats.json has {have} {key} columns, {name} needs {columns}")

        def take() -> None:
            self.state_stats = stats["state"].first(self.cfg.state_dim).to(self.device)
            self.action_stats = stats["actions"].first(self.cfg.action_dim).to(self.device)

        return take

    def save(self, folder: Path) -> None:
        """Write the statistics, as `prepare` reads them."""
        save_statistics(folder, self.row.asset_id, {"state": self.state_stats, "actions": self.action_stats})

    def _state(self, obs: Observation, device: torch.device | None = None) -> Tensor | None:
        """The columns the model reads, in π's convention, on the device of the statistics or this."""
        if not self.cfg.state_dim:
            return None
        state = state_columns(obs, self.cfg.state_dim, device or self.device, key=STATE_KEY)
        return transforms.aloha_state(state) if self.row.adapt_to_pi else state

    def _to_model(self, actions: Tensor, state: Tensor | None) -> Tensor:
        """Simulator actions [B, H, A] in π's convention, un-normalised."""
        if self.row.adapt_to_pi:
            actions = transforms.aloha_actions_inverse(actions)
        if self.row.delta_mask:
            assert state is not None
            actions = transforms.shift_by_state(actions, state, self.row.delta_mask, -1.0)
        return actions
