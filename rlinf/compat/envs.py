"""Environments whose flags are those of RLinf 0.4 (`compat: rlinf-0.4`)."""

from __future__ import annotations

from rlinf.envs.episodes import Episode
from rlinf.envs.vec import VecEnv


class PublishedVecEnv(VecEnv):
    """An episode that succeeds on its last allowed step is both terminated and truncated."""

    def is_cut(self, episode: Episode, *, terminated: bool) -> bool:
        """See VecEnv.is_cut; whether the episode ended by itself does not matter."""
        return episode.elapsed >= self.step_limit(episode)


def env_class(compat: str | None) -> type[VecEnv]:
    """The clean environments, or those of the release that `compat` names."""
    return VecEnv if compat is None else PublishedVecEnv
