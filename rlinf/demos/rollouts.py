"""`rlinf export --rollouts`: a policy plays, and its episodes become a dataset, every step of them.

Letters: B envs, C actions per chunk, A action dims, T frames of an episode.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlinf.config.schema import Config
from rlinf.data.noise import Noise
from rlinf.data.types import EpisodeRecord, Observation
from rlinf.demos.writer import DatasetWriter
from rlinf.envs.bridge import Bridge
from rlinf.envs.config import VideoConfig
from rlinf.envs.spec import env_options, env_spec, selection_ids
from rlinf.envs.vec import VecEnv
from rlinf.errors import UserError
from rlinf.metrics.stats import Rate
from rlinf.models.policy import Policy
from rlinf.storage.atomic_folder import atomic_folder, check_output

REPORT_EVERY = 10  # episodes
Array = np.ndarray


@dataclass
class _Row:
    """An env while an episode runs in it: what was seen and done so far, and the actions still to play."""

    seen: list[Observation] = field(default_factory=list)  # of one row each
    actions: list[Array] = field(default_factory=list)  # f32 [A] each
    queue: deque[Array] = field(default_factory=deque)  # f32 [A] each, of the last chunk

    def forget(self) -> None:
        """The episode is over, or its simulator died."""
        self.seen, self.actions = [], []
        self.queue.clear()


def record_rollouts(
    cfg: Config,
    policy: Policy,
    output: Path,
    *,
    episodes: int,
    successes_only: bool = False,
    overwrite: bool = False,
    on_progress: Callable[[str], None] = print,
) -> Rate:
    """Play training layouts of env.eval's suite, write their episodes to `output` and return how many succeeded.

    The held-out trials of evaluations are never played: a policy may learn from the dataset.
    """
    check_output(output, "OUTPUT", "dataset", overwrite=overwrite)
    env_cfg = replace(cfg.env.eval, ignore_terminations=False, video_cfg=VideoConfig())
    spec = env_spec(env_cfg, "env.eval")
    ids = spec.reset_ids["train"]
    if episodes > len(ids):
        raise UserError(f"--episodes {episodes} must be at most {len(ids)}, the training layouts of {spec.suite}")
    trials = selection_ids(spec, episodes, cfg.runner.seed)
    records: list[EpisodeRecord] = []
    with atomic_folder(output, what=f"OUTPUT={output}") as work:
        env = VecEnv(
            replace(env_cfg, total_num_envs=min(episodes, env_cfg.total_num_envs)),
            spec,
            env_ids=range(min(episodes, env_cfg.total_num_envs)),
            mode="eval",
            chunk_size=1,  # every step is seen
            seed=cfg.runner.seed,
            trials=trials,
            critic_state=spec.critic_state_dim > 0,
        )
        try:
            with DatasetWriter(work, spec) as writer:

                def finished(record: EpisodeRecord, row: _Row) -> None:
                    records.append(record)
                    if record.success_once or not successes_only:
                        _add(writer, record, row)
                    if len(records) % REPORT_EVERY == 0 or len(records) == episodes:
                        rate = Rate.of(r.success_once for r in records)
                        on_progress(f"rollouts {len(records)}/{episodes}  success {rate}")

                _play(env, policy, cfg.runner.seed, finished)
                if successes_only and not any(r.success_once for r in records):
                    raise UserError(
                        f"none of {episodes} episodes succeeded, so that --successes-only leaves no dataset"
                    )
        finally:
            env.close()
        success = Rate.of(r.success_once for r in records)
        about: dict[str, Any] = {"checkpoint": cfg.runner.ckpt_path, "simulator": env_cfg.env_type, "suite": spec.suite}
        about |= {"options": asdict(env_options(env_cfg, "env.eval")), "horizon": env_cfg.max_episode_steps}
        about |= {"seed": cfg.runner.seed, "episodes_played": len(records), "successes": success.successes}
        (work / "meta/rollouts.json").write_text(json.dumps(about | {"successes_only": successes_only}, indent=1))
    return success


def _play(env: VecEnv, policy: Policy, seed: int, finished: Callable[[EpisodeRecord, _Row], None]) -> None:
    """Play every trial step by step; a row asks the policy again when its chunk is played or its task changed."""
    device, bridge = next(policy.parameters()).device, Bridge(env.spec, policy.spec)
    rows, step = [_Row() for _ in range(env.num_envs)], env.reset()
    while not env.done:
        if any(not row.queue for row in rows):
            assert step.trials is not None
            noise = Noise.of_trials(step.trials, seed=seed, device=device)
            with torch.no_grad():
                chunks = policy.predict(step.obs.to(device), mode="eval", noise=noise).actions
            for row, chunk in zip(rows, bridge.to_env(chunks.cpu()).float().numpy(), strict=True):
                if not row.queue:
                    row.queue.extend(chunk)
        actions = np.stack([row.queue.popleft() for row in rows])
        after = env.chunk_step(torch.from_numpy(actions)[:, None])
        for i, row in enumerate(rows):
            if after.lost[i]:
                row.forget()
            elif after.valid[i, 0]:
                row.seen.append(step.obs[i : i + 1])
                row.actions.append(actions[i])
                if after.obs.task_descriptions[i] != step.obs.task_descriptions[i]:
                    row.queue.clear()
        for record in env.drain_episodes():
            finished(record, rows[record.env_id])
            rows[record.env_id].forget()
        step = after


def _add(writer: DatasetWriter, record: EpisodeRecord, row: _Row) -> None:
    """Write a finished episode."""
    seen = Observation.cat(row.seen)
    critic = None if seen.critic_state is None else seen.critic_state[:, :-1].numpy()  # without the time passed
    extra = {"task_name": record.task, "reset_id": record.reset_id, "success": record.success_once}
    writer.add(
        images=seen.images.numpy(),
        wrist_images=_numpy(seen.wrist_images),
        states=_numpy(seen.states),
        actions=np.stack(row.actions),
        critic_states=critic,
        task=seen.task_descriptions,
        extra=extra | {"return": record.episode_return},
    )


def _numpy(x: torch.Tensor | None) -> Array | None:
    return None if x is None else x.numpy()
