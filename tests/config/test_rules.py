"""Every key of the schema has a rule: nonsense is refused in one line that names the key, whatever the key."""

from __future__ import annotations

import logging
import re
import types
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import pytest
from omegaconf import OmegaConf

from rlinf.compat.keys import no_effect_paths
from rlinf.config.check import check_config
from rlinf.config.compose import Composed, compose_config, put, resolve, with_overrides
from rlinf.config.load import checked_config, default_tree, typed_config
from rlinf.config.recipes import default_config_dir
from rlinf.config.schema import Config
from rlinf.envs.spec import available_simulators, find_simulator
from rlinf.errors import UserError
from rlinf.models.config import ModelConfig, available_models, find_config
from rlinf.typed import Within, block_paths, hints

MODELS = {  # model_type -> a recipe that runs it
    "openpi": "toy_ppo_compact",
    "openvla": "toy_ppo_openvla_compact",
    "openvla_oft": "toy_grpo_openvlaoft_compact",
}
SIMULATORS = {  # env_type -> a recipe whose training it simulates
    "toy": "toy_ppo_compact",
    "metaworld": "quickstart",
    "calvin": "calvin_d_d_ppo_compact",
    "maniskill": "maniskill_ppo_compact",
    "robotwin": "robotwin_stack_blocks_two_ppo_compact",
}
NONSENSE = (".nan", ".inf", "-.inf", "-1", "1e30", "-1e30", f"{10**400}")
WRONG_TYPES = ("'zzz'", "true", "[zzz]", "{zzz: 1}")
NEGATIVE = {  # keys for which -1 means something, with what it means
    "runner.max_steps": "max_epochs decides",
    "runner.val_check_interval": "never",
    "runner.save_interval": "never",
    "sft.save_interval": "never",
    "runner.logger.table_interval": "never",
    "env.train.num_trials": "all",
    "env.eval.num_trials": "all",
    "actor.optim.lr_warmup_steps": "none",
    "rollout.sampling_params.temperature_eval": "greedy",
    "rollout.sampling_params.top_k": "every bin",
    "actor.model.temperature_eval": "greedy",
    "actor.model.top_k": "every bin",
    "algorithm.clip_log_ratio_min": "a bound below 0",
    "algorithm.rewards_lower_bound": "simulators may pay negative rewards",
    "algorithm.rewards_upper_bound": "simulators may pay negative rewards",
}


class Key(NamedTuple):
    """One key, and a recipe in which it is read."""

    recipe: str
    path: str
    hint: Any


def keys_of(cls: type, path: str, recipe: str) -> Iterator[Key]:
    """Every key below a dataclass, blocks included; models and simulators have their own."""
    for f in fields(cls):
        hint, below = hints(cls)[f.name], f"{path}.{f.name}" if path else f.name
        yield Key(recipe, below, hint)
        if is_dataclass(hint) and hint is not ModelConfig:
            yield from keys_of(hint, below, recipe)


def all_keys() -> Iterator[Key]:
    """Every key of the schema, of every model and of every simulator's options."""
    yield from keys_of(Config, "", "toy_ppo_compact")
    for name in available_models():
        yield from keys_of(find_config(name), "actor.model", MODELS[name])
    for name in available_simulators():
        yield from keys_of(find_simulator(name).Options, "env.train.init_params", SIMULATORS[name])
    for path, row in {row: (path, row) for path, row in no_effect_paths()}.values():  # the last of alternatives
        yield Key("toy_ppo_compact", path, Literal[row.only] if row.only else row.kind)


KEYS = list(all_keys())


@pytest.fixture(scope="module")
def files() -> dict[str, Composed]:
    """The recipes as their files say them; composing takes longer than everything after it."""
    return {name: compose_config(name, (), default_config_dir()) for name in {key.recipe for key in KEYS}}


def alternatives(hint: Any) -> Iterator[Any]:
    """What a value may be: the members of unions, the items of lists, each with its range."""
    if get_origin(hint) in (Union, types.UnionType, list, tuple):
        for arg in get_args(hint):
            yield from alternatives(arg)
    elif get_origin(hint) is dict and get_args(hint)[1] is not Any:
        yield from alternatives(get_args(hint)[1])
    else:
        yield hint


