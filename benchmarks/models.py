"""The models on one GPU, with random weights: a policy call against its floor, PPO updates, memory.

    python benchmarks/models.py [--models pi0,oft] [--batches 1,16,64,256] [--sections predict,sync,gap,update,lora]

Everything is measured in one run: the ceilings (bf16 GEMM rate, copy bandwidth), then each model. The tables at the end
are the text of docs/benchmarks.md (`--markdown FILE` keeps them, `--json FILE` the numbers). The command fails when a
promise of the last table is broken. On a CPU, `--size compact --device cpu` only shows that it runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from model_cases import CASES, Subject, collect_garbage
from model_floors import Ceilings, floor_seconds, phases_of
from model_report import broken, section
from model_updates import Rows, Update

GIB = 2**30
SECTIONS = ("predict", "sync", "gap", "update", "lora")
GAP_ROWS = 16
PPO_ROWS = {"base": Rows(256, 1024)}  # π0
LORA_ROWS = {"base": {"openvla": Rows(80, 320), "oft": Rows(40, 160)}}  # micro batches of the ManiSkill recipes
FEW_ROWS = Rows(4, 8)  # of the small sizes
Results = dict[str, Any]


class Clock:
    """Times calls on a device; a call's length decides how often it is repeated."""

    def __init__(self, device: torch.device, budget: float) -> None:
        self.device, self.budget = device, budget

    def seconds(self, call: Callable[[], object], *, least: int = 3, most: int = 50) -> float:
        """Median seconds of a call that is warm."""
        taken: list[float] = []
        while len(taken) < least or (len(taken) < most and sum(taken) < self.budget):
            self.synchronize()
            start = time.perf_counter()
            call()
            self.synchronize()
            taken.append(time.perf_counter() - start)
        return statistics.median(taken)

    def synchronize(self) -> None:
        """Wait until the device has done everything."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def start_peak(self) -> None:
        """Measure memory from here on."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def peak_gib(self) -> float | None:
        """The most memory held at once since; None on a CPU."""
        return torch.cuda.max_memory_allocated(self.device) / GIB if self.device.type == "cuda" else None


def measure_ceilings(clock: Clock) -> tuple[Ceilings, str]:
    """GEMM rate on random matrices and bytes read and written by a copy; and which GEMM it was."""
    cuda = clock.device.type == "cuda"
    side, numbers, dtype = (8192, GIB, torch.bfloat16) if cuda else (512, 1 << 22, torch.float32)
    a, b = (torch.randn(side, side, device=clock.device).to(dtype) for _ in range(2))
    source = torch.randn(numbers, device=clock.device, dtype=dtype)
    target = torch.empty_like(source)
    burst = 10  # so that launching is nothing beside it

    def multiply() -> None:
        for _ in range(burst):
            torch.matmul(a, b)

    def copy() -> None:
        for _ in range(burst):
            target.copy_(source)

    for call in (multiply, copy):
        call()
    flops = burst * 2 * side**3 / clock.seconds(multiply, least=10, most=30)
    bandwidth = burst * 2 * source.numel() * source.element_size() / clock.seconds(copy, least=10, most=30)
    return Ceilings(flops, bandwidth), f"{side}³ {str(dtype).removeprefix('torch.')}"


# ---------------------------------------------------------------------- one model
def measure_predict(subject: Subject, rows: int, ceilings: Ceilings, clock: Clock, *, eager: bool) -> Results:
    """A call as the rollout makes it, pictures on the host in and actions on the host out, in both modes."""
    obs, recorder = subject.observe(rows), subject.recorder
    phases = phases_of(subject.cfg, rows=rows, prompt=subject.prompt)
    row: Results = {"model": subject.key, "batch": rows, "floor_ms": 1000 * floor_seconds(phases, ceilings)}
    row["phases_ms"] = {phase.name: 1000 * phase.seconds(ceilings) for phase in phases}

    def milliseconds(mode: Literal["train", "eval"]) -> float:
        def call() -> None:
            subject.act(obs, mode).actions.cpu()

        call()  # compiles and records
        return 1000 * clock.seconds(call)

    clock.start_peak()
    try:
        row["eval_ms"], row["train_ms"] = milliseconds("eval"), milliseconds("train")
        row["peak_gib"] = clock.peak_gib()
        if eager:
            recorder.enabled = False
            row["eager_ms"] = milliseconds("eval")
    except torch.OutOfMemoryError:
        row["reason"] = "out of memory"
    recorder.enabled = True
    recorder.clear()
    return row


