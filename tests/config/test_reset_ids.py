"""env.eval.reset_ids: the trials of an evaluation by name, in the order given."""

import pytest

from rlinf.config.load import load_config
from rlinf.envs.spec import env_spec, eval_trials, num_trials
from rlinf.errors import UserError
from rlinf.storage.step_checkpoint import config_hash

TOY = ["runner.eval_random=true"]


def test_an_evaluation_plays_the_ids_that_are_named_in_their_order() -> None:
    env = load_config("toy_ppo_compact", [*TOY, "env.eval.reset_ids=[7,3,1000000]"], purpose="eval").env.eval
    assert eval_trials(env, env_spec(env)) == [7, 3, 1_000_000]
    assert num_trials(env, env_spec(env)) == 3


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("env.eval.reset_ids=[7,3,7]", "env.eval.reset_ids names an id twice"),
        (
            "env.eval.reset_ids=[5000]",
            "env.eval.reset_ids: 5000 is not held out in suite .*; its 1000 held-out ids begin",
        ),
        ("env.eval.reset_ids=[-1]", r"env.eval.reset_ids=\[-1\] must be a list, each item an integer from 0"),
    ],
)
def test_ids_that_no_evaluation_plays_are_refused(setting: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_config("toy_ppo_compact", [*TOY, setting], purpose="eval")


def test_training_has_no_such_list() -> None:
    with pytest.raises(UserError, match=r"env\.train\.reset_ids has no effect on training"):
        load_config("toy_ppo_compact", ["env.train.reset_ids=[1]"])


def test_runs_continue_whatever_was_evaluated() -> None:
    named = load_config("toy_ppo_compact", ["env.eval.reset_ids=[1,2]"])
    assert config_hash(named) == config_hash(load_config("toy_ppo_compact"))
