"""The metric table: complete, unambiguous, the same in the docs."""

from pathlib import Path

import pytest

from rlinf.metrics.names import CANONICAL, METRICS, expand, find_metric, markdown, task_metric

REPO = Path(__file__).parents[2]

GUIDE_NAMES = {
    "actor": ["loss", "value_loss", "grad_norm", "approx_kl", "pg_clipfrac", "value_clip_ratio"],
    "train": ["loss", "entropy_loss"],
    "train/actor": [
        "approx_kl",
        "clip_fraction",
        "clipped_ratio",
        "grad_norm",
        "lr",
        "policy_loss",
        "policy_loss_abs",
        "ratio",
        "ratio_abs",
        "dual_cliped_ratio",
        "entropy_loss",
        "total_loss",
    ],
    "train/critic": ["value_loss", "value_clip_ratio", "explained_variance", "lr"],
    "rollout": [
        "rewards",
        "advantages_mean",
        "advantages_max",
        "advantages_min",
        "returns_mean",
        "returns_max",
        "returns_min",
    ],
    "env": [
        "success_once",
        "success_at_end",
        "fail_once",
        "fail_at_end",
        "return",
        "reward",
        "episode_len",
        "num_trajectories",
        "avg_len",
    ],
    "eval": [
        "success_once",
        "success_at_end",
        "fail_once",
        "fail_at_end",
        "return",
        "reward",
        "episode_len",
        "num_trajectories",
        "avg_len",
        "avg_num_subtasks",
        "success_len_1",
        "success_len_5",
    ],
    "time": ["step", "sync_weights", "generate_rollouts", "cal_adv_and_returns", "actor_training", "eval"],
    "time/env": [
        "interact",
        "env_interact_step",
        "env/bootstrap_step",
        "env/send_rollout_trajectories",
        "evaluate",
    ],
    "time/rollout": ["rollout/generate", "predict", "sync_model_from_actor", "evaluate"],
    "time/actor": ["actor/sync_model_to_rollout", "actor/compute_adv", "run_training"],
}


@pytest.mark.parametrize("name", [f"{group}/{name}" for group, names in GUIDE_NAMES.items() for name in names])
def test_every_name_of_the_guides_is_logged(name: str) -> None:
    canonical = CANONICAL.get(name, name)
    assert expand({canonical: 0.25})[name] == 0.25


@pytest.mark.parametrize(
    ("alias", "canonical"),
    [
        ("actor/loss", "train/actor/policy_loss"),
        ("actor/pg_clipfrac", "train/actor/clip_fraction"),
        ("actor/value_loss", "train/critic/value_loss"),
        ("actor/value_clip_ratio", "train/critic/value_clip_ratio"),
        ("actor/grad_norm", "train/actor/grad_norm"),
        ("actor/approx_kl", "train/actor/approx_kl"),
        ("train/loss", "train/actor/total_loss"),
        ("train/entropy_loss", "train/actor/entropy_loss"),
        ("env/avg_num_subtasks", "env/avg_len"),
    ],
)
def test_aliases_mean_what_the_guides_say(alias: str, canonical: str) -> None:
    assert CANONICAL[alias] == canonical


def test_no_name_is_used_twice() -> None:
    names = [*METRICS, *(alias for metric in METRICS.values() for alias in metric.aliases)]
    assert len(names) == len(set(names))


def test_expand_keeps_values_and_adds_aliases() -> None:
    assert expand({"train/actor/policy_loss": -0.5, "env/return": 2.0}) == {
        "train/actor/policy_loss": -0.5,
        "env/return": 2.0,
        "actor/loss": -0.5,
    }


def test_families_match_one_path_component() -> None:
    assert find_metric("eval/task/door-open-v3/success_once").name == "eval/task/<task>/success_once"
    assert find_metric("env/" + task_metric("open/close door", "return")).name == "env/task/<task>/return"
    assert find_metric("env/extra/door_angle").unit == "1"
    with pytest.raises(ValueError, match="eval/task/a/b/success_once"):
        find_metric("eval/task/a/b/success_once")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("train/actor/polcy_loss", "nearest is 'train/actor/policy_loss'"),
        ("env/sucess_once", "nearest is 'env/success_once'"),
        ("actor/loss", "is an alias and is added by itself; log 'train/actor/policy_loss'"),
    ],
)
def test_undocumented_names_are_refused(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        expand({name: 1.0})


def test_rows_are_filled_and_do_not_break_the_markdown_table() -> None:
    for metric in METRICS.values():
        assert metric.unit
        assert metric.meaning
        assert "|" not in metric.meaning, metric.name


def test_docs_hold_the_table() -> None:
    assert (REPO / "docs" / "metrics.md").read_text(encoding="utf-8") == markdown()
