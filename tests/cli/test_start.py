"""`rlinf --version`, `rlinf recipes` and the shell's Tab, all without torch; and hints for paths that do not exist."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from rlinf.commands.completion import complete_recipe, complete_setting
from rlinf.config.load import load_config
from rlinf.config.recipes import RECIPES, recipe_sentences
from rlinf.errors import UserError
from rlinf.storage.step_checkpoint import newest_of_run, sha256, step_of
from rlinf.version import __version__
from tests.conftest import REPO

CODE = """
import sys
from rlinf.commands.cli import main
try:
    main()
finally:
    print([name for name in ("torch", "numpy", "hydra") if name in sys.modules], file=sys.stderr)
"""


def start(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`rlinf ARGUMENTS`; the last line of stderr lists the heavy modules that it imported."""
    env = {**os.environ, "PYTHONPATH": str(REPO), **environment}
    command = [sys.executable, "-c", CODE, *arguments]
    return subprocess.run(command, env=env, cwd=REPO, capture_output=True, text=True, check=False)


def test_version_and_recipes_need_nothing_heavy() -> None:
    version, recipes = start("--version"), start("recipes")
    assert (version.stdout, version.stderr) == (f"rlinf {__version__}\n", "[]\n")
    assert recipes.stderr == "[]\n"
    assert len(recipes.stdout.splitlines()) == len(list(RECIPES.glob("*.yaml")))
    assert tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["version"] == __version__


@pytest.mark.parametrize("name", sorted(recipe_sentences(RECIPES)))
def test_every_recipe_begins_with_a_sentence(name: str) -> None:
    sentence = recipe_sentences(RECIPES)[name]
    assert 20 < len(sentence) < 120
    assert sentence.endswith(".")


def test_completion_offers_commands_recipes_keys_and_choices() -> None:
    shell = {"COMP_WORDS": "rlinf re", "COMP_CWORD": "1", "_RLINF_COMPLETE": "complete_bash"}
    done = start(**shell)
    assert done.stdout.split() == ["recipes", "report", "replay", "record"]
    assert done.stderr == "[]\n"
    assert [name for name, _ in complete_recipe("toy_ppo")] == ["toy_ppo_compact", "toy_ppo_openvla_compact"]
    assert complete_setting("actor.optim.lr") == [
        *("actor.optim.lr=", "actor.optim.lr_scheduler=", "actor.optim.lr_warmup_steps="),
    ]
    assert complete_setting("actor.model.openpi.noise_me") == ["actor.model.openpi.noise_method="]
    assert complete_setting("algorithm.reward_type=c") == ["algorithm.reward_type=chunk_level"]
    assert complete_setting("runner.only_eval=") == ["runner.only_eval=true", "runner.only_eval=false"]


def test_an_option_of_another_program_is_answered_with_the_setting() -> None:
    done = start("train", "toy_ppo_compact", "--learning-rate=3e-4")
    assert done.returncode == 2
    assert done.stderr.startswith(
        "error: No such option: --learning-rate; settings are written key=value, here actor.optim.lr=VALUE\n"
    )


def save(folder: Path, saved_at: int) -> Path:
    """A checkpoint that holds an empty file."""
    (folder / "actor/model").mkdir(parents=True)
    (folder / "actor/w").touch()
    files = {"actor/w": sha256(folder / "actor/w")}
    manifest = {"step": step_of(folder.name), "config_hash": "a", "files": files, "versions": {}, "saved_at": saved_at}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def test_a_run_folder_stands_for_its_newest_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    newest = save(tmp_path / "run/toy/checkpoints/global_step_10", 20)
    save(tmp_path / "run/toy/checkpoints/global_step_9", 10)
    (tmp_path / "run/toy/checkpoints/global_step_11").mkdir()  # never completed
    for folder in ("run", "run/toy", "run/toy/checkpoints"):
        assert newest_of_run(str(tmp_path / folder)) == newest
    assert newest_of_run(str(newest)) is None
    cfg = load_config("toy_ppo_compact", [f"runner.ckpt_path={tmp_path}/run"], purpose="eval")
    assert cfg.runner.ckpt_path == str(newest)
    assert f"runner.ckpt_path={tmp_path}/run is a run folder; taking its newest step, {newest}" in caplog.text


def test_a_folder_of_several_runs_must_be_said_more_exactly(tmp_path: Path) -> None:
    steps = [save(tmp_path / f"{name}/checkpoints/global_step_3", n) for n, name in enumerate(("a", "b"))]
    with pytest.raises(UserError, match=f"several runs; name one of {steps[0]}, {steps[1]}$"):
        newest_of_run(str(tmp_path))
    shutil.rmtree(tmp_path / "b")
    assert newest_of_run(str(tmp_path)) == steps[0]
    shutil.rmtree(tmp_path / "a")
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(UserError, match="is a run folder without a checkpoint"):
        newest_of_run(str(tmp_path))


@pytest.mark.parametrize("key", ["actor.model.model_path", "runner.ckpt_path"])
def test_a_hub_id_is_answered_with_where_to_get_it(key: str) -> None:
    with pytest.raises(UserError) as error:
        load_config("toy_ppo_compact", [f"{key}=some-lab/pi0_base"], purpose="eval")
    assert f"hf download some-lab/pi0_base --local-dir checkpoints/pi0_base, then {key}=checkpoints/pi0_base" in str(
        error.value
    )
