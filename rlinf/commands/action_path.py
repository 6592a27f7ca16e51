"""`rlinf doctor --recipe`: demonstrations go the way of imitation into a policy's outputs, and from there the way of an
evaluation into the simulator. They must reach the success of the expert who made them.

No network takes part: what it should give is put in the place of what it gives. action_replay.py plays, this file
judges what came out. Letters: C actions of a chunk, A columns of the simulator's actions.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from rlinf.commands.action_replay import LOSSLESS, ActionReplay, Samples
from rlinf.config.check import check_config
from rlinf.config.schema import Config
from rlinf.data.types import Observation
from rlinf.demos.collect import collect_demos
from rlinf.demos.mistakes import (
    SAME_SHARE,
    Columns,
    action_mistakes,
    picture_mistakes,
    state_mistakes,
    statistics_mistakes,
)
from rlinf.demos.player import Demo
from rlinf.envs.config import NO_SIMULATOR, EnvConfig, VideoConfig
from rlinf.envs.spec import check_setup, env_spec
from rlinf.envs.vec import VecEnv
from rlinf.errors import UserError
from rlinf.models.action_path import Seen
from rlinf.models.config import is_placeholder
from rlinf.models.policy import find_policy
from rlinf.runtime.worker import limit_threads

Array = np.ndarray
Tensor = torch.Tensor
MOST_ROWS = 4096  # frames that statistics are compared with
MAX_LOST = 0.25  # of the expert's successes that the rounding of tokens may cost


class Verdict:
    """Tells line by line what was found."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say, self.healthy = say, True

    def tell(self, what: str, mistakes: Sequence[str], fine: str) -> bool:
        """A line for each mistake, or that all is well; returns which."""
        for mistake in mistakes:
            self.say(f"FAIL  {what}: {mistake}")
        if not mistakes:
            self.say(f"ok    {what}: {fine}")
        self.healthy &= not mistakes
        return not mistakes

    def note(self, what: str, text: str) -> None:
        """Something that is no mistake."""
        self.say(f"--    {what}: {text}")


def check_recipe(cfg: Config, *, dataset: str | None, episodes: int, say: Callable[[str], None]) -> bool:
    """Check the action path of a config (loaded with purpose "doctor"); False where something is wrong.

    Without a dataset the simulator's expert plays a few demonstrations. A policy that the config names gives the
    statistics; without one they are fitted as `rlinf sft` does.
    """
    limit_threads(cfg)
    model = cfg.actor.model
    if is_placeholder(model.model_path):
        model = replace(model, model_path=None)
        cfg = replace(cfg, actor=replace(cfg.actor, model=model))
    if cfg.env.train.env_type != NO_SIMULATOR:  # what cannot be is refused before anything is played
        find_policy(model.model_type).action_path(model)
        _start(cfg.env.train, "env.train")
        _start(cfg.env.eval, "env.eval")
    with tempfile.TemporaryDirectory(prefix="rlinf-doctor-") as scratch:
        folder = _recorded(cfg, Path(scratch) / "demos", episodes) if dataset is None else dataset
        cfg = replace(cfg, sft=replace(cfg.sft, dataset=str(folder)))
        return Check(cfg, episodes, say, given=dataset is not None).run()


def _start(block: EnvConfig, where: str) -> None:
    """Start a simulator that holds all scenes in one process, and end it: it may need a GPU that is not here."""
    spec = env_spec(block, where)
    if spec.batched:
        cfg = replace(block, total_num_envs=1, video_cfg=VideoConfig())
        env = VecEnv(cfg, spec, env_ids=[0], mode="eval", chunk_size=1, seed=0, trials=[0])
        try:
            env.open()
        finally:
            env.close()


