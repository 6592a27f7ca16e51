"""VecEnv on the toy: episodes, flags, rewards, ids, trials, offloading, video."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlinf.data.types import EnvStep
from rlinf.envs.config import EnvConfig, VideoConfig
from rlinf.envs.spec import env_spec, eval_trials
from rlinf.envs.vec import VecEnv
from rlinf.envs.video import VideoRecorder, draw_lines, fit, tile
from rlinf.errors import UserError
from rlinf.simulators.tiles import tile_size

CHUNK = 4
Make = Callable[..., VecEnv]


@pytest.fixture
def make() -> Iterator[Make]:
    """VecEnv of toys; keywords of EnvConfig and of VecEnv may be mixed."""
    open_envs: list[VecEnv] = []

    def build(num_envs: int = 2, *, first_env: int = 0, mode: Any = "train", **settings: Any) -> VecEnv:
        own = {k: settings.pop(k) for k in ("video", "critic_state", "seed") if k in settings}
        settings = {"total_num_envs": num_envs, "max_episode_steps": 12, "num_processes": 1} | settings
        cfg = EnvConfig(env_type="toy", **settings)
        spec = env_spec(cfg)
        trials = eval_trials(cfg, spec) if mode == "eval" else None
        own = {"seed": 0, "critic_state": True} | own
        env = VecEnv(
            cfg,
            spec,
            env_ids=range(first_env, first_env + num_envs),
            mode=mode,
            chunk_size=CHUNK,
            trials=trials,
            **own,
        )
        open_envs.append(env)
        return env

    yield build
    for env in open_envs:
        env.close()


def expert(step: EnvStep) -> torch.Tensor:
    """Straight to the target: agent and target are the first four columns of the critic state."""
    state = step.obs.critic_state
    assert state is not None
    agent, target = state[:, :2].clone(), state[:, 2:4]
    chunk = []
    for _ in range(CHUNK):
        chunk.append(((target - agent) / 0.2).clamp(-1, 1))
        agent += 0.2 * chunk[-1]
    return torch.stack(chunk, 1)


def idle(env: VecEnv) -> torch.Tensor:
    return torch.zeros(env.num_envs, CHUNK, 2)


def half_expert(step: EnvStep) -> torch.Tensor:
    """Row 0 acts, row 1 does nothing."""
    actions = expert(step)
    actions[1] = 0
    return actions


def play(env: VecEnv, chunks: int, policy: Callable[[EnvStep], torch.Tensor]) -> list[EnvStep]:
    steps = [env.reset()]
    for _ in range(chunks):
        steps.append(env.chunk_step(policy(steps[-1])))
    return steps[1:]


def test_an_ended_episode_waits_for_the_reset(make: Make) -> None:
    env = make()
    steps = play(env, 4, half_expert)
    records = {r.env_id: r for r in env.drain_episodes()}
    ended = [s.terminated[0].any().item() for s in steps]
    first = ended.index(True)
    at = int(steps[first].terminated[0].float().argmax())
    assert sum(int(s.terminated[0].sum()) for s in steps) == 1
    assert steps[first].valid[0].tolist() == [t <= at for t in range(CHUNK)]
    for s in steps[first + 1 :]:
        assert not s.valid[0].any()
        assert s.rewards[0].abs().sum() == 0
        assert torch.equal(s.obs.images[0], steps[first].obs.images[0])
    assert [s.truncated[1].tolist() for s in steps][2] == [False, False, False, True]  # row 1 reached 12 steps
    assert not steps[3].valid.any()
    assert (len(records), env.drain_episodes()) == (2, [])
    record, failed = records[0], records[1]
    assert record.steps == first * CHUNK + at + 1
    assert (record.success_once, record.success_at_end, record.episode_return) == (True, True, 1.0)
    assert (failed.steps, failed.success_once, failed.episode_return) == (12, False, 0.0)


@pytest.mark.parametrize(
    ("auto_reset", "ignore", "terminated", "truncated", "valid"),
    [
        # row 0 succeeds inside the first or second chunk; four chunks of 4 steps, limit 12
        (False, False, 1, 0, "until success"),
        (False, True, 0, 1, "12 steps"),
        (True, False, 2, 0, "more than one episode"),
        (True, True, 0, 1, "always"),
    ],
)
def test_flags_of_the_four_ways_to_end(
    make: Make, auto_reset: bool, ignore: bool, terminated: int, truncated: int, valid: str
) -> None:
    steps = play(make(auto_reset=auto_reset, ignore_terminations=ignore), 4, half_expert)
    row = EnvStep.cat([s[0:1] for s in steps])
    assert (
        (int(row.terminated.sum()) >= terminated)
        if auto_reset and not ignore
        else int(row.terminated.sum()) == terminated
    )
    assert int(row.truncated.sum()) == truncated
    count = int(row.valid.sum())
    assert {
        "until success": 1 <= count <= 8,
        "12 steps": count == 12,
        "more than one episode": row.terminated.sum() >= 2,
        "always": count == 16,
    }[valid]
    # flags stand where the episode ended, never moved to the chunk's end
    ends = (row.terminated | row.truncated).nonzero()
    for chunk, step in ends.tolist():
        assert row.valid[chunk, step]
        assert not row.valid[chunk, step + 1 :].any()
    finals = [s for s in steps if s.final_rows is not None]
    assert bool(finals) == auto_reset


def test_ignoring_terminations_keeps_both_success_measures(make: Make) -> None:
    def leave(step: EnvStep) -> torch.Tensor:
        """Reach the target, then walk away from it."""
        actions = expert(step)
        return actions if step.obs.critic_state[0, -1] < 0.5 else -torch.ones_like(actions)  # type: ignore[index]

    env = make(1, ignore_terminations=True, max_episode_steps=16)
    play(env, 4, leave)
    (record,) = env.drain_episodes()
    assert (record.steps, record.success_once, record.success_at_end) == (16, True, False)
    assert record.episode_return == 0.0  # relative reward: +1 when reached, -1 when left


def test_reward_is_the_level_or_its_differences(make: Make) -> None:
    def rewards(**settings: Any) -> torch.Tensor:
        env = make(1, ignore_terminations=True, reward_coef=5.0, **settings)
        return torch.cat([s.rewards[0] for s in play(env, 3, expert)])

    relative, level = rewards(), rewards(use_rel_reward=False)
    assert relative.sum() == 5.0
    assert (relative > 0).sum() == 1
    assert torch.equal(torch.cumsum(relative, 0), level)


def test_auto_reset_gives_the_last_and_the_next_observation(make: Make) -> None:
    env = make(auto_reset=True)
    step = env.reset()
    for _ in range(3):
        step = env.chunk_step(half_expert(step))
        if step.final_rows is not None and 0 in step.final_rows:
            break
    assert step.final_obs is not None
    assert step.final_rows is not None
    final = step.final_obs[0:1]
    assert final.critic_state is not None
    agent, target, elapsed = final.critic_state[0, :2], final.critic_state[0, 2:4], final.critic_state[0, 4]
    assert torch.linalg.norm(agent - target) <= 0.25
    assert elapsed == env.drain_episodes()[0].steps / 12
    assert step.obs.critic_state is not None
    assert step.obs.critic_state[0, 4] == 0
    assert not torch.equal(step.obs.images[0], final.images[0])


def test_reset_ids_do_not_depend_on_how_envs_are_spread(make: Make) -> None:
    def records(env: VecEnv) -> list[tuple[int, int]]:
        play(env, 6, lambda s: idle(env))
        return [(r.env_id, r.reset_id) for r in env.drain_episodes()]

    settings = {"total_num_envs": 4, "group_size": 2, "auto_reset": True}
    whole = records(make(4, **settings))
    halves = records(make(2, **settings)) + records(make(2, first_env=2, **settings))
    assert sorted(whole) == sorted(halves)
    by_env = {env: [i for e, i in whole if e == env] for env in range(4)}
    assert by_env[0] == by_env[1] != by_env[2] == by_env[3]
    assert len(set(by_env[0])) == 2


def test_ordered_ids(make: Make) -> None:
    env = make(2, use_ordered_reset_state_ids=True)
    ids = env.spec.reset_ids["train"]
    played = []
    for _ in range(2):
        play(env, 3, lambda s: idle(env))
        played.append([r.reset_id for r in env.drain_episodes()])
    assert played == [[ids[0], ids[1]], [ids[2], ids[3]]]


def test_evaluation_plays_every_trial_once(make: Make) -> None:
    env = make(3, mode="eval", num_trials=7, ignore_terminations=True, num_processes=2, python=sys.executable)
    step = env.reset()
    assert not env.done
    while not env.done:
        step = env.chunk_step(expert(step))
    records = env.drain_episodes()
    assert sorted(r.reset_id for r in records) == sorted(eval_trials(env.cfg, env.spec))
    assert [r.steps for r in records] == [12] * 7
    assert all(r.success_once for r in records)
    assert not env.chunk_step(idle(env)).valid.any()
    assert sorted(r.reset_id for r in records if r.env_id == 0) == sorted(eval_trials(env.cfg, env.spec)[0::3])


def test_offload_and_back_changes_nothing(make: Make) -> None:
    env, twin = make(auto_reset=True), make(auto_reset=True)
    for e in (env, twin):
        e.reset()
        e.chunk_step(idle(e) + 0.1)
    env.offload()
    assert not env._fleet.running
    env.onload()
    for _ in range(3):
        a, b = env.chunk_step(idle(env) - 0.2), twin.chunk_step(idle(env) - 0.2)
        assert torch.equal(a.obs.images, b.obs.images)
        assert torch.equal(a.truncated, b.truncated)
        assert env.drain_episodes() == twin.drain_episodes()


def test_bad_actions_are_refused(make: Make) -> None:
    env = make(2, first_env=2, total_num_envs=4)
    with pytest.raises(ValueError, match="before reset"):
        env.chunk_step(idle(env))
    env.reset()
    with pytest.raises(ValueError, match=r"shape \(2, 4, 3\), expected .* \(2, 4, 2\)"):
        env.chunk_step(torch.zeros(2, 4, 3))
    env.chunk_step(idle(env))
    actions = idle(env)
    actions[1, 2, 0] = float("nan")
    with pytest.raises(UserError, match=r"action of env 3 is not finite: nan in column 0 \(x\) at step 6"):
        env.chunk_step(actions)


def test_a_split_group_is_refused(make: Make) -> None:
    with pytest.raises(UserError, match="splits a group of group_size=2"):
        make(3, group_size=2)


def test_video_holds_every_step_of_the_first_envs(make: Make, tmp_path: Path) -> None:
    av = pytest.importorskip("av")
    video = VideoRecorder(VideoConfig(video_base_dir=str(tmp_path), max_envs=2), seed=7, control_hz=10.0)
    env = make(3, video=video)
    env.reset()
    for _ in range(3):
        env.chunk_step(idle(env))
    env.reset()  # a new rollout is a new file
    env.close()
    assert sorted(p.name for p in (tmp_path / "seed_7").iterdir()) == ["0.mp4", "1.mp4"]
    with av.open(str(tmp_path / "seed_7" / "0.mp4")) as file:
        frames = [f.to_ndarray(format="rgb24") for f in file.decode(video=0)]
        assert file.streams.video[0].average_rate == 10
    assert len(frames) == 1 + 12
    assert frames[0].shape == (128, 256, 3)  # two tiles in a row, enlarged


def test_captions_stand_on_a_band_and_are_cut_at_the_border() -> None:
    pytest.importorskip("PIL")
    plain = np.full((128, 160, 3), 90, np.uint8)
    drawn = draw_lines(plain, ["reach-red", "step 3"])
    band = int((drawn[:, -1, 0] == 30).sum())  # rows, darkened to a third
    assert 128 // 8 < band < 128 // 4
    assert np.array_equal(drawn[band:], plain[band:])
    upper, lower = np.split(drawn[: band - 1].max(-1), 2)
    assert min((upper > 200).sum(), (lower > 200).sum()) > 20  # letters in both lines
    long = draw_lines(plain, ["w" * 200])
    assert long.shape == plain.shape
    assert (long[:, -8:] > 200).any()  # the line runs up to the border
    assert np.array_equal(draw_lines(plain, []), plain)


def test_images_are_made_larger_or_smaller_by_a_whole_factor_and_tiled_with_even_sides() -> None:
    assert fit(np.zeros((48, 64, 3), np.uint8), 9).shape == (144, 192, 3)
    assert fit(np.zeros((200, 200, 3), np.uint8), 9).shape == (200, 200, 3)
    assert fit(np.zeros((480, 480, 3), np.uint8), 2).shape == (480, 480, 3)
    assert fit(np.zeros((480, 480, 3), np.uint8), 9).shape == (240, 240, 3)
    assert fit(np.zeros((480, 480, 3), np.uint8), 1024).shape == (160, 160, 3)  # no caption can be read below
    noise = np.random.default_rng(0).integers(0, 256, (481, 650, 3), np.uint8)  # three to a side of the grid
    small = fit(noise, 9)
    whole = noise[:480, :648].reshape(160, 3, 216, 3, 3).astype(float).mean((1, 3))
    assert small.shape == (160, 216, 3) == (*tile_size((481, 650), 9), 3)
    assert np.abs(small - whole).max() <= 0.5 + 1e-9
    assert fit(small, 9) is small  # a frame that its simulator made small stays as it is
    grid = tile([np.full((129, 131, 3), i, np.uint8) for i in (1, 2, 3)])
    assert grid.shape == (130, 394, 3)
    assert [int(grid[0, x, 0]) for x in (0, 131, 262, 393)] == [1, 2, 3, 0]
