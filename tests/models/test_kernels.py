"""nn/kernels, nn/gradients: every kernel against the plain formula in fp32, with its gradients.

Without a GPU the same tests run in Triton's interpreter, where Triton is installed:
TRITON_INTERPRET=1 python -m pytest tests/models/test_kernels.py
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence

import pytest
import torch

from rlinf.models.nn import fused

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [] if INTERPRETED else pytest.mark.gpu
# Relative errors of a tensor; the interpreter cuts numbers to bf16 instead of rounding them.
BOUND = {torch.float32: 2e-6, torch.bfloat16: 1.2e-2 if INTERPRETED else 6e-3}
B, S, E = 3, 7, 16
Tensor = torch.Tensor
Call = Callable[[dict[str, Tensor]], Sequence[Tensor]]


@pytest.fixture
def use_kernels(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Switches them on or off."""
    return lambda on: monkeypatch.setattr(fused, "_kernels_for", lambda x: on)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + seed)).to(DEVICE)


def distance(a: Tensor, b: Tensor) -> float:
    """Relative."""
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm())


def chunked(given: dict[str, Tensor], name: str) -> Sequence[Tensor]:
    return given[name].chunk(3, -1)


def ada(given: dict[str, Tensor], name: str = "row") -> Sequence[Tensor]:
    scale, shift, gate = chunked(given, name)
    return fused.add_norm(given["x"], given["y"], gate, scale, shift, eps=1e-6, one_plus=True)


def rope(given: dict[str, Tensor]) -> Sequence[Tensor]:
    angle = randn(B, S, 1, E // 2, seed=9)
    k, v = given["kv"].chunk(2, -1)
    angles = (angle.cos().to(k.dtype), angle.sin().to(k.dtype))
    return fused.rope(given["q"], k, v, angles, head_dim=E)


CASES: dict[str, Call] = {
    "norm": lambda g: fused.add_norm(g["x"], None, None, g["w"], eps=1e-6, one_plus=True)[1:],
    "add_norm": lambda g: fused.add_norm(g["x"], g["y"], None, g["w"], eps=1e-6),
    "ada of each row": ada,
    "ada of all rows": lambda g: ada(g, "one"),
    "gate of each row": lambda g: fused.add_norm(
        g["x"], g["y"], chunked(g, "row")[0], g["w"], g["u"], eps=1e-6, one_plus=True
    ),
    "layer norm": lambda g: fused.add_norm(g["x"], None, None, g["w"], g["u"], eps=1e-6, centred=True)[1:],
    "layer norm of a gated sum": lambda g: fused.add_norm(
        g["x"], g["y"], g["u"], g["w"], g["w"], eps=1e-6, centred=True
    ),
    "norm alone is read": lambda g: fused.add_norm(g["x"], g["y"], None, g["w"], eps=1e-6)[1:],
    "gelu": lambda g: (fused.gelu_gate(*g["x"].chunk(2, -1)),),
    "silu": lambda g: (fused.silu_gate(*g["x"].chunk(2, -1)),),
    "rope": rope,
    "rope, keys and values alone": lambda g: rope(g)[1:],
    "rope, strided gradients": lambda g: [t.transpose(1, 2).contiguous() for t in rope(g)],
}


@pytest.mark.parametrize("width", [48, 1100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_those_of_the_formula(case, dtype, width, use_kernels):
    shapes = {"x": (B, S, width), "y": (B, S, width), "w": (width,), "u": (width,)}
    shapes |= {"row": (B, 1, 3 * width), "one": (1, 1, 3 * width), "q": (B, S, 4 * E), "kv": (B, S, 4 * E)}
    given = {name: randn(*shape, seed=i).to(dtype) for i, (name, shape) in enumerate(shapes.items())}

    def run(dtype: torch.dtype) -> list[Tensor | None]:
        inputs = {name: tensor.to(dtype).requires_grad_() for name, tensor in given.items()}
        outs = CASES[case](inputs)
        seeds = [randn(*out.shape, seed=20 + i).bfloat16().to(dtype) for i, out in enumerate(outs)]
        with torch.no_grad():
            again = CASES[case](inputs)
        return [*outs, *again, *torch.autograd.grad(outs, list(inputs.values()), seeds, allow_unused=True)]

    use_kernels(True)
    fast = run(dtype)
    use_kernels(False)
    for a, b in zip(fast, run(torch.float32), strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert (a.shape, a.dtype) == (b.shape, dtype)
            assert distance(a, b) < BOUND[dtype]


def test_gradients_of_many_rows_are_the_same_every_time(use_kernels):
    """Sums over rows are made in a fixed order by any number of programs."""
    use_kernels(True)
    x, w = randn(40 if INTERPRETED else 400, 30, 96), randn(96).requires_grad_()
    runs = []
    for _ in range(2):
        out = fused.add_norm(x, None, None, w, eps=1e-6)[1]
        runs.append(torch.autograd.grad(out, w, torch.ones_like(out))[0])
    assert torch.equal(*runs)
    value = x.double()
    want = (value * torch.rsqrt(value.square().mean(-1, keepdim=True) + 1e-6)).sum((0, 1))
    assert float((runs[0].double() - want).abs().max()) < 1e-5 * want.numel() ** 0.5 * len(x) ** 0.5
