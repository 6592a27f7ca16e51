"""flow_policy_math: means, standard deviations, log-probs and entropies of every sampler."""

from __future__ import annotations

import re

import torch
from safetensors.torch import load_file

from rlinf.models.openpi import flow
from rlinf.models.openpi.heads import NoiseHead


@torch.no_grad()
def test_every_stored_formula(golden_dir, max_delta):
    io = load_file(golden_dir / "flow_policy_math" / "io.safetensors")
    head = NoiseHead(32, (128, 64), 32, (0.08, 0.16))
    bounds = {name: buffer.clone() for name, buffer in head.named_buffers()}
    weights = load_file(golden_dir / "flow_policy_math" / "noise_net.safetensors")
    head.load_state_dict(weights)
    for name, value in bounds.items():
        max_delta(f"noise_net {name}", value, weights[name], 1e-6)
    x, v, x_next = io["x_t"], io["v_t"], io["x_next"]
    left = set(io) - {"x_t", "v_t", "x_next", "suffix_out", "flow_sde.batchidx.idx"}

    def check(key, got):
        left.discard(key)
        max_delta(key, got, io[key], 1e-6, relative=True)

    def part(tensor):
        return tensor[..., :2, :4]

    std_net = head(io["suffix_out"])
    check("noise_net.std", std_net)
    check("safe_logprob", part(flow.logprob(x_next, x, torch.ones_like(x), squared_error=True)))
    for key in sorted(io):
        if key.startswith("timesteps.N"):
            check(key, flow.timesteps(int(key.split("N")[1])))
        elif key.startswith("anneal."):
            check(key, flow.annealed_noise_level(int(key.split(".")[1]), 0.7, 0.3, 400))
    for prefix in sorted({key.rsplit(".", 1)[0] for key in io}):
        match = re.fullmatch(r"(flow_\w+)\.N(\d+)\.a([\d.]+)", prefix)
        if match is None:
            continue
        method, steps = match[1], int(match[2])
        table = flow.step_weights(method, steps, float(match[3]), "cpu")
        found = {"mean": [], "std": [], "logprob": [], "entropy": []}
        for i in range(steps):
            index = torch.full((len(x),), i)
            mean = flow.step_mean(table.at(index), x, v)
            std = std_net if method == "flow_noise" else table.std[index][:, None, None].expand_as(x)
            found["mean"].append(part(mean))
            found["std"].append(part(std))
            found["logprob"].append(part(flow.logprob(x_next, mean, std)))
            found["entropy"].append(part(flow.entropy(std)))
        for name, values in found.items():
            check(f"{prefix}.{name}", torch.stack(values))
    index, table = io["flow_sde.batchidx.idx"], flow.step_weights("flow_sde", 5, 0.5, "cpu")
    check("flow_sde.batchidx.mean", part(flow.step_mean(table.at(index), x, v)))
    check("flow_sde.batchidx.std", part(table.std[index][:, None, None].expand_as(x)))
    assert not left, f"stored but not compared: {sorted(left)}"
