"""Many put-on-plate scenes in one process, stepped together by one ManiSkill environment on the GPU.

A step moves every env, also those that wait for a reset or ended earlier in the chunk: what such a row was like is kept
aside before the others move on, so that its episode, its picture and its state stay as they were. Pictures leave the
device once per chunk. Letters: B envs, R rows of a call, C actions of a chunk. GPU physics is unverified: not yet run.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from zipfile import BadZipFile

import numpy as np

from rlinf.simulators.contract import Array, ChunkResult, Rows, SceneObservation, SetupError
from rlinf.simulators.maniskill.judge import Judgement, level
from rlinf.simulators.maniskill.observation import DISTANCES
from rlinf.simulators.maniskill.suite import Options
from rlinf.simulators.vulkan import check_driver

if TYPE_CHECKING:
    from torch import Tensor

    from rlinf.simulators.maniskill.gpu.environment import PutOnPlate


class PausedRow(NamedTuple):
    """A row as it was when it stopped playing."""

    state: dict[str, Tensor]  # [1, ...] each
    seen: dict[str, Tensor]  # [...] each; empty where nobody will look


class Batch:
    """The scenes of a process, all of one environment id; a `BatchSimulator`."""

    def __init__(self, options: Options, num_scenes: int, env: PutOnPlate | None = None) -> None:
        """`env` stands in for the environment on this process's GPU, in tests."""
        import torch  # only where there is a GPU: processes of the CPU back end have none

        self._torch, self._env = torch, env or make_env(options, num_scenes)
        self._reward_mode = options.reward_mode
        self._paused: dict[int, PausedRow] = {}
        self._playing: set[int] = set()  # rows that were given an episode

    def reset(self, rows: Rows, reset_ids: Sequence[int]) -> None:
        """Start these episodes."""
        as_tensor = self._torch.as_tensor
        options = {"env_idx": as_tensor(rows, device=self._env.device), "episode_id": as_tensor(reset_ids)}
        self._env.reset(options=options)
        self._begin(rows)

    def task(self, row: int) -> str:
        """The environment id is the task."""
        return self._env.episodes[row].env_id

    def step_chunk(
        self, rows: Rows, actions: Array, steps: Sequence[int], *, stop_on_success: bool, record: Sequence[bool]
    ) -> list[ChunkResult]:
        """Execute the first steps[r] of actions f32 [R, C, 7] in every row, fewer where success ends an episode."""
        self._resume([row for row in rows if row in self._paused])
        commands = self._torch.zeros((self._env.num_envs, *actions.shape[1:]))
        commands[list(rows)] = self._torch.from_numpy(np.ascontiguousarray(actions, np.float32))
        commands = commands.to(self._env.device)
        results = {row: ChunkResult.zeros(actions.shape[1]) for row in rows}
        limits, filmed = dict(zip(rows, steps, strict=True)), {r for r, film in zip(rows, record, strict=True) if film}
        happened = []
        live = [row for row in rows if limits[row] > 0]
        for i in range(max(steps)):
            if not live:
                break
            self._pause([row for row in self._playing - set(live) if row not in self._paused], look=i > 0)
            happened.append(self._env.advance(commands[:, i]))
            success = happened[-1]["success"].tolist() if stop_on_success else [False] * self._env.num_envs
            for row in live:
                results[row].steps = i + 1
            self._film([row for row in live if row in filmed], results)
            live = [row for row in live if i + 1 < limits[row] and not success[row]]
        self._fill(results, happened)
        return [results[row] for row in rows]

    def observe(self, rows: Rows) -> list[SceneObservation]:
        """What the rows see; those that ended within the chunk where they ended."""
        moving = [row for row in rows if row not in self._paused or not self._paused[row].seen]
        self._resume([row for row in moving if row in self._paused])
        now = self._env.look() if moving else {}
        pick = [{n: now[n][row] for n in now} if row in moving else self._paused[row].seen for row in rows]
        seen = {name: self._torch.stack([one[name] for one in pick]).cpu().numpy() for name in pick[0]}
        told = self._env.get_language_instruction()
        return [
            {
                "images": seen["images"][r],
                "wrist_images": None,
                "states": seen["states"][r],
                "task_description": told[row],
                "critic_state": seen["critic_state"][r],
            }
            for r, row in enumerate(rows)
        ]

    def get_state(self, rows: Rows) -> list[bytes]:
        """The rows' episodes, to continue as exactly as ManiSkill restores them."""
        moving = [row for row in rows if row not in self._paused]
        now = self._env.snapshot(moving) if moving else {}
        states = {row: {name: value[r : r + 1] for name, value in now.items()} for r, row in enumerate(moving)}
        return [_to_bytes(self._paused[row].state if row in self._paused else states[row]) for row in rows]

    def set_state(self, rows: Rows, states: Sequence[bytes]) -> None:
        """Continue saved episodes."""
        self._restore(rows, [self._from_bytes(state) for state in states])
        self._begin(rows)

    def close(self) -> None:
        """Free the environment."""
        self._env.close()

    def _begin(self, rows: Rows) -> None:
        """Note that these rows play an episode from here on."""
        self._playing |= set(rows)
        for row in rows:
            self._paused.pop(row, None)

    def _pause(self, rows: Rows, *, look: bool) -> None:
        """Remember rows that take no part in the next step; `look` where what they see is still to be asked."""
        if not rows:
            return
        state, seen = self._env.snapshot(rows), self._env.look() if look else {}
        for r, row in enumerate(rows):
            mine = {name: value[r : r + 1].clone() for name, value in state.items()}
            self._paused[row] = PausedRow(mine, {name: value[row].clone() for name, value in seen.items()})

    def _resume(self, rows: Rows) -> None:
        """Put rows back to where they stopped."""
        if rows:
            self._restore(rows, [self._paused.pop(row).state for row in rows])

    def _restore(self, rows: Rows, states: Sequence[dict[str, Tensor]]) -> None:
        self._env.restore(rows, {name: self._torch.cat([state[name] for state in states]) for name in states[0]})

    def _film(self, rows: Rows, results: Mapping[int, ChunkResult]) -> None:
        """Add what these rows see to their frames."""
        if rows:
            frames = self._env.look()["images"][list(rows)].cpu().numpy()
            for row, frame in zip(rows, frames, strict=True):
                results[row].frames.append(frame)

    def _fill(self, results: Mapping[int, ChunkResult], happened: Sequence[Mapping[str, Tensor]]) -> None:
        """Fill in what happened at each step, read from the device once."""
        stack = self._torch.stack
        flags = stack([stack([one[name] for name in Judgement._fields]) for one in happened]).cpu().numpy()
        distances = stack([stack([one[name] for name in DISTANCES]) for one in happened]).cpu().numpy()  # [steps, 3, B]
        for row, result in results.items():
            for i in range(result.steps):
                judged = Judgement(*flags[i, :, row].tolist())
                result.success[i], result.rewards[i] = judged.success, level(self._reward_mode, judged)
                result.info = {name: float(flag) for name, flag in judged._asdict().items() if name != "success"}
                result.info |= dict(zip(DISTANCES, distances[i, :, row].tolist(), strict=True))

    def _from_bytes(self, state: bytes) -> dict[str, Tensor]:
        """The tensors of one row that `_to_bytes` wrote."""
        with np.load(io.BytesIO(state), allow_pickle=False) as saved:
            return {name: self._torch.from_numpy(saved[name]) for name in saved.files}