def check_sync(subject: Subject) -> Results:
    """Run the recorded function eagerly while every wait for the device is an error."""
    if subject.device.type != "cuda":
        return {"waits": None}
    recorder, obs, given = subject.recorder, subject.observe(2), []
    function = recorder.function

    def watched(inputs: dict[str, torch.Tensor], **options: Any) -> dict[str, torch.Tensor]:
        given.append((inputs, options))
        return function(inputs, **options)

    recorder.function, recorder.enabled = watched, False
    for mode in ("train", "eval"):
        subject.act(obs, mode)
    recorder.function, recorder.enabled = function, True
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.no_grad():
            for inputs, options in given:
                function(inputs, **options)
    except RuntimeError as error:
        return {"waits": str(error).splitlines()[0]}
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return {"waits": False}


def measure_gap(subject: Subject) -> Results:
    """How far `evaluate`, as an update calls it, is from what `predict` stored at the same weights."""
    policy, out = subject.policy, subject.act(subject.observe(GAP_ROWS), "train")
    found: Results = {}
    for name, cache in (("", None), ("cached_", out.cache)):
        if name and cache is None:
            continue
        new = policy.evaluate(out.replay, values=policy.spec.has_value, entropy=False, cache=cache)
        found[f"{name}logprob"] = float((new.logprobs - out.logprobs).detach().abs().max())
        if new.values is not None and out.values is not None:
            found[f"{name}value"] = float((new.values - out.values).detach().abs().max())
    return found


# ---------------------------------------------------------------------- updates
def measure_ppo(size: str, clock: Clock) -> list[Results]:
    """π0: rows/s with the prefixes kept since the rollout, then with each computed again."""
    rows = PPO_ROWS.get(size, FEW_ROWS)
    subject = Subject.build("pi0", size, clock.device, gradient_checkpointing=False)  # the expert alone fits easily
    clock.start_peak()
    update, table = Update(subject, rows), []
    for prefix in ("cached", "recomputed"):
        if prefix == "recomputed":
            update.forget_cache()
        table.append({"prefix": prefix} | asdict(rows) | update.measure(3) | {"peak_gib": clock.peak_gib()})
        say(f"pi0 update, prefix {prefix}: {table[-1]['samples_per_s']:.0f} samples/s")
    return table


def measure_lora(key: str, size: str, clock: Clock) -> Results:
    """A token policy with adapters on every linear layer: rows/s, and the memory of rollout and update."""
    rows = LORA_ROWS.get(size, {}).get(key, FEW_ROWS)
    subject = Subject.build(key, size, clock.device, is_lora=True, lora_rank=32, cuda_graphs=False)
    clock.start_peak()
    row = {"model": key, "trainable": subject.cfg.num_trainable_parameters()} | asdict(rows)
    row |= Update(subject, rows).measure(1) | {"peak_gib": clock.peak_gib()}
    say(f"{key} LoRA update: {row['samples_per_s']:.1f} samples/s, peak {row['peak_gib']} GiB")
    return row


