"""`rlinf doctor --recipe`: demonstrations go the way of imitation into a policy's outputs, and from there the way of an
evaluation into the simulator. They must reach the success of the expert who made them.

No network takes part: what it should give is put in the place of what it gives. Letters: N episodes, B rows, C actions
of a chunk, H actions the network gives at once, A columns of the simulator's actions.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from rlinf.compat.envs import env_class
from rlinf.config.check import check_config
from rlinf.config.schema import Config
from rlinf.data.types import Observation
from rlinf.demos.collect import collect_demos
from rlinf.demos.dataset import DemoDataset
from rlinf.demos.hub import find_dataset
from rlinf.demos.mistakes import (
    SAME_SHARE,
    Columns,
    action_mistakes,
    picture_mistakes,
    state_mistakes,
    statistics_mistakes,
)
from rlinf.demos.player import Demo, DemoJob, DemoPlayer
from rlinf.demos.recorded import choose_episodes
from rlinf.envs.bridge import Bridge
from rlinf.envs.config import NO_SIMULATOR, EnvConfig, VideoConfig
from rlinf.envs.spec import check_setup, env_spec
from rlinf.envs.vec import VecEnv
from rlinf.errors import UserError
from rlinf.models.action_path import ActionPath, Seen
from rlinf.models.config import is_placeholder
from rlinf.models.policy import find_policy
from rlinf.progress import report
from rlinf.runtime.worker import limit_threads
from rlinf.simulators.contract import EnvSpec
from rlinf.training.sft import fitted_model, rows_for_statistics

Array = np.ndarray
Tensor = torch.Tensor
MOST_ROWS = 4096  # frames that statistics are compared with
MOST_PAIRS = 64  # observations that are compared
LOSSLESS = 1e-3  # share of a column's range up to which actions count as equal
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
    """One dataset, one policy's path and one simulator."""

    def __init__(self, cfg: Config, episodes: int, say: Callable[[str], None], *, given: bool) -> None:
        self.verdict, self.given = Verdict(say), given
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
        self.lossless = True

    def run(self) -> bool:
        """Every check that the dataset and the config allow."""
        self._check_statistics()
        if self.spec is None or not all(e.is_replayable for e in self.episodes):
            self._check_actions(self._round_trip())
            self.verdict.note("replay", self._why_not())
            return self.verdict.healthy
        block, where = self._block()
        check_setup(block, where)
        self.spec = env_spec(block, where)
        self.bridge = Bridge(self.spec, self.policy)
        demos = self._expert(block) if self.given and all(e.is_expert for e in self.episodes) else []
        faithful = not demos or self._check_dataset(demos)
        samples = self._replay(block, demos, faithful=faithful)
        self._check_actions(samples)
        self._check_success(samples, demos, where)
        self._check_observations(samples, where)
        return self.verdict.healthy

    # ------------------------------------------------------------------ what is played
    def _why_not(self) -> str:
        if self.spec is None:
            return "the config has no simulator; normalising, the model's layout and back were checked alone"
        if any(e.reset_id is None for e in self.episodes):
            return (
                "meta/episodes of the dataset has no column reset_id, which tells where an episode began; normalising, "
                "the model's layout, the bridge and back were checked without the simulator"
            )
        return (
            "the dataset was collected with action noise by a version that did not record it (noise_seed): collect it "
            "again, or with collect.action_noise=0"
        )

    def _block(self) -> tuple[EnvConfig, str]:
        """The env block that plays the episodes, and its key: the evaluation's where it plays the same suite."""
        train, evaluation = self.cfg.env.train, self.cfg.env.eval
        mine, its = env_spec(train), env_spec(evaluation, "env.eval")

        def plays(spec: EnvSpec) -> bool:
            ids = [spec.reset_ids[split] for split in ("demo", "train")]
            return all(any(e.reset_id in some for some in ids) for e in self.episodes)

        same = train.env_type == evaluation.env_type and (mine.suite, mine.tasks) == (its.suite, its.tasks)
        if same and plays(its):
            return evaluation, "env.eval"
        if plays(mine):
            self.verdict.note("simulator", f"env.eval plays {its.suite}; these demonstrations are of env.train's suite")
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

    # ------------------------------------------------------------------ the three ways through
    def _expert(self, block: EnvConfig) -> list[Demo]:
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

    def _round_trip(self) -> Samples:
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

    def _replay(self, block: EnvConfig, demos: Sequence[Demo], *, faithful: bool) -> Samples:
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
                got = self._decoded(step.obs, outputs)
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

    def _decoded(self, seen: Observation, outputs: Tensor) -> Array:
        """The actions f32 [B, C, A] that an evaluation makes of a network's outputs and gives to the simulator."""
        actions = self.path.actions(seen, outputs).cpu().float()
        return (actions if self.bridge is None else self.bridge.to_env(actions)).numpy()

    def _wanted(self, actions: Tensor) -> Array:
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
        wanted, got = self._wanted(actions[i : i + 1, :chunk])[0], self._decoded(blind, outputs[i : i + 1])[0]
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

    # ------------------------------------------------------------------ what is found
    def _check_statistics(self) -> None:
        """The statistics must be of numbers such as the demonstrations hold."""
        data, horizon = self.data, self.path.action_horizon
        rows = range(0, len(data), 1 + len(data) // MOST_ROWS)
        states = None if data.states is None else data.states[list(rows)]
        empty = torch.zeros(len(rows), 1, 1, 3, dtype=torch.uint8)
        actions, is_target = data.action_chunks(rows, horizon)
        normal = self.path.normal(Observation(empty, None, states, [""] * len(rows)), actions)
        names = [f"state column {i}" for i in range(0 if normal.state is None else normal.state.shape[1])]
        mistakes = [] if normal.state is None else statistics_mistakes(normal.state.cpu().numpy(), names, clips=False)
        columns = range(self.policy.action_dim) if self.bridge is None else self.bridge.columns  # that are executed
        mistakes += statistics_mistakes(
            normal.actions[is_target][:, list(columns)].cpu().numpy(),
            [f"action {name} (column {i})" for i, name in enumerate(self._names())],
            clips=self.path.clips,
        )
        source = f"of {self.cfg.actor.model.model_path}" if self.has_policy else "fitted as `rlinf sft` does"
        fine = f"{source}; {len(rows)} frames lie within them"
        hint = f" (statistics {source}: are they of another suite, or of data in other units?)" if mistakes else ""
        self.verdict.tell("statistics", [line + hint for line in mistakes], fine)

    def _check_dataset(self, demos: Sequence[Demo]) -> bool:
        """What the dataset says the expert did must be what it does."""
        assert self.bridge is not None
        chunk, wanted, got, states = self.policy.num_action_chunks, [], [], []
        for episode, demo in zip(self.episodes, demos, strict=True):
            steps = min(episode.length, len(demo.labels)) // chunk * chunk
            rows = self.data.actions[episode.first : episode.first + steps]
            got.append(self._wanted(rows[:, None])[:, 0].reshape(-1, chunk, self.bridge.env.action_dim))
            labels = self.bridge.from_env(torch.from_numpy(demo.labels[:steps, None]))
            wanted.append(self._wanted(labels)[:, 0].reshape(got[-1].shape))
            if self.bridge.env.state_dim:
                states.append(demo.states[:steps].reshape(len(got[-1]), chunk, -1))
        right = np.concatenate(wanted)
        mistakes = action_mistakes(
            right,
            np.concatenate(got),
            names=self.bridge.env.action_names,
            tolerance=LOSSLESS * _scale(right) + 1e-5,
            states=[np.concatenate(states)] if states else [],
            share=SAME_SHARE,
        )
        fine = f"on {len(demos)} reset ids the expert does what the dataset says it did"
        return self.verdict.tell("dataset's actions", mistakes, fine)

    def _check_actions(self, samples: Samples) -> None:
        """What reaches the simulator must be what was recorded."""
        wanted, got, counted = (np.stack(x) for x in (samples.wanted, samples.got, samples.counted))
        resolution = self.path.resolution().numpy()
        rounding = resolution if self.bridge is None else resolution[self.bridge.columns]
        if self.spec is not None and self.spec.gripper in ("sign", "binary_pm1"):
            rounding[-1] = 0.0
        tolerance = 1.01 * rounding + 0.1 * LOSSLESS * _scale(wanted) + 1e-6
        states = [np.stack(some) for some in zip(*samples.states, strict=True)]
        mistakes = action_mistakes(
            wanted, got, names=self._names(), tolerance=tolerance, states=states, counted=counted
        )
        if mistakes and (order := self._other_order(samples, tolerance)) is not None:
            mistakes = [f"all columns: chunk order: {order}"]
        errors = np.where(counted, np.abs(got - wanted), 0.0).max((0, 1))
        worst, self.lossless = int(errors.argmax()), bool((errors <= LOSSLESS * _scale(wanted)).all() and counted.all())
        fine = f"{len(wanted)} chunks of {wanted.shape[1]} come out as they went in; "
        fine += f"largest error {errors[worst]:.1g}, of {self._names()[worst]} (column {worst})"
        self.verdict.tell("actions", mistakes, fine)

    def _other_order(self, samples: Samples, tolerance: Array) -> str | None:
        """In which order the tokens of a chunk would have to be written for them to be read as they should."""
        chunk, columns = self.policy.num_action_chunks, self.policy.action_dim
        if chunk == 1 or samples.outputs[0][1].dim() != 2:  # not tokens
            return None
        wanted, counted = np.stack(samples.wanted), np.stack(samples.counted)
        for sizes, what in (
            ((chunk, columns), "action after action is written, column after column is read"),
            ((columns, chunk), "column after column is written, action after action is read"),
        ):
            got = [
                self._decoded(seen, outputs.unflatten(1, sizes).transpose(1, 2).flatten(1))[0]
                for seen, outputs in samples.outputs
            ]
            if not Columns(wanted, np.stack(got), tolerance, counted).wrong():
                return what
        return None

    def _check_success(self, samples: Samples, demos: Sequence[Demo], where: str) -> None:
        """The replay must reach what the expert reaches."""
        recorded = [demo.success for demo in demos] or [e.success for e in self.episodes]
        who = "the expert's own" if demos or not self.given else "that of the recorded episodes"
        lost = [i for i, success in enumerate(recorded) if success and not samples.successes[i]]
        reached, count = sum(samples.successes.values()), len(self.episodes)
        allowed = 0 if self.lossless else int(MAX_LOST * sum(recorded))
        mistakes = []
        if len(lost) > allowed or not any(recorded):
            ids = ", ".join(str(self.episodes[i].reset_id) for i in lost)
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

    def _names(self) -> Sequence[str]:
        """Names of the action columns that come out of the bridge."""
        return [str(i) for i in range(self.policy.action_dim)] if self.spec is None else self.spec.action_names

    def _other_settings(self, where: str) -> str:
        """Options in which the simulator differs from that which the demonstrations were recorded in."""
        mine, its = self.cfg.env.train.init_params, self.cfg.env.eval.init_params
        other = [key for key in sorted({*mine, *its}) if mine.get(key) != its.get(key)]
        return (
            f"; env.train and env.eval differ in init_params.{', '.join(other)}"
            if other and where[4:] == "eval"
            else ""
        )


def _noise(demo: Demo, at: int, chunk: int) -> Array:
    """What was added to the expert's actions from a step on, f32 [C, A]; 0 beyond the end."""
    out = np.zeros((chunk, demo.labels.shape[1]), np.float32)
    noise = (demo.actions - demo.labels)[at : at + chunk]
    out[: len(noise)] = noise
    return out


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
