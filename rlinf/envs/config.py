"""The `env.train` and `env.eval` blocks. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from rlinf.typed import Count, Seed, Weight, Within

NO_SIMULATOR = ""  # env_type of `rlinf sft` with a config that has no env.train block


@dataclass(frozen=True, kw_only=True)
class VideoConfig:
    """Videos that an env worker writes of its first envs."""

    save_video: bool = False
    """Film the first environments of every rank, of its first pipeline stage."""
    info_on_video: bool = True
    """Write reward, success and step onto the frames."""
    video_base_dir: str = "video"
    """Folder of the files, one sub-folder per rank."""
    fps: Annotated[int, Within(0, 1000)] = 0
    """0 plays at the simulator's control rate."""
    max_envs: Annotated[int, Within(1, 1024)] = 9
    """Envs shown, tiled; recording renders every step of these."""


@dataclass(frozen=True, kw_only=True)
class SimulatorKeys:
    """Keys of an env block that only some simulators read: those whose `Options` have a field of that name."""

    center_crop: bool = False
    """Crop images to the centre; for simulators that read it; others warn."""
    use_custom_reward: bool = False
    """Pay a reward of one's own; for simulators that read it; others warn."""
    assets_path: str | None = None
    """Folder of the simulator's assets; for simulators that read it; others warn."""
    seeds_path: str | None = None
    """File of the seeds to play; for simulators that read it; others warn."""
    task_config: dict[str, Any] = field(default_factory=dict)
    """Task settings, handed to the simulator as they are; for simulators that read it; others warn."""


@dataclass(frozen=True, kw_only=True)
class EnvConfig(SimulatorKeys):
    """One set of environments (env.train or env.eval)."""

    env_type: str = "toy"
    """Simulator: one of rlinf/simulators, of an installed package, or the dotted path of your own module."""
    task_suite_name: str | list[str] | None = None
    """Suite or task of that simulator, e.g. metaworld_50, or a list of them: [reach-v3, push-v3], in equal shares."""
    task_weights: dict[str, Annotated[float, Within(1e-6, 1e6)]] = field(default_factory=dict)
    """env.train: shares of the tasks in the episodes, {reach-v3: 2}; a task that is not named weighs 1."""
    total_num_envs: Annotated[int, Within(1, 10**6)] = 8
    """Environments over all workers and stages."""
    auto_reset: bool = False
    """Start a new episode at the chunk end where one ended; rollouts then continue across iterations."""
    ignore_terminations: bool = False
    """Play to max_episode_steps even after success."""
    max_steps_per_rollout_epoch: Annotated[int, Within(1, 10**6)] = 100
    """Primitive steps per rollout."""
    max_episode_steps: Annotated[int, Within(1, 10**6)] = 100
    """Primitive steps after which an episode is truncated."""
    rollout_epoch: Annotated[int, Within(1, 10**6)] = 1
    """Rollouts of every env per training step."""
    num_trials: Annotated[int, Within(-1)] = 0
    """env.eval: held-out ids to play once each; 0 derives envs x episodes per rollout x epochs, -1 plays all."""
    reset_ids: list[Annotated[int, Within(0)]] = field(default_factory=list)
    """env.eval: the held-out ids to play, in this order, in place of num_trials of them."""
    use_rel_reward: bool = True
    """Pay differences of the reward level instead of the level itself."""
    reward_coef: Weight = 1.0
    """Reward of a success."""
    seed: Seed = 0
    """Offset to runner.seed for reset ids."""
    group_size: Count = 1
    """Neighbouring envs that start from the same reset id."""
    use_ordered_reset_state_ids: bool = False
    """Take reset ids in order instead of drawing them."""
    enable_offload: bool = False
    """Free the simulators' memory while the actor trains."""
    init_params: dict[str, Any] = field(default_factory=dict)
    """Options of the simulator itself; keys are those of its `Options`."""
    num_processes: Annotated[int, Within(0, 4096)] = 0
    """Simulator processes per env worker and stage; 0 chooses by cores."""
    python: str | None = None
    """Interpreter of the simulator processes; null is the running one, or where a simulator needs an environment of its
    own (RoboTwin) the one that install.sh made."""
    step_deadline_s: Annotated[float, Within(0.01, 10**6)] = 120.0
    """Seconds a simulator may take for one chunk or reset before it is restarted."""
    max_restarts: Annotated[int, Within(0, 10**6)] = 3
    """Restarts per simulator process within one training step before the run stops."""
    video_cfg: VideoConfig = field(default_factory=VideoConfig)
    """Videos of what the policy does."""
