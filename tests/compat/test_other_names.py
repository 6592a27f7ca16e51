"""The names of other frameworks lead to keys that exist."""

from __future__ import annotations

import pytest

from rlinf.compat.other_names import OTHER_NAMES, key_meant
from rlinf.config.load import load_config
from rlinf.config.schema import Config
from rlinf.errors import UserError
from rlinf.models.config import ModelConfig
from rlinf.typed import leaves


def test_every_name_leads_to_a_key() -> None:
    keys = {path for path, _ in leaves(Config)} | {path for path, _ in leaves(ModelConfig, "actor.model")}
    assert {key for named in OTHER_NAMES.values() for key in named if key} <= keys
    assert len(OTHER_NAMES) > 20


@pytest.mark.parametrize(
    ("setting", "purpose", "key"),
    [
        ("learning_rate=3e-4", "train", "actor.optim.lr"),
        ("learning_rate=3e-4", "sft", "sft.lr"),
        ("actor.optim.learning_rate=3e-4", "train", "actor.optim.lr"),
        ("sft.learning_rate=3e-4", "train", "sft.lr"),
        ("env.eval.num_envs=4", "train", "env.eval.total_num_envs"),
        ("trainer.total_epochs=3", "train", "runner.max_epochs"),  # verl
        ("policy.n_action_steps=8", "train", "actor.model.num_action_chunks"),  # LeRobot
        ("ent_coef=0.01", "train", "algorithm.entropy_bonus"),  # Stable-Baselines3
        ("num_train_steps=1000", "sft", "sft.steps"),  # openpi
        ("seed=1", "train", "runner.seed"),
    ],
)
def test_an_unknown_key_of_another_framework_names_ours(setting: str, purpose: str, key: str) -> None:
    with pytest.raises(UserError) as error:
        load_config("toy_ppo_compact", [setting], purpose=purpose)  # type: ignore[arg-type]
    assert str(error.value) == f"command line: unknown key {setting.partition('=')[0]}; did you mean {key}?"


def test_a_name_that_nobody_knows_means_nothing() -> None:
    assert key_meant("actor.zzz") is None
