"""Which env, column and row is which: every index formula of a run, in one place. Torch-free.

    env      one simulated world, numbered 0 .. E-1 over all ranks and stages
    group    `group_size` neighbouring envs that start from the same reset id
    stage    a share of the envs that is simulated while the policy acts for the other stages
    rank     one process of a component; one of env or rollout handles equally many envs in every stage (in evaluations
             as nearly as their number allows: some ranks one less, with few envs some none), one of the actor learns
             from neighbouring groups, whatever their stages
    epoch    one of the `rollout_epoch` rollouts of a training step
    chunk    the actions of one call of the policy, numbered 0 .. T-1 in an epoch: the T of tensors [T, B, ...]
    column   one env in one epoch: the B of tensors [T, B, ...]
    row      one chunk of one column, numbered chunk by chunk: row = chunk x B + column
    stratum  neighbouring columns of which every global batch takes equally many rows

Twelve envs in groups of two, two stages, three ranks. Groups are dealt to the stages in turn, and the envs of a rank in
all of its stages are neighbours, so that the number of stages never moves an env to another rank:

    env       0   1   2   3   4   5   6   7   8   9  10  11
    group     0---0   1---1   2---2   3---3   4---4   5---5
    stage     0   0   1   1   0   0   1   1   0   0   1   1
    rank      0-----------0   1-----------1   2-----------2

Columns are ordered by group, then epoch, then member of the group, whatever the ranks and stages. With two epochs, rank
0 of the drawing holds these eight columns, rank 1 the next eight; chunk 0 of them are the rows 0 to 7 of rank 0, chunk
1 the rows 8 to 15:

    column    0   1   2   3   4   5   6   7
    env       0   1   0   1   2   3   2   3
    epoch     0   0   1   1   0   0   1   1

An update shuffles rows within strata, of which there are gcd(columns of all ranks, global batch size); ranks divide
both numbers, so that each holds whole strata, and a global batch has the same rows on any number of ranks. With the 24
columns of three ranks and global batches of 12 rows there are 12 strata of 2 columns, and each batch has one row of
every stratum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np


class Piece(NamedTuple):
    """The places [first, end) in the batch that one rank handles in a stage."""

    rank: int
    first: int
    end: int


@dataclass(frozen=True)
class EnvLayout:
    """How the envs of a run are dealt to stages and to the ranks of any component."""

    num_envs: int  # over all ranks and stages
    stages: int = 1
    group_size: int = 1

    def share(self, ranks: int) -> int:
        """Envs that each of so many ranks handles in one stage; the most, where they are not equally many."""
        return max(map(len, self._places(ranks, stage=0)))

    def env_ids(self, ranks: int, rank: int, stage: int) -> list[int]:
        """The envs that `rank` of `ranks` handles in a stage, in the order of its batch."""
        group = self.group_size
        places = self._places(ranks, stage)[rank]
        return [(place // group * self.stages + stage) * group + place % group for place in places]

    def routes(self, sources: int, targets: int, stage: int = 0) -> list[list[Piece]]:
        """For each target rank, the pieces of the source ranks' batches that, one after another, are its own batch.

        A rank without envs has no pieces. Stages of equally many envs have the same routes.
        """
        return _pieces(self._places(sources, stage), self._places(targets, stage))

    def experience_routes(self, sources: int, targets: int) -> list[list[Piece]]:
        """For each target rank, the pieces of what the source ranks' envs of all stages lived through that are its own.

        Places count a rank's envs in the order of their numbers, so that only groups must be whole: 64 envs in groups
        of 8 and two stages fill 4 env ranks, and 8 actors with a group each.
        """
        return _pieces(split_evenly(self.num_envs, sources), split_evenly(self.num_envs, targets))

    def _places(self, ranks: int, stage: int) -> list[range]:
        """The places within a stage that each rank handles: whole groups, whose numbers differ by at most one."""
        size = self.group_size
        groups = len(range(stage, self.num_envs // size, self.stages))
        return [range(part.start * size, part.stop * size) for part in split_evenly(groups, ranks)]


@dataclass(frozen=True)
class Columns:
    """The columns of one rank, in the order of an array [groups of a stage, stages, epochs, members of a group]."""

    num_envs: int  # of the rank in one stage
    stages: int = 1
    epochs: int = 1
    group_size: int = 1

    def __len__(self) -> int:
        return self.num_envs * self.stages * self.epochs

    def of_envs(self, first: int, end: int) -> slice:
        """The columns of the envs first..end (whole groups, counted over all stages of the rank) in all epochs."""
        return slice(first * self.epochs, end * self.epochs)

    def part(self, x: Any, stage: int, epoch: int) -> Any:
        """The view [groups, members, ...] of a tensor or array x [B, ...] that belongs to one stage and epoch."""
        shape = (self.num_envs // self.group_size, self.stages, self.epochs, self.group_size, *x.shape[1:])
        return x.reshape(shape)[:, stage, epoch]

    def numbers(self, stage: int, epoch: int) -> np.ndarray:
        """The column of every env of the rank in one stage and epoch, i64 [num_envs]."""
        return self.part(np.arange(len(self)), stage, epoch).reshape(-1)


def _pieces(have: list[range], want: list[range]) -> list[list[Piece]]:
    """For each range of places wanted, the pieces of the ranges at hand that make it up."""
    return [
        [
            Piece(source, max(part.start, own.start) - own.start, min(part.stop, own.stop) - own.start)
            for source, own in enumerate(have)
            if max(part.start, own.start) < min(part.stop, own.stop)
        ]
        for part in want
    ]


def split_evenly(count: int, parts: int) -> list[range]:
    """Split 0..count-1 into ranges whose sizes differ by at most one."""
    edges = [count * i // parts for i in range(parts + 1)]
    return [range(a, b) for a, b in pairwise(edges)]


def row_numbers(chunk: int, columns: Any, num_columns: int) -> Any:
    """The rows of one chunk in the given columns."""
    return chunk * num_columns + columns


def chunk_and_column(rows: Any, num_columns: int) -> tuple[Any, Any]:
    """The inverse of `row_numbers`: an index pair into tensors [T, B, ...]."""
    return rows // num_columns, rows % num_columns


def global_batches(
    num_chunks: int,
    num_columns: int,
    *,
    batch_size: int,
    ranks: int,
    rank: int,
    shuffle: Callable[[int, int], np.ndarray],
) -> Iterator[np.ndarray]:
    """The rows i64 [batch_size / ranks] that a rank adds to each global batch of one update epoch.

    `num_columns` and row numbers are the rank's own. `shuffle(stratum, count)` is a permutation of 0 .. count-1, the
    same for a stratum wherever it lies.
    """
    strata = math.gcd(num_columns * ranks, batch_size)
    width, share = num_columns * ranks // strata, batch_size // strata
    mine = []
    for local in range(strata // ranks):
        order = shuffle(rank * (strata // ranks) + local, num_chunks * width)
        chunks, places = chunk_and_column(order, width)
        mine.append(row_numbers(chunks, local * width + places, num_columns))
    rows = np.stack(mine)  # [strata of this rank, T x width]
    for first in range(0, rows.shape[1], share):
        yield rows[:, first : first + share].reshape(-1)
