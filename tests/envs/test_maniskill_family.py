"""What episode ids of the put-on-plate tasks mean, in numbers, and how they are split; nothing is simulated."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from rlinf.envs.config import EnvConfig
from rlinf.envs.spec import env_options, env_spec, eval_trials
from rlinf.errors import UserError
from rlinf.simulators.maniskill import Options, spec
from rlinf.simulators.maniskill.reset_ids import OOD, STRIDE, ShuffledIds, rows_of
from rlinf.simulators.maniskill.tasks import (
    ENV_IDS,
    PREFIX,
    RING_YAWS,
    START_QPOS,
    TEMPLATES,
    VARIANTS,
    YAWS,
    Episode,
    digits,
    episode,
    places_of,
    variant,
)


def play(name: str, obj_set: str, episode_id: int) -> Episode:
    return episode(PREFIX + name, obj_set, episode_id)


@pytest.mark.parametrize(
    ("name", "train", "test", "everything"),
    [
        ("Main-v3", 802816, 141120, 25 * 1 * 21 * 784 * 4),
        ("VisionImage-v1", 802816, 250880, 16 * 1 * 21 * 784 * 4),
        ("VisionTexture03-v1", 802816, 12845056, 16 * 1 * 17 * 16 * 784 * 4),
        ("VisionTexture05-v1", 802816, 12845056, 16 * 1 * 17 * 16 * 784 * 4),
        ("VisionWhole03-v1", 802816, 12845056, 16 * 1 * 17 * 16 * 784 * 4),
        ("VisionWhole05-v1", 802816, 12845056, 16 * 1 * 17 * 16 * 784 * 4),
        ("Carrot-v1", 802816, 451584, 25 * 1 * 16 * 784 * 4),
        ("Plate-v1", 802816, 12845056, 16 * 17 * 16 * 784 * 4),
        ("Instruct-v1", 802816, 12845056, 16 * 1 * 17 * 16 * 784 * 4),
        ("MultiCarrot-v1", 32317440, 9695232, 25 * 1 * 24 * 16 * 2104 * 4),
        ("MultiPlate-v1", 45244416, 678666240, 16 * 17 * 16 * 21 * 2104 * 4),
        ("Position-v1", 802816, 643072, 16 * 1 * 16 * (784 + 628) * 8),
        ("EEPose-v1", 802816, 11540480000, 16 * 1 * 14376 * 16 * 784 * 4),
        ("PositionChangeTo-v1", 2154496, 2154496, 2154496),
        ("Single-v1", 3136, 3136, 3136),
        ("MainCarrot-v3", 50176, 28224, 25 * 1 * 784 * 4),
        ("MainImage-v3", 50176, 15680, 1 * 21 * 784 * 4),
    ],
)
def test_number_of_ids(name: str, train: int, test: int, everything: int) -> None:
    for obj_set, total in (("train", train), ("test", test), ("all", everything)):
        assert variant(PREFIX + name, obj_set).total == total
        first, last = play(name, obj_set, 0), play(name, obj_set, total - 1)
        assert (first.object.index, last.object.index) == (
            variant(PREFIX + name, obj_set).objects.first,
            variant(PREFIX + name, obj_set).objects.first + variant(PREFIX + name, obj_set).objects.count - 1,
        )
        with pytest.raises(ValueError, match=rf"episode_id={total} must lie in \[0, {total}\)"):
            play(name, obj_set, total)


def test_seventeen_ids() -> None:
    assert len(ENV_IDS) == 17


def test_training_starts_of_the_position_tests_are_dropped_from_their_heights() -> None:
    """Position-v1 from 0.95 m in the trained grid, PositionChangeTo-v1 from 0.95 and 0.92 m on the three-place grid."""
    for name, heights, places in (("Position-v1", (0.95, 0.95), 784), ("PositionChangeTo-v1", (0.95, 0.92), 2104)):
        start = play(name, "train", 4321)
        assert (start.object.position[2], start.plate.position[2]) == heights
        assert variant(PREFIX + name, "train").radices[-2] == places


def test_all_holds_training_and_test() -> None:
    """Of each digit: the first members are those of training, the last those of the test."""
    assert play("EEPose-v1", "all", 0).qpos == START_QPOS
    assert play("EEPose-v1", "all", 1 * 16 * 3136).qpos == play("EEPose-v1", "test", 0).qpos
    ring = play("Position-v1", "all", variant(PREFIX + "Position-v1", "all").total - 1)
    outer = play("Position-v1", "test", variant(PREFIX + "Position-v1", "test").total - 1)
    assert (ring.object, ring.plate) == (outer.object, outer.plate)
    assert play("PositionChangeTo-v1", "all", 77) == replace(play("PositionChangeTo-v1", "test", 77), obj_set="all")
    pairs = [play("MultiPlate-v1", "all", (p * 16 + e) * 21 * 2104 * 4) for p in range(17) for e in range(16)]
    assert len({(p.plate.index, p.extra_plate.index) for p in pairs if p.extra_plate}) == 17 * 16


def test_places() -> None:
    """Distances of exactly 0.15 m occur and rounding decides: 2104, not 2020."""
    assert [len(places_of(k)) for k in ("pair", "ring", "second_object", "second_plate")] == [784, 628, 2104, 2104]
    cells = {cell for pair in places_of("pair") for cell in pair}
    assert len(cells) == 36
    assert sorted({round(x, 6) for x, _ in cells}) == [-0.235, -0.205, -0.175, -0.145, -0.115, -0.085]
    ring = {cell for pair in places_of("ring") for cell in pair}
    assert len(ring) == 28
    assert not ring & cells
    assert {round(max(abs(x + 0.16), abs(y)), 6) for x, y in ring} == {0.105}
    for a, b, c in places_of("second_object"):
        assert min(math.dist(a, b), math.dist(b, c)) > 0.07
        assert math.dist(a, c) > 0.15 - 1e-9


def test_digits_come_most_significant_first() -> None:
    assert digits(0, (16, 1, 1, 16, 784, 4)) == (0,) * 6
    assert digits(3136, (16, 1, 1, 16, 784, 4)) == (0, 0, 0, 1, 0, 0)
    assert digits(107417, (16, 1, 1, 16, 784, 4)) == (2, 0, 0, 2, 198, 1)
    assert digits(11540479999, variant(PREFIX + "EEPose-v1", "test").radices) == (15, 0, 14374, 15, 783, 3)


def test_yaws_are_those_of_the_layout() -> None:
    yaws = [
        2 * math.atan2(e.object.quaternion[3], e.object.quaternion[0])
        for e in (play("Main-v3", "train", i) for i in range(4))
    ]
    assert np.allclose(np.rad2deg(yaws), [0, 45, 90, 135])
    yaws = [
        2 * math.atan2(e.object.quaternion[3], e.object.quaternion[0])
        for e in (play("Position-v1", "test", i) for i in range(4))
    ]
    assert np.allclose(np.rad2deg(yaws), [-22.5, -67.5, -112.5, -157.5])
    assert (YAWS[0], RING_YAWS[0]) == (0.0, math.radians(-22.5))


def test_arm_poses() -> None:
    """All five joints at once are enough of the 14375: every one differs, and shoulder + elbow stay within 0.25."""
    base = np.array(START_QPOS)
    offsets = [np.array(play("EEPose-v1", "test", k * 16 * 3136).qpos) - base for k in range(0, 14375, 23)]
    assert {len(np.unique(np.round(offsets, 6), axis=0))} == {625}
    assert np.abs([o[1] + o[2] for o in offsets]).max() <= 0.25 + 1e-9
    assert {round(abs(o[5]), 6) for o in offsets} <= {0.0, 0.3, 0.6}
    assert all((o[6:] == 0).all() for o in offsets)


def test_templates_of_instruct() -> None:
    assert len(TEMPLATES) == 21
    told = {play("Instruct-v1", "test", k * 16 * 3136).template for k in range(16)}
    assert told == set(range(1, 17))
    assert (
        play("Instruct-v1", "test", 10 * 16 * 3136).instruction("7up can", "plate")
        == "put the 7up can where the plate is"
    )
    assert play("Main-v3", "train", 0).instruction("carrot", "plate") == "put carrot on plate"


def test_a_second_object_may_be_the_first_as_published() -> None:
    """With the nine unseen objects the sum counts their offset twice: then one object stands at the second's place."""
    alone = play("MultiCarrot-v1", "test", 5574528)
    assert alone.extra_object is None
    assert alone.object.position[2] == 1.0
    step = 16 * 2104 * 4
    pairs = [play("MultiCarrot-v1", "test", (o * 8 + e) * step) for o, e in itertools.product(range(9), range(8))]
    assert sum(p.extra_object is None for p in pairs) == 9
    pairs = [play("MultiCarrot-v1", "train", (o * 15 + e) * step) for o, e in itertools.product(range(16), range(15))]
    assert {(p.object.index, p.extra_object.index) for p in pairs if p.extra_object} == set(
        itertools.permutations(range(16), 2)
    )


