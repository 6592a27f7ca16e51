"""Every key a config may hold, with its type, default and meaning. Torch-free and Ray-free.

`load.py` fills these dataclasses from YAML and refuses what they do not know. `actor.model` is the model's own
`Config` (models/<model_type>/config.py); `init_params` is checked against the simulator's `Options`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from rlinf.algorithms.config import AlgorithmConfig
from rlinf.envs.config import EnvConfig
from rlinf.models.config import ModelConfig
from rlinf.typed import Count, CountOrNever, Seed, Share, Weight, Within, ZeroOrMore

RECIPE, TIME = "<recipe>", "<time>"  # in log_path: filled in when the config is loaded, and when the run begins
Rate = Annotated[float, Within(0, 10)]  # of learning; 0 learns nothing
Decay = Annotated[float, Within(0, 0.999999)]
Norm = Annotated[float, Within(1e-9, 1e9)]


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Where things run."""

    num_nodes: Annotated[int, Within(1, 1024)] = 1
    """Machines taking part."""
    component_placement: dict[str, Any] = field(default_factory=lambda: {"actor,env,rollout": "all"})
    """Placement grammar: component list -> resource[:process] ranges (docs/placement.md)."""
    node_groups: list[dict[str, Any]] = field(default_factory=list)
    """Labelled sets of nodes that placements may name."""
    backend: Literal["auto", "local", "ray"] = "auto"
    """auto takes one process when the plan allows it, else Ray."""
    ray_address: str | None = None
    """Ray cluster to join (`auto`, or host:port of its head); null starts one on this machine for the run."""
    virtual_devices: Annotated[int, Within(0, 128)] = 0
    """Pretend that every node has this many accelerators, all of them its CPU; 0 counts the real ones."""
    torch_threads: Annotated[int, Within(0, 4096)] = 0
    """CPU threads of torch; 0 leaves it to torch, with Ray it deals the cores out to a node's processes. Small networks
    are as fast with 1, and steadier on a busy machine."""


@dataclass(frozen=True, kw_only=True)
class LoggerConfig:
    """Where a run writes."""

    log_path: str = f"logs/{TIME}-{RECIPE}"
    """Folder of this run's files; `<time>` and `<recipe>` stand for its begin and the name of its config. A folder that
    holds another run is refused (docs/runs.md)."""
    project_name: str = "rlinf"
    """Project that Weights & Biases and SwanLab file the run under."""
    experiment_name: str = "run"
    """Sub-folder of log_path that holds the checkpoints, and the run's name in dashboards."""
    logger_backends: list[Literal["tensorboard", "wandb", "swanlab"]] = field(default_factory=lambda: ["tensorboard"])
    """Where curves are shown; metrics.jsonl is always written."""
    table_interval: CountOrNever = 50
    """Show every metric on the console each so many steps, beside the line of every step; -1 never, `--verbose` is 1.
    metrics.log holds the table of all steps."""
    wandb_mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    """auto is WANDB_MODE if set, online after `wandb login`, else offline: kept in log_path for `wandb sync`."""
    wandb_entity: str | None = None
    """User or team that owns the run; null is the default one."""
    wandb_proxy: str | None = None
    """Proxy for Weights & Biases, http://host:port."""
    swanlab_mode: Literal["auto", "online", "cloud", "local", "offline", "disabled"] = "auto"
    """auto is SWANLAB_MODE if set, online after `swanlab login`, else offline: kept in log_path for `swanlab sync`.
    cloud is another name of online; local needs SwanLab's dashboard."""


