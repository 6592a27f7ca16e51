"""The golden vectors notice mistakes: each one, patched into a shipped module, fails a golden test that else passes.

The tests themselves are called, on the numbers they always compare; only their `max_delta` goes on after a failure, so
that the worst key can be shown.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import test_flow_policy_math
import test_openvla_oft_official
import test_openvla_oft_rlinf
import test_openvla_oft_rlinf_official
import test_openvla_rlinf_policy
import test_openvla_tiny
import test_pi_rlinf_policy
import test_pi_tiny
import test_preprocess_openvla
import test_rl_algorithms
from mistakes import MISTAKES
from pi_tiny_model import tiny_inputs, tiny_policy
from prismatic_tiny_model import OFT, tiny_net
from safetensors.torch import load_file

Check = Callable[..., float]


@dataclass
class Ledger:
    """A `max_delta` that notes which keys fail, and by how much, and goes on."""

    check: Check
    keys: set[str] = field(default_factory=set)
    off: dict[str, float] = field(default_factory=dict)  # max |Δ| / bound of the keys that fail

    def __call__(self, key: str, got: object, want: object, bound: float, *, relative: bool = False) -> float:
        self.keys.add(key)
        with contextlib.suppress(AssertionError):
            return self.check(key, got, want, bound, relative=relative)
        worst = math.inf  # shapes differ, or it is no number
        with contextlib.suppress(AssertionError):
            worst = self.check(key, got, want, math.inf, relative=relative)
        self.off[key] = worst / bound if bound else math.inf
        return worst


@dataclass(frozen=True)
class Stage:
    """What golden tests get from fixtures."""

    golden: Path
    tokenizer: Path
    scratch: Path

    def pi(self, check: Check, *, pi05: bool) -> None:
        net = tiny_policy(self.golden, pi05=pi05, tokenizer_file=self.tokenizer).net
        test_pi_tiny.test_every_stored_tensor((net, tiny_inputs(self.golden, pi05)), check)

    def pi_policies(self, check: Check) -> None:
        for case in ("pi0_flow_sde", "pi0_flow_noise_joint"):
            test_pi_rlinf_policy.check_case(case, self.golden, self.tokenizer, check)

    def openvla(self, check: Check) -> None:
        stored = load_file(self.golden / "openvla_tiny" / "io.safetensors")
        test_openvla_tiny.test_every_stored_tensor((tiny_net(self.golden), stored), self.golden, check)

    def openvla_policy(self, check: Check) -> None:
        for sampler in ("greedy", "sample_T1.6_k50"):
            test_openvla_rlinf_policy.test_every_stored_number(sampler, self.golden, self.scratch, check)

    def oft(self, check: Check) -> None:
        stored = load_file(self.golden / OFT / "io.safetensors")
        test_openvla_oft_official.test_inference("discrete", stored, self.golden, check)

    def oft_policy(self, check: Check) -> None:
        test_openvla_oft_rlinf.test_every_stored_number("chunk4_chunk", self.golden, self.scratch, check)

    def oft_official_policy(self, check: Check) -> None:
        test_openvla_oft_rlinf_official.test_every_stored_number(self.golden, self.scratch, check)

    def preprocessing(self, check: Check) -> None:
        stored = load_file(self.golden / "preprocess_openvla" / "io.safetensors")
        test_preprocess_openvla.test_pixel_values(stored, "down", check)
        test_preprocess_openvla.test_tokens(stored, check)

    def flow_math(self, check: Check) -> None:
        test_flow_policy_math.test_every_stored_formula(self.golden, check)

    def algorithms(self, check: Check) -> None:
        folder = self.golden / "rl_algorithms"
        meta = json.loads((folder / "meta.json").read_text())
        vectors = test_rl_algorithms.Vectors(load_file(folder / "io.safetensors"), meta["meta"], meta["sizes"])
        test_rl_algorithms.test_advantages(vectors, check)


GOLDENS: dict[str, Callable[[Stage, Check], None]] = {
    "pi0_tiny": lambda stage, check: stage.pi(check, pi05=False),
    "pi05_tiny": lambda stage, check: stage.pi(check, pi05=True),
    "pi_rlinf_policy": Stage.pi_policies,
    "openvla_tiny": Stage.openvla,
    "openvla_rlinf_policy": Stage.openvla_policy,
    "openvla_oft_official": Stage.oft,
    "openvla_oft_rlinf": Stage.oft_policy,
    "openvla_oft_rlinf_official": Stage.oft_official_policy,
    "preprocess_openvla": Stage.preprocessing,
    "flow_policy_math": Stage.flow_math,
    "rl_algorithms": Stage.algorithms,
}


@pytest.fixture
def stage(golden_dir, small_vocab_tokenizer, tmp_path) -> Stage:
    return Stage(golden_dir, small_vocab_tokenizer, tmp_path)


@pytest.mark.parametrize("golden", GOLDENS)
def test_without_a_mistake_every_golden_passes(golden, stage, max_delta):
    GOLDENS[golden](stage, max_delta)


@pytest.mark.parametrize("name", MISTAKES)
def test_the_mistake_is_noticed(name, stage, max_delta, monkeypatch):
    mistake, ledger = MISTAKES[name], Ledger(max_delta)
    mistake.patch(monkeypatch)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(AssertionError):
        GOLDENS[mistake.golden](stage, ledger)  # it may stop at what it asserts beside its numbers
    assert ledger.off, f"{mistake.golden} passes with this mistake in"
    worst = max(ledger.off, key=lambda key: (ledger.off[key] < math.inf, ledger.off[key]))
    print(f"{len(ledger.off)} of {len(ledger.keys)} keys fail, worst {worst}: {ledger.off[worst]:.3g} x its bound")


def test_there_are_enough_of_them():
    assert len({mistake.patch for mistake in MISTAKES.values()}) >= 16
    assert {mistake.golden for mistake in MISTAKES.values()} == set(GOLDENS)
