"""Seconds per call of the quickstart's compact π0 on this machine's CPU: acting, updating, imitating.

python benchmarks/compact_policy.py [--threads 1] [--repeats 20]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from rlinf.config.load import load_config
from rlinf.data.noise import Noise
from rlinf.data.types import ChunkIndex, Observation
from rlinf.envs.spec import env_spec
from rlinf.models.policy import Policy, find_policy

ACT, UPDATE, IMITATE = 32, 96, 64  # rows per call, as in the quickstart


def observation(cfg, rows: int) -> Observation:
    """Random pictures and states of the shapes the simulator gives."""
    spec, generator = env_spec(cfg.env.train), torch.Generator().manual_seed(0)
    return Observation(
        images=torch.randint(0, 256, (rows, *spec.image_size, 3), dtype=torch.uint8, generator=generator),
        wrist_images=None,
        states=torch.rand(rows, spec.state_dim, generator=generator),
        task_descriptions=["Press a handle down sideways"] * rows,
        critic_state=torch.rand(rows, spec.critic_input_dim, generator=generator),
    )


def noise(rows: int) -> Noise:
    return Noise(seed=0, at=ChunkIndex(0, 0, 0), env_ids=range(rows))


def median_ms(call: Callable[[], object], repeats: int) -> float:
    """Median milliseconds of a call, after two to warm up."""
    seconds = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return 1000 * statistics.median(seconds[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    cfg = load_config("quickstart", purpose="plan", devices=[0])
    policy: Policy = find_policy(cfg.actor.model.model_type).build(cfg.actor.model, torch.device("cpu"))
    spec, parameters = policy.spec, sum(cfg.actor.model.num_parameters().values())
    print(f"compact π0, {parameters:,} parameters, torch {torch.__version__}, {args.threads} thread(s)")
    obs, replay = (
        observation(cfg, ACT),
        policy.predict(observation(cfg, UPDATE), mode="train", noise=noise(UPDATE)).replay,
    )
    frames, actions = observation(cfg, IMITATE), torch.rand(IMITATE, spec.num_action_chunks, spec.action_dim)

    def update() -> None:
        out = policy.evaluate(replay, values=True, entropy=False)
        assert out.values is not None
        (out.logprobs.mean() + out.values.mean()).backward()

    for name, rows, call in (
        ("act: predict a chunk", ACT, lambda: policy.predict(obs, mode="train", noise=noise(ACT))),
        ("update: evaluate + backward", UPDATE, update),
        (
            "imitate: sft_loss + backward",
            IMITATE,
            lambda: policy.sft_loss(frames, actions, noise=noise(IMITATE)).backward(),
        ),
    ):
        ms = median_ms(call, args.repeats)
        print(f"{name:30s} {rows:4d} rows {ms:8.1f} ms {1000 * rows / ms:9.0f} rows/s")


if __name__ == "__main__":
    main()
