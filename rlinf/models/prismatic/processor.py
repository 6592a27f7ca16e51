"""Observation in, model inputs out; action bins in, simulator actions out.

Letters: B rows, n cameras, S pixels of a side, C actions a chunk, A columns, p state columns.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

from rlinf.data.types import Observation
from rlinf.models.action_path import Normal, Seen
from rlinf.models.images import resize
from rlinf.models.inputs import Prompts, camera_images, state_columns
from rlinf.models.prismatic import action_bins
from rlinf.models.prismatic.architecture import NUM_BINS, Architecture
from rlinf.models.prismatic.base_config import PrismaticConfig
from rlinf.models.prismatic.folder import ColumnRanges, StatisticsTable
from rlinf.models.prismatic.prompts import PromptTokenizer

Tensor = torch.Tensor
logger = logging.getLogger(__name__)

FITTED_KEY = "data"  # name of statistics that were fitted without an unnorm_key


@dataclass(frozen=True)
class Inputs:
    """One batch as the network reads it."""

    images: Tensor  # u8 [B, n, S, S, 3]
    prompts: Prompts
    state: Tensor | None  # f32 [B, p] normalised


class Processor(nn.Module):
    """Between a simulator and the network: statistics and tokenizer of a checkpoint.

    Everything runs on the device of the statistics. It is an `ActionPath`.
    """

    clips = True
    relative_actions = False

    def __init__(self, cfg: PrismaticConfig, arch: Architecture, tokenizer: PromptTokenizer) -> None:
        super().__init__()
        self.cfg, self.arch, self.tokenizer = cfg, arch, tokenizer
        self.table = StatisticsTable({}, "this policy")
        self.action_ranges = ColumnRanges.identity(cfg.action_dim)
        self.state_ranges = ColumnRanges.identity(cfg.state_columns)

    @property
    def device(self) -> torch.device:
        """Where inputs and actions are computed."""
        return self.action_ranges.low.device

    def encode(self, obs: Observation) -> Inputs:
        """Resize, normalise, tokenise."""
        prompts = self.tokenizer(obs.task_descriptions).to(self.device)
        return Inputs(self.encode_images(obs), prompts, self._state(obs))

    def encode_images(self, obs: Observation) -> Tensor:
        """Every camera at the model's resolution, aspect ignored: u8 [B, n, S, S, 3]."""
        count, to_size = self.cfg.num_images_in_input, partial(resize, size=self.arch.image_size)
        return camera_images(obs, count, to_size, self.device, key="actor.model.num_images_in_input")

    def encode_actions(self, chunk: Tensor) -> Tensor:
        """Simulator actions f32 [B, C, A] -> normalised, those outside the statistics' range clipped."""
        wanted = (self.cfg.num_action_chunks, self.cfg.action_dim)
        if chunk.shape[1:] != wanted:
            raise ValueError(f"actions {list(chunk.shape)} must be [B, {wanted[0]}, {wanted[1]}]")
        return self.action_ranges.normalize(chunk.to(self.device, torch.float32))

    def decode_bins(self, bins: Tensor) -> Tensor:
        """Bins [B, C * A] -> simulator actions f32 [B, C, A]."""
        return self.decode_actions(action_bins.decode(bins).unflatten(1, (-1, self.cfg.action_dim)))

    def decode_actions(self, normal: Tensor) -> Tensor:
        """Normalised actions [B, C, A] -> simulator actions f32 [B, C, A]."""
        return self.action_ranges.unnormalize(normal.float())

    def fit(self, states: Tensor | None, chunk: Tensor) -> None:
        """Statistics of a data set: states [M, S], actions [M, A] row by row."""
        if not self.cfg.state_columns:
            states = None
        elif states is not None:
            states = states[:, : self.cfg.state_columns]
        self._prepared(StatisticsTable.fit(self.cfg.unnorm_key or FITTED_KEY, states, chunk))()

    # ------------------------------------------------------------------ the action path, without the network
    @property
    def action_horizon(self) -> int:
        """As many as are executed."""
        return self.cfg.num_action_chunks

    def seen(self, obs: Observation) -> Seen:
        """See ActionPath.seen."""
        return Seen(self.encode_images(obs), self._raw_state(obs))

    def targets(self, obs: Observation, actions: Tensor) -> Tensor:
        """See ActionPath.targets: bins i64 [B, C * A], or of an L1 head normalised actions f32 [B, C, A]."""
        normal = self.encode_actions(actions)
        return normal if self.cfg.regression is not None else action_bins.encode(normal).flatten(1)

    def actions(self, obs: Observation, targets: Tensor) -> Tensor:
        """See ActionPath.actions."""
        return self.decode_actions(targets) if self.cfg.regression is not None else self.decode_bins(targets)

    def normal(self, obs: Observation, actions: Tensor) -> Normal:
        """See ActionPath.normal."""
        state = self._raw_state(obs)
        normal = None if state is None else self.state_ranges.scale(state)
        return Normal(normal, self.action_ranges.scale(actions.to(self.device, torch.float32)))

    def resolution(self) -> Tensor:
        """See ActionPath.resolution: half a bin."""
        if self.cfg.regression is not None:
            return torch.zeros(self.cfg.action_dim, dtype=torch.float64)
        ranges = self.action_ranges
        width = torch.where(ranges.mask, ranges.high - ranges.low, 2.0) / (NUM_BINS - 1)
        return width.cpu() / 2

    # ------------------------------------------------------------------ files
    def prepare(self, folder: Path) -> Callable[[], None]:
        """Check the statistics of a checkpoint (small sizes may have none); the function returned takes them over."""
        table, key = StatisticsTable.read(folder), self.cfg.unnorm_key
        if table.entries or self.cfg.size == "base":
            return self._prepared(table)
        if key is not None:
            logger.warning("actor.model.unnorm_key=%s: %s has no statistics, actions stay in [-1, 1]", key, folder)
        return lambda: None

    def _prepared(self, table: StatisticsTable) -> Callable[[], None]:
        """Look the ranges of this configuration up; the function returned takes them over."""
        wanted, kind, columns = self.cfg.unnorm_key, self.cfg.statistics_kind, self.cfg.state_columns
        key = table.resolve(wanted)
        if wanted not in (None, key):
            logger.warning("actor.model.unnorm_key=%s: taking %s, which %s has", wanted, key, table.origin)
        action = table.load(key, "action", kind=kind, columns=self.cfg.action_dim)
        state = table.load(key, "proprio", kind=kind, columns=columns) if columns else ColumnRanges.identity(0)

        def take() -> None:
            device = self.device
            self.table, self.action_ranges, self.state_ranges = table, action.to(device), state.to(device)

        return take

    def _state(self, obs: Observation) -> Tensor | None:
        """The state columns that are read, normalised: f32 [B, p]."""
        state = self._raw_state(obs)
        return None if state is None else self.state_ranges.normalize(state)

    def _raw_state(self, obs: Observation) -> Tensor | None:
        """The state columns that are read, as the robot gives them: f32 [B, p]."""
        if not self.cfg.state_columns:
            return None
        return state_columns(obs, self.cfg.state_columns, self.device, key="actor.model.proprio_dim")
