"""The numbers of `models.py` as the section of docs/benchmarks.md, and the promises they must keep."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Results = dict[str, Any]
OPENPI_MS = {1: (216, 76), 64: (768, 510)}  # published π0, three padded cameras, on an H200: eager, compiled
OPENPI_SAMPLES = 87  # samples/s of its update, which computes every prefix again
HEADER = """## Models on one GPU

```bash
python benchmarks/models.py
```

Published sizes with random weights, bf16. A call is `Policy.predict` as the rollout makes it: 224 x 224 pictures on
the host in, actions on the host out, kernels recorded; median of 3 to 10 calls. `eval` is the deterministic sampler,
`train` also gives log-probs, values and (π) the prefix cache. The floor is the sum over vision, prefix and decoding or
denoising of max(FLOPs / GEMM rate, bytes / bandwidth), with the two ceilings measured in the same run and FLOPs and
bytes counted by `benchmarks/model_floors.py`. Peak memory includes the weights."""


@dataclass(frozen=True)
class Check:
    """A promise: what was found, and whether it holds (None: not measured)."""

    promise: str
    found: str
    kept: bool | None


def section(results: Results, titles: dict[str, str]) -> str:
    """The whole text, in Markdown."""
    top = results["ceilings"]
    parts = [
        HEADER,
        f"{results['device']}, torch {results['torch']}, size `{results['size']}`: GEMM {top['tflops']:.1f} TFLOP/s "
        f"({top['gemm']}, random), copy {top['gb_per_s']:.0f} GB/s; {results['seconds']:.0f} s in all.",
    ]
    if results["predict"]:
        parts.append("\n\n".join(_predict(results["predict"], titles)))
    if results["size"] == "base":
        parts.append(_against_openpi(results))
    if results["update"]:
        parts.append(_updates(results["update"]))
    if results["lora"]:
        parts.append(_lora(results["lora"], titles))
    if results["gap"]:
        parts.append(_gaps(results["gap"], titles))
    if results["sync"]:
        parts.append(_sync(results["sync"], titles))
    parts += [f"Failed: {what}: {why}" for what, why in results["errors"].items()]
    rows = [(c.promise, c.found, {True: "PASS", False: "FAIL", None: "–"}[c.kept]) for c in checks(results)]
    parts.append(_table(("promise", "found", ""), rows))
    return "\n\n".join(parts) + "\n"


def broken(results: Results) -> list[str]:
    """The promises of the published size that were measured and do not hold, and everything that failed."""
    unkept = [f"{check.promise} ({check.found})" for check in checks(results) if check.kept is False]
    return unkept + [f"{what}: {why}" for what, why in results["errors"].items()]


def checks(results: Results) -> list[Check]:
    """Every promise about numbers, for the published size on a GPU."""
    measured = results["size"] == "base" and results["device"] != "CPU"
    found = {(row["model"], row["batch"]): row for row in results["predict"]} if measured else {}
    cached = next((row["samples_per_s"] for row in results["update"] if measured and row["prefix"] == "cached"), None)
    waits = {key: row["waits"] for key, row in results["sync"].items() if row["waits"] is not None}
    lora = next((row["peak_gib"] for row in results["lora"] if measured and row["model"] == "openvla"), None)
    failed = results["errors"].get("openvla LoRA")
    return [
        _at_most("π0, one camera, batch 64, eval: at most 150 ms", found.get(("pi0", 64)), 150.0, _sampling, "ms"),
        _at_most("π0, one camera, batch 1, eval: at most 8 ms", found.get(("pi0", 1)), 8.0, _sampling, "ms"),
        _at_most("OpenVLA-OFT K=8, batch 64: at most 1.5 x floor", found.get(("oft", 64)), 1.5, _ratio, "x"),
        _at_most("OpenVLA, batch 16: at most 2 x floor", found.get(("openvla", 16)), 2.0, _ratio, "x"),
        Check(
            "π0 PPO update with the prefix cache: at least 1500 samples/s",
            "not measured" if cached is None else f"{cached:.0f} samples/s",
            None if cached is None else cached >= 1500.0,
        ),
        Check(
            "no wait for the device inside a recorded function",
            "; ".join(f"{key}: {why}" for key, why in waits.items() if why) or f"{len(waits)} models",
            not any(waits.values()) if waits else None,
        ),
        Check(
            "OpenVLA LoRA update, micro batch 80, runs on this GPU",
            failed or ("not measured" if lora is None else f"peak {lora:.1f} GiB"),
            False if failed else None if lora is None else True,
        ),
    ]


def _at_most(promise: str, row: Results | None, limit: float, read: Callable[[Results], float], unit: str) -> Check:
    if row is None or "reason" in row:
        return Check(promise, "not measured" if row is None else row["reason"], None if row is None else False)
    value = read(row)
    return Check(promise, f"{value:.2f} {unit}", value <= limit)


def _sampling(row: Results) -> float:
    """Milliseconds of the deterministic sampler, which is what openpi's anchors time; `train` stands in the tables."""
    return row["eval_ms"]


def _slower(row: Results) -> float:
    """Milliseconds of the slower of the two modes."""
    return max(row["eval_ms"], row["train_ms"])


