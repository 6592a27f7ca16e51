"""Demonstrations are played by several processes at once and come back in order."""

from rlinf.demos.player import DemoJob, DemoPlayer
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