def _recorded(cfg: Config, folder: Path, episodes: int) -> Path:
    """Let the expert play as for `rlinf collect`, without noise; of a large suite, some tasks."""
    if cfg.env.train.env_type == NO_SIMULATOR:
        raise UserError("the config has no simulator whose expert could play: name demonstrations with --dataset")
    check_config(cfg, "collect")
    check_setup(cfg.env.train, "env.train")
    tasks = cfg.collect.tasks or list(env_spec(cfg.env.train).tasks)
    few = min(episodes, len(tasks))
    wanted = replace(
        cfg.collect,
        tasks=[tasks[i * len(tasks) // few] for i in range(few)],
        episodes_per_task=math.ceil(episodes / few),
        action_noise=0.0,
        output=str(folder),
    )
    return collect_demos(replace(cfg, collect=wanted), on_progress=lambda line: None)


class Check:
    """Judges what reaches the simulator, and what the policy sees there."""

    def __init__(self, cfg: Config, episodes: int, say: Callable[[str], None], *, given: bool) -> None:
        self.verdict, self.given = Verdict(say), given
        self.replay = ActionReplay(cfg, episodes)
        self.cfg, self.lossless = self.replay.cfg, True

    def run(self) -> bool:
        """Every check that the dataset and the config allow."""
        self._check_statistics()
        if (why_not := self.replay.why_not()) is not None:
            self._check_actions(self.replay.round_trip())
            self.verdict.note("replay", why_not)
            return self.verdict.healthy
        block, where = self.replay.enter()
        if where == "env.train":
            other = env_spec(self.cfg.env.eval, "env.eval").suite
            self.verdict.note("simulator", f"env.eval plays {other}; these demonstrations are of env.train's suite")
        demos = self.replay.expert(block) if self.given and all(e.is_expert for e in self.replay.episodes) else []
        faithful = not demos or self._check_dataset(demos)
        samples = self.replay.play(block, demos, faithful=faithful)
        self._check_actions(samples)
        self._check_success(samples, demos, where)
        self._check_observations(samples, where)
        return self.verdict.healthy

    def _check_statistics(self) -> None:
        """The statistics must be of numbers such as the demonstrations hold."""
        data, horizon = self.replay.data, self.replay.path.action_horizon
        rows = range(0, len(data), 1 + len(data) // MOST_ROWS)
        states = None if data.states is None else data.states[list(rows)]
        empty = torch.zeros(len(rows), 1, 1, 3, dtype=torch.uint8)
        actions, is_target = data.action_chunks(rows, horizon)
        normal = self.replay.path.normal(Observation(empty, None, states, [""] * len(rows)), actions)
        names = [f"state column {i}" for i in range(0 if normal.state is None else normal.state.shape[1])]
        mistakes = [] if normal.state is None else statistics_mistakes(normal.state.cpu().numpy(), names, clips=False)
        bridge = self.replay.bridge
        columns = range(self.replay.policy.action_dim) if bridge is None else bridge.columns  # that are executed
        mistakes += statistics_mistakes(
            normal.actions[is_target][:, list(columns)].cpu().numpy(),
            [f"action {name} (column {i})" for i, name in enumerate(self.replay.names)],
            clips=self.replay.path.clips,
        )
        source = f"of {self.cfg.actor.model.model_path}" if self.replay.has_policy else "fitted as `rlinf sft` does"
        fine = f"{source}; {len(rows)} frames lie within them"
        hint = f" (statistics {source}: are they of another suite, or of data in other units?)" if mistakes else ""
        self.verdict.tell("statistics", [line + hint for line in mistakes], fine)

    def _check_dataset(self, demos: Sequence[Demo]) -> bool:
        """What the dataset says the expert did must be what it does."""
        assert self.replay.bridge is not None
        chunk, wanted, got, states = self.replay.policy.num_action_chunks, [], [], []
        for episode, demo in zip(self.replay.episodes, demos, strict=True):
            steps = min(episode.length, len(demo.labels)) // chunk * chunk
            rows = self.replay.data.actions[episode.first : episode.first + steps]
            got.append(self.replay.wanted(rows[:, None])[:, 0].reshape(-1, chunk, self.replay.bridge.env.action_dim))
            labels = self.replay.bridge.from_env(torch.from_numpy(demo.labels[:steps, None]))
            wanted.append(self.replay.wanted(labels)[:, 0].reshape(got[-1].shape))
            if self.replay.bridge.env.state_dim:
                states.append(demo.states[:steps].reshape(len(got[-1]), chunk, -1))
        right = np.concatenate(wanted)
        mistakes = action_mistakes(
            right,
            np.concatenate(got),
            names=self.replay.bridge.env.action_names,
            tolerance=LOSSLESS * _scale(right) + 1e-5,
            states=[np.concatenate(states)] if states else [],
            share=SAME_SHARE,
        )
        fine = f"on {len(demos)} reset ids the expert does what the dataset says it did"
        return self.verdict.tell("dataset's actions", mistakes, fine)

    def _check_actions(self, samples: Samples) -> None:
        """What reaches the simulator must be what was recorded."""
        wanted, got, counted = (np.stack(x) for x in (samples.wanted, samples.got, samples.counted))
        resolution = self.replay.path.resolution().numpy()
        rounding = resolution if self.replay.bridge is None else resolution[self.replay.bridge.columns]
        if self.replay.spec is not None and self.replay.spec.gripper in ("sign", "binary_pm1"):
            rounding[-1] = 0.0
        tolerance = 1.01 * rounding + 0.1 * LOSSLESS * _scale(wanted) + 1e-6
        states = [np.stack(some) for some in zip(*samples.states, strict=True)]
        mistakes = action_mistakes(
            wanted, got, names=self.replay.names, tolerance=tolerance, states=states, counted=counted
        )
        if mistakes and (order := self._other_order(samples, tolerance)) is not None:
            mistakes = [f"all columns: chunk order: {order}"]
        errors = np.where(counted, np.abs(got - wanted), 0.0).max((0, 1))
        worst, self.lossless = int(errors.argmax()), bool((errors <= LOSSLESS * _scale(wanted)).all() and counted.all())
        fine = f"{len(wanted)} chunks of {wanted.shape[1]} come out as they went in; "
        fine += f"largest error {errors[worst]:.1g}, of {self.replay.names[worst]} (column {worst})"
        self.verdict.tell("actions", mistakes, fine)

    def _other_order(self, samples: Samples, tolerance: Array) -> str | None:
        """In which order the tokens of a chunk would have to be written for them to be read as they should."""
        chunk, columns = self.replay.policy.num_action_chunks, self.replay.policy.action_dim
        if chunk == 1 or samples.outputs[0][1].dim() != 2:  # not tokens
            return None
        wanted, counted = np.stack(samples.wanted), np.stack(samples.counted)
        for sizes, what in (
            ((chunk, columns), "action after action is written, column after column is read"),
            ((columns, chunk), "column after column is written, action after action is read"),
        ):
            got = [
                self.replay.decoded(seen, outputs.unflatten(1, sizes).transpose(1, 2).flatten(1))[0]
                for seen, outputs in samples.outputs
            ]
            if not Columns(wanted, np.stack(got), tolerance, counted).wrong():
                return what
        return None

    def _check_success(self, samples: Samples, demos: Sequence[Demo], where: str) -> None:
        """The replay must reach what the expert reaches."""
        recorded = [demo.success for demo in demos] or [e.success for e in self.replay.episodes]
        who = "the expert's own" if demos or not self.given else "that of the recorded episodes"
        lost = [i for i, success in enumerate(recorded) if success and not samples.successes[i]]
        reached, count = sum(samples.successes.values()), len(self.replay.episodes)
        allowed = 0 if self.lossless else int(MAX_LOST * sum(recorded))
        mistakes = []
        if len(lost) > allowed or not any(recorded):
            ids = ", ".join(str(self.replay.episodes[i].reset_id) for i in lost)
            mistakes = [
                f"{reached} of {count} episodes succeed, {who}: {sum(recorded)} of {count}"
                + (f"; lost are the reset ids {ids}" if lost else "; without a success nothing is proven")
                + self._other_settings(where)
            ]
        fine = f"{reached} of {count} episodes succeed in {where}'s simulator, {who}: {sum(recorded)} of {count}"
        self.verdict.tell("replay", mistakes, fine)

    def _check_observations(self, samples: Samples, where: str) -> None:
        """The policy must see in an evaluation what was recorded for it."""
        (mine, before), (its, now) = _joined(samples.recorded), _joined(samples.seen)
        cameras = ["main", *(f"wrist_{i}" for i in range(mine.shape[1] - 1))]
        mistakes = picture_mistakes(mine, its, cameras)
        size = f"{mine.shape[3]} x {mine.shape[2]}"
        fine = f"{len(mine)} observations of {', '.join(cameras)} at the model's {size} are those that {where} shows"
        self.verdict.tell("pictures", mistakes, fine)
        if before is None or now is None:
            self.verdict.note("state", "the policy reads none")
        else:
            fine = f"{now.shape[1]} columns are those that {where} shows"
            self.verdict.tell("state", state_mistakes(before, now), fine)
        for said, told in list(samples.sentences.items())[:1]:
            self.verdict.note("instruction", f"the dataset says {said!r} where the simulator says {told!r}")

    def _other_settings(self, where: str) -> str:
        """Options in which the simulator differs from that which the demonstrations were recorded in."""
        mine, its = self.cfg.env.train.init_params, self.cfg.env.eval.init_params
        other = [key for key in sorted({*mine, *its}) if mine.get(key) != its.get(key)]
        return (
            f"; env.train and env.eval differ in init_params.{', '.join(other)}"
            if other and where[4:] == "eval"
            else ""
        )


def _scale(actions: Array) -> Array:
    """The range of each column of actions [M, C, A], f64 [A]; of one that never changes its size."""
    flat = actions.reshape(-1, actions.shape[-1]).astype(np.float64)
    return np.maximum(np.ptp(flat, 0), 0.1 * np.abs(flat).max(0)) + 1e-6


def _joined(seen: Sequence[Seen]) -> tuple[Array, Array | None]:
    """Images u8 [M, n, h, w, 3] and state f64 [M, S] of observations of one row each."""
    states = [s.state for s in seen if s.state is not None]
    return torch.cat([s.images for s in seen]).cpu().numpy(), torch.cat(
        states
    ).cpu().double().numpy() if states else None
