"""The `env.train` and `env.eval` blocks. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class VideoConfig:
    """Videos that an env worker writes of its first envs."""

    save_video: bool = False
    """Write videos of the first envs of each env worker and stage."""
    info_on_video: bool = True
    """Write reward, success and step onto the frames."""
    video_base_dir: str = "video"
    """Folder of the videos."""
    fps: int = 0
    """0 plays at the simulator's control rate."""
    max_envs: int = 9
    """Envs shown, tiled; recording renders every step of these."""


@dataclass(frozen=True, kw_only=True)
class EnvConfig:
    """One set of environments (env.train or env.eval)."""

    env_type: str = "toy"
    """Simulator: its folder under rlinf/simulators, the name of an installed plugin, or a dotted path."""
    task_suite_name: str | None = None
    """Suite of that simulator, e.g. metaworld_50."""
    total_num_envs: int = 8
    """Environments over all workers and stages."""
    auto_reset: bool = False
    """Start a new episode at the chunk end where one ended; rollouts then continue across iterations."""
    ignore_terminations: bool = False
    """Play to max_episode_steps even after success."""
    max_steps_per_rollout_epoch: int = 100
    """Primitive steps per rollout."""
    max_episode_steps: int = 100
    """Primitive steps after which an episode is truncated."""
    rollout_epoch: int = 1
    """Rollouts of every env per training step."""
    num_trials: int = 0
    """env.eval: held-out ids to play once each; 0 derives envs x episodes per rollout x epochs, -1 plays all."""
    use_rel_reward: bool = True
    """Pay differences of the reward level instead of the level itself."""
    reward_coef: float = 1.0
    """Reward of a success."""
    seed: int = 0
    """Offset to runner.seed for reset ids."""
    group_size: int = 1
    """Neighbouring envs that start from the same reset id."""
    use_fixed_reset_state_ids: bool = False
    """Start every rollout from the same reset ids."""
    use_ordered_reset_state_ids: bool = False
    """Take reset ids in order instead of drawing them."""
    is_eval: bool = False
    """Accepted for compatibility; env.eval always plays held-out ids."""
    enable_offload: bool = False
    """Free the simulators' memory while the actor trains."""
    center_crop: bool = False
    """Show the policy the middle of the images."""
    use_custom_reward: bool = False
    """Pay the simulator's own shaped reward."""
    assets_path: str | None = None
    """Folder with the simulator's files."""
    seeds_path: str | None = None
    """File with the seeds to play."""
    policy_setup: str | None = None
    """Accepted for compatibility; the model's own policy_setup counts."""
    task_config: dict[str, Any] = field(default_factory=dict)
    """Passed to RoboTwin."""
    init_params: dict[str, Any] = field(default_factory=dict)
    """Options of the simulator itself; keys are those of its `Options`."""
    num_processes: int = 0
    """Simulator processes per env worker and stage; 0 chooses by cores."""
    python: str | None = None
    """Interpreter of the simulator processes; null is the running one."""
    step_deadline_s: float = 120.0
    """Seconds a simulator may take for one chunk or reset before it is restarted."""
    max_restarts: int = 3
    """Restarts per simulator process within one training step before the run stops."""
    video_cfg: VideoConfig = field(default_factory=VideoConfig)
