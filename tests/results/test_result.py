"""result.json: what an evaluation writes, which settings its protocol holds, and whose policy it names."""

from __future__ import annotations

import errno
import json
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlinf.commands import jobs
from rlinf.config.load import load_config
from rlinf.config.schema import Config
from rlinf.data.types import EpisodeRecord
from rlinf.envs.config import EnvConfig
from rlinf.envs.spec import env_spec, eval_trials, find_simulator, selection_ids, task_of
from rlinf.errors import DiskFullError, UserError
from rlinf.metrics.episode_summary import benchmark_table
from rlinf.results.identity import files_hash
from rlinf.results.protocol import benchmark_protocol, differences, evaluation_protocol, of_benchmark, protocol_hash
from rlinf.results.result import read_result, results_of_run, write_result
from rlinf.simulators.contract import SetupError

OWN = ["runner.logger.logger_backends=[]", "env.eval.num_processes=1", "env.eval.num_trials=6"]


def config(folder: Path, *overrides: str, name: str = "toy_ppo_compact") -> Config:
    own = [f"runner.logger.log_path={folder}", *OWN, *overrides]
    return load_config(name, own, purpose="eval", devices=[0])


@pytest.fixture(scope="module")
def expert_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("expert")
    jobs.evaluate(config(folder, "runner.eval_expert=true", "env.eval.total_num_envs=2"))
    return folder


def test_an_evaluation_is_read_back_as_it_was_written(expert_run: Path) -> None:
    result = read_result(expert_run)
    assert result.path == expert_run / "eval/step_0/result.json" == results_of_run(expert_run)[0]
    assert json.loads(json.dumps(result.to_json())) == json.loads(result.path.read_text())
    assert result.policy.kind == "expert"
    assert [e.index for e in result.episodes] == list(range(6))
    cfg = config(expert_run, "runner.eval_expert=true")
    assert [e.reset_id for e in result.episodes] == eval_trials(cfg.env.eval, env_spec(cfg.env.eval))
    assert (result.success["successes"], result.success["trials"]) == (6, 6)
    assert result.protocol == evaluation_protocol(cfg)
    assert not any(key.startswith("policy.") for key in result.protocol)
    assert {"commit", "packages", "command"} <= result.provenance.keys()
    assert result.episodes[0].instructions[0] == (0, "reach the red dot")


def test_another_run_gets_another_folder_and_the_same_one_its_own(expert_run: Path) -> None:
    jobs.evaluate(config(expert_run, "runner.eval_expert=true", "env.eval.num_trials=1"))
    assert [p.parent.name for p in results_of_run(expert_run)] == ["step_0", "step_0_2"]
    assert len(read_result(results_of_run(expert_run)[0]).episodes) == 6


def test_evaluations_that_end_at_once_lose_no_result(expert_run: Path, tmp_path: Path) -> None:
    result = read_result(results_of_run(expert_run)[0])
    ready = threading.Barrier(8)

    def write(number: int) -> Path | None:
        ready.wait()
        return write_result(replace(result, run=f"run-{number}"), tmp_path).path

    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(write, range(8)))
    assert len(set(paths)) == 8
    assert [read_result(path).run for path in paths if path is not None] == [f"run-{n}" for n in range(8)]
    assert write_result(replace(result, run="run-3"), tmp_path).path == paths[3]  # its own is replaced
    assert sorted(p.name for p in tmp_path.rglob("*") if p.is_file()) == ["result.json"] * 8


def test_a_result_that_cannot_be_written_leaves_no_folder(
    expert_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, "x")

    monkeypatch.setattr("rlinf.results.result.write_file", full)
    with pytest.raises(DiskFullError, match="No space left on device"):
        write_result(read_result(expert_run), tmp_path)
    assert list((tmp_path / "eval").iterdir()) == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"config": None}, "config=None must be a block of keys"),
        ({"protocol": ["x"]}, r"protocol=\['x'\] must be a block of keys"),
        ({"device": None}, "device=None must be a block of keys"),
        ({"policy": {"path": "x"}}, r"policy\.kind is missing"),
        ({"policy": "x"}, "policy='x' must be a block of keys"),
        ({"batches": [0]}, r"batches=\[0\] must be a list"),
        ({"provenance": []}, r"provenance=\[\] must be a block"),
        ({"episodes": [1]}, r"episodes=\[1\] must be a list, each item a block of keys"),
        ({"success_once": "<b>"}, r"episodes\[0\]\.success_once='<b>' must be true or false"),
        ({"instructions": ["x"]}, r"episodes\[0\]\.instructions=\['x'\] must be a list"),
        ({"return": None}, r"episodes\[0\]\.return=None must be a number"),
        ({"index": 1}, "two of its episodes have the same index"),
    ],
    ids=str,
)
def test_a_damaged_result_is_refused_by_field(
    change: dict[str, Any], says: str, expert_run: Path, tmp_path: Path
) -> None:
    content, (name,) = json.loads(results_of_run(expert_run)[0].read_text()), change
    (content if name in content else content["episodes"][0]).update(change)
    file = tmp_path / "result.json"
    file.write_text(json.dumps(content))
    with pytest.raises(UserError, match=f"^{file} is damaged: {says}"):
        read_result(file)


