"""What users of LeRobot, Stable-Baselines3, openpi, verl or CleanRL type for a key of this package. Torch-free."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple


class Named(NamedTuple):
    """The keys that a name means here."""

    key: str
    in_sft: str = ""  # the key for `rlinf sft`, where that is another


_LR = Named("actor.optim.lr", "sft.lr")
_BATCH = Named("actor.global_batch_size", "sft.batch_size")
_MICRO_BATCH = Named("actor.micro_batch_size")
_LENGTH = Named("runner.max_epochs", "sft.steps")
_PASSES = Named("algorithm.update_epoch")
_CLIP = Named("algorithm.clip_ratio_high")
_CLIP_GRAD = Named("actor.optim.clip_grad", "sft.clip_grad")
_EVAL = Named("runner.val_check_interval", "sft.eval_interval")
_WEIGHTS = Named("actor.model.model_path")
_FOLDER = Named("runner.logger.log_path", "sft.output")
_RUN = Named("runner.logger.experiment_name")
_CHUNK = Named("actor.model.num_action_chunks")
_TASK = Named("env.train.task_suite_name")

OTHER_NAMES: dict[str, Named] = {
    **dict.fromkeys(("learning_rate", "lr", "peak_lr", "optimizer_lr"), _LR),
    **dict.fromkeys(("critic_lr", "value_learning_rate", "vf_lr"), Named("actor.optim.value_lr")),
    **dict.fromkeys(("batch_size", "train_batch_size", "minibatch_size", "ppo_mini_batch_size"), _BATCH),
    **dict.fromkeys(("ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu", "micro_batch_size_per_gpu"), _MICRO_BATCH),
    **dict.fromkeys(("total_timesteps", "total_steps", "num_train_steps", "max_iterations", "steps"), _LENGTH),
    **dict.fromkeys(("total_epochs", "num_epochs", "epochs"), _LENGTH),
    **dict.fromkeys(("n_epochs", "ppo_epochs", "update_epochs"), _PASSES),
    **dict.fromkeys(("clip_range", "clip_ratio", "clip_coef", "clip_eps"), _CLIP),
    **dict.fromkeys(("clip_range_vf", "cliprange_value"), Named("algorithm.value_clip")),
    **dict.fromkeys(("ent_coef", "entropy_coef", "entropy_coeff"), Named("algorithm.entropy_bonus")),
    **dict.fromkeys(("vf_coef", "value_loss_coef", "critic_coef"), Named("algorithm.value_coef")),
    **dict.fromkeys(("max_grad_norm", "grad_clip", "grad_clip_norm"), _CLIP_GRAD),
    **dict.fromkeys(("discount", "discount_factor"), Named("algorithm.gamma")),
    **dict.fromkeys(("lam", "lambda"), Named("algorithm.gae_lambda")),
    **dict.fromkeys(("adv_estimator", "advantage_estimator"), Named("algorithm.adv_type")),
    **dict.fromkeys(("num_generations", "n_samples_per_prompt"), Named("algorithm.group_size")),
    **dict.fromkeys(("n_envs", "num_envs"), Named("env.train.total_num_envs")),
    **dict.fromkeys(("n_steps", "num_rollout_steps", "rollout_length"), Named("env.train.max_steps_per_rollout_epoch")),
    **dict.fromkeys(
        ("n_eval_episodes", "num_eval_episodes", "eval_episodes", "n_episodes"), Named("env.eval.num_trials")
    ),
    **dict.fromkeys(("env_id", "env_name", "task", "task_suite"), _TASK),
    **dict.fromkeys(("eval_freq", "eval_interval", "test_freq"), _EVAL),
    **dict.fromkeys(("save_freq", "save_every", "checkpoint_interval"), Named("runner.save_interval")),
    **dict.fromkeys(("pretrained_path", "policy_path", "pretrained_model_path", "base_model"), _WEIGHTS),
    **dict.fromkeys(("checkpoint", "checkpoint_path", "load_path"), Named("runner.ckpt_path")),
    **dict.fromkeys(("resume", "resume_from", "resume_mode"), Named("runner.resume_dir")),
    **dict.fromkeys(("output_dir", "log_dir", "logdir", "tensorboard_log", "default_local_dir"), _FOLDER),
    **dict.fromkeys(("exp_name", "run_name", "job_name"), _RUN),
    **dict.fromkeys(("wandb_project", "project"), Named("runner.logger.project_name")),
    **dict.fromkeys(("dataset_path", "dataset_root", "repo_id"), Named("sft.dataset")),
    **dict.fromkeys(("chunk_size", "n_action_steps", "action_chunk_size"), _CHUNK),
    **dict.fromkeys(("policy", "policy_type", "model_name"), Named("actor.model.model_type")),
    **dict.fromkeys(("nnodes", "n_nodes"), Named("cluster.num_nodes")),
    "temperature": Named("rollout.sampling_params.temperature_train"),
    "seed": Named("runner.seed"),
}
"""The last word of a key that does not exist -> the key that it means."""


def key_meant(path: str, siblings: Collection[str] = (), *, sft: bool = False) -> str | None:
    """The key that an unknown one means, preferably in the same block, which has the keys `siblings`.

    Example: key_meant("env.eval.num_envs", {"total_num_envs"}) == "env.eval.total_num_envs"
    """
    block, _, name = path.rpartition(".")
    named = OTHER_NAMES.get(name.replace("-", "_"))
    if named is None:
        return None
    for key in (named.key, named.in_sft):
        if (last := key.rpartition(".")[2]) and last in siblings:
            return f"{block}.{last}"
    return named.in_sft if sft and named.in_sft else named.key