# ---------------------------------------------------------------------- the run
def run(args: argparse.Namespace) -> Results:
    """Every section asked for; one that fails is reported and the rest go on."""
    device = torch.device(args.device)
    clock = Clock(device, args.seconds)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    results: Results = {"device": name, "torch": torch.__version__, "size": args.size, "sections": args.sections}
    results |= {"predict": [], "sync": {}, "gap": {}, "update": [], "lora": [], "errors": {}}
    ceilings, gemm = measure_ceilings(clock)
    results["ceilings"] = {"tflops": ceilings.flops / 1e12, "gb_per_s": ceilings.bandwidth / 1e9, "gemm": gemm}
    say(f"{name}, torch {torch.__version__}: {results['ceilings']}")
    collect_garbage()

    def visit(key: str) -> None:
        start = time.perf_counter()
        subject = Subject.build(key, args.size, device)
        clock.synchronize()
        say(f"{key}: {CASES[key].title}, built in {time.perf_counter() - start:.1f} s")
        for rows in args.batches if "predict" in args.sections else ():
            row = measure_predict(subject, rows, ceilings, clock, eager=args.eager)
            collect_garbage()
            say(f"{key} batch {rows}: " + ", ".join(f"{k} {v:.2f}" for k, v in row.items() if isinstance(v, float)))
            results["predict"].append(row)
        if "sync" in args.sections:
            results["sync"][key] = check_sync(subject)
            say(f"{key} waits for the device inside the recorded function: {results['sync'][key]['waits']}")
        if "gap" in args.sections:
            results["gap"][key] = measure_gap(subject)
            say(f"{key} evaluate - predict: {results['gap'][key]}")

    def ppo() -> None:
        results["update"] += measure_ppo(args.size, clock)

    def lora(key: str) -> None:
        results["lora"].append(measure_lora(key, args.size, clock))

    def attempt(what: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # the other numbers of a long run must not be lost
            traceback.print_exc()
            results["errors"][what] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        keep(results, args.json)
        collect_garbage()

    if {"predict", "sync", "gap"} & set(args.sections):
        for key in args.models:
            attempt(key, partial(visit, key))
    if "update" in args.sections and "pi0" in args.models:
        attempt("pi0 update", ppo)
    if "lora" in args.sections:
        for key in (key for key in ("openvla", "oft") if key in args.models):
            attempt(f"{key} LoRA", partial(lora, key))
    return results


def keep(results: Results, file: Path | None) -> None:
    """Write the numbers found so far."""
    if file is not None:
        file.write_text(json.dumps(results, indent=1) + "\n")


def say(text: str) -> None:
    """A line of progress, so that a run that is cut short still shows what it found."""
    print(text, flush=True)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = {"models": tuple(CASES), "sections": SECTIONS}
    for name, known in names.items():
        parser.add_argument(f"--{name}", default=",".join(known), help=f"any of {', '.join(known)}")
    parser.add_argument("--batches", default="1,16,64,256")
    parser.add_argument("--size", default="base", choices=("base", "small", "compact"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=1.0, help="time per measurement (3 to 50 calls)")
    parser.add_argument("--eager", action="store_true", help="also without recorded kernels")
    parser.add_argument("--json", type=Path, help="file for the numbers")
    parser.add_argument("--markdown", type=Path, help="file for the tables")
    args = parser.parse_args(arguments)
    args.batches = [int(batch) for batch in args.batches.split(",")]
    for name, known in names.items():
        chosen = getattr(args, name).split(",")
        if unknown := [item for item in chosen if item not in known]:
            parser.error(f"--{name} {unknown[0]}: known are {', '.join(known)}")
        setattr(args, name, chosen)
    return args


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    warnings.filterwarnings("ignore", message=".*starts from random weights")
    start = time.perf_counter()
    results = run(args)
    results["seconds"] = time.perf_counter() - start
    text = section(results, {key: CASES[key].title for key in CASES})
    print(f"\n{text}")
    keep(results, args.json)
    if args.markdown is not None:
        args.markdown.write_text(text)
    if failed := broken(results):
        raise SystemExit(f"not as promised: {'; '.join(failed)}")


if __name__ == "__main__":
    main()