def test_a_measured_value_may_be_no_number(expert_run: Path, tmp_path: Path) -> None:
    result = read_result(expert_run)
    odd = replace(result.episodes[0], extra={"gap": math.nan}, episode_return=math.inf)
    written = write_result(replace(result, episodes=(odd, *result.episodes[1:])), tmp_path)
    assert read_result(tmp_path).episodes[0].episode_return == written.episodes[0].episode_return


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"step": 0, "episodes": []}', "of an earlier version of rlinf: evaluate again"),
        ("[]", "schema must be 'rlinf-result'"),
        ('{"schema": "rlinf-result", "version": 2}', "has version 2, this rlinf reads version 1"),
        ('{"schema": "rlinf-result", "version": 1}', "is damaged"),
        ("{", "is damaged, it is no whole JSON file"),
    ],
)
def test_what_is_no_result_is_refused(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text(text)
    with pytest.raises(UserError, match=says):
        read_result(tmp_path / "result.json")
    with pytest.raises(UserError, match=r"holds no eval/step_N/result\.json"):
        read_result(tmp_path.parent)


# ---------------------------------------------------------------- protocol
def test_the_protocol_holds_what_changes_a_number_and_nothing_else(tmp_path: Path) -> None:
    cfg = config(tmp_path, "runner.eval_random=true")
    env, model = cfg.env.eval, cfg.actor.model

    def protocol(env: EnvConfig = env, model: Any = model, seed: int = 0, compat: Any = None) -> dict[str, Any]:
        runner, actor = replace(cfg.runner, seed=seed), replace(cfg.actor, model=model)
        return evaluation_protocol(
            replace(cfg, env=replace(cfg.env, eval=env), actor=actor, runner=runner, compat=compat)
        )

    plain = protocol()
    where = {"fault_file": "elsewhere", "batched": True}
    assert protocol(replace(env, total_num_envs=env.total_num_envs // 2, num_trials=6, num_processes=3)) == plain
    assert protocol(replace(env, init_params=env.init_params | where), replace(model, model_path="x")) == plain
    assert protocol(model=replace(model, openpi=replace(model.openpi, noise_level=0.1))) == plain
    fewer_steps = replace(model, openpi=replace(model.openpi, num_steps=3))
    for key, other in {
        "horizon": protocol(replace(env, max_episode_steps=6)),
        "trials.count": protocol(replace(env, num_trials=5)),
        "trials.reset_ids": protocol(replace(env, num_trials=5)),
        "simulator.radius": protocol(replace(env, init_params=env.init_params | {"radius": 0.2})),
        "suite": protocol(replace(env, task_suite_name="toy_red")),
        "compat": protocol(compat="rlinf-0.4"),
        "policy.denoise_steps": protocol(model=fewer_steps),
        "policy.seed": protocol(seed=1),
    }.items():
        assert key in [d.key for d in differences(plain, other)]
        assert protocol_hash(other) != protocol_hash(plain)
        assert (of_benchmark(other) == of_benchmark(plain)) == key.startswith("policy.")


def test_a_protocol_names_the_renderer_and_versions() -> None:
    env = EnvConfig(env_type="metaworld", task_suite_name="reach-v3", init_params={"gl": "egl", "image_size": 64})
    egl = benchmark_protocol(env)
    osmesa = benchmark_protocol(replace(env, init_params={"gl": "osmesa", "camera_heights": 64}))
    (found,) = differences(egl, osmesa)
    assert str(found) == 'simulator.gl: "egl" and "osmesa"'
    assert egl["simulator.version.mujoco"].count(".") == 2


def test_a_machine_without_the_simulator_loses_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(options: object) -> dict[str, Any]:
        raise SetupError("no files")

    monkeypatch.setattr(find_simulator("toy"), "protocol", absent)
    assert "simulator.unknown" in evaluation_protocol(config(tmp_path, "runner.eval_random=true"))


# ---------------------------------------------------------------- whose policy
def test_the_hash_of_a_policy_changes_with_weights_and_statistics_alone(tmp_path: Path) -> None:
    for name in ("model.safetensors", "norm_stats.json", "sft.json"):
        (tmp_path / name).write_text(name)
    first = files_hash((tmp_path,))
    (tmp_path / "sft.json").write_text("seconds: 2")
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache/x").write_text("x")
    assert files_hash((tmp_path,)) == first
    (tmp_path / "norm_stats.json").write_text("others")
    assert files_hash((tmp_path,)) != first
    with pytest.raises(UserError, match="holds no policy"):
        files_hash((tmp_path / "absent",))


# ---------------------------------------------------------------- tables
def record(task: str, success: bool, **extra: float) -> EpisodeRecord:
    return EpisodeRecord("suite", task, 0, 0, 0, 1, float(success), success, success, extra)


def test_tables_are_those_of_the_benchmarks() -> None:
    groups = {"easy": ("a", "b"), "hard": ("c",)}
    records = [record("a", True), record("b", True), record("c", False), record("c", False)]
    rows = benchmark_table(records, groups, "metaworld_50")["rows"]
    assert [row[:2] for row in rows] == [
        ["easy", 1.0],
        ["hard", 0.0],
        ["average of groups", 0.5],
        ["all episodes", 0.5],
    ]
    assert rows[1][4:] == [0, 2]
    chains = [record("chain-D", False, avg_len=n, success_len_1=float(n > 0), success_len_2=0.0) for n in (0, 1)]
    table = benchmark_table(chains, {}, "calvin_d")
    assert [row[:2] for row in table["rows"]] == [
        ["avg_num_subtasks", 0.5],
        ["success_len_1", 0.5],
        ["success_len_2", 0.0],
    ]
    assert [row[0] for row in benchmark_table(records, {}, "toy")["rows"]] == ["a", "b", "c", "all episodes"]


# ---------------------------------------------------------------- choosing a checkpoint
@pytest.mark.parametrize(
    ("simulator", "suite"),
    [
        ("toy", "toy_2"),
        ("metaworld", "metaworld_50"),
        ("calvin", "calvin_d"),
        ("maniskill", "PutOnPlateInScene25Main-v3"),
        ("toy", ["toy_red"]),
    ],
)
def test_policies_are_chosen_by_ids_that_no_evaluation_reports(simulator: str, suite: str) -> None:
    env = EnvConfig(env_type=simulator, task_suite_name=suite, num_trials=-1)
    spec = env_spec(env)
    reported = set(eval_trials(env, spec))
    for seed in (0, 3):
        chosen_by = selection_ids(spec, 64, seed)
        assert not reported & set(chosen_by)
        assert all(reset_id in spec.reset_ids["train"] for reset_id in chosen_by)
    assert selection_ids(spec, 64, 0) != selection_ids(spec, 64, 3)


def test_no_layout_is_chosen_by_twice_and_every_task_equally_often() -> None:
    tasks = env_spec(EnvConfig(env_type="metaworld", task_suite_name="metaworld_50"))
    chosen_by = selection_ids(tasks, 32, 3, whole_rounds=True)
    assert len(chosen_by) == len({task_of(tasks, "train", reset_id) for reset_id in chosen_by}) == 50
    assert len(selection_ids(tasks, 32, 3)) == 32
    listed = env_spec(EnvConfig(env_type="metaworld", task_suite_name=["reach-v3", "door-close-v3", "push-v3"]))
    assert len(selection_ids(listed, 7, 0, whole_rounds=True)) == 9
    few = replace(tasks, reset_ids={**tasks.reset_ids, "train": range(10, 15)})
    for seed in range(3):
        assert sorted(selection_ids(few, 32, seed, whole_rounds=True)) == list(range(10, 15))


def test_a_suite_without_training_layouts_says_so() -> None:
    with pytest.raises(UserError, match="'ood' is for evaluations alone"):
        selection_ids(env_spec(EnvConfig(env_type="maniskill", task_suite_name="ood")), 8, 0)