def test_a_second_plate_is_always_another() -> None:
    step = 21 * 2104 * 4
    pairs = [play("MultiPlate-v1", "test", (p * 15 + e) * step) for p, e in itertools.product(range(16), range(15))]
    assert {(p.plate.index, p.extra_plate.index) for p in pairs if p.extra_plate} == set(
        itertools.permutations(range(1, 17), 2)
    )
    trained = [play("MultiPlate-v1", "train", e * step) for e in range(16)]
    assert [(p.plate.index, p.extra_plate.index) for p in trained if p.extra_plate] == [(0, i) for i in range(1, 17)]


def test_the_object_jumps_only_where_that_is_the_test() -> None:
    jumps = play("PositionChangeTo-v1", "test", 516799).teleport
    assert jumps is not None
    assert jumps.step == 5
    assert jumps.position == pytest.approx((-0.085, -0.045, 1.0))
    assert play("PositionChangeTo-v1", "train", 516799).teleport is None


def test_the_extra_digit_of_textures_changes_nothing() -> None:
    a, b = (play("VisionWhole05-v1", "test", k * 16 * 3136 + 12345) for k in (0, 7))
    assert (a.object, a.plate, a.image, a.texture) == (b.object, b.plate, b.image, b.texture)
    assert a.texture == ("whole", 0.5)


