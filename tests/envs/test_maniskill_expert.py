"""The scripted expert of put-on-plate: objects that are hard to take, noise, moved objects; nothing is drawn."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from rlinf.simulators.maniskill import Expert, Options
from rlinf.simulators.maniskill.assets import find_assets
from rlinf.simulators.maniskill.expert import MAX_MOVE, MAX_TURN, euler, matrix, rotation, rotation_vector
from rlinf.simulators.maniskill.grasps import BAR, TABLE_Z, TIP, find_grasp, surface
from rlinf.simulators.maniskill.judge import level
from rlinf.simulators.maniskill.tasks import ENV_IDS, PREFIX, VARIANTS, episode, variant

STEPS = 80
NOTHING = np.zeros((0, 3))


@dataclass
class Played:
    """A world nobody draws, and what the expert did in it."""

    world: object
    actions: np.ndarray
    levels: list[float]

    @property
    def object_name(self) -> str:
        return self.world.assets.objects[self.world.episode.object.index].name


@pytest.fixture(scope="module")
def assets(maniskill_path: Path):
    return find_assets([(env_id, obj_set) for env_id in ENV_IDS for obj_set in VARIANTS[env_id]])


@pytest.fixture
def play(assets):
    """Plays an episode up to success, or for `more` steps after it."""
    from rlinf.simulators.maniskill.cpu.world import World

    def run(name: str, obj_set: str, episode_id: int, *, noise: float = 0.0, more: int = 0) -> Played:
        played, expert, rng = Played(World(assets), np.zeros((0, 7)), []), Expert(Options()), np.random.default_rng(0)
        world = played.world
        world.reset(episode(PREFIX + name, obj_set, episode_id))
        left = more
        while world.steps < STEPS and (left or not world.judge.judgement.success):
            left -= bool(world.judge.judgement.success)
            action = expert.act(played)
            played.actions = np.concatenate([played.actions, action[None]])
            played.levels.append(level("default", world.step(action + noise * rng.standard_normal(7))))
        return played

    return run


def of_object(assets, name: str, number: int) -> int:
    """A training id of Main-v3 with the object of this name."""
    index = [model.name for model in assets.objects].index(name)
    ids_of_one = variant(PREFIX + "Main-v3", "train").total // 16
    return index * ids_of_one + np.random.default_rng(number).integers(ids_of_one).item()


@pytest.mark.parametrize("name", ["BBQ sauce", "ketchup bottle", "kitchen shovel", "fast food cup"])
def test_objects_that_a_plain_recipe_misses(assets, play, name: str) -> None:
    for number in range(2):
        played = play("Main-v3", "train", of_object(assets, name, number))
        assert played.object_name == name
        assert played.world.judge.judgement.success
        assert len(played.actions) < 45
        returned = sum(np.diff([0.0, *played.levels]))
        assert played.levels[-1] == 1.2
        assert returned == pytest.approx(1.2, abs=1e-12)


@pytest.mark.parametrize(
    ("name", "obj_set", "episode_id"),
    [
        ("Main-v3", "train", 407236),  # a pipe beside the plate: no room for a finger there
        ("Main-v3", "train", 558628),  # a plant that topples
        ("MultiCarrot-v1", "train", 11750385),  # a zucchini that sticks out over the plate
        ("Carrot-v1", "test", 204308),
        ("Plate-v1", "test", 5876721),
        ("Position-v1", "test", 1234),
        ("EEPose-v1", "test", 10**10),
        ("PositionChangeTo-v1", "test", 700001),  # the object is elsewhere after five steps
    ],
)
def test_other_scenes(play, name: str, obj_set: str, episode_id: int) -> None:
    played = play(name, obj_set, episode_id)
    assert played.world.judge.judgement.success
    assert played.levels[-1] == 1.2


def test_noise_does_not_derail_it(assets, play) -> None:
    for number, name in enumerate(("carrot", "golf ball", "toy bear")):
        assert play("Main-v3", "train", of_object(assets, name, number), noise=0.01).levels[-1] == 1.2


def test_steps_are_small_and_the_same_again(assets, play) -> None:
    first, again = (play("Main-v3", "train", of_object(assets, "banana", 0)) for _ in range(2))
    assert np.linalg.norm(first.actions[:, :3], axis=1).max() <= MAX_MOVE + 1e-6
    turns = [np.linalg.norm(rotation_vector(_from_euler(angles))) for angles in first.actions[:, 3:6]]
    assert max(turns) <= MAX_TURN + 1e-6
    assert set(first.actions[:, 6]) == {-1.0, 1.0}
    np.testing.assert_array_equal(first.actions, again.actions)


def test_it_leaves_the_object_on_the_plate(assets, play) -> None:
    played = play("Main-v3", "train", of_object(assets, "bread", 0), more=10)
    assert played.levels[-11:] == [1.2] * 11
    assert played.actions[-1, 6] == 1.0
    assert played.world.gripper_pose[2] > played.world.object_pose[2] + 0.05


# grasps


def box(size: tuple[float, float, float], yaw: float = 0.0, at: tuple[float, float] = (0.0, 0.0)) -> np.ndarray:
    """Points on the sides of a box that stands on the table."""
    steps = [np.linspace(-x / 2, x / 2, 25) for x in size]
    points = np.stack(np.meshgrid(*steps, indexing="ij"), axis=-1).reshape(-1, 3)
    points = points[(np.abs(points) >= np.array(size) / 2 - 1e-9).any(1)]
    return points @ rotation(np.array([0, 0, yaw])).T + [*at, TABLE_Z + size[2] / 2]


@pytest.mark.parametrize("yaw", [0.0, np.pi / 4, np.pi / 2, -np.pi / 3])
def test_the_fingers_close_on_the_short_side(yaw: float) -> None:
    grasp = find_grasp(box((0.10, 0.03, 0.03), yaw, (-0.2, 0.05)), NOTHING, yaw=-1.5)
    assert abs(np.sin(grasp.yaw - (yaw + np.pi / 2))) < 1e-6
    np.testing.assert_allclose(grasp.position, [-0.2, 0.05, TABLE_Z + TIP + 0.003], atol=1e-6)
    assert abs(grasp.yaw + 1.5) <= np.pi / 2


def test_a_tall_object_stays_below_the_hand() -> None:
    grasp = find_grasp(box((0.05, 0.03, 0.08)), NOTHING, yaw=0.0)
    assert grasp.position[2] + BAR == pytest.approx(TABLE_Z + 0.08 + 0.003)
    assert abs(np.sin(grasp.yaw)) == pytest.approx(1.0)


def test_fingers_keep_off_what_lies_beside() -> None:
    bar = box((0.10, 0.03, 0.03))
    plate = box((0.11, 0.11, 0.008), at=(0.0, 0.075))
    blocked = find_grasp(bar, plate, yaw=np.pi / 2)
    assert blocked.position[2] == pytest.approx(TABLE_Z + 0.008 + TIP + 0.003)
    aside = find_grasp(bar, box((0.11, 0.11, 0.008), at=(0.08, 0.075)), yaw=np.pi / 2)
    assert aside.position[2] == pytest.approx(TABLE_Z + TIP + 0.003)
    assert aside.position[0] < 0.012


def test_an_object_out_of_reach_is_approached_all_the_same() -> None:
    fallen = box((0.03, 0.03, 0.03)) - [0, 0, 5.0]
    np.testing.assert_allclose(find_grasp(fallen, NOTHING, 0.0).position, fallen.mean(0), atol=1e-9)


def test_points_lie_on_the_faces(tmp_path: Path) -> None:
    (tmp_path / "square.obj").write_text(
        "v 0 0 0\nv .02 0 0\nv .02 .02 0\nv 0 .02 0\n# a comment\nf 1//1 2//1 3//1 4//1\n"
    )
    points = surface(tmp_path / "square.obj")
    assert (points[:, 2] == 0).all()
    assert points.min() == 0
    assert points.max() == 0.02
    nearest = np.linalg.norm(points - [0.011, 0.007, 0], axis=1).min()
    assert len(points) == 81
    assert nearest < 0.0025


def test_turns_become_euler_angles() -> None:
    rng = np.random.default_rng(0)
    for vector in rng.uniform(-0.5, 0.5, (20, 3)):
        turn = rotation(vector)
        np.testing.assert_allclose(rotation_vector(turn), vector, atol=1e-12)
        np.testing.assert_allclose(_from_euler(euler(turn)), turn, atol=1e-12)
    half = np.array([np.cos(0.3), 0, 0, np.sin(0.3)])
    np.testing.assert_allclose(rotation_vector(matrix(half)), [0, 0, 0.6], atol=1e-12)


def _from_euler(angles: np.ndarray) -> np.ndarray:
    about = [rotation(axis * angle) for axis, angle in zip(np.eye(3), angles, strict=True)]
    return about[0] @ about[1] @ about[2]
