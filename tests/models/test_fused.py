"""nn/fused, nn/packed, nn/graphs: the fast forms give the plain formulas' numbers and gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from rlinf.models.nn import fused
from rlinf.models.nn.graphs import ALIGNMENT, GradientRecorder, Recorder, Staging, kept
from rlinf.models.nn.packed import Packed, pack

gpu = pytest.mark.gpu
B, S, W = 3, 5, 48


def randn(*shape: int, device: str = "cpu") -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(device)


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("shape", [(W,), (1, 1, W), (B, 1, W)])
def test_add_norm_is_the_norm_of_the_sum(centred, shape):
    x, y, gate, scale, shift = randn(B, S, W), randn(B, S, W + 0), randn(*shape), randn(*shape), randn(*shape)
    total, normal = fused.add_norm(x, y, gate, scale, shift, eps=1e-6, one_plus=True, centred=centred)
    torch.testing.assert_close(total, x + gate * y)
    value = total - total.mean(-1, keepdim=True) if centred else total
    want = value / (value.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + scale) + shift
    torch.testing.assert_close(normal, want)


@gpu
@pytest.mark.parametrize("rows", [1, 17, 48])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_of_few_queries(rows, masked):
    q, k, v = (randn(B, 2, n, 64, device="cuda").bfloat16() for n in (rows, 90, 91))
    k, v = k[:, :, :75], v[:, :, :75]  # as in buffers with room
    bias = torch.where(randn(B, 1, rows, 75, device="cuda") > 1, -2.3e38, 0.0).bfloat16() if masked else None
    want = torch.nn.functional.scaled_dot_product_attention(
        q.float(), k.float(), v.float(), attn_mask=None if bias is None else bias.float()
    )
    with torch.no_grad():
        got = fused.attend(q, k, v, bias)
    assert float((got.float() - want).norm() / want.norm()) < 6e-3


@gpu
@pytest.mark.parametrize("padded", [False, True])
def test_first_queries_that_see_fewer_keys(padded):
    """What π0's state token sees, told as a bias and told shortly, for as many queries as 50 actions have."""
    q, k, v = (randn(B, 1, n, 256, device="cuda").bfloat16() for n in (408, 120, 120))
    valid = torch.arange(120, device="cuda") >= (7 if padded else 0)
    everyone = torch.where(valid, 0.0, -2.3e38)[None, None, None].bfloat16()
    bias = everyone.expand(B, 1, 408, 120).clone()
    bias[:, :, :8, 70:] = -2.3e38
    with torch.no_grad():
        told = fused.attend(q, k, v, bias, fused.Lead(8, 70, everyone if padded else None))
    want = torch.nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float(), attn_mask=bias.float())
    assert float((told.float() - want).norm() / want.norm()) < 6e-3


@gpu
def test_attention_keeps_the_gradient_of_values_alone():
    q, k, v = (randn(B, 2, 8, 64, device="cuda").bfloat16() for _ in range(3))
    fused.attend(q, k, v.requires_grad_(), None).sum().backward()
    assert v.grad is not None


@gpu
def test_linear_with_gelu():
    layer, x = nn.Linear(64, 96).cuda().bfloat16(), randn(B, S, 64, device="cuda").bfloat16()
    with torch.no_grad():
        got, want = fused.linear_gelu(x, layer), torch.nn.functional.gelu(layer(x), approximate="tanh")
    assert float((got.float() - want.float()).norm() / want.float().norm()) < 6e-3


@gpu
def test_rope_writes_behind_stored_keys():
    q, k, v, angle = (randn(B, S, n, device="cuda") for n in (64, 16, 16, 8))
    room = (torch.zeros(B, 1, 9, 16, device="cuda"), torch.zeros(B, 1, 9, 16, device="cuda"), 9 - S)
    angles = (angle.cos()[:, :, None], angle.sin()[:, :, None])
    with torch.no_grad():
        want = fused.rope(q, k, v, angles, head_dim=16)
        got = fused.rope(q, k, v, angles, head_dim=16, room=room)
    torch.testing.assert_close(got[0], want[0])
    for buffer, part in zip(got[1:], want[1:], strict=True):
        assert torch.equal(buffer[:, :, 9 - S :], part)
        assert not buffer[:, :, : 9 - S].any()


class Two(Packed):
    groups = (("a", "b"),)

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 3), nn.Linear(4, 5)


class Three(Packed):
    groups = (("a", "b", "c"),)

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, n) for n in (3, 5, 2))