@dataclass(frozen=True, kw_only=True)
class RunnerConfig:
    """How long to train and what to keep."""

    task_type: Literal["embodied", "embodied_eval", "embodied_sft"] = "embodied"
    """embodied_eval evaluates whatever command runs the file."""
    seed: Seed = 0
    """Root of all randomness; env.*.seed and actor.seed are added as offsets."""
    max_epochs: Count = 1000
    """Training steps (one step is one rollout and its update)."""
    max_steps: CountOrNever = -1
    """Upper bound on training steps, at most max_epochs; -1 leaves max_epochs in charge."""
    only_eval: bool = False
    """Evaluate instead of training; `rlinf eval` sets it."""
    eval_expert: bool = False
    """`rlinf eval`: the simulator's scripted expert plays instead of the policy."""
    eval_random: bool = False
    """`rlinf eval`: the policy may be one of random weights; `rlinf eval --random` sets it."""
    val_check_interval: CountOrNever = -1
    """Evaluate every this many steps and after the last; -1 never."""
    save_interval: CountOrNever = -1
    """Save every this many steps; -1 leaves it at the last."""
    save_last: bool = True
    """Save the last step, whatever save_interval says. With save_last=false and save_interval=-1 nothing is saved."""
    keep_checkpoints: ZeroOrMore = 0
    """Keep only the newest k checkpoints; 0 keeps all."""
    resume_dir: str | None = None
    """A global_step_N or run folder to continue from, or `auto`: the run in log_path, without one the newest unfinished
    run of this recipe, with the same settings of what is learnt and how."""
    run_id: str | None = None
    """Id of the run, in every file that it writes; null draws one, and a run that is continued keeps its own."""
    ckpt_path: str | None = None
    """Weights to load before anything else (a checkpoint folder, or a .pt imported weights-only)."""
    weight_sync_interval: Annotated[int, Within(1, 10**6)] = 1
    """Updates between weight syncs, where rollout and actor are not in one process. A run that begins or is resumed
    syncs at once, and so does every evaluation."""
    max_staleness: Annotated[int, Within(0, 1000)] = 0
    """Updates that the weights of a rollout may lack when it is learnt from. 0 rolls out and learns in turn; with 1 or
    more the next rollouts run during the update, and actors have processes of their own, where need be on the same
    accelerators."""
    per_worker_log: bool = False
    """With Ray: the output of every process also by worker, as GROUP_NAME/rank_K.log."""
    per_worker_log_path: str | None = None
    """With Ray: folder for the output of processes; null is worker_logs below log_path."""
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    """Where the run writes."""


@dataclass(frozen=True, kw_only=True)
class EnvGroupConfig:
    """The environments."""

    group_name: str = "EnvGroup"
    """Folder of these workers' logs, with runner.per_worker_log."""
    train: EnvConfig = field(default_factory=EnvConfig)
    """Environments that rollouts learn from."""
    eval: EnvConfig = field(default_factory=EnvConfig)
    """Environments that play the held-out trials."""


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """Token sampling of OpenVLA and OpenVLA-OFT."""

    do_sample: bool = True
    """False evaluates greedily; training always samples."""
    temperature_train: Annotated[float, Within(0.001, 100)] = 1.0
    """Divides the logits of the action bins."""
    temperature_eval: Annotated[float, Within(-1, 100)] = 0.6
    """Greedy when <= 0."""
    top_k: Annotated[int, Within(-1, 256)] = 0
    """Draw from this many of the 256 action bins; <= 0 keeps all."""


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """The side that runs the policy in the loop."""

    group_name: str = "RolloutGroup"
    """Folder of these workers' logs, with runner.per_worker_log."""
    enable_offload: bool = False
    """Weights wait in pinned host memory while others work on the same accelerators; those shared with an actor of the
    same process stay."""
    pipeline_stage_num: Literal["auto"] | Annotated[int, Within(1, 1024)] = "auto"
    """Env batches alternated so that simulators and policy overlap. auto: 2 where the policy has an accelerator, the
    simulators run on the host's cores and the envs can be halved; else 1."""
    prefix_cache_bytes: Literal["auto"] | Annotated[int, Within(0, 1 << 50)] = "auto"
    """Device memory, shared by the ranks on it, for the prefixes that train_expert_only updates use again. auto: what
    is free after weights, optimiser, experience and the activations of the last update."""
    prefix_cache_host_bytes: Literal["auto"] | Annotated[int, Within(0, 1 << 50)] = "auto"
    """Pinned host memory of each rollout rank for the prefixes that the device has no room for; what neither holds is
    computed again. auto: half of what the host has free beside a GPU, none without one."""
    sampling_params: SamplingConfig = field(default_factory=SamplingConfig)
    """Token sampling of OpenVLA and OpenVLA-OFT."""
    model: dict[str, Any] = field(default_factory=dict)
    """model_path and precision overrides, or a whole model block for evaluation-only configs."""


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW with a second group for the value head."""

    lr: Rate = 1e-5
    """Learning rate of everything but the value head."""
    value_lr: Rate = 1e-4
    """Learning rate of the value head."""
    adam_beta1: Decay = 0.9
    """Decay of AdamW's mean of gradients."""
    adam_beta2: Decay = 0.999
    """Decay of AdamW's mean of squared gradients."""
    adam_eps: Annotated[float, Within(1e-16, 1)] = 1e-8
    """Added to the root of that mean before dividing by it."""
    weight_decay: Annotated[float, Within(0, 100)] = 0.01
    """Share of a weight, times the learning rate, that a step takes off it."""
    clip_grad: Norm = 1.0
    """Largest norm of the gradient; a larger one is scaled down."""
    critic_warmup_steps: ZeroOrMore = 0
    """Optimiser steps that train the value head alone."""
    lr_scheduler: Literal["constant", "cosine"] = "constant"
    """How the learning rates change after the warm-up."""
    total_training_steps: ZeroOrMore = 0
    """Length of the schedule in training steps; 0 takes the run's own length."""
    lr_warmup_steps: Annotated[int, Within(-1)] = 0
    """Training steps of linear warm-up, counted from the first one, also while the critic learns alone; -1 for none."""
    min_lr_rate: Share = 0.0
    """cosine: the rates never fall below this share of their full value."""
    num_cycles: Annotated[float, Within(0, 1000)] = 0.5
    """cosine: waves until the end of the schedule; 0.5 falls once from full to least."""


