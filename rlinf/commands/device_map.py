"""The device map of a plan: who lives where, who shares parameters, what travels between processes and how much."""

from __future__ import annotations

from collections.abc import Iterator

from rlinf.commands.units import bytes_text, count_text, plural, ranks_text
from rlinf.config.check import policy_spec
from rlinf.config.derived import chunks_per_rollout, rollout_size
from rlinf.config.schema import Config
from rlinf.data.layout import Piece
from rlinf.envs.config import EnvConfig
from rlinf.envs.routing import num_processes
from rlinf.envs.spec import env_spec
from rlinf.models.config import PolicySpec
from rlinf.placement.plan import Mode, Plan

Row = tuple[str, str]
AWAY = {"env": "update", "rollout": "update", "actor": "rollout"}  # component -> the phase it offloads for


def device_rows(cfg: Config, plan: Plan) -> Iterator[Row]:
    """One row per accelerator or CPU node with the processes on it and their workers; `|` parts processes."""
    users: dict[tuple[int, int], list[str]] = {}
    for index, process in enumerate(plan.processes):
        text = f"p{index}: " + " ".join(f"{worker.role}[{worker.rank}]" for worker in process.workers)
        for device in process.slot.devices or (-1,):
            users.setdefault((process.slot.node, device), []).append(text)
    kind = "virtual gpu" if cfg.cluster.virtual_devices else "gpu"
    for (node, device), processes in sorted(users.items()):
        yield (f"node {node} " + ("cpu" if device < 0 else f"{kind} {device}"), " | ".join(processes))
    env, mode = _env(cfg)
    shares = {len(plan.env_ids("env", rank, s, mode)) for rank in range(len(plan.env)) for s in range(plan.stages)}
    envs = max(shares)
    count = num_processes(env, env_spec(env), envs)
    uneven = f"{min(shares)} to " if len(shares) > 1 else ""
    yield ("simulators", f"{plural(count, 'process')} per env rank and stage, for its {uneven}{plural(envs, 'env')}")
    yield ("parameters", _parameters(cfg, plan))
    if plan.offload:
        yield ("offload", ", ".join(f"{name} during the {AWAY[name]}" for name in sorted(plan.offload)))


def traffic_rows(cfg: Config, plan: Plan) -> Iterator[Row]:
    """What passes between processes in a training step; inside of one nothing is copied."""
    if plan.one_process:
        yield ("messages", "none: all workers are threads of one process")
        return
    messages = [(name, text) for name, text in _messages(cfg, plan) if text]
    yield from messages or [("messages", "none: workers that talk to each other share a process")]
    if cfg.runner.only_eval:
        return
    size = cfg.actor.model.num_trainable_parameters()
    if plan.rollout_copies:
        every = plural(cfg.runner.weight_sync_interval, "step").removeprefix("1 ")
        copies = ranks_text("rollout", plan.rollout_copies)
        sent = bytes_text(size * parameter_bytes(cfg))
        yield ("weight sync", f"actor[0] -> {copies}: {sent} to each, every {every}")
    else:
        yield ("weight sync", "none: rollout and actor share a process and its parameters")
    if len(plan.actor) > 1:
        actors = ranks_text("actor", range(len(plan.actor)))
        yield ("gradients", f"of {count_text(size)} parameters, summed over {actors} at every optimiser step")


def parameter_bytes(cfg: Config) -> int:
    """Bytes of a parameter on its device."""
    model = cfg.actor.model
    half = model.precision in ("bf16", "bf16-mixed") or (model.precision is None and model.size == "base")
    return 2 if half else 4


def actor_shards(cfg: Config, plan: Plan) -> int:
    """Into how many parts the actor's state is cut."""
    return len(plan.actor) if cfg.actor.fsdp_config.shards else 1


def observation_bytes(cfg: Config) -> int:
    """One env's observation on its way to the policy: native images, state, what only the critic sees."""
    spec = env_spec(_env(cfg)[0])
    (height, width), (wrist_height, wrist_width) = spec.image_size, spec.wrist_image_size
    pixels = height * width + spec.num_wrist_images * wrist_height * wrist_width
    critic = spec.critic_input_dim if policy_spec(cfg).critic_state_dim else 0
    return 3 * pixels + 4 * (spec.state_dim + critic)


def sample_bytes(spec: PolicySpec) -> int:
    """One sample in the arena: uint8 images at the model's size, actions, log-probs, state, rewards, flags, values."""
    images = spec.num_images * spec.image_size**2 * 3
    numbers = 2 * spec.num_action_chunks * spec.action_dim + spec.state_dim + spec.num_action_chunks
    return images + 4 * (numbers + 2 * spec.values_per_chunk) + 3 * spec.num_action_chunks


def _env(cfg: Config) -> tuple[EnvConfig, Mode]:
    """The envs that the run plays first, and their mode."""
    return (cfg.env.eval, "eval") if cfg.runner.only_eval else (cfg.env.train, "train")


def _parameters(cfg: Config, plan: Plan) -> str:
    """Who holds which weights."""
    ranks, copies = len(plan.actor), plan.rollout_copies
    sharing = [rank for rank in range(len(plan.rollout)) if rank not in copies]
    parts = []
    if sharing:
        parts.append(f"{ranks_text('rollout', sharing)} and the actor of the process share theirs")
    if copies:
        parts.append(f"{ranks_text('rollout', copies)} {'has a copy' if len(copies) == 1 else 'have copies'}")
    if ranks > 1:
        kind = "replicas" if actor_shards(cfg, plan) == 1 else "shards while they learn"
        parts.append(f"{ranks_text('actor', range(ranks))} hold {kind}")
    return "; ".join(parts)


def _messages(cfg: Config, plan: Plan) -> Iterator[tuple[str, str]]:
    """Name and text of the batches that workers hand on; no text where all rows stay in their process."""
    spec, (env, mode) = policy_spec(cfg), _env(cfg)
    chunks, rounds = chunks_per_rollout(cfg, mode), env.rollout_epoch * plan.stages
    seen = chunks if cfg.runner.only_eval else chunks + 1  # the last one is valued
    acted = 4 * spec.num_action_chunks * spec.action_dim
    there, back = plan.routes("env", "rollout", mode), plan.routes("rollout", "env", mode)
    yield ("observations", _message(plan, "env", "rollout", there, observation_bytes(cfg), seen * rounds))
    yield ("actions", _message(plan, "rollout", "env", back, acted, chunks * rounds))
    if not cfg.runner.only_eval:
        lived = rollout_size(cfg) // cfg.env.train.total_num_envs * sample_bytes(spec)
        yield ("experience", _message(plan, "rollout", "actor", plan.experience_routes, lived, 1))


def _message(plan: Plan, source: str, target: str, routes: list[list[Piece]], row_bytes: int, times: int) -> str:
    """How much of a batch, a row per env, changes its process."""
    rows = moved = 0
    for rank, route in enumerate(routes):
        for sender, first, end in route:
            rows += end - first
            if plan.process_of(source, sender) != plan.process_of(target, rank):
                moved += end - first
    if not moved:
        return ""
    text = f"{source} -> {target}: {bytes_text(moved * row_bytes * times)} per step"
    if times > 1:
        text += f" = {times} x {bytes_text(moved * row_bytes)} per chunk and stage"
    return text + (f"; {1 - moved / rows:.0%} stays in its process" if moved < rows else "")
