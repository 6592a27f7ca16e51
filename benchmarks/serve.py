"""A served policy beside the policy alone: latency and requests/s of 1, 8 and 64 clients over loopback.

    python benchmarks/serve.py [--size base] [--device cuda] [--clients 1,8,64] [--seconds 6] [--json FILE]

π0 with random weights and 224 px uint8 images. `predict` is measured at batch 1 and at the largest number of clients
before and after the server, in the same process; clients are processes of their own. The command fails where a promise
is broken: at most 4 ms above `predict` for one client, at least 90 % of `predict`'s rate at 64. On a CPU,
`--size compact --device cpu` only shows that it runs.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

PIXELS = 224
PROCESSES = 8  # of clients, at most
READY_SECONDS = 60.0  # until every client has had its first answer
LEAD_SECONDS = 1.5  # of asking that does not count
MOST_OVERHEAD_MS, LEAST_SHARE = 4.0, 0.9  # promises
Results = dict[str, Any]


def check_imports() -> None:
    """Say at once what is not installed."""
    needed = ("torch", "numpy", "websockets", "msgpack", "sentencepiece", "safetensors")
    if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
        raise SystemExit(f"not installed: {', '.join(missing)}; pip install -e '.[serve]' brings what serving needs")


def measure_predict(subject: Any, rows: int, seconds: float) -> list[float]:
    """Seconds of each call of the policy alone: images on the host in, actions on the host out."""
    obs, taken = subject.observe(rows), []
    for _ in range(2):
        subject.act(obs, "eval").actions.cpu()  # compiles and records
    end = time.perf_counter() + seconds
    while len(taken) < 5 or time.perf_counter() < end:
        start = time.perf_counter()
        subject.act(obs, "eval", len(taken)).actions.cpu()
        taken.append(time.perf_counter() - start)
    return taken


def measure_clients(subject: Any, port: int, clients: int, seconds: float) -> Results:
    """What `clients` see over `seconds`, all of them asking all the time."""
    spec = subject.policy.spec
    order = {
        "port": port,
        "pixels": PIXELS,
        "cameras": ["image", "wrist_image", "wrist_image_right"][: spec.num_images],
        "state_dim": spec.state_dim,
        "prompt": subject.text,
        "actions": [spec.num_action_chunks, spec.action_dim],
    }
    count = min(clients, PROCESSES)
    script = [sys.executable, str(Path(__file__).with_name("serve_clients.py"))]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment}
    processes = [subprocess.Popen(script, **pipes) for _ in range(count)]
    watchdog = threading.Timer(READY_SECONDS + seconds, lambda: [process.kill() for process in processes])
    watchdog.daemon = True
    watchdog.start()
    try:
        for i, process in enumerate(processes):
            tell(process, order | {"numbers": list(range(i, clients, count))})
        lines = [process.stdout.readline() for process in processes]
        begin = time.time() + LEAD_SECONDS
        if lines == ["ready\n"] * count:
            for process in processes:
                tell(process, [begin, begin + seconds])
            lines = [process.stdout.readline() for process in processes]
        if not all(lines) or any(process.wait() for process in processes):
            raise SystemExit(f"{clients} clients: a client process failed, or took more than {READY_SECONDS:.0f} s")
    finally:
        watchdog.cancel()
        for process in processes:
            process.kill()
    answers = [answer for line in lines for answer in json.loads(line)]
    if not answers:
        raise SystemExit(f"{clients} clients: no answer within {seconds:g} s; choose more --seconds")
    latencies = sorted(1000 * answer[1] for answer in answers)
    rows: Results = {"clients": clients, "requests": len(answers), "per_second": len(answers) / seconds}
    rows |= {f"p{p}_ms": latencies[min(len(latencies) - 1, len(latencies) * p // 100)] for p in (50, 99)}
    return rows | {
        "infer_ms": statistics.median(answer[2] for answer in answers),
        "batch": statistics.fmean(answer[3] for answer in answers),
    }


def tell(process: subprocess.Popen[str], order: Any) -> None:
    """Send a client process a line."""
    assert process.stdin is not None
    process.stdin.write(json.dumps(order) + "\n")
    process.stdin.flush()


def count_unequal(subject: Any, batcher: Any) -> tuple[int, int]:
    """Of 24 requests at once: how many got other actions than `predict` gives for the same batch, and policy calls."""
    import torch

    from rlinf.data.noise import Noise, generator
    from rlinf.data.types import Observation
    from rlinf.serving.messages import pack

    policy, clients, obs = batcher.policy, 24, subject.observe(24)
    batches: list[tuple[int, list[Any]]] = []
    act_in = policy.act_in

    def watched(given: Any, episodes: list[Any]) -> Any:
        batches.append((len(given), list(episodes)))
        return act_in(given, episodes)

    policy.act_in = watched
    sessions = [batcher.open_session() for _ in range(clients)]
    messages = []
    for i in range(clients):
        message = {"image": obs.images[i].numpy(), "prompt": subject.text}
        if obs.wrist_images is not None:
            message["wrist_images"] = obs.wrist_images[i].numpy()
        if obs.states is not None:
            message["state"] = obs.states[i].numpy()
        messages.append(pack(message))
    answers = [batcher.submit(session, message) for session, message in zip(sessions, messages, strict=True)]
    found = [answer.result(60).actions for answer in answers]
    policy.act_in = act_in
    unequal = 0
    for size, episodes in batches:
        rows = [next(i for i, session in enumerate(sessions) if session.episode is episode) for episode in episodes]
        padded = rows + rows[:1] * (size - len(rows))
        same: Observation = obs[padded]
        noise = Noise.of_rows([generator(0, "eval", 0, 0, 0, 0) for _ in padded], subject.device)
        with torch.no_grad():
            wanted = subject.policy.predict(same, mode="eval", noise=noise).actions.float().cpu().numpy()
        unequal += sum(not (found[row] == wanted[place]).all() for place, row in enumerate(rows))
    for session in sessions:
        batcher.close_session(session)
    return unequal, len(batches)


def serve_and_measure(subject: Any, args: argparse.Namespace) -> Results:
    """Start the server in a thread of this process, compare its actions, measure every number of clients, stop it."""
    from rlinf.serving.batcher import Batcher
    from rlinf.serving.metadata import describe
    from rlinf.serving.policy import LoadedPolicy
    from rlinf.serving.server import PolicyServer, Settings, bind

    loaded, most = LoadedPolicy(subject.policy), max(args.clients)
    batcher = Batcher(loaded, max_batch=most, window=args.window_ms / 1000)
    server = PolicyServer(batcher, Settings(), describe(loaded, most))
    at, started = bind("127.0.0.1", 0), threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(server.run(at, started.set)), daemon=True)
    try:
        start = time.perf_counter()
        batcher.warm_up(subject.text, None if subject.device.type == "cuda" else [1])
        say(f"batch sizes recorded in {time.perf_counter() - start:.1f} s")
        unequal, calls = count_unequal(subject, batcher)
        say(f"24 requests in {calls} policy calls: {unequal} with other actions than predict's at the same batch")
        thread.start()
        if not started.wait(30):
            raise SystemExit("the server did not start within 30 s")
        found = []
        for clients in args.clients:
            found.append(measure_clients(subject, at.getsockname()[1], clients, args.seconds))
            say(", ".join(f"{key} {value:.4g}" for key, value in found[-1].items()))
        return {"served": found, "unequal": unequal}
    finally:
        server.stop()
        if thread.is_alive():
            thread.join(30)
        batcher.close()


def run(args: argparse.Namespace) -> Results:
    """Everything, in one process."""
    import torch
    from model_cases import Subject

    device = torch.device(args.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    start = time.perf_counter()
    subject = Subject.build(args.model, args.size, device, gradient_checkpointing=False)
    say(f"{name}, torch {torch.__version__}, {args.model} {args.size}: built in {time.perf_counter() - start:.1f} s")
    batches, taken = sorted({1, max(args.clients)}), {}
    for batch in batches:
        taken[batch] = measure_predict(subject, batch, args.seconds / 4)
        say(f"predict, batch {batch}: {1000 * statistics.median(taken[batch]):.2f} ms")
    served = serve_and_measure(subject, args)
    for batch in batches:  # the device may have become slower or faster
        after = measure_predict(subject, batch, args.seconds / 4)
        say(f"predict again, batch {batch}: {1000 * statistics.median(after):.2f} ms")
        taken[batch] += after
    predict = [
        {"batch": b, "ms": 1000 * statistics.median(t), "per_second": b / statistics.median(t)}
        for b, t in taken.items()
    ]
    return (
        {"device": name, "torch": torch.__version__, "model": args.model, "size": args.size}
        | {
            "predict": predict,
            "seconds": time.perf_counter() - start,
        }
        | served
    )


def promises(results: Results) -> list[tuple[str, str, bool]]:
    """Promise, what was found, and whether it was kept, of what was measured."""
    alone = {row["batch"]: row for row in results["predict"]}
    unequal = results["unequal"]
    checks = [("actions equal predict's at the same batch", f"{unequal} of 24 differ", unequal == 0)]
    for row in results["served"]:
        if row["clients"] == 1:
            overhead = row["p50_ms"] - alone[1]["ms"]
            text = f"one client: at most {MOST_OVERHEAD_MS:g} ms above predict"
            checks.append((text, f"{overhead:.2f} ms", overhead <= MOST_OVERHEAD_MS))
        elif row["clients"] in alone:
            share = row["per_second"] / alone[row["clients"]]["per_second"]
            text = f"{row['clients']} clients: at least {LEAST_SHARE:.0%} of predict's rate"
            checks.append((text, f"{share:.1%}", share >= LEAST_SHARE))
    return checks


def section(results: Results) -> str:
    """The tables, as docs/benchmarks.md shows them."""
    lines = ["| what | batch | ms a call | rows/s |", "| --- | --- | --- | --- |"]
    lines += [f"| predict alone | {r['batch']} | {r['ms']:.2f} | {r['per_second']:.1f} |" for r in results["predict"]]
    lines += ["", "| clients | p50 ms | p99 ms | requests/s | policy call ms | mean batch |"]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    for r in results["served"]:
        numbers = (
            f"{r['p50_ms']:.2f} | {r['p99_ms']:.2f} | {r['per_second']:.1f} | {r['infer_ms']:.2f} | {r['batch']:.1f}"
        )
        lines.append(f"| {r['clients']} | {numbers} |")
    lines += ["", "| promise | found |  |", "| --- | --- | --- |"]
    lines += [f"| {text} | {found} | {'PASS' if kept else 'FAIL'} |" for text, found, kept in promises(results)]
    return "\n".join(lines)


def say(text: str) -> None:
    """A line of progress, so that a run that is cut short still shows what it found."""
    print(text, flush=True)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pi0", choices=("pi0", "pi0_3cam", "pi05"))
    parser.add_argument("--size", default="base", choices=("base", "small", "compact"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--clients", default="1,8,64")
    parser.add_argument("--seconds", type=float, default=6.0, help="time per number of clients")
    parser.add_argument("--window-ms", type=float, default=2.0)
    parser.add_argument("--json", type=Path, help="file for the numbers")
    args = parser.parse_args(arguments)
    args.clients = [int(clients) for clients in args.clients.split(",")]
    if min(args.clients) < 1 or args.seconds <= 0:
        parser.error("--clients and --seconds must be positive")
    return args


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    check_imports()
    warnings.filterwarnings("ignore", message=".*starts from random weights")
    results = run(args)
    print(f"\n{section(results)}\n\nin {results['seconds']:.0f} s")
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    judged = args.size == "base" and args.device != "cpu"
    if judged and (broken := [text for text, _, kept in promises(results) if not kept]):
        raise SystemExit(f"not as promised: {'; '.join(broken)}")


if __name__ == "__main__":
    main()