class Doubled(nn.Linear):
    """Stands for an adapted layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


@torch.no_grad()
def test_an_adapted_layer_in_the_middle_is_noticed():
    block, x = Three(), randn(6, 4)
    pack(block)
    before = block.project(block.groups[0], x)
    layer = Doubled(4, 5)
    layer.weight, layer.bias = block.b.weight, block.b.bias
    block.b = layer
    after = block.project(block.groups[0], x)
    torch.testing.assert_close(after[1], 2 * before[1])
    torch.testing.assert_close(after[2], before[2])


def test_packed_layers_keep_names_follow_updates_and_notice_replacement(monkeypatch):
    block, x = Two(), randn(6, 4)
    names = list(block.state_dict())
    pack(block)
    assert list(block.state_dict()) == names
    products = []
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *a: products.append(1) or torch._C._nn.linear(*a))

    def both() -> int:
        products.clear()
        with torch.no_grad():
            got = block.project(("a", "b"), x)
            products_used = len(products)
            for layer, y in zip((block.a, block.b), got, strict=True):
                torch.testing.assert_close(y, x @ layer.weight.T + layer.bias)
        return products_used

    assert both() == 1
    with torch.no_grad():
        block.b.weight.add_(1.0)  # an optimiser step
    assert both() == 1
    block.a.weight.data = block.a.weight.data.clone()  # moved
    assert both() == 2
    pack(block)
    assert both() == 1
    y = block.project(("a", "b"), x)[1].sum()  # with gradients, every layer gets its own
    y.backward()
    assert block.b.weight.grad is not None


def test_recorder_runs_the_function_itself_on_a_cpu():
    recorder = Recorder(lambda given, *, k: {"y": given["x"] * k, "n": torch.tensor(len(given))}, nn.Linear(1, 1))
    out = recorder({"x": torch.ones(2), "absent": None}, k=3)
    assert out["y"].tolist() == [3.0, 3.0]
    assert int(out["n"]) == 1


def test_linear_of_few_is_a_linear_layer():
    x, weight, bias, onto = randn(B, S, W).bfloat16(), randn(7, W), randn(7), randn(B, S, 7)
    want = x.float() @ weight.T + bias
    torch.testing.assert_close(fused.linear_of_few(x, weight, bias), want)
    torch.testing.assert_close(fused.linear_of_few(x, weight, bias, silu=True), want * want.sigmoid())
    torch.testing.assert_close(fused.linear_of_few(x, weight, bias, onto=onto, factor=-0.2), onto - 0.2 * want)
    room = torch.zeros(B, S + 1, 7, dtype=torch.bfloat16)
    assert fused.linear_of_few(x, weight, bias, out=room[:, 1:]).dtype == torch.bfloat16
    assert torch.equal(room[:, 1:], fused.linear_of_few(x, weight, bias).bfloat16())


def test_inputs_from_the_host_travel_together():
    """One buffer for all dtypes; strided, and of one number or none."""

    def tensors(seed: int) -> dict[str, torch.Tensor]:
        g = torch.Generator().manual_seed(seed)
        pictures = torch.randint(0, 256, (2, 1, 3, 3, 3), generator=g, dtype=torch.uint8)
        tokens = torch.randint(0, 99, (2, 48), generator=g, dtype=torch.int32)[:, :5]
        state = torch.randn(2, 32, generator=g)
        index = torch.randint(0, 4, (1,), generator=g)
        return {"pictures": pictures, "tokens": tokens, "valid": tokens > 40, "state": state, "index": index}

    staging = Staging(tensors(0), torch.device("cpu"))
    places = [view.data_ptr() for view in staging.inputs.values()]
    assert all((place - places[0]) % ALIGNMENT == 0 for place in places)
    for seed in (1, 2):
        given = tensors(seed)
        staging.load(given)
        assert all(torch.equal(view, given[name]) for name, view in staging.inputs.items())
        assert [view.data_ptr() for view in staging.inputs.values()] == places


def test_nothing_is_kept_outside_a_recording():
    made = []

    def make(n: int) -> int:
        made.append(n)
        return n + 1

    assert [kept(make, 1), kept(make, 1)] == [2, 2]
    assert made == [1, 1]


@gpu
def test_recorder_brings_inputs_from_the_host():
    """Mixed with inputs on the device, written over as soon as the call returns; what is kept is made once."""
    layer, made = nn.Linear(4, 4).cuda(), []

    def constant(rows: int) -> torch.Tensor:
        made.append(rows)
        return torch.arange(rows, device="cuda")[:, None].float()

    def function(given):
        return {"y": layer(given["x"]) + given["z"] + kept(constant, len(given["x"]))}

    recorder, rows = Recorder(function, layer), 1024
    with torch.no_grad():
        x, z, found, want = torch.empty(rows, 4), torch.empty(rows, 1, dtype=torch.uint8), [], []
        for i in range(20):
            x.copy_(torch.randn(rows, 4, generator=torch.Generator().manual_seed(i)))
            z.fill_(i)
            given = {"x": x, "z": z} if i % 3 else {"x": x.cuda(), "z": z}
            want.append(layer(x.cuda()) + i + torch.arange(rows, device="cuda")[:, None])
            found.append(recorder(given)["y"])
        for a, b in zip(found, want, strict=True):
            torch.testing.assert_close(a, b)
        assert made == [rows, rows]  # for each of two recordings
        recorder.enabled = False
        torch.testing.assert_close(recorder({"x": x, "z": z})["y"], want[-1])


@gpu
def test_recorder_replays_follows_weights_and_records_anew_when_they_move():
    layer, calls = nn.Linear(4, 4).cuda(), []

    def function(given, *, k):
        calls.append(1)
        return {"y": layer(given["x"]) * k}

    recorder = Recorder(function, layer, limit=2)
    with torch.no_grad():
        for rows in (2, 3, 2):
            x = randn(rows, 4, device="cuda")
            torch.testing.assert_close(recorder({"x": x}, k=2)["y"], layer(x) * 2)
        recorded = len(calls)
        first = recorder({"x": x}, k=2)["y"]
        layer.weight.mul_(2.0)
        second = recorder({"x": x}, k=2)["y"]
        assert len(calls) == recorded
        torch.testing.assert_close(second, layer(x) * 2)
        assert not torch.equal(first, second)
        layer.weight.data = layer.weight.data.clone() * 3.0
        torch.testing.assert_close(recorder({"x": x}, k=2)["y"], layer(x) * 2)
        assert len(calls) > recorded


def test_gradient_recorder_calls_the_function_itself_on_a_cpu():
    layer, calls = nn.Linear(4, 2), []

    def function(given):
        calls.append(sorted(given))
        return (layer(given["x"]).square().mean(),)

    recorder, x = GradientRecorder(function, layer, enabled=True), randn(3, 4)
    (loss,) = recorder({"x": x, "absent": None})
    assert calls == [["x"]]
    loss.backward()
    want = 2 * layer(x).T @ x / 6  # d mean(y²) / d W
    torch.testing.assert_close(layer.weight.grad, want)
    twin = copy.deepcopy(recorder)
    assert twin.module is not layer
    assert (twin.enabled, twin.limit) == (True, 4)


@gpu
def test_gradient_recorder_gives_the_losses_and_gradients_of_the_direct_call():
    net, calls = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).cuda(), []
    net.register_parameter("unused", nn.Parameter(torch.ones(1, device="cuda")))

    def function(given):
        calls.append(1)
        y = net(given["x"])
        return (y - given["want"]).square().mean(), y.mean(1)

    def run(call, rows: int, seed: int, *, both: bool = True) -> list[torch.Tensor | None]:
        """Outputs, and the gradients of a loss made outside, of the first or of both; copies, as replays overwrite."""
        net.zero_grad(set_to_none=True)
        draw = torch.Generator().manual_seed(seed)
        given = {name: torch.randn(rows, n, generator=draw).cuda() for name, n in (("x", 4), ("want", 2))}
        loss, features = call(given | {"absent": None} if call is recorder else given)
        (loss + 3 * features.square().sum() if both else loss).backward()
        grads = [p.grad if p.grad is None else p.grad.clone() for p in net.parameters()]
        return [loss.detach().clone(), features.detach().clone(), *grads]

    def compare(rows: int, seed: int, *, both: bool = True) -> list[torch.Tensor | None]:
        fast = run(recorder, rows, seed, both=both)
        for a, b in zip(fast, run(function, rows, seed, both=both), strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(a, b)
        return fast

    recorder = GradientRecorder(function, net, enabled=True, limit=2)
    first = compare(3, seed=0)
    calls.clear()
    assert not torch.equal(first[-1], compare(3, seed=1)[-1])
    compare(3, seed=1, both=False)  # the second output gets no gradient
    with torch.no_grad():
        net[0].weight.mul_(2.0)  # an optimiser step
    assert not torch.equal(first[-1], compare(3, seed=0)[-1])
    assert len(calls) == 3  # of the direct calls: replays run no Python
    compare(5, seed=0)
    calls.clear()
    compare(7, seed=0)  # beyond the limit
    assert len(calls) == 2
    compare(5, seed=1)
    compare(3, seed=0)  # the others are still replayed
    assert len(calls) == 4
    net[0].weight.data = net[0].weight.data.clone() * 0.5  # moved: recorded anew
    compare(7, seed=0)
    calls.clear()
    compare(7, seed=1)
    assert len(calls) == 1


@gpu
def test_recorded_gradients_of_micro_batches_add_up():
    net = nn.Linear(4, 2).cuda()

    def function(given, *, power):
        return (net(given["x"]).pow(power).mean(),)

    recorder = GradientRecorder(function, net)

    def gradients(call) -> list[torch.Tensor]:
        net.zero_grad(set_to_none=True)
        for rows, power in ((3, 2), (5, 2), (3, 2), (3, 3), (3, 2)):
            call({"x": randn(rows, 4, device="cuda") * (power + rows)}, power=power)[0].backward()
        return [p.grad.clone() for p in net.parameters()]

    for _ in range(2):
        for fast, plain in zip(gradients(recorder), gradients(function), strict=True):
            torch.testing.assert_close(fast, plain)
    first, second = (recorder({"x": randn(3, 4, device="cuda") * n}, power=2)[0] for n in (1, 2))
    assert float(first) != float(second)  # outputs are copies
    second.backward()
    with pytest.raises(RuntimeError, match="a later call has overwritten"):
        first.backward()
