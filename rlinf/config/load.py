"""YAML and overrides -> one frozen `Config`, or one line that says what is wrong. Imports neither torch nor Ray."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import OmegaConf

from rlinf.compat.other_names import key_meant
from rlinf.config.check import Purpose, check_config
from rlinf.config.compose import (
    ABSENT,
    COMMAND_LINE,
    Composed,
    Layer,
    Tree,
    compose_config,
    get,
    merged,
    put,
    resolve,
    with_overrides,
)
from rlinf.config.recipes import default_config_dir
from rlinf.config.schema import RECIPE, Config, RunnerConfig
from rlinf.envs.config import NO_SIMULATOR, EnvConfig
from rlinf.envs.spec import env_options, env_spec, find_simulator
from rlinf.errors import UserError
from rlinf.models.config import ModelConfig, RunSettings, available_models, find_config, is_placeholder
from rlinf.storage.redaction import FromEnvironment
from rlinf.storage.step_checkpoint import newest_of_run, policy_folder
from rlinf.typed import UnknownKeyError, convert, defaults_of, key_paths

logger = logging.getLogger(__name__)
Found = TypeVar("Found")
LOG_PATH = "runner.logger.log_path"


def load_config(
    name_or_path: str,
    overrides: Sequence[str] = (),
    *,
    config_dir: Path | None = None,
    purpose: Purpose = "train",
    devices: Sequence[int] | None = None,
) -> Config:
    """The checked config of a recipe name or YAML path, with `key=value` overrides.

    `devices` is the accelerators per node, by default those of this machine.
    Example: load_config("toy_ppo_compact", ["runner.max_epochs=2"]).actor.model.size == "compact"
    """
    return checked_config(compose_config(name_or_path, overrides, config_dir or default_config_dir()), purpose, devices)


def stored_config(tree: Tree, source: str, overrides: Sequence[str] = (), *, purpose: Purpose = "eval") -> Config:
    """The checked config of a resolved tree that a file of a run holds; `source` names the file in errors."""
    tree = {**tree, "runner": {key: value for key, value in tree["runner"].items() if key != "run_id"}}
    files = Composed(tree["runner"]["logger"]["experiment_name"], tree, (Layer(source, tree), Layer(COMMAND_LINE, {})))
    return checked_config(with_overrides(files, overrides), purpose)


def checked_config(composed: Composed, purpose: Purpose = "train", devices: Sequence[int] | None = None) -> Config:
    """The config of a composed tree, refused where a key or a value cannot be."""
    try:
        cfg = typed_config(composed, resolve(composed, default_tree(composed)), purpose)
    except UnknownKeyError as error:
        path = _innermost(composed.tree, error.path)
        if (meant := key_meant(path, error.siblings, sft=purpose == "sft")) is None:
            raise
        hint = f"did you mean {meant}?"
        raise UnknownKeyError(path, error.siblings, error.source, hint) from None
    if purpose in ("sft", "doctor") and get(composed.tree, "env.train") is ABSENT:
        cfg = _without_simulator(composed, cfg)
    elif purpose in ("train", "eval", "collect", "bench") and _has_no_simulator(composed):
        raise UserError(f"{composed.name} has no simulator: it has no block env.train; only `rlinf sft` takes it")
    cfg = _at_home(cfg)
    check_config(cfg, purpose, devices)
    return cfg


def _has_no_simulator(composed: Composed) -> bool:
    return all(get(composed.tree, f"env.{name}") is ABSENT for name in ("train", "eval"))


def _at_home(cfg: Config) -> Config:
    """The same config with `~` replaced by the home folder in the paths that commands write to."""

    def full(path: str) -> str:
        found = os.path.expanduser(path)
        return FromEnvironment(found, path.written) if isinstance(path, FromEnvironment) else found

    def with_video(env: EnvConfig) -> EnvConfig:
        return replace(env, video_cfg=replace(env.video_cfg, video_base_dir=full(env.video_cfg.video_base_dir)))

    log = replace(cfg.runner.logger, log_path=full(cfg.runner.logger.log_path))
    return replace(
        cfg,
        runner=replace(cfg.runner, logger=log),
        collect=replace(cfg.collect, output=full(cfg.collect.output)),
        sft=replace(cfg.sft, output=full(cfg.sft.output)),
        env=replace(cfg.env, train=with_video(cfg.env.train), eval=with_video(cfg.env.eval)),
    )


def _innermost(tree: Tree, path: str) -> str:
    """The path of the first value below a key: optimizer.lr for optimizer."""
    node = get(tree, path)
    while isinstance(node, dict) and node:
        name, node = next(iter(node.items()))
        path = f"{path}.{name}"
    return path


def default_tree(composed: Composed) -> Tree:
    """Every default, those of the chosen model included, so that `${...}` may refer to keys no file sets."""
    defaults = defaults_of(Config)
    name = OmegaConf.select(OmegaConf.create(composed.tree), "actor.model.model_type")
    config = _find(composed, "actor.model", name, find_config) if isinstance(name, str) else None
    defaults["actor"]["model"] = {} if config is None else defaults_of(config)
    for tree in (defaults, composed.tree):
        if isinstance(path := get(tree, LOG_PATH), str):
            put(tree, LOG_PATH, path.replace(RECIPE, composed.name))
    return defaults


def typed_config(composed: Composed, tree: Tree, purpose: Purpose) -> Config:
    """The resolved tree as dataclasses; every key is known and of its type after this."""
    if purpose == "eval" or tree["runner"]["task_type"] == "embodied_eval":
        tree["runner"]["only_eval"] = True
    actor, rollout = _models(composed, tree)
    tree["actor"]["model"] = rollout if tree["runner"]["only_eval"] else actor
    keys = frozenset([*key_paths(Config), *key_paths(type(actor), "actor.model")])
    cfg: Config = convert(Config, tree, "", composed.origin, keys)
    cfg = replace(cfg, runner=_with_step_of_run(cfg.runner))
    cfg = replace(cfg, actor=replace(cfg.actor, model=_completed_model(composed, cfg)))
    train, evaluation = _switched_on(cfg.env.train, "whole_chunks"), cfg.env.eval
    if cfg.compat is not None:
        train, evaluation = _switched_on(train, "compat"), _switched_on(evaluation, "compat")
    return replace(cfg, env=replace(cfg.env, train=train, eval=evaluation))


def _with_step_of_run(runner: RunnerConfig) -> RunnerConfig:
    """The same block with a run folder in ckpt_path replaced by the checkpoint that it stands for."""
    given = runner.ckpt_path
    if given is None or (newest := newest_of_run(given)) is None:
        return runner
    logger.warning("runner.ckpt_path=%s is a run folder; taking its newest step, %s", given, newest)
    return replace(runner, ckpt_path=str(newest))


def _without_simulator(composed: Composed, cfg: Config) -> Config:
    """The same config with no simulator to fit, and the dimensions that no file sets left to the dataset."""
    env = replace(cfg.env, train=replace(cfg.env.train, env_type=NO_SIMULATOR))
    model = cfg.actor.model.left_to_data(lambda key: get(composed.tree, f"actor.model.{key}") is not ABSENT)
    return replace(cfg, env=env, actor=replace(cfg.actor, model=model))


def _switched_on(env: EnvConfig, option: str) -> EnvConfig:
    """The same env with an option that its simulator may have set to true, unless its init_params say otherwise."""
    if option not in {f.name for f in fields(find_simulator(env.env_type).Options)}:
        return env
    return replace(env, init_params={option: True} | env.init_params)


def _models(composed: Composed, tree: Tree) -> tuple[ModelConfig, ModelConfig]:
    """The model that learns, and the one an evaluation runs: `rollout.model` where it names one, else the same."""
    actor, rollout = tree["actor"]["model"], tree["rollout"].get("model") or {}
    if get(composed.tree, "actor.model") is ABSENT:
        actor = {}
    rollout = {key: value for key, value in rollout.items() if value is not None}
    if "model_type" not in rollout or rollout["model_type"] == actor.get("model_type"):
        rollout = merged(actor, rollout)
    if not actor:
        return (_model(composed, rollout, "rollout.model"),) * 2
    return _model(composed, actor, "actor.model"), _model(composed, rollout, "rollout.model")


def _model(composed: Composed, block: Tree, path: str) -> ModelConfig:
    """A model block as its model's own `Config`."""
    if "model_type" not in block:
        available = ", ".join(available_models())
        raise UserError(f"{composed.origin(path)}: {path}.model_type is required; available: {available}")
    cls = _find(composed, path, block["model_type"], find_config)
    return convert(cls, block, path, composed.origin, frozenset(key_paths(cls, path)))