def _ratio(row: Results) -> float:
    return _slower(row) / row["floor_ms"]


# ---------------------------------------------------------------------- tables
def _predict(rows: list[Results], titles: dict[str, str]) -> Iterator[str]:
    eager = any("eager_ms" in row for row in rows)
    names = ["batch", "eval ms", "train ms", *(["eager ms"] if eager else []), "floor ms", "eval / floor"]
    names += ["train / floor", "peak GiB", "floor by phase, ms"]
    for key in dict.fromkeys(row["model"] for row in rows):
        lines = []
        for row in (row for row in rows if row["model"] == key):
            phases = ", ".join(f"{name} {ms:.2f}" for name, ms in row["phases_ms"].items())
            eager_ms = [_number(row.get("eager_ms"), 2)] if eager else []
            times = [_number(row.get(f"{mode}_ms"), 2) for mode in ("eval", "train")]
            ratios = [_number(_over(row.get(f"{mode}_ms"), row["floor_ms"]), 2) for mode in ("eval", "train")]
            memory = row.get("reason") or _number(row.get("peak_gib"), 1)
            lines.append((str(row["batch"]), *times, *eager_ms, f"{row['floor_ms']:.2f}", *ratios, memory, phases))
        yield f"**{titles[key]}**\n\n{_table(names, lines)}"


def _against_openpi(results: Results) -> str:
    found = {(row["model"], row["batch"]): row for row in results["predict"] if "reason" not in row}
    lines = []
    for batch, (eager, compiled) in OPENPI_MS.items():
        ours = [found[key, batch]["eval_ms"] if (key, batch) in found else None for key in ("pi0_3cam", "pi0")]
        faster = [f"{compiled / ms:.1f}x" if ms else "–" for ms in ours]
        cells = [f"{_number(ms, 1)} ({times})" for ms, times in zip(ours, faster, strict=True)]
        lines.append((f"predict ms, batch {batch}", str(eager), str(compiled), *cells))
    rates = {row["prefix"]: row["samples_per_s"] for row in results["update"]}
    ours_per_s = ", ".join(f"{rate:.0f} {name} ({rate / OPENPI_SAMPLES:.0f}x)" for name, rate in rates.items())
    lines.append(("update, samples/s", f"{OPENPI_SAMPLES} recomputed", "", "", ours_per_s or "–"))
    title = "Beside openpi's π0 (H=5, N=5, three padded cameras), measured on an H200:"
    columns = ("", "openpi eager", "openpi compiled", "ours, 3 cameras", "ours, 1 camera")
    return f"{title}\n\n{_table(columns, lines)}"


def _updates(rows: list[Results]) -> str:
    lines = [(row["prefix"], *_sizes(row), f"{row['samples_per_s']:.0f}", _number(row["peak_gib"], 1)) for row in rows]
    rates = {row["prefix"]: row["samples_per_s"] for row in rows}
    ratio = f"The cache makes the update {rates['cached'] / rates['recomputed']:.1f} times as fast."
    title = "PPO update of π0 (one camera, expert and critic learn), `ActorWorker` with one optimiser step:"
    names = ("prefix", "micro batch", "global batch", "samples/s", "peak GiB so far")
    return f"{title}\n\n{_table(names, lines)}\n\n{ratio}"


def _lora(rows: list[Results], titles: dict[str, str]) -> str:
    lines = [
        (
            titles[row["model"]],
            f"{row['trainable'] / 1e6:.1f} M",
            *_sizes(row),
            f"{row['samples_per_s']:.1f}",
            _number(row["peak_gib"], 1),
            _small(row["logprob_gap"]),
        )
        for row in rows
    ]
    names = ("model", "trainable", "micro batch", "global batch", "samples/s", "peak GiB", "max abs Δ log-prob")
    title = "PPO update with LoRA (rank 32, every linear layer, gradient checkpointing), `ActorWorker`:"
    return f"{title}\n\n{_table(names, lines)}"


def _gaps(gaps: dict[str, Results], titles: dict[str, str]) -> str:
    names = ("logprob", "value", "cached_logprob", "cached_value")
    lines = [(titles[key], *(_small(row.get(name)) for name in names)) for key, row in gaps.items()]
    title = "`evaluate` (with gradients) minus `predict` at equal weights, largest absolute difference:"
    return f"{title}\n\n{_table(('model', 'log-prob', 'value', 'log-prob, cached', 'value, cached'), lines)}"


def _sync(sync: dict[str, Results], titles: dict[str, str]) -> str:
    words = {None: "not on a GPU", False: "never"}
    lines = [(titles[key], words.get(row["waits"], str(row["waits"]))) for key, row in sync.items()]
    title = "Waits for the device inside the recorded function (`torch.cuda.set_sync_debug_mode`):"
    return f"{title}\n\n{_table(('model', 'waits'), lines)}"


def _sizes(row: Results) -> tuple[str, str]:
    return str(row["micro_batch"]), str(row["global_batch"])


def _small(value: float | None) -> str:
    return "–" if value is None else f"{value:.1e}"


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None or math.isnan(value) else f"{value:.{digits}f}"


def _over(value: float | None, floor: float) -> float | None:
    return None if value is None else value / floor


def _table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