# ids of training, demonstrations and evaluation


@pytest.mark.parametrize("total", [1, 2, 7, 784, 3136])
def test_the_shuffle_is_one(total: int) -> None:
    ids = ShuffledIds(total, range(total), offset=5)
    assert sorted(ids) == list(range(5, 5 + total))
    assert all(i in ids for i in range(5, 5 + total))
    assert 5 + total not in ids
    assert 4 not in ids


@pytest.mark.parametrize("env_id", ENV_IDS)
def test_splits_are_disjoint_and_cover(env_id: str) -> None:
    for obj_set in VARIANTS[env_id]:
        ids = spec(Options(id=env_id, obj_set=obj_set)).reset_ids
        total = variant(env_id, obj_set).total
        sample = {name: [split[len(split) * k // 50] for k in range(50)] for name, split in ids.items() if len(split)}
        for name, split in sample.items():
            assert all(0 <= i < total for i in split)
            assert all(i in ids[name] for i in split)
            assert not any(i in ids[other] for other in ids if other != name for i in split)
        trained = obj_set != "test" or env_id == PREFIX + "Single-v1"
        assert (len(ids["train"]) > 0) == (len(ids["demo"]) > 0) == trained
        assert sum(map(len, ids.values())) == total if trained else len(ids["eval"]) == min(total, 65536)


def test_evaluations_of_any_size_mix_everything() -> None:
    """A stride through episode ids would always stand at the same place; a stride through the shuffle does not."""
    for count in (96, 128, 256):
        cfg = EnvConfig(
            env_type="maniskill", num_trials=count, init_params={"id": PREFIX + "Plate-v1", "obj_set": "test"}
        )
        played = [episode(PREFIX + "Plate-v1", "test", i) for i in eval_trials(cfg, env_spec(cfg))]
        assert len({e.episode_id for e in played}) == count
        assert {e.object.index for e in played} == set(range(16))
        assert {e.plate.index for e in played} == set(range(1, 17))
        assert {e.image for e in played} == set(range(16))
        assert len({e.object.position for e in played}) > 30
        assert len({e.object.quaternion for e in played}) == 4


def test_held_out_ids_never_change() -> None:
    """Results are compared over versions; so is what training on Main-v3 must not have seen."""
    ids = spec(Options()).reset_ids
    assert [len(ids[name]) for name in ("eval", "demo", "train")] == [4096, 200704, 598016]
    assert list(ids["eval"][:4]) == [678965, 287824, 448126, 688538]
    assert list(spec(Options(id=PREFIX + "Carrot-v1")).reset_ids["eval"][:100]) == list(ids["eval"][:100])


def test_the_suite_of_sixteen() -> None:
    made = spec(Options(id=OOD, trials_per_task=3))
    rows = rows_of(OOD, "train")
    assert len(rows) == len(made.tasks) == len(set(rows)) == 16
    assert sum(obj_set == "test" for _, obj_set in rows) == 13
    assert {group: len(tasks) for group, tasks in made.task_groups.items()} == {
        "IND": 1,
        "Vision": 5,
        "Semantic": 7,
        "Execution": 3,
        "OOD": 15,
        "Average": 16,
    }
    classes = [made.task_groups[name] for name in ("IND", "Vision", "Semantic", "Execution")]
    assert sorted(t for tasks in classes for t in tasks) == sorted(made.tasks)
    ids = made.reset_ids["eval"]
    assert [i // STRIDE for i in ids] == [n for n in range(16) for _ in range(3)]
    assert ids[0] in spec(Options()).reset_ids["eval"]  # in distribution, but never trained on
    assert (made.reset_ids["train"], made.reset_ids["demo"]) == ((), ())


# options


def options(**params: object) -> Options:
    return env_options(EnvConfig(env_type="maniskill", init_params=params), "env.train")


def test_the_published_block_is_taken_as_it_is() -> None:
    published = {
        "id": "PutOnPlateInScene25Main-v3",
        "control_mode": "None",
        "sim_backend": "gpu",
        "sim_config": {"sim_freq": 500, "control_freq": 5},
        "sensor_configs": {"shader_pack": "default"},
        "obj_set": "train",
    }
    made = options(**published)
    assert (made.control_mode, made.shader, made.size, made.on_gpu) == (None, "default", (480, 640), True)
    shape = spec(made)
    assert (shape.action_dim, shape.state_dim, shape.gripper, shape.control_hz) == (7, 8, "binary_pm1", 5.0)
    assert shape.image_size == (480, 640)
    assert shape.tasks == ("PutOnPlateInScene25Main-v3",)


def test_sizes() -> None:
    assert options(image_size=64).size == (64, 64)
    assert options(image_size=[120, 160]).size == (120, 160)


@pytest.mark.parametrize(
    ("params", "line"),
    [
        ({"id": "PutOnPlateInScene25Main-v1"}, "did you mean 'PutOnPlateInScene25Main-v3'"),
        ({"id": "Plate"}, "known: PutOnPlateInScene25 \\+ Main-v3, VisionImage-v1"),
        ({"id": PREFIX + "Carrot-v1", "obj_set": "trained"}, "obj_set='trained' must be 'train' or 'test' or 'all'"),
        ({"control_mode": "pd_joint_pos"}, "control_mode='pd_joint_pos' must be null or arm_pd_ee_target_delta_pose"),
        ({"sensor_configs": {"shader_pack": "minimum"}}, "shader_pack='minimum' must be .*did you mean 'minimal'"),
        ({"sensor_configs": {"shader": "rt"}}, "sensor_configs.shader is not an option .*'shader_pack'"),
        ({"sim_config": {"sim_freq": 501}}, "sim_freq=501 must be a multiple of control_freq=5"),
        ({"sim_config": {"control_freq": 0}}, "control_freq=0 must be a whole number of Hz above 0"),
        ({"sim_backend": "tpu"}, "sim_backend='tpu' must be 'auto' or 'cpu'"),
        ({"reward_mode": "dense"}, "reward_mode='dense' must be 'default' or 'only_success' or 'raw'"),
        ({"shaped_reward": 0.5, "sim_backend": "gpu"}, "shaped_reward=0.5 needs sim_backend: cpu"),
        ({"image_size": 8}, "image_size=8 must be an integer from 16 to 4096 or a list, each item"),
        ({"image_size": [64]}, "image_size=.* must be an integer from 16 to 4096 or a list"),
        ({"id": "ood", "sim_backend": "gpu"}, "id=ood needs sim_backend: cpu"),
        ({"id": "ood", "trials_per_task": 0}, "trials_per_task=0 must be an integer from 1"),
        ({"obj_sets": "train"}, "unknown key env.train.init_params.obj_sets; .*obj_set"),
    ],
)
def test_wrong_options_are_refused_in_one_line(params: dict[str, object], line: str) -> None:
    with pytest.raises(UserError, match=line) as caught:
        options(**params)
    assert "\n" not in str(caught.value)
    assert "env.train.init_params" in str(caught.value)
