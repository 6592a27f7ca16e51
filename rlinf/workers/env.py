"""EnvWorker: the simulators of one rank, a batch per pipeline stage."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch

from rlinf.compat.envs import env_class
from rlinf.config.schema import Config
from rlinf.data.types import EnvStep, EpisodeRecord
from rlinf.envs.bridge import Bridge
from rlinf.envs.config import EnvConfig
from rlinf.envs.spec import check_setup, env_spec, eval_trials
from rlinf.envs.vec import VecEnv
from rlinf.envs.video import VideoRecorder
from rlinf.placement.plan import Mode
from rlinf.runtime.worker import Worker


def check_simulators(cfg: Config) -> None:
    """Refuse simulators whose files are missing on this machine, of those that the run will start."""
    if not cfg.runner.only_eval:
        check_setup(cfg.env.train, "env.train")
    if cfg.runner.only_eval or cfg.runner.val_check_interval > 0:
        check_setup(cfg.env.eval, "env.eval")


class EnvWorker(Worker):
    """Steps environments and keeps the records of the episodes that ended."""

    def setup(self) -> None:
        self.policy_spec = self.cfg.actor.model.spec()
        self._envs: dict[tuple[Mode, int], VecEnv] = {}
        self._last: dict[tuple[Mode, int], EnvStep] = {}  # where the envs of a mode and stage stand
        self._episodes: list[EpisodeRecord] = []
        self._tasks_built = 0  # for training episodes, until `drain_counts` was last called
        check_simulators(self.cfg)

    def start_simulators(self, *, mode: Mode) -> None:
        """Start the simulator processes of `mode`, which refuse here what they lack, not in the first rollout."""
        for stage in range(self.plan.stages):
            if self.plan.env_ids("env", self.rank, stage, mode):
                self._env(mode, stage).open()

    def begin(self, *, mode: Mode, stage: int, new_step: bool = True) -> EnvStep | None:
        """The observation a rollout starts from: of fresh episodes, or with auto_reset of those that are running.

        `new_step`: it is the first of a training step, or an evaluation. None where this rank has no envs in the
        stage, which happens in evaluations of few.
        """
        if not self.plan.env_ids("env", self.rank, stage, mode):
            return None
        env = self._env(mode, stage)
        if mode == "train" and self.cfg.env.train.auto_reset and (mode, stage) in self._last:
            if new_step:
                env.begin_step()
            env.flush_video()
            if env.began_anew():
                self._last[mode, stage] = env.start()
            return EnvStep.start(self._last[mode, stage].obs, env.chunk_size)
        self._last[mode, stage] = env.reset(new_step=new_step)
        return self._last[mode, stage]

    def step(self, actions: torch.Tensor | None, *, mode: Mode, stage: int) -> EnvStep | None:
        """Execute one chunk of actions, f32 [B, C, A] in the policy's convention; None where there are no envs."""
        if actions is None:
            return None
        env = self._env(mode, stage)
        self._last[mode, stage] = env.chunk_step(self._bridges[mode].to_env(actions))
        self._episodes += env.drain_episodes()
        return self._last[mode, stage]

    def finished(self, *, stage: int) -> bool:
        """Whether every evaluation trial of this stage has been played."""
        return ("eval", stage) not in self._envs or self._env("eval", stage).done

    def drain_episodes(self) -> list[EpisodeRecord]:
        """The episodes that ended since the last call, in order of their envs."""
        episodes, self._episodes = self._episodes, []
        return sorted(episodes, key=lambda e: e.env_id)

    def drain_counts(self) -> dict[str, float]:
        """Simulator processes restarted so far, and tasks built for training episodes since the last call."""
        built = sum(env.num_tasks_built for env in self._train_envs.values())
        new, self._tasks_built = built - self._tasks_built, built
        return {"env/restarts": sum(env.num_restarts for env in self._envs.values()), "env/tasks_built": new}

    def release(self, *, mode: Mode) -> None:
        """Close the simulators of `mode`, their videos included; the next rollout starts them again."""
        for key in [k for k in self._envs if k[0] == mode]:
            self._envs.pop(key).close()
            self._last.pop(key, None)

    def offload(self) -> int:
        """Free the memory of the training simulators between rollouts; returns 0, for no tensors are moved."""
        for env in self._train_envs.values():
            env.offload()
        return 0

    def onload(self) -> int:
        """Start the training simulators again where they stood; returns 0 like `offload`."""
        for env in self._train_envs.values():
            env.onload()
        return 0

    def state(self) -> dict[str, Any]:
        """What a resumed run needs to continue the training episodes bit for bit."""
        return {str(stage): env.state() for stage, env in self._train_envs.items()}

    def load_state(self, states: list[dict[str, Any]]) -> None:
        """Continue from the `state` of every rank of an earlier run."""
        for stage, saved in states[self.rank].items():
            self._last["train", int(stage)] = self._env("train", int(stage)).load_state(saved)

    def close(self) -> None:
        for env in self._envs.values():
            env.close()
        self._envs.clear()

    @property
    def _train_envs(self) -> dict[int, VecEnv]:
        """The training envs by stage, as far as they have been started."""
        return {stage: env for (mode, stage), env in self._envs.items() if mode == "train"}

    @cached_property
    def _bridges(self) -> dict[Mode, Bridge]:
        """What converts the policy's actions for the simulators of each mode."""
        modes: tuple[Mode, ...] = ("train", "eval")
        return {mode: Bridge(env_spec(self._config(mode)), self.policy_spec) for mode in modes}

    def _config(self, mode: Mode) -> EnvConfig:
        return self.cfg.env.train if mode == "train" else self.cfg.env.eval

    def _env(self, mode: Mode, stage: int) -> VecEnv:
        """The envs of a stage; started by the first call."""
        if (mode, stage) not in self._envs:
            cfg = self._config(mode)
            spec = env_spec(cfg)
            env_ids = self.plan.env_ids("env", self.rank, stage, mode)
            self._envs[mode, stage] = env_class(self.cfg.compat)(
                cfg,
                spec,
                env_ids=env_ids,
                mode=mode,
                chunk_size=self.policy_spec.num_action_chunks,
                seed=self.cfg.runner.seed + cfg.seed,
                trials=eval_trials(cfg, spec) if mode == "eval" else None,
                video=VideoRecorder(
                    cfg.video_cfg,
                    seed=env_ids[0],
                    control_hz=spec.control_hz,
                    run_id=self.cfg.runner.run_id or "",
                )
                if cfg.video_cfg.save_video and stage == 0  # one film is enough of a run
                else None,
                critic_state=self.policy_spec.critic_state_dim > 0,
            )
        return self._envs[mode, stage]