@dataclass(frozen=True, kw_only=True)
class MixedPrecisionConfig:
    """Numbers that travel between actor ranks."""

    reduce_dtype: Literal["bf16", "fp32"] | None = None
    """Dtype in which gradients are summed over ranks; null is fp32. Micro batches add up in fp32 in any case."""


@dataclass(frozen=True, kw_only=True)
class FsdpConfig:
    """How the actor's ranks share the work (docs/sharding.md); one rank has nothing to share."""

    strategy: Literal["fsdp", "fsdp2", "no_shard"] = "fsdp"
    """fsdp and fsdp2 both mean FSDP2: each rank keeps a part of weights, gradients and optimiser state. no_shard: each
    keeps all of them, and only gradients travel."""
    sharding_strategy: Literal["full_shard", "shard_grad_op", "hybrid_shard", "no_shard"] = "full_shard"
    """shard_grad_op gathers weights once per optimiser step instead of once per pass, no_shard as above; hybrid_shard
    is full_shard on one node, and refused on several."""
    gradient_checkpointing: bool = False
    """Recompute each block's activations in the backward pass."""
    cpu_offload: bool = False
    """Shards and optimiser state live on the host, where the optimiser steps too; also on one rank."""
    offload_pin_memory: bool = False
    """Pin that host memory."""
    reshard_after_forward: bool = True
    """Give a block's gathered weights back between its forward and backward pass; false is shard_grad_op."""
    enable_gradient_accumulation: bool = True
    """Sum gradients over ranks with the last micro batch only; false does so with each, and keeps no full gradients."""
    mixed_precision: MixedPrecisionConfig = field(default_factory=MixedPrecisionConfig)
    """Numbers that travel between actor ranks."""

    @property
    def shards(self) -> bool:
        """Whether several ranks share the parameters out; else each holds all of them."""
        return "no_shard" not in (self.strategy, self.sharding_strategy)


@dataclass(frozen=True, kw_only=True)
class ActorConfig:
    """The side that learns."""

    group_name: str = "ActorGroup"
    """Folder of these workers' logs, with runner.per_worker_log."""
    micro_batch_size: Annotated[int, Within(1, 10**6)] = 32
    """Samples per forward on one rank; less where they would not divide its share of the global batch."""
    global_batch_size: Count = 256
    """Samples per optimiser step over all ranks."""
    seed: Seed = 0
    """Offset to runner.seed for weights and shuffling."""
    enable_offload: bool = False
    """Optimiser state, fp32 copies and shards wait in pinned host memory during rollouts on the same accelerators, and
    with them weights that no rollout of the same process reads."""
    max_nonfinite_steps: ZeroOrMore = 3
    """Optimiser steps in a row with a non-finite gradient before the run stops; each one is skipped and counted."""
    model: ModelConfig
    """The policy; its keys are those of its model_type."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """Optimiser and learning rates."""
    fsdp_config: FsdpConfig = field(default_factory=FsdpConfig)
    """How the actor's ranks share the work."""


