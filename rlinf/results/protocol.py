"""The protocol of an evaluation: every setting that changes a number, under flat dotted keys. Torch-free.

Keys that begin with `policy.` describe how the policy acts (denoising steps, temperature, chunk); two different
policies may differ in them. All others describe the benchmark, and results are comparable only where these are equal.
What changes no number (envs, placement, stages, paths) is left out.
"""

from __future__ import annotations

import hashlib
import json
import logging
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache
from typing import Any, NamedTuple

from rlinf.config.schema import Config
from rlinf.envs.config import EnvConfig
from rlinf.envs.spec import env_options, env_spec, eval_trials, find_simulator
from rlinf.models.config import ModelConfig
from rlinf.simulators.contract import SetupError

logger = logging.getLogger(__name__)
POLICY = "policy."
VERSION = "version."  # before the name of a package, in what a simulator's `protocol` gives
NOISE = "by trial"  # how an evaluation's noise is keyed: (seed, reset id, chunk of the episode)
PATHS = ("_path", "_file", "_dir")  # endings of options that say where something lies, not what it is
Protocol = dict[str, Any]


class Difference(NamedTuple):
    """A key in which two protocols differ; a protocol without the key has None."""

    key: str
    first: Any
    second: Any

    def __str__(self) -> str:
        return f"{self.key}: {_shown(self.first)} and {_shown(self.second)}"


def evaluation_protocol(cfg: Config) -> Protocol:
    """What an evaluation of `cfg` measures: env.eval played by actor.model, or by the expert."""
    protocol = benchmark_protocol(cfg.env.eval) | {"compat": cfg.compat}
    if not cfg.runner.eval_expert:
        protocol |= {f"{POLICY}{key}": value for key, value in _acting(cfg.actor.model, cfg.runner.seed).items()}
    return json.loads(json.dumps(dict(sorted(protocol.items())), default=str))  # as a file gives it back


def benchmark_protocol(env: EnvConfig) -> Protocol:
    """What a simulator plays under an env.eval block, whoever acts."""
    spec, trials = env_spec(env, "env.eval"), eval_trials(env, env_spec(env, "env.eval"))
    return {
        "simulator": env.env_type,
        **{f"simulator.{key}": value for key, value in simulator_protocol(env).items()},
        "suite": spec.suite,
        "tasks": list(spec.tasks),
        "trials.count": len(trials),
        "trials.reset_ids": digest(trials),
        "horizon": env.max_episode_steps,
        "ignore_terminations": env.ignore_terminations,
        "reward.relative": env.use_rel_reward and not spec.pays_events,
        "reward.coefficient": env.reward_coef,
        "image_size": list(spec.image_size),
        "wrist_image_size": list(spec.wrist_image_size) if spec.num_wrist_images else None,
    }


def simulator_protocol(env: EnvConfig) -> Protocol:
    """The simulator's options with what its `protocol` adds, resolves and leaves out (simulators/contract.py)."""
    module, options = find_simulator(env.env_type), env_options(env, "env.eval")
    given = {key: value for key, value in asdict(options).items() if not key.endswith(PATHS)}
    if "protocol" in vars(module):
        try:
            given |= module.protocol(options)
        except (SetupError, OSError) as error:  # the simulators run on other machines: what was played must not be lost
            logger.warning("the protocol of %s is incomplete: %s", env.env_type, error)
            given["unknown"] = "versions and files: this machine has none"
        if env.python is not None:  # whose packages are others
            given |= _versions_in(env.python, tuple(key for key in given if key.startswith(VERSION)))
    given |= {"task_suite_name": None, "listed": None}  # suite and tasks tell
    return {key: value for key, value in leaves(given) if value is not None}


@cache
def _versions_in(python: str, keys: tuple[str, ...]) -> dict[str, str | None]:
    """The versions of packages that another interpreter has; nothing where it does not answer."""
    listed = "{d.metadata['Name']: d.version for d in importlib.metadata.distributions()}"
    program = f"import importlib.metadata, json; print(json.dumps({listed}))"
    answer = subprocess.run([python, "-c", program], capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        return {}
    found = {str(name).lower(): version for name, version in json.loads(answer.stdout).items()}
    return {key: found.get(key.removeprefix(VERSION).lower()) for key in keys}


def _acting(model: ModelConfig, seed: int) -> Protocol:
    """How a policy acts in an evaluation."""
    return dict(leaves(model.acting())) | {"seed": seed, "noise": NOISE}


def protocol_hash(protocol: Mapping[str, Any]) -> str:
    """A short digest of all keys and values."""
    return digest(dict(sorted(protocol.items())))


def of_benchmark(protocol: Mapping[str, Any]) -> Protocol:
    """The keys in which results must agree to be compared, whoever acts."""
    return {key: value for key, value in protocol.items() if not key.startswith(POLICY)}


def differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[Difference]:
    """The keys in which two protocols differ, in alphabetical order; `of_benchmark` narrows them down."""
    keys = sorted({*first, *second})
    return [Difference(key, first.get(key), second.get(key)) for key in keys if first.get(key) != second.get(key)]


def digest(value: Any) -> str:
    """Sixteen hexadecimal digits of a plain value."""
    return hashlib.sha256(json.dumps(value, default=str).encode()).hexdigest()[:16]


def leaves(tree: Mapping[str, Any], path: str = "") -> Sequence[tuple[str, Any]]:
    """Dotted keys and values of nested mappings."""
    found: list[tuple[str, Any]] = []
    for key, value in tree.items():
        nested = isinstance(value, Mapping) and value
        found += leaves(value, f"{path}{key}.") if nested else [(f"{path}{key}", value)]
    return found


def _shown(value: Any) -> str:
    return "absent" if value is None else json.dumps(value)
