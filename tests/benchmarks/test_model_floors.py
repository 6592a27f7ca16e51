"""Counted FLOPs and weights are those of the networks, and give the known floors of one H200."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import model_floors as floors
import pytest
import torch
from model_cases import CASES, Subject
from model_floors import Ceilings, Phase, floor_seconds
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from rlinf.models.openpi.architecture import BASE as PI
from rlinf.models.openpi.model import PiNet
from rlinf.models.prismatic.architecture import BASE as PRISMATIC
from rlinf.models.prismatic.model import PrismaticNet

H200 = Ceilings(flops=989e12, bandwidth=4.8e12)
ROWS = 3
SHORT = replace(PI, action_horizon=5)


def openvla(rows: int) -> list[Phase]:
    return floors.prismatic_phases(PRISMATIC, rows=rows, cameras=1, prompt=31, tokens=7, one_by_one=True)


def oft(rows: int) -> list[Phase]:
    return floors.prismatic_phases(PRISMATIC, rows=rows, cameras=1, prompt=30, tokens=56, one_by_one=False)


def robotwin(rows: int, prompt: int = 46) -> list[Phase]:
    return floors.prismatic_phases(
        PRISMATIC, rows=rows, cameras=1, prompt=prompt, tokens=350, one_by_one=False, state=14, stop=True
    )


def pi(arch, cameras: int, prompt: int, steps: int) -> Callable[[int], list[Phase]]:
    return lambda rows: floors.pi_phases(arch, rows=rows, cameras=cameras, prompt=prompt, steps=steps, output=True)


# TFLOP of one row: vision, prefix or the whole language pass, decoding or denoising.
TERAFLOPS = {
    "openvla": (openvla, (0.40, 3.74, 0.08)),
    "oft K=8": (oft, (0.40, 4.5)),
    "oft robotwin, padded": (lambda rows: robotwin(rows, 512), (0.40, 15.3)),
    "oft robotwin": (robotwin, (0.40, 8.7)),
    "pi0": (pi(PI, 3, 48, 10), (0.66, 3.33, 0.38)),
    "pi05": (pi(replace(PI, pi05=True), 3, 200, 10), (0.66, 3.97, 0.39)),
}
# Milliseconds at batch 1, 16, 64, 256. For one row of π0.5 the known floor reads the modulations at every step, where
# one reading serves all of them.
MILLISECONDS = {
    "openvla": (openvla, (20.9, 87, 297, 1137)),
    "oft K=8": (oft, (5.0, 79, 318, 1271)),
    "oft robotwin, padded": (lambda rows: robotwin(rows, 512), (15.8, 253, 1013, 4054)),
    "oft robotwin": (robotwin, (9.2, 147, 590, 2358)),
    "pi0, H=50, N=10": (pi(PI, 3, 48, 10), (5.4, 71, 283, 1132)),
    "pi05, H=50, N=10": (pi(replace(PI, pi05=True), 3, 200, 10), (math.nan, 81, 325, 1300)),
    "pi0, 3 cameras": (pi(SHORT, 3, 48, 5), (4.7, 65, 260, 1038)),
    "pi0, 1 camera": (pi(SHORT, 1, 16, 5), (2.0, 22, 86, 344)),
    "pi05 calvin": (pi(replace(SHORT, pi05=True), 2, 20, 5), (math.nan, 43, 169, 675)),
}


@pytest.mark.parametrize("name", TERAFLOPS)
def test_flops_of_the_published_sizes(name):
    phases, known = TERAFLOPS[name]
    counted = [phase.flops / 1e12 for phase in phases(1)]
    assert counted[: len(known)] == pytest.approx(known, rel=0.03)
    assert sum(counted[len(known) :]) < 0.01


@pytest.mark.parametrize("name", MILLISECONDS)
def test_floors_of_the_published_sizes(name):
    phases, known = MILLISECONDS[name]
    for rows, milliseconds in zip((1, 16, 64, 256), known, strict=True):
        if not math.isnan(milliseconds):
            assert 1000 * floor_seconds(phases(rows), H200) == pytest.approx(milliseconds, rel=0.03)


def test_bytes_of_the_published_sizes():
    vision, prefix, denoise = pi(PI, 3, 48, 10)(1)
    assert vision.weight_bytes == pytest.approx(0.82e9, rel=0.03)
    assert prefix.weight_bytes == pytest.approx(3.96e9, rel=0.03)
    assert prefix.cache_bytes == pytest.approx(15.0e6, rel=0.03)
    assert denoise.weight_bytes / 10 == pytest.approx(0.62e9, rel=0.03)
    assert denoise.cache_bytes == 10 * prefix.cache_bytes
    prefill = openvla(1)[1]
    assert prefill.cache_bytes == pytest.approx(150e6, rel=0.03)
    times = pi(replace(PI, pi05=True), 3, 200, 10)(1)[3]
    mlp = 4 * 2 * PI.expert_width**2
    assert times.weight_bytes - mlp == pytest.approx(0.46e9, rel=0.03)


def test_a_phase_is_bound_by_the_slower_of_products_and_memory():
    phase = Phase("x", products=6.0, attention=2.0, weight_bytes=30.0, cache_bytes=10.0)
    assert phase.seconds(Ceilings(flops=1.0, bandwidth=1.0)) == 40.0
    assert phase.seconds(Ceilings(flops=0.1, bandwidth=1.0)) == 80.0
    assert floor_seconds([phase, phase], Ceilings(flops=1.0, bandwidth=10.0)) == 16.0


def matrices(module: nn.Module) -> int:
    """Entries of the matrices that tokens are multiplied with."""
    return sum(m.weight.numel() for m in module.modules() if isinstance(m, nn.Linear | nn.Conv2d))


@pytest.mark.parametrize("pi05", [False, True])
def test_weights_are_those_of_the_pi_network(pi05):
    arch = replace(PI, pi05=pi05)
    with torch.device("meta"):
        net = PiNet(arch)
    vision, projector, language, expert = net._parts
    assert floors.pi_vision_weights(arch) == matrices(vision) + matrices(projector)
    assert floors.pi_language_weights(arch, output=True) == matrices(language)
    last = language.layers[-1]
    unread = matrices(last) - last.self_attn.k_proj.weight.numel() - last.self_attn.v_proj.weight.numel()
    assert floors.pi_language_weights(arch, output=False) == matrices(language) - unread
    adaptive = sum(m.weight.numel() for name, m in expert.named_modules() if name.endswith("norm.dense"))
    assert floors.pi_expert_weights(arch) == matrices(expert) - adaptive
    action = floors.action_weights(arch)
    mlp = sum(m.weight.numel() for name, m in net.named_children() if name.startswith("time_mlp"))
    total = matrices(vision) + matrices(projector) + matrices(language) + matrices(expert)
    assert sum(action.values()) + mlp == matrices(net) - total
    if pi05:
        assert floors.time_weights(arch) == adaptive + mlp


def test_weights_are_those_of_the_prismatic_network():
    with torch.device("meta"):
        net = PrismaticNet(PRISMATIC)
    assert floors.prismatic_vision_weights(PRISMATIC) == matrices(net.vision_backbone) + matrices(net.projector)
    assert floors.prismatic_language_weights(PRISMATIC) == matrices(net.language_model.model)


@pytest.mark.parametrize("key", CASES)
def test_flops_are_those_the_network_makes(key):
    """A call of the compact network: products equal to the last one, attention as scores and values over all pairs."""
    subject = Subject.build(key, "compact", torch.device("cpu"))
    obs = subject.observe(ROWS)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        subject.act(obs, "eval")
    made = {str(op): count for op, count in counter.get_flop_counts()["Global"].items()}
    phases = floors.phases_of(subject.cfg, rows=ROWS, prompt=subject.prompt)
    attention = sum(phase.attention for phase in phases)
    if key == "openvla":  # the counter takes the whole square of a causal pass
        length = subject.policy.spec.num_images * subject.cfg.architecture().image_tokens + subject.prompt
        attention += phases[1].attention * (2 * length / (length + 1) - 1)
    print({name: f"{count:,}" for name, count in made.items()}, [(p.name, p.products, p.attention) for p in phases])
    assert sum(made.values()) == pytest.approx(attention + sum(phase.products for phase in phases), rel=1e-9)
    assert made["aten.bmm"] == pytest.approx(attention, rel=1e-9)