@dataclass(frozen=True, kw_only=True)
class CollectConfig:
    """`rlinf collect`: demonstrations by scripted experts."""

    output: str = "data/demos"
    """Dataset folder (LeRobot v3 layout)."""
    episodes_per_task: Count = 5
    """Successful episodes kept per task; failures are dropped and the next id is tried."""
    tasks: list[str] = field(default_factory=list)
    """Task names; empty takes every task of the suite."""
    action_noise: Annotated[float, Within(0, 10)] = 0.3
    """Each episode adds Gaussian action noise of a std drawn uniformly from 0 to this; labels stay clean."""
    max_attempts: Count = 10
    """Ids tried per wanted episode before the task is reported as failed."""
    max_steps: ZeroOrMore = 0
    """Steps an expert may take; 0 takes env.train.max_episode_steps (some MetaWorld tasks need up to 400)."""


@dataclass(frozen=True, kw_only=True)
class SftConfig:
    """`rlinf sft`: supervised fine-tuning on a dataset."""

    dataset: str = "data/demos"
    """Dataset in LeRobot's layout v3.0 or v2.1: a folder, or a Hub id owner/name."""
    features: dict[str, Any] = field(default_factory=dict)
    """Name in the dataset -> input of the policy (main, wrist_0, wrist_1, state, action, privileged), where the names
    are not the usual ones; several features of one input are put side by side."""
    output: str = "checkpoints/sft"
    """Folder for the policy in HF layout: weights, statistics, tokenizer."""
    steps: Count = 1000
    """Optimiser steps."""
    batch_size: Count = 64
    """Samples per step."""
    noise_draws: Count = 1
    """Draws of (noise, time) per sample and step."""
    lr: Rate = 1e-3
    """Learning rate after the warm-up."""
    lr_scheduler: Literal["constant", "cosine"] = "constant"
    """cosine falls to 0 at `steps`."""
    warmup_steps: ZeroOrMore = 50
    """Steps in which the learning rate rises to its full value."""
    weight_decay: Annotated[float, Within(0, 100)] = 0.0
    """Share of a weight, times the learning rate, that a step takes off it."""
    clip_grad: Norm = 1.0
    """Largest norm of the gradient; a larger one is scaled down."""
    state_loss: Weight = 0.0
    """Weight of a second loss: the mean image token must tell the simulator's privileged state through a linear layer
    that is thrown away afterwards. Helps a network that must first learn to see; 0 leaves it out."""
    log_interval: Count = 50
    """Steps between two lines of the console and of metrics.jsonl."""
    eval_interval: ZeroOrMore = 0
    """Evaluate every this many steps; 0 never."""
    stop_at_success: Share | None = None
    """Stop once an evaluation reaches this success rate (a deliberately weak start for RL)."""
    stop_at_most: Share | None = None
    """With stop_at_success: above this rate, move back towards the last evaluated weights until inside the band. If no
    weights on the way lie inside, the nearest are kept and sft.json says `stopped_at_success: false`."""
    eval_trials: Count = 32
    """Training-layout episodes per such evaluation (held-out ids are never used)."""
    save_interval: CountOrNever = 2000
    """Save to `<output>-checkpoints` every this many steps, for `rlinf sft --resume`; -1 saves only what a signal
    (Ctrl-C, SIGTERM) ends."""
    keep_checkpoints: ZeroOrMore = 1
    """Keep only the newest k of these, and none once the output is complete; 0 keeps all for good."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """One run."""

    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    """Where things run."""
    runner: RunnerConfig = field(default_factory=RunnerConfig)
    """How long to train and what to keep."""
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    """How experience becomes a gradient."""
    env: EnvGroupConfig = field(default_factory=EnvGroupConfig)
    """The environments."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """The side that runs the policy in the loop."""
    actor: ActorConfig
    """The side that learns."""
    collect: CollectConfig = field(default_factory=CollectConfig)
    """`rlinf collect`: demonstrations by scripted experts."""
    sft: SftConfig = field(default_factory=SftConfig)
    """`rlinf sft`: supervised fine-tuning on a dataset."""
    compat: Literal["rlinf-0.4"] | None = None
    """Compute what the published code computed, defects included (docs/compat.md)."""
