"""Runner: training step by step, with evaluations, checkpoints and resuming."""

from __future__ import annotations

import json
import math
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from rlinf.config.derived import chunks_per_rollout, total_steps
from rlinf.config.schema import Config
from rlinf.data.types import EpisodeRecord
from rlinf.envs.spec import env_spec, eval_trials, num_trials
from rlinf.errors import UserError
from rlinf.metrics.episode_summary import evaluation_metrics, summarise
from rlinf.metrics.phases import Usage, evaluation_seconds, step_metrics
from rlinf.metrics.run_log import Player, RunListener
from rlinf.placement.plan import Mode, Plan
from rlinf.progress import report
from rlinf.results.identity import PolicyIdentity, policy_identity
from rlinf.rollout_loop import roll_out
from rlinf.runtime.cluster import Group, make_cluster
from rlinf.runtime.stop_signals import stop_on_signals
from rlinf.storage.step_checkpoint import config_hash, find_resume, new_checkpoint, read_progress
from rlinf.workers.actor import ActorWorker
from rlinf.workers.env import EnvWorker
from rlinf.workers.rollout import RolloutWorker

STARTING = {"env": "starting the environments", "rollout": "loading the policy", "actor": "preparing the optimiser"}


class Runner:
    """Owns the cluster and calls its workers; knows nothing of simulators, models or algorithms."""

    def __init__(self, cfg: Config, plan: Plan, *, watch: RunListener) -> None:
        self.cfg, self.plan, self.watch = cfg, plan, watch
        self.total_steps = total_steps(cfg)
        self.folder = Path(cfg.runner.logger.log_path) / cfg.runner.logger.experiment_name
        self.global_step = 0
        self.saved_step = 0  # the step that a resumed run would continue from
        self.stop_requested = False
        self.stop_signal = signal.SIGTERM  # the one that asked for it
        self.times: dict[str, float] = {}  # seconds of each phase of the running step
        self.bytes = {"sync": 0, "offload": 0}  # moved since they were last reported
        self.copies_behind = math.inf  # updates since the last weight sync
        self.last_checkpoint: Path | None = None
        self.resume_from = self._find_resume()  # before anything heavy: it may refuse
        self.cluster = make_cluster(cfg, plan)
        self.env = self._launch(EnvWorker, "env")  # first: it may refuse, and weights take long to load
        self.rollout = self._launch(RolloutWorker, "rollout")
        self.actor = self._launch(ActorWorker, "actor")
        self.groups = {"env": self.env, "rollout": self.rollout, "actor": self.actor}
        report("starting", len(STARTING), len(STARTING))

    def train(self) -> None:
        """Run every remaining step, with evaluations and checkpoints where they are due."""
        self.resume()
        self.start_simulators("train")
        self.watch.start(self.global_step, self.total_steps)
        self.times, self.bytes = {}, dict.fromkeys(self.bytes, 0)
        with stop_on_signals(self._request_stop):
            while self.global_step < self.total_steps and not self.stop_requested:
                self.usage()  # setting up, loading and saving belong to no step
                with self.timed("step"):
                    metrics = self.step(self.global_step)
                    self.global_step += 1
                    used, evaluating = self.usage(), None
                    if self._evaluation_due():
                        metrics |= self.evaluate()
                        evaluating = self.usage()
                times, self.times = self.times, {}
                metrics |= step_metrics(self.plan, times, used, evaluating, env_steps=metrics["env/steps"])
                self.watch.log(self.global_step, metrics)
                if self.cfg.runner.save_interval > 0 and self.global_step % self.cfg.runner.save_interval == 0:
                    self.save()  # after the log line: a resumed run's metrics.jsonl then lacks nothing
            wanted = self.stop_requested or self.cfg.runner.save_last  # the loop ended, whenever a signal came
            if wanted and self.saved_step < self.global_step:
                self.save()

    def step(self, step: int) -> dict[str, float]:
        """One rollout and the update from its experience; returns the step's metrics."""
        with self.resident("env", "rollout"):
            if self.copies_behind >= self.cfg.runner.weight_sync_interval:
                self.sync()
            with self.timed("generate_rollouts"):
                self.cluster.get(self.begin_rollout(step))
        with self.resident("actor"):
            metrics = self.learn(step, self.experience())
        return metrics | self.rollout_metrics(self.env.call("drain_counts"), self.env.call("drain_episodes"))

    def begin_rollout(self, step: int) -> list[Any]:
        """Queue the rollout of a training step; returns futures that are done when it is."""
        epochs, chunks = self.cfg.env.train.rollout_epoch, chunks_per_rollout(self.cfg)
        return roll_out(self.env, self.rollout, self.plan, mode="train", step=step, epochs=epochs, chunks=chunks)

    def learn(self, step: int, experience: list[list[Any]]) -> dict[str, float]:
        """Compute advantages of the experience (futures by actor rank) and take the optimiser steps on it."""
        with self.timed("cal_adv_and_returns"):
            prepared = [self.actor.one(rank, "compute_advantages", *parts) for rank, parts in enumerate(experience)]
            metrics = dict(self.cluster.get(prepared)[0])
        with self.timed("actor_training"):
            metrics |= self.cluster.get(self.actor.call("update", step, self.total_steps))[0]
            self.copies_behind += 1
        return metrics

    def rollout_metrics(self, counts: list[Any], episodes: list[Any]) -> dict[str, float]:
        """Metrics of the futures of a rollout's counts and episodes, and of the bytes moved since the last call."""
        moved, self.bytes = self.bytes, dict.fromkeys(self.bytes, 0)
        metrics = {f"{name}/bytes": float(count) for name, count in moved.items()}
        by_rank = self.cluster.get(counts)
        metrics |= {name: float(sum(rank[name] for rank in by_rank)) for name in by_rank[0]}
        records = [record for rank in self.cluster.get(episodes) for record in rank]
        spec = env_spec(self.cfg.env.train)
        episodes_mean = summarise(records, spec.task_groups, by_task=spec.balanced)
        return metrics | {f"env/{name}": value for name, value in episodes_mean.items()}

    def sync(self) -> None:
        """Send the actor's weights to the rollout ranks that hold copies; nothing if no update came after the last."""
        if self.copies_behind == 0:
            return
        with self.timed("sync_weights"):
            sent = self.actor.one(0, "send_weights")
            received = [self.rollout.one(rank, "receive_weights") for rank in self.plan.rollout_copies]
            self.bytes["sync"] += self.cluster.get([sent, *received])[0]
            self.copies_behind = 0

    def experience(self) -> list[list[Any]]:
        """For each actor rank, futures of its share of the rollout ranks' experience."""
        return [
            [self.rollout.one(source, "experience", first, end, reader=rank) for source, first, end in route]
            for rank, route in enumerate(self.plan.experience_routes)
        ]

    def evaluate(self) -> dict[str, float]:
        """Play the held-out trials and write eval/step_N/result.json; returns metrics of their success."""
        records = self.play_trials()
        self.watch.evaluated(self.global_step, records, self.player())
        return evaluation_metrics(records, env_spec(self.cfg.env.eval).task_groups)

    def player(self) -> Player:
        """Who plays an evaluation now: the policy that was loaded, or one trained since, which has no files yet."""
        ranks, stages = range(len(self.plan.rollout)), range(self.plan.stages)
        calls = [self.plan.env_ids("rollout", rank, stage, "eval") for rank in ranks for stage in stages]
        trained = self.global_step > 0 and not self.cfg.runner.only_eval
        policy = PolicyIdentity("checkpoint", training_run=self.cfg.runner.run_id) if trained else self.loaded_policy
        return Player(policy, [ids for ids in calls if ids], self.cluster.get(self.rollout.call("describe_device"))[0])

    @cached_property
    def loaded_policy(self) -> PolicyIdentity:
        """The policy that the run started with."""
        return policy_identity(self.cfg)

    def evaluate_only(self) -> dict[str, float]:
        """As `evaluate`, with no training around it: the metrics say what it cost, too."""
        self.usage()  # setting up belongs to no evaluation
        metrics = self.evaluate()
        return metrics | {"time/eval": self.times["eval"], **evaluation_seconds(self.usage())}

    def play_trials(self) -> list[EpisodeRecord]:
        """Play every held-out trial once, with the deterministic sampler and the same noise at every call."""
        env = self.cfg.env.eval
        rounds = math.ceil(num_trials(env, env_spec(env)) / self.plan.eval_envs.num_envs)
        chunks = (rounds + env.max_restarts) * env.max_episode_steps  # of one step at least; lost trials play again
        with self.timed("eval"), self.resident("rollout"):
            self.sync()
            self._episodes()  # what the training envs finished belongs to the training step
            played = roll_out(
                self.env, self.rollout, self.plan, mode="eval", step=0, epochs=1, chunks=chunks, finished=self._played
            )
            self.cluster.get(played)
            self.cluster.get(self.env.call("release", mode="eval"))
            place = {reset_id: i for i, reset_id in enumerate(eval_trials(env, env_spec(env)))}
            return sorted(self._episodes(), key=lambda episode: place[episode.reset_id])

    def save(self) -> None:
        """Write a complete checkpoint of this step, or none."""
        states = self.cluster.get(self.env.call("state"))
        root, keep = self.folder / "checkpoints", self.cfg.runner.keep_checkpoints
        about = {"config_hash": config_hash(self.cfg), "run": self.cfg.runner.run_id or ""}
        checkpoint = new_checkpoint(root, self.global_step, keep=keep, **about)
        with self.timed("save"), self.resident("actor"), checkpoint as folder:
            (folder / "actor").mkdir()
            self.cluster.get(self.actor.call("save", folder / "actor"))
            (folder / "runner.json").write_text(json.dumps({"step": self.global_step, "env": states}))
        self.last_checkpoint, self.saved_step = root / f"global_step_{self.global_step}", self.global_step
        self.watch.saved(self.global_step, self.last_checkpoint)

    def resume(self) -> None:
        """Continue from runner.resume_dir, exactly where that run stood."""
        folder = self.resume_from
        if folder is None:
            return
        saved = read_progress(folder)
        with self.resident("actor"):
            self.cluster.get(self.actor.call("load", folder / "actor"))
            self.copies_behind = math.inf
        self.cluster.get(self.env.call("load_state", saved["env"]))
        self.global_step = self.saved_step = saved["step"]

    def start_simulators(self, mode: Mode) -> None:
        """Start the simulators of a mode before anything is written; those that offload wait for the first rollout."""
        if "env" not in self.plan.offload:
            self.cluster.get(self.env.call("start_simulators", mode=mode))

    def close(self) -> None:
        """End all workers and close the logs."""
        self.cluster.shutdown()
        self.watch.close()

    def usage(self) -> Usage:
        """Seconds of each worker, and bytes between processes, since the last call."""
        busy = {role: self.cluster.get(group.call("drain_seconds")) for role, group in self.groups.items()}
        return Usage(busy, self.cluster.drain_bytes())

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the block's seconds to `time/<name>` of this step."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.times[name] = self.times.get(name, 0.0) + time.perf_counter() - start

    @contextmanager
    def resident(self, *roles: str) -> Iterator[None]:
        """Have the named components on their devices for the block; those in plan.offload are moved there and back.

        After an error they stay: a worker that is stuck would never answer, and the error would not be seen.
        """
        moving = [self.groups[role] for role in roles if role in self.plan.offload]
        self._move(moving, "onload")
        yield
        self._move(moving, "offload")

    def _launch(self, worker_cls: type, role: str) -> Group:
        """Start a component; one that offloads is moved off its device until it is needed."""
        report(STARTING[role], list(STARTING).index(role), len(STARTING))
        group = self.cluster.launch(worker_cls, role)
        if role in self.plan.offload:
            self._move([group], "offload")
        return group

    def _move(self, groups: Sequence[Group], method: str) -> None:
        """Call `onload` or `offload` of every rank of the groups, and count the bytes moved."""
        if groups:
            with self.timed("offload"):
                moved = self.cluster.get([future for group in groups for future in group.call(method)])
                self.bytes["offload"] += sum(moved)

    def _find_resume(self) -> Path | None:
        """The checkpoint that runner.resume_dir means."""
        wanted = self.cfg.runner.resume_dir
        if wanted is None or self.cfg.runner.only_eval:
            return None
        root, run_id = self.folder / "checkpoints", self.cfg.runner.run_id
        folder = find_resume(root, wanted, config_hash(self.cfg), self.watch.warn, run_id)
        if folder is not None:
            ranks = len(read_progress(folder)["env"])
            if ranks != len(self.plan.env):
                raise UserError(f"checkpoint {folder} was made with {ranks} env ranks, not {len(self.plan.env)}")
        return folder

    def _evaluation_due(self) -> bool:
        interval = self.cfg.runner.val_check_interval
        return interval > 0 and (self.global_step % interval == 0 or self.global_step == self.total_steps)

    def _played(self) -> bool:
        """Whether every held-out trial has been played; waits for the chunk in flight."""
        stages = range(self.plan.stages)
        return all(all(self.cluster.get(self.env.call("finished", stage=stage))) for stage in stages)

    def _episodes(self) -> list[EpisodeRecord]:
        return [e for rank in self.cluster.get(self.env.call("drain_episodes")) for e in rank]

    def _request_stop(self, number: signal.Signals) -> None:
        if not self.stop_requested:
            self.stop_signal, self.stop_requested = number, True
