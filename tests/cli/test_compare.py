"""`rlinf compare`: results paired by trial, policies played on the same trials, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlinf.commands import compare
from rlinf.commands.compare import play_until_decided, run_compare
from rlinf.commands.contestants import Recorded, labels, split_arguments
from rlinf.commands.played import Played
from rlinf.config.load import load_config
from rlinf.errors import UserError
from rlinf.metrics.stats import Rate
from rlinf.results.comparison import Trial
from rlinf.results.identity import PolicyIdentity
from rlinf.results.result import Episode, Result, read_result, write_result
from rlinf.results.schedule import rounds

PROTOCOL = {"simulator": "metaworld", "simulator.render": "exact", "horizon": 60, "policy.denoise_steps": 2}
TOY = [
    "runner.logger.logger_backends=[]",
    "env.eval.total_num_envs=12",
    "env.eval.num_processes=1",
    "env.eval.max_episode_steps=4",
]


def result(folder: Path, solved: int, reset_ids: range, tasks: int = 1, **protocol: Any) -> str:
    """The path of a result.json in which the first `solved` layouts of every task succeed."""
    episodes = tuple(
        Episode(i, "suite", f"task-{i % tasks}", reset_id, 0, 0, 5, 1.0, i // tasks < solved, i // tasks < solved)
        for i, reset_id in enumerate(reset_ids)
    )
    written = write_result(
        Result(
            step=0,
            run="12345678",
            recipe="recipe",
            policy=PolicyIdentity("checkpoint", f"checkpoints/{folder.name}", f"digest of {folder.name}"),
            protocol=PROTOCOL | {"trials.count": len(episodes)} | protocol,
            success=asdict(Rate.of(e.success_once for e in episodes)),
            groups={},
            tasks={},
            rates={},
            table={},
            metrics={},
            episodes=episodes,
            provenance={},
            config={},
        ),
        folder,
    )
    return str(written.path)


def test_results_are_compared_on_the_trials_that_both_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weak, strong = result(tmp_path / "weak", 10, range(60)), result(tmp_path / "strong", 40, range(20, 70))
    found = run_compare([weak, strong], output=tmp_path / "out")
    assert found.pairs[0].overall.pairs.count == 40
    assert found.pairs[0].better == "strong"
    text = capsys.readouterr().out
    assert "weak: 60 trials, 40 of them in all results" in text
    assert "strong is better than weak: +100.0 points [+" in text
    assert "after 40 pairs (40 solved by strong alone, 0 by weak alone, 0 by both, 0 by neither)" in text


def test_folders_that_hold_results_alone_are_results_under_the_names_that_were_typed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As one shares them: eval/step_N/result.json, and no run.json beside them."""
    for name, solved in (("random", 0), ("picked", 40)):
        result(tmp_path / name, solved, range(40))
    run_compare([str(tmp_path / "random"), str(tmp_path / "picked")], output=tmp_path / "out")
    assert "picked is better than random: +100.0 points" in capsys.readouterr().out


def test_results_of_one_policy_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [tmp_path / "x" / "a", tmp_path / "y" / "a"]
    run_compare([result(folder, 5, range(40)) for folder in folders], output=tmp_path / "out")
    assert "warning: x and y are the same policy, file by file" in capsys.readouterr().out


def test_what_was_found_is_written_and_never_replaced(tmp_path: Path) -> None:
    paths = [result(tmp_path / "a", 10, range(60)), result(tmp_path / "b", 12, range(60))]
    run_compare(paths, output=tmp_path / "out")
    content = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert (content["schema"], content["version"], content["stopped"]) == ("rlinf-comparison", 1, "all trials")
    assert [policy["result"] for policy in content["policies"]] == paths
    assert content["policies"][1]["success"] == asdict(Rate(12, 60))
    assert content["pairs"][0]["overall"]["verdict"] == "not separable"
    assert content["protocol"] == {key: value for key, value in PROTOCOL.items() if not key.startswith("policy.")}
    with pytest.raises(UserError, match=r"--output=.*out exists and is not an empty folder"):
        run_compare(paths, output=tmp_path / "out")


def test_results_of_another_renderer_are_refused_with_the_key_and_both_values(tmp_path: Path) -> None:
    exact = result(tmp_path / "exact", 10, range(40))
    fast = result(tmp_path / "fast", 30, range(40), **{"simulator.render": "fast"})
    with pytest.raises(UserError, match=r'simulator\.render: "exact" and "fast"\nevaluate one again') as refused:
        run_compare([exact, fast], output=tmp_path / "out")
    assert "horizon" not in str(refused.value)
    assert not (tmp_path / "out").exists()


def test_policies_may_act_under_settings_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [result(tmp_path / "a", 5, range(40)), result(tmp_path / "b", 5, range(40), **{"policy.denoise_steps": 4})]
    run_compare(paths, output=tmp_path / "out")
    assert "a and b act under settings of their own; policy.denoise_steps: 2 and 4" in capsys.readouterr().out