def make_env(options: Options, num_envs: int) -> PutOnPlate:
    """Make the ManiSkill environment on the GPU; a SetupError says what this machine lacks."""
    import torch

    if not torch.cuda.is_available():
        raise SetupError("sim_backend: gpu needs an NVIDIA GPU and a torch that sees it; sim_backend: cpu does not")
    if sys.version_info >= (3, 13) and find_spec("mani_skill") is None:
        raise SetupError("sim_backend: gpu needs ManiSkill's package, which ends at Python 3.12; use sim_backend: cpu")
    check_driver()
    enable_gpu_physics()
    from rlinf.simulators.maniskill.gpu.environment import PutOnPlate

    return PutOnPlate(
        num_envs=num_envs,
        task=options.id,
        obj_set=options.obj_set,
        control_mode=options.control_mode,
        image_size=options.size,
        obs_mode="none",  # pictures are taken when they are asked for
        sim_config=dict(options.sim_config),
        sensor_configs={"shader_pack": options.shader},
        sim_backend="gpu",
        render_backend="gpu",
    )


def enable_gpu_physics() -> None:
    """Load PhysX's GPU library, which SAPIEN downloads when it is not there."""
    from sapien import physx

    folder = Path.home() / ".sapien" / "physx" / physx.version()
    try:
        physx.enable_gpu()
    except (OSError, RuntimeError, BadZipFile) as error:
        raise SetupError(
            f"sim_backend: gpu needs {folder}/libPhysXGpu_64.so, from physx-precompiled of github.com/sapien-sim, and "
            f"it cannot be loaded ({error}); sim_backend: cpu does not need it"
        ) from None


def _to_bytes(state: Mapping[str, Tensor]) -> bytes:
    """The tensors of one row as an .npz file."""
    buffer = io.BytesIO()
    arrays: dict[str, Any] = {name: value.cpu().numpy() for name, value in state.items()}
    np.savez(buffer, **arrays)
    return buffer.getvalue()
