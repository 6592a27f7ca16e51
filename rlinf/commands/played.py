"""A policy that plays the trials of a comparison, and writes their result.json as an evaluation does."""

from __future__ import annotations

import gc
import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rlinf.commands import jobs
from rlinf.commands.run_folders import in_folder, with_id
from rlinf.config.derived import make_plan
from rlinf.config.schema import Config
from rlinf.data.types import EpisodeRecord
from rlinf.demos.player import check_expert, play_trials
from rlinf.envs.spec import env_spec
from rlinf.metrics.episode_summary import evaluation_metrics
from rlinf.metrics.run_log import Player, RunLog
from rlinf.models.files.pretrained import PretrainedPolicy
from rlinf.models.policy import find_policy
from rlinf.results.comparison import Trial
from rlinf.results.identity import PolicyIdentity, policy_identity
from rlinf.results.protocol import evaluation_protocol
from rlinf.runtime.cluster import check_backend
from rlinf.storage.step_checkpoint import step_of


class Played:
    """A policy that plays trials now, a batch at a time; it is loaded for each batch and gone after it."""

    def __init__(self, name: str, argument: str, cfg: Config) -> None:
        self.name, self.argument, self.cfg = name, argument, cfg
        self.protocol = evaluation_protocol(cfg)
        self.outcomes: dict[Trial, bool] = {}
        self.file: Path | None = None  # its result.json, once that is written
        self._records: list[EpisodeRecord] = []
        self._player: Player | None = None

    @property
    def identity(self) -> PolicyIdentity:
        """Which policy plays."""
        return self._player.policy if self._player is not None else policy_identity(self.cfg)

    def check(self) -> None:
        """Refuse what this machine cannot play, or a policy of another model, before any weights are loaded."""
        if self.cfg.runner.eval_expert:
            check_expert(self.cfg.env.eval)
        jobs.check_machine(self.cfg)
        check_backend(make_plan(self.cfg))
        model = self.cfg.actor.model
        policy = find_policy(model.model_type)
        if self.cfg.runner.ckpt_path is not None and issubclass(policy, PretrainedPolicy):
            policy.action_path(model)  # reads config.json and statistics

    def write_to(self, folder: Path) -> None:
        """Have everything written below `folder`."""
        moved = in_folder(self.cfg, folder)  # of which the policy is no part: it may lie in the folder of its own run
        logs, workers = moved.runner.logger, moved.runner.per_worker_log_path
        runner = replace(self.cfg.runner, logger=logs, per_worker_log_path=workers)
        self.cfg = with_id(replace(self.cfg, env=moved.env, runner=runner), None)

    def play(self, reset_ids: Sequence[int]) -> None:
        """Play these trials."""
        cfg = _with_trials(self.cfg, reset_ids)
        if cfg.runner.eval_expert:
            records = play_trials(cfg.env.eval, seed=cfg.runner.seed + cfg.env.eval.seed)
            self._player = Player(policy_identity(cfg))
        else:
            runner = jobs.make_runner(cfg, make_plan(cfg), _Quiet())
            try:
                runner.start_simulators("eval")
                records, self._player = runner.play_trials(), runner.player()
            finally:
                runner.close()
            del runner
            gc.collect()  # the next policy is loaded before Python would find the cycles that hold this one
        calls = max((r.first_call + r.calls for r in self._records), default=0)  # of the batches before
        self._records += [replace(record, first_call=record.first_call + calls) for record in records]
        self.outcomes |= {(r.suite, r.task, r.reset_id): r.success_once for r in records}

    def write(self) -> None:
        """Write the result.json of all that was played, as an evaluation of these trials does; print its warnings."""
        if self._player is None:
            return
        cfg = _with_trials(self.cfg, [record.reset_id for record in self._records])
        said = io.StringIO()
        log, step = RunLog(cfg, stream=said), step_of(cfg.runner.ckpt_path)
        try:
            log.start_evaluation(step)
            log.evaluated(step, self._records, self._player)
            log.log_evaluation(step, evaluation_metrics(self._records, env_spec(cfg.env.eval).task_groups))
            self.file = log.evaluations[-1]
        finally:
            log.close()
            for line in said.getvalue().splitlines():
                if line.startswith("warning: "):
                    print(line)


class _Quiet:
    """A RunListener that writes nothing: `Played.write` does, once all batches are played."""

    def start(self, first_step: int, total_steps: int) -> None:
        pass

    def log(self, step: int, metrics: dict[str, float]) -> None:
        pass

    def evaluated(self, step: int, records: Sequence[EpisodeRecord], player: Player) -> None:
        pass

    def saved(self, step: int, checkpoint: Path) -> None:
        pass

    def note(self, message: str) -> None:
        pass

    def warn(self, message: str) -> None:
        print(f"warning: {message}")

    def close(self) -> None:
        pass


def _with_trials(cfg: Config, reset_ids: Sequence[int]) -> Config:
    """The same config, whose evaluation plays these trials."""
    return replace(cfg, env=replace(cfg.env, eval=replace(cfg.env.eval, reset_ids=list(reset_ids))))