def _completed_model(composed: Composed, cfg: Config) -> ModelConfig:
    """The model with what other blocks decide; small sizes read a placeholder path as random weights."""
    model, privileged = cfg.actor.model, []
    for name, env in (("train", cfg.env.train), ("eval", cfg.env.eval)):  # eval blocks often refer to the training one
        if get(composed.tree, f"env.{name}") is not ABSENT:
            _find(composed, f"env.{name}", env.env_type, find_simulator)
            env_options(env, f"env.{name}", composed.origin)  # refuses what the simulator does not know
            privileged.append(env_spec(env, f"env.{name}").critic_input_dim)
    trained = policy_folder(cfg.runner.ckpt_path) if cfg.runner.ckpt_path is not None else None
    if trained is not None:
        model = replace(model, model_path=str(trained), lora_path=None)  # its adapters are those of the run
    elif model.size != "base":
        base, adapters = (None if is_placeholder(p) else p for p in (model.model_path, model.lora_path))
        model = replace(model, model_path=base, lora_path=adapters)
    sampling = cfg.rollout.sampling_params
    return model.for_run(
        RunSettings(
            critic_state_dim=privileged[0] if privileged else 0,  # where both exist, training decides
            temperature_train=sampling.temperature_train,
            temperature_eval=sampling.temperature_eval if sampling.do_sample else 0.0,
            top_k=sampling.top_k,
            gradient_checkpointing=cfg.actor.fsdp_config.gradient_checkpointing,
        )
    )


def _find(composed: Composed, path: str, name: Any, find: Callable[[str], Found]) -> Found:
    """What `find` finds under a name that the block at `path` gives; an error names the block and its file."""
    try:
        return find(str(name))
    except UserError as error:
        raise UserError(f"{composed.origin(path)}: {path}.{error}") from error
