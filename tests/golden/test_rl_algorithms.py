"""The tensors of golden/rl_algorithms against our functions; published defects are compared in compat mode.

`kl.*` pins estimates of a distance to a reference policy, which nothing here computes.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlinf.algorithms.advantages import Targets, estimate
from rlinf.algorithms.config import AlgorithmConfig
from rlinf.algorithms.logprobs import reduce_level
from rlinf.algorithms.losses import VARIANCE, Batch, compute_loss, huber
from rlinf.algorithms.masks import filter_groups, group_statistics, loss_mask
from rlinf.compat.formulas import published_loss
from rlinf.data.types import PolicyEval
from rlinf.models.prismatic import action_bins

BOUND = 1e-6
Metrics = dict[str, tuple[torch.Tensor, torch.Tensor]]
# Metrics that the published code got wrong: compared in compat mode only.
DEFECTIVE = {"actor/clip_fraction", "actor/dual_cliped_ratio", "critic/value_clip_ratio", "actor/total_loss"}


@dataclass(frozen=True)
class Vectors:
    tensors: dict[str, torch.Tensor]
    cases: dict[str, dict[str, Any]]  # name -> arguments (and metrics)
    sizes: dict[str, int]

    def names(self, prefix: str) -> list[str]:
        return [name for name in self.cases if name.startswith(prefix)]


@pytest.fixture(scope="module")
def vectors(golden_dir: Path) -> Vectors:
    folder = golden_dir / "rl_algorithms"
    meta = json.loads((folder / "meta.json").read_text())
    return Vectors(load_file(folder / "io.safetensors"), meta["meta"], meta["sizes"])


def test_every_tensor_is_read(vectors: Vectors) -> None:
    groups = ("adv.", "loss.", "pre.", "loss_mask.", "ent.", "huber.", "kl.", "logits", "in.", "targets")
    unknown = [key for key in vectors.tensors if not key.startswith(groups)]
    assert not unknown, f"tensors that no test reads: {unknown}"
    cases = {k.rsplit(".", 1)[0] for k in vectors.tensors if k.endswith((".loss", ".advantages"))}
    assert cases == set(vectors.cases)


def test_loss_masks(vectors: Vectors, max_delta) -> None:
    mask = loss_mask(vectors.tensors["in.dones"])
    count = mask.sum((0, 2))
    for level, got in (("action", mask), ("chunk", mask.any(-1, keepdim=True))):
        want = vectors.tensors[f"loss_mask.{level}"]
        max_delta(f"loss_mask.{level}", got, want, 0)
        max_delta(
            f"loss_mask.{level}_sum", count[None, :, None].expand_as(got), vectors.tensors[f"loss_mask.{level}_sum"], 0
        )


def test_advantages(vectors: Vectors, max_delta) -> None:
    t = vectors.tensors
    for name in vectors.names("adv."):
        args = vectors.cases[name]
        cfg = AlgorithmConfig(
            adv_type=args["adv_type"],
            gamma=args.get("gamma", 0.99),
            gae_lambda=args.get("gae_lambda", 0.95),
            group_size=args["group_size"],
            reward_type=args["reward_type"],
            normalize_advantages=args.get("normalize_advantages", True),
        )
        level = args["reward_type"].removesuffix("_level")
        masked = "loss_mask" not in args
        advantages, returns = estimate(
            t["in.rewards"],
            t["in.dones"],
            None if "values" in args else t[f"in.values_{level}"],
            t[f"loss_mask.{level}"] if masked else None,
            torch.ones(t["in.rewards"].shape[1], dtype=torch.bool),
            cfg,
        )
        max_delta(f"{name}.advantages", advantages, t[f"{name}.advantages"], BOUND, relative=True)
        if f"{name}.returns" in t:
            max_delta(f"{name}.returns", returns, t[f"{name}.returns"], BOUND, relative=True)
        else:
            assert returns is None


def test_preprocessing(vectors: Vectors, max_delta) -> None:
    """Rollout epochs side by side, masks, reward filter, rows in shuffled order."""
    t, epochs, chunks = vectors.tensors, vectors.sizes["E"], vectors.sizes["T"]
    for name in ("rewards", "dones", "prev_values", "prev_logprobs"):
        per_epoch = t[f"pre.in.{name}"].chunk(epochs)
        max_delta(f"pre.out.{name}", torch.cat(per_epoch, dim=1), t[f"pre.out.{name}"], 0)

    mask = loss_mask(t["pre.out.dones"])
    count = mask.sum((0, 2))[None, :, None]
    mask = mask.any(-1, keepdim=True)
    max_delta("pre.out.loss_mask_sum", count.expand_as(mask), t["pre.out.loss_mask_sum"], 0)
    # The bounds of the filter are not stored: those of the groups it kept must reproduce what it dropped.
    group_size = next(vectors.cases[n]["group_size"] for n in vectors.names("adv.grpo"))
    alive = torch.ones(mask.shape[1], dtype=torch.bool)
    mean, _, _ = group_statistics((t["pre.out.rewards"] * mask).sum((0, 2)), alive, group_size)
    kept = mean[(t["pre.out.loss_mask"] == mask).all(0).all(-1)]
    keep = filter_groups(
        t["pre.out.rewards"], mask, alive, group_size=group_size, lower=float(kept.min()), upper=float(kept.max())
    )
    max_delta("pre.out.loss_mask", mask & keep[None, :, None], t["pre.out.loss_mask"], 0)

    order = t["pre.shuffle_id"]
    assert sorted(order.tolist()) == list(range(len(order)))
    for name in ("rewards", "dones", "prev_values", "prev_logprobs", "loss_mask", "loss_mask_sum"):
        rows = t[f"pre.out.{name}"][:chunks].flatten(0, 1)[order]
        max_delta(f"pre.flat.{name}", rows, t[f"pre.flat.{name}"], 0)


def test_losses_in_compat_mode(vectors: Vectors, max_delta) -> None:
    """Losses, gradients and metrics of every case, defects included."""
    for name in vectors.names("loss."):
        value, metrics, gradients = _run(vectors, vectors.cases[name], compat=True)
        _check_loss(vectors, max_delta, name, value, gradients)
        for metric, want in vectors.cases[name]["metrics"].items():
            _check_metric(max_delta, name, metrics, metric, want)


def test_losses(vectors: Vectors, max_delta) -> None:
    """By default everything but the defects is the same; the masked means differ by exactly the forgotten broadcast."""
    for name in vectors.names("loss."):
        args = vectors.cases[name]
        value, metrics, gradients = _run(vectors, args, compat=False)
        factor = _forgotten_broadcast(vectors, args)
        if factor == 1 or args["max_episode_steps"] is not None:
            _check_loss(vectors, max_delta, name, value, gradients)
        else:
            want = vectors.tensors[f"{name}.grad_logprobs"] / factor
            max_delta(f"{name}.grad_logprobs / {factor}", gradients["grad_logprobs"], want, BOUND)
            if args["loss_type"] != "actor":  # values have the mask's own shape: no defect
                max_delta(
                    f"{name}.grad_values", gradients["grad_values"], vectors.tensors[f"{name}.grad_values"], BOUND
                )
            if args["loss_type"] == "actor":
                max_delta(
                    f"{name}.loss / {factor}", value, vectors.tensors[f"{name}.loss"] / factor, BOUND, relative=True
                )
        for metric, want in args["metrics"].items():
            if factor == 1 and metric not in DEFECTIVE:
                _check_metric(max_delta, name, metrics, metric, want)
        if "actor/approx_kl" in metrics:
            want = args["metrics"]["actor/approx_kl"] / factor
            max_delta(f"{name} approx_kl / {factor}", metrics["actor/approx_kl"][0], want, BOUND, relative=True)
        assert 0.0 <= float(metrics["actor/clip_fraction"][0]) <= 1.0


def test_huber(vectors: Vectors, max_delta) -> None:
    max_delta(
        "huber.out", huber(vectors.tensors["huber.err"], 10.0), vectors.tensors["huber.out"], BOUND, relative=True
    )


def test_token_logprobs(vectors: Vectors, max_delta) -> None:
    t = vectors.tensors
    log_prob = t["logits"].float().log_softmax(-1)
    max_delta("logits.logprobs", action_bins.chosen(log_prob, t["targets"]), t["logits.logprobs"], BOUND, relative=True)
    max_delta("logits.entropy", action_bins.entropy(log_prob), t["logits.entropy"], BOUND, relative=True)


def test_entropy_levels(vectors: Vectors, max_delta) -> None:
    t = vectors.tensors
    entropy = t["ent.in"].unflatten(1, (vectors.sizes["C"], vectors.sizes["D"]))
    for level in ("token", "action", "chunk"):
        want = t[f"ent.{level}"]
        got = reduce_level(entropy, f"{level}_level").reshape(want.shape)
        max_delta(f"ent.{level}", got, want, BOUND, relative=True)


def _check_loss(vectors: Vectors, max_delta, name: str, value, gradients: dict[str, torch.Tensor]) -> None:
    t = vectors.tensors
    max_delta(f"{name}.loss", value, t[f"{name}.loss"], BOUND, relative=True)
    for what, gradient in gradients.items():
        if f"{name}.{what}" in t:
            max_delta(f"{name}.{what}", gradient, t[f"{name}.{what}"], BOUND, relative=True)
        else:
            assert not gradient.any(), f"{name}: {what} must be zero"


def _check_metric(max_delta, name: str, metrics: Metrics, metric: str, want: float) -> None:
    if not metric.startswith("__sum__/"):
        max_delta(f"{name} {metric}", metrics[metric][0], want, BOUND, relative=True)
        return
    # Raw sums were stored as f32, rounded in proportion to their sum of |x|, which the sum of squares bounds.
    field = metric.rsplit("/", 1)[1]
    sums = {key.removeprefix(VARIANCE): float(value) for key, (value, _) in metrics.items()}
    squares = sums["errors_sq_sum" if field.startswith("errors") else "returns_sq_sum"]
    scale = max(1.0, squares if field.endswith("sq_sum") else math.sqrt(sums["count"] * squares))
    max_delta(f"{name} {metric}", sums[field] / scale, want / scale, BOUND)


def _forgotten_broadcast(vectors: Vectors, args: dict[str, Any]) -> int:
    """Log-prob entries per mask entry, by which the published masked means came out too large."""
    if not args["use_mask"] or args["logprob_type"] == "chunk_level":
        return 1
    per_action = vectors.sizes["D"] if args["logprob_type"] == "token_level" else 1
    return per_action * (vectors.sizes["C"] if args["reward_type"] == "chunk_level" else 1)


def _run(
    vectors: Vectors, args: dict[str, Any], *, compat: bool
) -> tuple[torch.Tensor, Metrics, dict[str, torch.Tensor]]:
    t, (C, A) = vectors.tensors, (vectors.sizes["C"], vectors.sizes["D"])
    chunk = args["reward_type"] == "chunk_level"
    level, columns = ("chunk", slice(0, 1)) if chunk else ("action", slice(None))
    logprobs = t["loss.logprobs"].clone().requires_grad_()
    values = t[f"loss.val_{level}"].clone().requires_grad_()
    clip_ratio_c = args.get("clip_ratio_c", 3.0)
    cfg = AlgorithmConfig(
        loss_type=args["loss_type"],
        reward_type=args["reward_type"],
        logprob_type=args["logprob_type"],
        clip_ratio_low=0.2,
        clip_ratio_high=0.28,
        dual_clip=clip_ratio_c is not None,
        clip_ratio_c=clip_ratio_c or 3.0,
        clip_log_ratio_min=args.get("clip_log_ratio_min"),
        clip_log_ratio_max=args.get("clip_log_ratio_max"),
        behave_weight_threshold=args.get("behave_weight_threshold"),
    )
    old = t["loss.old_logprobs"].unflatten(1, (C, A))
    proximal = args.get("proximal_logprobs")  # written as "old_logprobs + 0.05"
    batch = Batch(
        new=PolicyEval(logprobs=logprobs.unflatten(1, (C, A)), values=values, entropy=None),
        old_logprobs=old,
        old_values=t[f"loss.prev_val_{level}"],
        targets=Targets(
            advantages=t[f"loss.adv_{level}"],
            returns=t[f"loss.ret_{level}"],
            mask=t["loss.mask_action"][:, columns] if args["use_mask"] else None,
            mask_sum=t["loss.mask_sum_action"][:, columns] if args["use_mask"] else None,
        ),
        max_episode_steps=args["max_episode_steps"],
        critic_only=args.get("critic_warmup", False),
        proximal_logprobs=None if proximal is None else old + float(proximal.split("+")[1]),
    )
    value, metrics = (published_loss if compat else compute_loss)(batch, cfg)
    grads = torch.autograd.grad(value, [logprobs, values], allow_unused=True, materialize_grads=True)
    return value, metrics, {"grad_logprobs": grads[0], "grad_values": grads[1]}
