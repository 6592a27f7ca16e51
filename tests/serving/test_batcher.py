"""Batches of several clients: actions of `predict` at the same batch, noise of the connection alone, sizes."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import numpy as np
import pytest
import torch

pytest.importorskip("websockets")

from rlinf.data.noise import Noise, generator
from rlinf.data.types import ChunkIndex
from rlinf.serving import batcher as module
from rlinf.serving.batcher import Batcher, batch_sizes, rows_to_take
from rlinf.serving.messages import pack
from rlinf.serving.policy import Episode, LoadedPolicy
from tests.serving.conftest import make_pi0
from tests.serving.loopback import MeanPixel, observation


def test_sizes_that_are_recorded():
    assert batch_sizes(64) == [1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64]
    assert (batch_sizes(1), batch_sizes(10), batch_sizes(16)) == ([1], [1, 2, 4, 8, 10], [1, 2, 4, 8, 12, 16])
    taken = {n: rows_to_take(n, batch_sizes(64)) for n in (1, 3, 5, 6, 9, 10, 20, 22, 35, 62, 63, 64, 100)}
    assert taken == {1: 1, 3: 3, 5: 4, 6: 6, 9: 8, 10: 10, 20: 16, 22: 22, 35: 32, 62: 62, 63: 63, 64: 64, 100: 64}
    assert rows_to_take(5, range(1, 65)) == 5  # a CPU computes any size


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_batch_of_clients_gets_what_predict_gives(device: str, pi0: LoadedPolicy, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "ACTIVE_SECONDS", 60.0)
    policy = pi0 if device == "cpu" else make_pi0(device)
    rng, clients = np.random.default_rng(0), 6
    images = rng.integers(0, 256, (clients, 2, 64, 64, 3), dtype=np.uint8)
    states = rng.random((clients, 4), dtype=np.float32)
    texts = ["press the button", "open the door of the oven", "go", "press the button", "push", "go"]
    batches: list = []
    act_in = policy.act_in

    def watched(obs, episodes):
        batches.append((obs, [(episode.seed, episode.calls) for episode in episodes]))
        return act_in(obs, episodes)

    monkeypatch.setattr(policy, "act_in", watched)
    found = Batcher(policy, max_batch=8, window=60.0)
    sessions = [found.open_session() for _ in range(clients)]
    sessions[2].episode = Episode(seed=11, calls=4)
    try:
        for call in range(2):
            answers: list[Future] = []
            for i, session in enumerate(sessions):
                message = {"image": images[i, 0], "wrist_image": images[i, 1], "state": states[i], "prompt": texts[i]}
                answers.append(found.submit(session, pack(message)))
            actions = [answer.result(60).actions for answer in answers]
            obs, keys = batches[call]
            assert len(batches) == call + 1  # one policy call for all
            assert len(obs) == (clients if device == "cpu" else 8)
            assert sorted(keys) == [(3, call)] * 5 + [(11, 4 + call)]
            keys += keys[:1] * (len(obs) - len(keys))
            noise = Noise.of_rows([generator(seed, "eval", 0, 0, n, 0) for seed, n in keys], device)
            wanted = policy.policy.predict(obs, mode="eval", noise=noise).actions.cpu().numpy()
            seen = obs.images.cpu().numpy()
            for i, chunk in enumerate(actions):
                row = next(r for r in range(clients) if np.array_equal(seen[r], images[i, 0]))
                assert obs.task_descriptions[row] == texts[i]
                assert np.array_equal(obs.wrist_images[row, 0].cpu().numpy(), images[i, 1])
                assert np.array_equal(obs.states[row].cpu().numpy(), states[i])
                assert np.array_equal(chunk, wanted[row])
    finally:
        found.close()


def test_episodes_of_a_batch_are_those_of_clients_alone(pi0: LoadedPolicy):
    images = np.random.default_rng(1).integers(0, 256, (2, 64, 64, 3), dtype=np.uint8)
    wrist, states = images[:, None], np.zeros((2, 4), np.float32)
    episodes = [Episode(seed=3), Episode(seed=8, calls=2)]
    together = pi0.act(images, instruction="go", state=states, wrist_images=wrist, episodes=episodes)
    assert [episode.calls for episode in episodes] == [1, 3]
    pi0.reset()
    alone = pi0.act(images[0], instruction="go", state=states[0], wrist_images=wrist[0])
    assert np.abs(together[0] - alone).max() < 1e-4  # equal but for what a batch does to floats
    again = pi0.act(
        images[::-1], instruction="go", state=states, wrist_images=wrist[::-1], episodes=[Episode(8, 2), Episode(3)]
    )
    assert np.abs(again[::-1] - together).max() < 1e-4
    with pytest.raises(ValueError, match="1 episodes for 2 images"):
        pi0.act(images, instruction="go", state=states, wrist_images=wrist, episodes=[Episode()])


def test_rows_of_other_noise_keys_as_before():
    keyed = Noise(seed=5, at=ChunkIndex(0, 0, 7), env_ids=[0, 1], stream="eval").normal((3,))
    rows = Noise.of_rows([generator(5, "eval", 0, env, 7, 0) for env in (0, 1)]).normal((3,))
    assert torch.equal(keyed, rows)


@pytest.mark.parametrize("behind", [False, True])  # whether the device computes while answers are given
def test_the_next_batch_is_gathered_while_one_computes_and_shapes_do_not_mix(behind: bool):
    policy = MeanPixel()
    policy.gate.clear()
    found = Batcher(LoadedPolicy(policy), window=0.0)
    found._computes_behind = behind
    sessions = [found.open_session() for _ in range(4)]
    try:
        answers = [found.submit(sessions[0], pack(observation(0)))]
        assert policy.entered.wait(30)
        answers += [found.submit(session, pack(observation(i))) for i, session in enumerate(sessions[1:3], 1)]
        image = np.zeros((4, 6, 3), np.uint8)
        answers.append(found.submit(sessions[3], pack(observation(3, **{"observation/image": image}))))
        policy.gate.set()
        assert [answer.result(30).batch for answer in answers] in ([1, 2, 2, 1], [1, 1, 1, 1])
        assert sum(len(obs) for obs in policy.calls) == 4
        assert {tuple(obs.images.shape[1:]) for obs in policy.calls} == {(8, 8, 3), (4, 6, 3)}
    finally:
        found.close()


def test_pads_repeat_the_first_row_and_give_no_actions(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "ACTIVE_SECONDS", 60.0)
    policy = MeanPixel()
    found = Batcher(LoadedPolicy(policy), max_batch=8, window=60.0)
    monkeypatch.setattr(found, "_sizes", batch_sizes(8))
    sessions = [found.open_session() for _ in range(3)]
    try:
        answers = [found.submit(session, pack(observation(i))) for i, session in enumerate(sessions)]
        actions = [answer.result(30).actions for answer in answers]
        (obs,) = policy.calls
        assert len(obs) == 4
        assert torch.equal(obs.images[3], obs.images[0])
        assert [session.episode.calls for session in sessions] == [1, 1, 1]
        for i, chunk in enumerate(actions):
            message = observation(i)
            alone = LoadedPolicy(policy).act(
                message["observation/image"], instruction="go", state=message["observation/state"]
            )
            assert np.array_equal(chunk, alone)
    finally:
        found.close()


@pytest.mark.parametrize("behind", [False, True])
def test_a_batch_that_fails_takes_no_other_with_it(behind: bool):
    policy = MeanPixel()
    policy.gate.clear()
    found = Batcher(LoadedPolicy(policy), window=0.0)
    found._computes_behind = behind
    sessions = [found.open_session() for _ in range(2)]
    try:
        first = found.submit(sessions[0], pack(observation(0)))
        assert policy.entered.wait(30)
        second = found.submit(sessions[1], pack(observation(1)))
        policy.faults.append(RuntimeError("once"))
        policy.gate.set()
        with pytest.raises(RuntimeError, match="the policy failed: RuntimeError: once"):
            first.result(30)
        assert second.result(30).actions.shape == (3, 2)
        assert [session.episode.calls for session in sessions] == [0, 1]
        assert found.counts.failure is None
    finally:
        found.close()


@pytest.mark.parametrize("behind", [False, True])
def test_closing_answers_what_was_asked(behind: bool):
    policy = MeanPixel()
    policy.gate.clear()
    found = Batcher(LoadedPolicy(policy), window=60.0)
    found._computes_behind = behind
    sessions = [found.open_session() for _ in range(3)]  # the third never asks
    answers = [found.submit(session, pack(observation())) for session in sessions[:2]]
    threading.Timer(0.05, policy.gate.set).start()
    found.close()
    assert all(answer.result(0).actions.shape == (3, 2) for answer in answers)
    with pytest.raises(ValueError, match="the server is stopping"):
        found.submit(sessions[0], pack(observation())).result(0)
