"""Demonstrations are played by several processes at once and come back in order."""

import io

import numpy as np
from PIL import Image

from rlinf.demos.player import PIXELS, DemoJob, DemoPlayer
from rlinf.envs.config import EnvConfig
from rlinf.envs.spec import env_spec, ids_of_task


def test_jobs_come_back_in_order_and_may_grow_while_they_are_played() -> None:
    cfg = EnvConfig(env_type="toy", num_processes=3)
    spec = env_spec(cfg)
    ids = [ids_of_task(spec, "demo", task)[i] for i in range(4) for task in spec.tasks]
    jobs = [DemoJob(reset_id, max_steps=1 if i == 2 else 40) for i, reset_id in enumerate(ids)]
    with DemoPlayer(cfg, spec) as player:
        seen = []
        for job, success in player.play_and(lambda demo: (demo.job, demo.success), jobs):
            seen.append(job)
            if not success and len(seen) <= len(ids):
                jobs.append(DemoJob(job.reset_id, max_steps=40))
    assert seen == jobs
    assert [job.reset_id for job in seen[len(ids) :]] == [ids[2]]


def test_what_is_encoded_where_it_is_drawn_decodes_to_the_same_images() -> None:
    cfg = EnvConfig(env_type="toy", num_processes=1)
    spec = env_spec(cfg)
    jobs = [DemoJob(ids_of_task(spec, "demo", spec.tasks[0])[0], max_steps=40)]
    with DemoPlayer(cfg, spec) as drawn, DemoPlayer(cfg, spec, encodes=True) as encoded:
        (plain,), (coded,) = drawn.play(jobs), encoded.play(jobs)
    assert plain.pictures == ()
    assert len(coded.images) == 0
    assert np.array_equal(plain.actions, coded.actions)
    cameras = [plain.images, *(() if plain.wrist_images is None else np.moveaxis(plain.wrist_images, 1, 0))]
    assert len(coded.pictures) == len(cameras)
    for camera, pictures in zip(cameras, coded.pictures, strict=True):
        assert np.array_equal(camera, [np.asarray(Image.open(io.BytesIO(png))) for png in pictures.pngs])
        some = camera.reshape(len(camera), -1, 3)[:, :: 1 + camera[0].size // 3 // PIXELS]
        assert np.array_equal(some, pictures.pixels)
