"""Observation in, model inputs out; action bins in, simulator actions out.

Letters: B rows, n cameras, S pixels of a side, L prompt slots, C actions a chunk, A columns, p state columns.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from rlinf.data.types import Observation
from rlinf.errors import UserError
from rlinf.models.images import resize
from rlinf.models.prismatic import actions
from rlinf.models.prismatic.architecture import Architecture
from rlinf.models.prismatic.options import PrismaticConfig
from rlinf.models.prismatic.prompts import PromptTokenizer
from rlinf.models.prismatic.statistics import Statistics, StatisticsTable

Tensor = torch.Tensor
logger = logging.getLogger(__name__)

FITTED_KEY = "data"  # name of statistics that were fitted without an unnorm_key


@dataclass(frozen=True)
class Inputs:
    """One batch as the network reads it."""

    images: Tensor  # u8 [B, n, S, S, 3]
    ids: Tensor  # i32 [B, L]: BOS, pads, prompt
    valid: Tensor  # bool [B, L]
    state: Tensor | None  # f32 [B, p] normalised
    shortest: int  # fewest valid slots of a row, known without asking the device
    longest: int


class Processor(nn.Module):
    """Statistics and tokenizer of a checkpoint; everything runs on the statistics' device."""

    def __init__(self, cfg: PrismaticConfig, arch: Architecture, tokenizer: PromptTokenizer) -> None:
        super().__init__()
        self.cfg, self.arch, self.tokenizer = cfg, arch, tokenizer
        self.table = StatisticsTable({}, "this policy")
        self.action_stats = Statistics.identity(cfg.action_dim)
        self.state_stats = Statistics.identity(cfg.state_columns)

    @property
    def device(self) -> torch.device:
        return self.action_stats.low.device

    def encode(self, obs: Observation) -> Inputs:
        """Resize, normalise, tokenise."""
        ids, valid = self.tokenizer(obs.task_descriptions)
        shortest, longest = torch.stack(valid.sum(1).aminmax()).tolist()  # still on the host
        return Inputs(
            images=self.encode_images(obs),
            ids=ids.to(self.device, non_blocking=True),
            valid=valid.to(self.device, non_blocking=True),
            state=self._state(obs),
            shortest=shortest,
            longest=longest,
        )

    def encode_images(self, obs: Observation) -> Tensor:
        """Every camera at the model's resolution, aspect ignored: u8 [B, n, S, S, 3]."""
        size, n = self.arch.image_size, self.cfg.num_images_in_input
        cameras = [resize(obs.images.to(self.device), size, method="tensor")[:, None]]
        available = 0 if obs.wrist_images is None else obs.wrist_images.shape[1]
        if n - 1 > available:
            raise UserError(
                f"actor.model.num_images_in_input={n} needs {n - 1} wrist cameras; the simulator has {available}"
            )
        if n > 1:
            assert obs.wrist_images is not None
            wrist = obs.wrist_images[:, : n - 1].to(self.device)
            cameras.append(resize(wrist.flatten(0, 1), size, method="tensor").unflatten(0, wrist.shape[:2]))
        return torch.cat(cameras, 1)

    def encode_actions(self, chunk: Tensor) -> Tensor:
        """Simulator actions f32 [B, C, A] -> normalised, those outside the statistics' range clipped."""
        wanted = (self.cfg.num_action_chunks, self.cfg.action_dim)
        if chunk.shape[1:] != wanted:
            raise ValueError(f"actions {list(chunk.shape)} must be [B, {wanted[0]}, {wanted[1]}]")
        return self.action_stats.normalize(chunk.to(self.device, torch.float32))

    def decode_bins(self, bins: Tensor) -> Tensor:
        """Bins [B, C * A] -> simulator actions f32 [B, C, A]."""
        return self.decode_actions(actions.decode(bins).unflatten(1, (-1, self.cfg.action_dim)))

    def decode_actions(self, normal: Tensor) -> Tensor:
        """Normalised actions [B, C, A] -> simulator actions f32 [B, C, A]."""
        return self.action_stats.unnormalize(normal.float())

    def fit(self, states: Tensor | None, chunk: Tensor) -> None:
        """Statistics of a data set: states [M, S], actions [M, A] row by row."""
        if not self.cfg.state_columns:
            states = None
        elif states is not None:
            states = states[:, : self.cfg.state_columns]
        self._prepared(StatisticsTable.fit(self.cfg.unnorm_key or FITTED_KEY, states, chunk))()

    def prepare(self, folder: Path) -> Callable[[], None]:
        """Check the statistics of a checkpoint (small sizes may have none); the function returned takes them over."""
        table = StatisticsTable.read(folder)
        if table.entries or self.cfg.size == "base":
            return self._prepared(table)
        if self.cfg.unnorm_key is not None:
            logger.warning(
                "actor.model.unnorm_key=%s: %s holds no action statistics, actions stay in [-1, 1]",
                self.cfg.unnorm_key,
                folder,
            )
        return lambda: None

    def _prepared(self, table: StatisticsTable) -> Callable[[], None]:
        key, kind, columns = self.cfg.unnorm_key, self.cfg.statistics_kind, self.cfg.state_columns
        action = table.load(key, "action", kind=kind, columns=self.cfg.action_dim)
        state = table.load(key, "proprio", kind=kind, columns=columns) if columns else Statistics.identity(0)

        def take() -> None:
            device = self.device
            self.table, self.action_stats, self.state_stats = table, action.to(device), state.to(device)

        return take

    def _state(self, obs: Observation) -> Tensor | None:
        columns = self.cfg.state_columns
        if not columns:
            return None
        if obs.states is None or obs.states.shape[1] < columns:
            have = "none" if obs.states is None else str(obs.states.shape[1])
            raise UserError(f"actor.model.proprio_dim={columns} state columns are read, the simulator gives {have}")
        return self.state_stats.normalize(obs.states[:, :columns].to(self.device, torch.float32))
