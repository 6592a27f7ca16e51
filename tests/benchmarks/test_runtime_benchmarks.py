"""The benchmarks of the runtime run, with a simulator that costs nothing; their numbers mean nothing here."""

from __future__ import annotations

import os
import re

import pipeline
import pytest
import scaling


def test_pipeline_compares_stages_and_gives_the_cores_back(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # the benchmark sets it
    before, children = os.sched_getaffinity(0), pipeline.children()
    pipeline.main(["--env=toy", "--envs=2", "--chunks=2", "--repeats=1", "--denoise=1", "--at-least=0"])
    assert os.sched_getaffinity(0) == before
    assert pipeline.children() == children
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "toy, 2 envs, 2 chunks of 5 actions"
    assert lines[1].startswith("compact π0, H=50, N=1, ")
    rows = {line[:42].strip(): line[42:].split() for line in lines if "stage" in line[:42] and "are" not in line}
    assert list(rows)[:3] == ["one stage, held", "two stages, held", "one stage, all cores, torch threads 1"]
    one, two = (float(rows[name][0]) for name in ("one stage, held", "two stages, held"))
    (ratio,) = re.findall(r"two stages are ([\d.]+)x as fast as one \(at least 0.0x\)", "\n".join(lines))
    assert float(ratio) == pytest.approx(one / two, rel=0.1)


@pytest.mark.parametrize(("two", "kept"), [(1.0, True), (1.1, False)])
def test_pipeline_fails_below_its_promise(
    two: float, kept: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # the benchmark sets it

    def setting(name: str, seconds: float) -> pipeline.Setting:
        return pipeline.Setting(name, None, [], True, 1, [seconds] * 3, [0.5] * 3, [0.5] * 3)

    free = [setting(f"one stage, all cores, torch threads {n}", seconds) for n, seconds in ((1, 1.2), (2, 1.4))]
    monkeypatch.setattr(pipeline, "run", lambda args: [setting("one", 1.6), setting("two", two), *free])
    if kept:
        pipeline.main([])
        assert capsys.readouterr().out.splitlines()[-2:] == [
            "two stages are 1.60x as fast as one (at least 1.6x)",
            "and 1.20x as fast as the best of one stage on all cores",
        ]
    else:
        with pytest.raises(SystemExit, match="slower than promised"):
            pipeline.main([])


def test_denoising_steps_balance_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulators of 1 s beside a policy of 0.2 s + 0.1 s a step: 8 steps."""

    def measure(setting: pipeline.Setting, cores: pipeline.Cores, step: int) -> None:
        setting.env.append(1.0)
        setting.policy.append(0.2 + 0.1 * setting.runner.cfg.actor.model.num_steps)

    monkeypatch.setattr(pipeline, "measure", measure)
    args = pipeline.parse(["--env=toy", "--envs=2", "--chunks=1"])
    assert pipeline.balanced_steps(args, pipeline.Cores.of_this_machine("cpu")) == 8


def test_scaling_counts_steps_and_calls() -> None:
    row = scaling.measure("toy", "local", 2, envs_each=2, chunks=2, repeats=1)
    assert (row.backend, row.workers) == ("local", 2)
    assert row.cores == min(2, len(os.sched_getaffinity(0)))
    assert min(row.steps_per_second, row.call_ms, row.queued_ms, row.observation_ms) > 0
    assert len(str(row)) == len(scaling.HEADER.splitlines()[1])


@pytest.mark.parametrize(("backend", "ranks", "processes"), [("ray", 4, 1), ("local", 1, 4)])
def test_scaling_has_as_many_simulator_processes_on_both_backends(backend: str, ranks: int, processes: int) -> None:
    cfg = scaling.config("toy", backend, 4, 2, "unused")
    plan = scaling.make_plan(cfg, [0])
    assert (len(plan.env), cfg.env.train.num_processes) == (ranks, processes)
    assert plan.num_envs("env") * len(plan.env) == 8
    assert plan.one_process == (backend == "local")