def test_tasks_are_told_where_they_have_enough_pairs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [result(tmp_path / "a", 0, range(60), tasks=2), result(tmp_path / "b", 28, range(60), tasks=2)]
    found = run_compare(paths, output=tmp_path / "out")
    assert {task: finding.verdict for task, finding in found.pairs[0].tasks.items()} == {
        "task-0": "better",
        "task-1": "better",
    }
    assert "  task-0  better         +93.3 points [" in capsys.readouterr().out


def test_several_results_are_ranked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = {"low": 10, "middle": 18, "high": 26}
    run_compare([result(tmp_path / n, solved, range(60)) for n, solved in names.items()], output=tmp_path / "out")
    rows = [line.split()[:3] for line in capsys.readouterr().out.splitlines() if line[:4].strip().isdigit()]
    assert rows == [["1", "a", "high"], ["1", "ab", "middle"], ["2", "b", "low"]]


def test_mistakes_are_told_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    one, other = result(tmp_path / "a", 5, range(20)), result(tmp_path / "b", 5, range(20, 40))
    result(tmp_path / "b2", 5, range(20))
    for name in ("policy", "empty", "compared"):
        (tmp_path / name).mkdir()
    (tmp_path / "policy" / "config.json").write_text('{"rlinf": {"model_type": "my_model"}}')
    (tmp_path / "compared" / "comparison.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("")
    damaged = Path(result(tmp_path / "damaged", 5, range(20)))
    damaged.write_text(damaged.read_text()[:400])
    monkeypatch.setattr(Played, "play", lambda *_: pytest.fail("played before all was checked"))
    for arguments, options, message in (
        ([one], {}, "1 to compare; name 2 to 26"),
        ([one, "nowhere"], {}, "nowhere does not exist; name a policy folder"),
        ([one, other], {}, "no trial in common"),
        ([one, one], {"alpha": 1.5}, "alpha=1.5 must lie between 0 and 1"),
        (["policy", "expert"], {}, "policy lies in no run whose settings could be used; name the recipe to play under"),
        (["expert", "random"], {}, "^expert and random need --recipe NAME"),
        ([one, "empty"], {}, "^empty is no policy, run or result: "),
        ([one, "compared"], {}, "^compared is no policy, .* written by `rlinf compare`: name the results in it"),
        ([one, "notes.txt"], {}, r"^notes\.txt is no policy, run or result"),
        ([one, "damaged"], {}, r"damaged/eval/step_0/result\.json is damaged"),
        ([one, one], {}, "is named twice"),
        ([one, "a"], {}, r"result\.json and a both mean "),
        (["expert", "random", "expert"], {"recipe": "toy_ppo_compact"}, "^expert is named twice"),
        (["expert", "policy"], {"recipe": "toy_ppo_compact"}, "policy/config.json: it is a checkpoint of my_model"),
        ([one, "b2"], {"output": Path("notes.txt/x")}, r"^--output=notes\.txt/x cannot be written: Not a directory"),
        (
            ["expert", "random"],
            {"recipe": "toy_ppo_compact", "max_pairs": 5000},
            "--max-pairs=5000 must be at most 1000",
        ),
        (["expert", "random"], {"recipe": "toy_ppo_compact", "overrides": ["env.eval.x=1"]}, "env.eval.x"),
    ):
        with pytest.raises(UserError, match=message):
            run_compare(arguments, **options)
    assert not (tmp_path / "logs").exists()


def test_policies_play_the_same_trials_until_there_is_a_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A random policy and the expert; then the random policy's result and the expert, who plays what is in it."""
    out = tmp_path / "played"
    found = run_compare(["random", "expert"], recipe="toy_ppo_compact", overrides=TOY, max_pairs=60, output=out)
    assert found.pairs[0].better == "expert"
    assert found.folder == out
    count = found.pairs[0].overall.pairs.count
    assert count in (12, 24, 48, 60)
    random, expert = (read_result(out / name) for name in ("random", "expert"))
    assert [(e.task, e.reset_id) for e in random.episodes] == [(e.task, e.reset_id) for e in expert.episodes]
    assert len(random.episodes) == random.protocol["trials.count"] == count
    assert (random.policy.kind, expert.policy.kind) == ("random", "expert")
    content = json.loads((out / "comparison.json").read_text())
    assert content["stopped"] == "verdict"
    assert content["policies"][0]["result"] == "random/eval/step_0/result.json"
    progress, verdict = capsys.readouterr().out.split("\n\n")  # nothing of the evaluations that are written
    assert all(" trials: random " in line for line in progress.splitlines())
    assert verdict.startswith("expert is better than random: ")

    again = run_compare([str(out / "random"), str(out / "expert")], output=tmp_path / "read")
    assert again.pairs[0].overall == found.pairs[0].overall
    mixed = run_compare([str(random.path), "expert"], output=tmp_path / "mixed")  # under the result's own settings
    assert mixed.pairs[0].overall == found.pairs[0].overall
    assert "expert is better than random" in capsys.readouterr().out


def test_an_interrupted_comparison_tells_what_it_has_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    play = Played.play
    calls: list[str] = []

    def interrupted(player: Played, reset_ids: Sequence[int]) -> None:
        calls.append(player.name)
        if len(calls) == 4:  # the second of both, in the second batch
            raise KeyboardInterrupt
        play(player, reset_ids)

    monkeypatch.setattr(Played, "play", interrupted)
    monkeypatch.setattr(compare, "find_contestants", lambda *_: twins)
    cfg = load_config("toy_ppo_compact", [*TOY, "runner.eval_expert=true"], purpose="eval")
    twins = [Played("one", "expert", cfg), Played("two", "expert", cfg)]
    with pytest.raises(KeyboardInterrupt):
        run_compare(["one", "two"], max_pairs=60, output=tmp_path / "out")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("12 trials: one ")
    assert lines[2].startswith("two and one are not separable: +0.0 points [")
    assert " after 12 pairs (" in lines[2]
    assert lines[-1] == f"comparison so far: {tmp_path}/out/comparison.json"
    content = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert content["stopped"] == "interrupted"
    assert [policy["success"]["trials"] for policy in content["policies"]] == [12, 12]
    assert len(read_result(tmp_path / "out" / "one").episodes) == 24


class Scripted:
    """A policy that solves every reset id below its skill, and remembers the batches it was asked to play."""

    def __init__(self, name: str, skill: int) -> None:
        self.name, self.skill = name, skill
        self.cfg = SimpleNamespace(env=SimpleNamespace(eval=SimpleNamespace(total_num_envs=16)))
        self.outcomes: dict[Trial, bool] = {}
        self.batches: list[int] = []

    def play(self, reset_ids: Sequence[int]) -> None:
        self.batches.append(len(reset_ids))
        self.outcomes |= {("suite", "task-0", reset_id): reset_id < self.skill for reset_id in reset_ids}


def test_a_policy_whose_comparisons_are_decided_plays_no_more() -> None:
    bad, good, better = players = [Scripted("bad", 0), Scripted("good", 250), Scripted("better", 260)]
    trials = rounds(dict.fromkeys(range(300), "task"), seed=0)
    assert play_until_decided(players, trials, alpha=0.05) == "all trials"
    assert bad.batches == [16]
    assert good.batches == better.batches == [16, 16, 32, 64, 128, 44]


def test_progress_counts_the_trials_of_a_result_that_were_played(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded = Recorded("old", "old", read_result(result(tmp_path / "old", 100, range(100))))
    assert play_until_decided([recorded, Scripted("new", 0)], rounds(dict.fromkeys(range(100)), 0), 0.05) == "verdict"
    assert capsys.readouterr().out.startswith("16 trials: old 16/16, new 0/16; -100.0 points")


def test_playing_ends_with_the_verdict() -> None:
    players = [Scripted("bad", 100), Scripted("good", 200)]
    trials = rounds(dict.fromkeys(range(300), "task"), seed=0)
    assert play_until_decided(players, trials, alpha=0.05) == "verdict"
    assert sum(players[0].batches) < 100
    assert players[0].outcomes.keys() == players[1].outcomes.keys()


def test_names_are_as_short_as_they_can_be() -> None:
    assert labels(["logs/q/sft", "logs/q/q/checkpoints/global_step_80"]) == ["sft", "global_step_80"]
    assert labels(["logs/a/eval/step_0/result.json", "logs/b/eval/step_0"]) == ["a", "b"]
    assert labels(["logs/a/eval/step_4/result.json", "logs/b"]) == ["a", "b"]
    assert labels(["logs/a/eval/step_4", "logs/a/eval/step_8"]) == ["step_4", "step_8"]
    assert labels(["logs/a/eval/step_4", "logs/a"]) == ["step_4", "a"]
    assert labels([".", "expert"]) == [Path.cwd().name, "expert"]
    assert labels(["x/a/1", "y/a/2", "x/b/1"]) == ["a/1", "a/2", "b/1"]
    assert labels(["p", "p", "expert"]) == ["p", "p (2)", "expert"]
    assert labels(["result.json", "expert"]) == ["result.json", "expert"]


def test_settings_are_told_from_policies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lr=3").mkdir()
    given = ["a", "env.eval.num_trials=4", "lr=3", "~env.eval.seed", "~/policies/b", "expert"]
    assert split_arguments(given) == (
        ["a", "lr=3", "~/policies/b", "expert"],
        ["env.eval.num_trials=4", "~env.eval.seed"],
    )