def nonsense(key: Key) -> Iterator[str]:
    """Values, as one types them, that the key must refuse."""
    members = list(alternatives(key.hint))
    kinds = {get_origin(h) or h for h in members}
    containers = {get_origin(h) for h in [key.hint, *get_args(key.hint)]}
    rules = [rule for h in members if get_origin(h) is Annotated for rule in get_args(h)[1:]]
    for text in (*NONSENSE, *WRONG_TYPES):
        value = text.strip("'")
        if text == "-1" and any(rule.holds(-1) for rule in rules):
            continue
        if value == "zzz" and str in kinds and Literal not in kinds:
            continue  # a name
        if (value == "true" and bool in kinds) or (value[0] == "{" and (dict in containers or Any in kinds)):
            continue
        if value == "[zzz]" and str in kinds and list in containers:
            continue
        yield text
        if containers & {list, tuple} and text[0] not in "[{" and not (value == "zzz" and str in kinds):
            yield f"[{text}]"


def test_every_number_has_a_range() -> None:
    bare = [key.path for key in KEYS for hint in alternatives(key.hint) if hint in (int, float)]
    assert bare == []


def test_minus_one_is_legal_only_where_it_means_something() -> None:
    legal = {
        key.path
        for key in KEYS
        for hint in alternatives(key.hint)
        if get_origin(hint) is Annotated and any(isinstance(r, Within) and r.holds(-1) for r in get_args(hint)[1:])
    }
    assert legal == set(NEGATIVE)


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> Iterator[None]:
    """Recipes without weights warn of it, thousands of times."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def complaint(key: Key, text: str, load: Callable[[Key, str], object]) -> str | None:
    """What is wrong with how a setting was refused; None if it was, in one line that names the key."""
    try:
        load(key, text)
    except UserError as error:
        block, _, name = key.path.rpartition(".")
        named = key.path in str(error) or (block in str(error) and name in str(error)) or f"{name}=" in str(error)
        return None if named and "\n" not in str(error) else f"{key.path}={text} says {error}"
    except Exception as error:
        return f"{key.path}={text} ends with {error!r}"
    return f"{key.path}={text} is accepted by {key.recipe}"


def test_nonsense_is_refused_for_every_key(files: dict[str, Composed]) -> None:
    """Values go straight into the resolved tree, which is the part of loading that takes time."""
    trees = {name: resolve(composed, default_tree(composed)) for name, composed in files.items()}
    blocks = set(block_paths(Config))

    def load(key: Key, text: str) -> None:
        tree, composed = deepcopy(trees[key.recipe]), files[key.recipe]
        if key.path in blocks or key.path in without_effect:
            checked_config(with_overrides(composed, [f"{key.path}={text}"]), "train", [1])
            return
        put(tree, key.path, OmegaConf.to_container(OmegaConf.create(f"value: {text}"))["value"])
        check_config(typed_config(composed, tree, "train"), "train", [1])

    without_effect = {path for path, _ in no_effect_paths()}
    for name in files:
        load(Key(name, "runner.seed", int), "0")  # what is refused below is refused for its own sake
    values = {".nan", ".inf", "-1", "1e30", "'zzz'", "true", "[.nan]", "[-1]"}
    few = {".nan", "-1", "'zzz'"}  # of keys that nothing reads; the slow test below tries them all
    tried = [
        (key, text) for key in KEYS for text in nonsense(key) if text in (few if key.path in without_effect else values)
    ]
    assert len(tried) > 4 * len(KEYS)
    assert [found for key, text in tried if (found := complaint(key, text, load))] == []


@pytest.mark.parametrize(
    ("recipe", "key"),
    [
        *[("toy_ppo_compact", key) for key in ("env.train.env_type", "actor.model.model_type", "actor.model.size")],
        *[("toy_ppo_compact", key) for key in ("algorithm.adv_type", "algorithm.loss_type")],
        ("toy_ppo_compact", "actor.model.openpi.config_name"),
        *[(recipe, "env.train.task_suite_name") for recipe in SIMULATORS.values()],
        ("calvin_d_d_ppo_compact", "env.train.init_params.tasks.0"),
        *[("maniskill_ppo_compact", f"env.train.init_params.{key}") for key in ("id", "control_mode")],
    ],
)
def test_names_that_are_looked_up_are_refused_as_well(files: dict[str, Composed], recipe: str, key: str) -> None:
    path, value = (key.removesuffix(".0"), "[zzz]") if key.endswith(".0") else (key, "zzz")
    with pytest.raises(UserError, match="zzz"):
        checked_config(with_overrides(files[recipe], [f"{path}={value}"]), "train", [1])


@pytest.mark.slow
def test_nonsense_on_the_command_line_is_refused_for_every_key(files: dict[str, Composed]) -> None:
    def load(key: Key, text: str) -> None:
        checked_config(with_overrides(files[key.recipe], [f"{key.path}={text}"]), "train", [1])

    assert [found for key in KEYS for text in nonsense(key) if (found := complaint(key, text, load))] == []


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("actor.optim.lr=-1", "must be a number from 0 to 10; nearest is 0"),
        ("algorithm.clip_ratio_low=.nan", "must be a number from 0 to 1; default is 0.2"),
        ("algorithm.gamma=1e30", "must be a number from 0 to 1; nearest is 1"),
        ("algorithm.kl_penalty=low_var", "must be 'kl' or .* or null (did you mean 'low_var_kl'?)"),
        ("env.train.step_deadline_s=.nan", "must be a number from 0.01 to 1000000; default is 120.0"),
        ("env.train.step_deadline_s=.inf", "must be a number .*; nearest is 1000000"),
        ("env.train.num_processes=-7", "must be an integer from 0 to 4096; nearest is 0"),
        ("actor.optim.adam_beta1=5", "must be a number from 0 to 0.999999; nearest is 0.999999"),
        ("rollout.model=5", "must be a block of keys"),
        ("actor.model=5", "must be a block of keys"),
        ("cluster.virtual_devices=1000000000000", "must be an integer from 0 to 128; nearest is 128"),
        ("cluster.num_nodes=1000000000000", "must be an integer from 1 to 1024; nearest is 1024"),
        ("runner.val_check_interval=-3", "must be an integer from 1 to 1e9 or -1; nearest is -1"),
        ("runner.max_epochs=true", "must be an integer from 1 to 1e9; default is 1000"),
        ("actor.model.precision=fp16", "must be 'fp32' or .* or null (did you mean 'bf16'?)"),
    ],
)
def test_the_refusal_says_key_value_rule_and_nearest(files: dict[str, Composed], setting: str, message: str) -> None:
    pattern = re.escape(message).replace(re.escape(".*"), ".*")
    key = re.escape(setting.partition("=")[0])
    with pytest.raises(UserError, match=rf"^command line: {key}=.*{pattern}$"):
        checked_config(with_overrides(files["toy_ppo_compact"], [setting]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            [
                *("cluster.num_nodes=1024", "cluster.virtual_devices=8"),
                "cluster.component_placement={'actor,env,rollout': all}",
            ],
            "env.train.total_num_envs=.* must divide by .* ranks x stages = 8192 x 1 = 8192; nearest is",
        ),
        (
            [
                *("env.train.total_num_envs=1000000", "env.train.max_steps_per_rollout_epoch=1000000"),
                *("env.train.rollout_epoch=1000000", "actor.global_batch_size=999999937"),
            ],
            "actor.global_batch_size=999999937 must divide the rollout of 500000000000000000 samples .*"
            "nearest are 976562500 and 1000000000",
        ),
    ],
)
def test_large_legal_numbers_are_answered_at_once(
    files: dict[str, Composed], settings: list[str], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        checked_config(with_overrides(files["toy_ppo_compact"], settings), "plan")
