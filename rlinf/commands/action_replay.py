"""Demonstrations on the way through a policy's outputs into the simulator, for `rlinf doctor --recipe`.

What is collected here is judged in action_path.py. Letters: N episodes, B rows, C actions of a chunk, H actions the
network gives at once, A columns of the simulator's actions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from rlinf.compat.envs import env_class
from rlinf.config.schema import Config
from rlinf.data.types import Observation
from rlinf.demos.dataset import DemoDataset
from rlinf.demos.hub import find_dataset
from rlinf.demos.player import Demo, DemoJob, DemoPlayer
from rlinf.demos.recorded import choose_episodes
from rlinf.envs.bridge import Bridge
from rlinf.envs.config import NO_SIMULATOR, EnvConfig, VideoConfig
from rlinf.envs.spec import check_setup, env_spec
from rlinf.errors import UserError
from rlinf.models.action_path import ActionPath, Seen
from rlinf.models.policy import find_policy
from rlinf.progress import report
from rlinf.simulators.contract import EnvSpec
from rlinf.training.sft import fitted_model, rows_for_statistics

Array = np.ndarray
Tensor = torch.Tensor
MOST_PAIRS = 64  # observations that are compared
LOSSLESS = 1e-3  # share of a column's range up to which actions count as equal


@dataclass
class Samples:
    """Chunks of actions as they should reach the simulator and as they do, and observations as pairs."""

    wanted: list[Array] = field(default_factory=list)  # f32 [C, A] each
    got: list[Array] = field(default_factory=list)
    counted: list[Array] = field(default_factory=list)  # bool [C, A] each
    states: list[tuple[Array, Array]] = field(default_factory=list)  # f32 [1, S] each: shown, and recorded
    outputs: list[tuple[Observation, Tensor]] = field(default_factory=list)  # of one row each, without pictures
    recorded: list[Seen] = field(default_factory=list)  # of one row each
    seen: list[Seen] = field(default_factory=list)
    successes: dict[int, bool] = field(default_factory=dict)  # by episode
    sentences: dict[str, str] = field(default_factory=dict)  # recorded -> told, where they differ


class ActionReplay:
    """One dataset, one policy's path and one simulator: chunks of demonstrations go through all three."""

    def __init__(self, cfg: Config, episodes: int) -> None:
        self.data = data = DemoDataset(find_dataset(str(cfg.sft.dataset), "--dataset"), cfg.sft.features)
        self.spec: EnvSpec | None = None
        if cfg.env.train.env_type != NO_SIMULATOR:
            self.spec = env_spec(cfg.env.train)
            if data.actions.shape[1] == self.spec.action_dim:  # a policy's columns may be more
                data.actions = Bridge(self.spec, cfg.actor.model.spec()).from_env(data.actions)
        model = fitted_model(cfg, data)
        self.cfg = replace(cfg, actor=replace(cfg.actor, model=model))
        self.has_policy = model.model_path is not None
        self.policy = model.spec()
        self.path: ActionPath = find_policy(model.model_type).action_path(model)
        if not self.has_policy:
            self.path.fit(*rows_for_statistics(self.path, data))
        self.bridge = None if self.spec is None else Bridge(self.spec, self.policy)
        self.episodes = choose_episodes(data, episodes)

    @property
    def names(self) -> Sequence[str]:
        """Names of the action columns that come out of the bridge."""
        return [str(i) for i in range(self.policy.action_dim)] if self.spec is None else self.spec.action_names

    def why_not(self) -> str | None:
        """Why the episodes cannot be played in the simulator; None where they can."""
        if self.spec is None:
            return "the config has no simulator; normalising, the model's layout and back were checked alone"
        if all(e.is_replayable for e in self.episodes):
            return None
        if any(e.reset_id is None for e in self.episodes):
            return (
                "meta/episodes of the dataset has no column reset_id, which tells where an episode began; normalising, "
                "the model's layout, the bridge and back were checked without the simulator"
            )
        return (
            "the dataset was collected with action noise by a version that did not record it (noise_seed): collect it "
            "again, or with collect.action_noise=0"
        )

    def enter(self) -> tuple[EnvConfig, str]:
        """Choose the env block that plays the episodes, and its key: the evaluation's where it plays the same suite.

        From here on actions are those of that block's simulator.
        """
        block, where = self._block()
        check_setup(block, where)
        self.spec = env_spec(block, where)
        self.bridge = Bridge(self.spec, self.policy)
        return block, where

    def _block(self) -> tuple[EnvConfig, str]:
        train, evaluation = self.cfg.env.train, self.cfg.env.eval
        mine, its = env_spec(train), env_spec(evaluation, "env.eval")

        def plays(spec: EnvSpec) -> bool:
            ids = [spec.reset_ids[split] for split in ("demo", "train")]
            return all(any(e.reset_id in some for some in ids) for e in self.episodes)

        same = train.env_type == evaluation.env_type and (mine.suite, mine.tasks) == (its.suite, its.tasks)
        if same and plays(its):
            return evaluation, "env.eval"
        if plays(mine):
            return train, "env.train"
        if plays(its):
            return evaluation, "env.eval"
        strange = next(
            e.reset_id for e in self.episodes if not any(e.reset_id in ids for ids in mine.reset_ids.values())
        )
        raise UserError(
            f"--dataset {self.cfg.sft.dataset}: reset id {strange} belongs to neither {mine.suite} nor {its.suite}: "
            "the demonstrations are of another suite, or of a simulator with other init_params"
        )

    def expert(self, block: EnvConfig) -> list[Demo]:
        """The expert plays the same episodes again, with the noise of the dataset's."""
        assert self.spec is not None
        jobs = [
            DemoJob(int(e.reset_id or 0), e.length, float(e.noise_std or 0.0), int(e.noise_seed or 0))
            for e in self.episodes
        ]
        demos = []
        with DemoPlayer(block, self.spec, num_processes=min(len(jobs), block.num_processes or 2)) as player:
            for demo in player.play(jobs):
                demos.append(demo)
                report("the expert plays", len(demos), len(jobs))
        return demos

    def round_trip(self) -> Samples:
        """Every chunk of the episodes into the model's outputs and back, without a simulator."""
        samples = Samples()
        for number, episode in enumerate(self.episodes):
            rows = range(episode.first, episode.first + episode.length, self.policy.num_action_chunks)
            for row in rows:
                _, obs, actions, is_target = self.data.batch([row], self.path.action_horizon)
                outputs = self.path.targets(obs, actions)
                self._sample(samples, 0, (obs, obs), actions, is_target, outputs)
            report("through the action path", number + 1, len(self.episodes))
        return samples

    def play(self, block: EnvConfig, demos: Sequence[Demo], *, faithful: bool) -> Samples:
        """Play the episodes in the simulator by what comes out of the path, chunk by chunk."""
        assert self.spec is not None
        chunk, count = self.policy.num_action_chunks, len(self.episodes)
        cfg = replace(
            block,
            total_num_envs=count,
            num_processes=min(block.num_processes, count),
            max_episode_steps=-(-max(e.length for e in self.episodes) // chunk) * chunk + 2 * chunk,
            ignore_terminations=False,
            video_cfg=VideoConfig(),
        )
        env = env_class(self.cfg.compat)(
            cfg,
            self.spec,
            env_ids=range(count),
            mode="eval",
            chunk_size=chunk,
            seed=self.cfg.runner.seed,
            trials=[int(e.reset_id or 0) for e in self.episodes],
        )
        samples, at, equal = Samples(), [0] * count, [True] * count
        try:
            step = env.reset()
            while not env.done:
                rows = [e.first + min(t, e.length - 1) for e, t in zip(self.episodes, at, strict=True)]
                _, obs, actions, is_target = self.data.batch(rows, self.path.action_horizon)
                outputs = self.path.targets(obs, actions)
                got = self.decoded(step.obs, outputs)
                noise = [_noise(demo, t, chunk) for demo, t in zip(demos, at, strict=True)] if demos else 0.0
                for i, episode in enumerate(self.episodes):
                    if i in samples.successes or at[i] >= episode.length:
                        continue
                    if at[i] == 0 or (faithful and equal[i]):
                        self._compare(samples, i, obs, step.obs)
                    equal[i] &= self._sample(samples, i, (step.obs, obs), actions, is_target, outputs)
                step = env.chunk_step(torch.from_numpy((got + noise).astype(np.float32)))
                for i in range(count):
                    at[i] = 0 if step.lost[i] else at[i] + int(step.valid[i].sum())
                for record in env.drain_episodes():
                    samples.successes[record.env_id] = record.success_once
                    report("replaying demonstrations", len(samples.successes), count)
        finally:
            env.close()
        return samples

    def decoded(self, seen: Observation, outputs: Tensor) -> Array:
        """The actions f32 [B, C, A] that an evaluation makes of a network's outputs and gives to the simulator."""
        actions = self.path.actions(seen, outputs).cpu().float()
        return (actions if self.bridge is None else self.bridge.to_env(actions)).numpy()

    def wanted(self, actions: Tensor) -> Array:
        """Actions f32 [B, C, A_policy] of the dataset as the simulator would read them, f32 [B, C, A]."""
        if self.bridge is None or self.spec is None:
            return actions.numpy()
        wanted = actions[..., self.bridge.columns].numpy().copy()
        if self.spec.gripper == "sign":
            wanted[..., -1] = np.sign(wanted[..., -1])
        elif self.spec.gripper == "binary_pm1":
            wanted[..., -1] = np.where(wanted[..., -1] > 0.5, 1.0, -1.0)
        return wanted

    def _sample(
        self,
        samples: Samples,
        i: int,
        obs: tuple[Observation, Observation],
        actions: Tensor,
        is_target: Tensor,
        outputs: Tensor,
    ) -> bool:
        """Note row i of a batch, shown and recorded; returns whether its actions arrived as they were recorded."""
        chunk, (shown, recorded) = self.policy.num_action_chunks, obs
        blind = replace(shown[i : i + 1], images=shown.images[:1, :1, :1], wrist_images=None)
        wanted, got = self.wanted(actions[i : i + 1, :chunk])[0], self.decoded(blind, outputs[i : i + 1])[0]
        counted = np.broadcast_to(is_target[i, :chunk, None].numpy(), wanted.shape).copy()
        if self.path.clips:  # which statistics are to blame for, where there are many
            normal = self.path.normal(recorded[i : i + 1], actions[i : i + 1]).actions[0, :chunk].abs().cpu().numpy()
            columns = range(normal.shape[1]) if self.bridge is None else self.bridge.columns
            counted &= normal[:, list(columns)] <= 1.0
        samples.wanted.append(wanted)
        samples.got.append(got)
        samples.outputs.append((blind, outputs[i : i + 1]))
        samples.counted.append(counted)
        if shown.states is not None and recorded.states is not None:
            samples.states.append((shown.states[i : i + 1].numpy(), recorded.states[i : i + 1].numpy()))
        scale = np.abs(wanted).max() + 1e-6
        return bool((np.abs(got - wanted)[is_target[i, :chunk].numpy()] <= LOSSLESS * scale).all())

    def _compare(self, samples: Samples, i: int, recorded: Observation, seen: Observation) -> None:
        """Note row i of an observation as recorded, and as the evaluation shows it."""
        if len(samples.seen) < MOST_PAIRS:
            samples.recorded.append(self.path.seen(recorded[i : i + 1]))
            samples.seen.append(self.path.seen(seen[i : i + 1]))
        said, told = recorded.task_descriptions[i], seen.task_descriptions[i]
        if said != told:
            samples.sentences[said] = told


def _noise(demo: Demo, at: int, chunk: int) -> Array:
    """What was added to the expert's actions from a step on, f32 [C, A]; 0 beyond the end."""
    out = np.zeros((chunk, demo.labels.shape[1]), np.float32)
    noise = (demo.actions - demo.labels)[at : at + chunk]
    out[: len(noise)] = noise
    return out
