"""What makes reinforcement learning work: trainings of one recipe from one policy that differ in one setting each.

    python benchmarks/study.py [--folder logs/study] [--steps 24] [--only AXIS | --so-far] [--add] [--results results]

Demonstrations and a weak policy are made once; every training plays the same number of episodes from there, and the
policy it leaves is evaluated without noise on the same held-out trials. Axes that change imitation make a policy of
their own first, which stops where the recipe's share of training layouts succeeds, as the shared one does. Trainings
that are complete in the folder are not repeated, so that a study can be stopped and gone on with; `--so-far` shows
those and makes no other, and `--add` puts lines made later into the file that is there. The table goes to standard
output and to RESULTS/studies/NAME.json, which docs/results.md shows (`make docs`).
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rlinf.metrics.loggers import read_jsonl
from rlinf.metrics.stats import Rate
from rlinf.results.result import Result, read_result, results_of_run
from rlinf.results.study import Study, Trial, read_studies, write_study

RECIPE = "quickstart"
NAME = "quickstart"
NOTE = (
    "One task of MetaWorld (handle-press-side), a compact π0, from one weak policy; every line plays as many episodes. "
    "The recipe's own settings are trained three times, with other seeds, to show how far lines differ by chance."
)
SUCCESS = "env/success_once"
NOISE_FOR = "one draw of noise for all actions of a chunk"
FLOW = "actor.model.openpi."
NO_CRITIC = ("actor.model.add_value_head=false", f"{FLOW}value_input=null")
GRPO = ("algorithm.adv_type=grpo", "algorithm.loss_type=actor", "env.train.auto_reset=false", *NO_CRITIC)


@dataclass(frozen=True)
class Line:
    """A training to be made."""

    axis: str
    settings: tuple[str, ...] = ()
    envs: int = 1  # times the recipe's, in as many fewer steps
    imitation: bool = False  # its settings reach imitation, so that it needs a policy of its own

    @property
    def folder(self) -> str:
        """Name of its folder: the axis and the values."""
        values = "_".join(part.rpartition("=")[2] for part in self.settings)
        return re.sub(r"[^\w.-]+", "_", f"{self.axis}-{values or 'as_it_is'}")

    @property
    def acts_otherwise(self) -> bool:
        """Whether its settings change how a policy acts without noise, so that the start must be played again."""
        return any(part.startswith("actor.model.num_steps=") for part in self.settings)


def lines() -> list[Line]:
    """The study: axis by axis."""
    made = [Line("the recipe")] + [Line("the recipe", (f"runner.seed={seed}",)) for seed in (1, 2)]
    made += [Line("noise level", (f"{FLOW}noise_level={level}",)) for level in (0.25, 0.5, 1.5)]
    made += [Line(NOISE_FOR, (f"{FLOW}noise_per=chunk", f"{FLOW}noise_level={level}")) for level in (0.5, 1.0)]
    made += [Line("source of the noise", (f"{FLOW}noise_method=flow_noise",))]
    made += [Line("denoising steps", (f"actor.model.num_steps={steps}",)) for steps in (1, 4)]
    # A critic of another shape does not fit the shared policy's file.
    made += [Line("critic", (f"{FLOW}value_input={what}",), imitation=True) for what in ("expert", "vlm")]
    made += [Line("learning rate", (f"actor.optim.lr={rate}",)) for rate in ("3e-5", "3e-4")]
    made += [Line("environments a step", ("env.train.total_num_envs=64",), envs=2)]
    groups = [(f"algorithm.group_size={size}", f"env.train.group_size={size}") for size in (8, 16)]
    made += [Line("GRPO, size of a group", (*GRPO, *group)) for group in groups]
    made += [Line("what learns", (f"{FLOW}train_expert_only=true",))]
    made += [Line("actions a chunk", (f"actor.model.num_action_chunks={n}",), imitation=True) for n in (2, 5, 10)]
    made += [Line("imitation's state loss", (f"sft.state_loss={weight}",), imitation=True) for weight in (0.0, 1.0)]
    return made


def call(*args: str, log: Path) -> None:
    """Run a command of the package with its output in a file; ends the study where it fails."""
    whole = [sys.executable, "-m", "rlinf", *args]
    with log.open("a", encoding="utf-8") as out:
        print("$", shlex.join(whole), file=out, flush=True)
        code = subprocess.run(whole, stdout=out, stderr=subprocess.STDOUT, check=False).returncode
    if code:
        sys.exit(f"{shlex.join(whole)} ended with status {code}; see {log}")


def evaluate(folder: Path, policy: Path, settings: Sequence[str]) -> Result:
    """What a policy scores on the recipe's held-out trials; played once."""
    if not results_of_run(folder):
        places = (f"runner.ckpt_path={policy}", f"runner.logger.log_path={folder}")
        call("eval", RECIPE, *places, "env.eval.video_cfg.save_video=false", *settings, log=folder.with_suffix(".log"))
    return read_result(results_of_run(folder)[0])


def imitate(folder: Path, demos: Path, settings: Sequence[str]) -> Path:
    """The policy of the folder, which imitates the demonstrations; made once, and they with it."""
    folder.mkdir(parents=True, exist_ok=True)
    policy = folder / "policy"
    if not demos.exists():
        call("collect", RECIPE, f"collect.output={demos}", log=folder / "collect.log")
    if not policy.exists():
        call("sft", RECIPE, f"sft.dataset={demos}", f"sft.output={policy}", *settings, log=folder / "sft.log")
    return policy


def train(line: Line, folder: Path, steps: int) -> tuple[Trial, Result]:
    """One line of the study, made if it is not there, and the evaluation of its policy."""
    place, demos = folder / line.folder, folder / "demos"
    if line.imitation:
        policy = imitate(place / "start", demos, line.settings)
    else:
        policy = imitate(folder / "start", demos, ())
    place.mkdir(parents=True, exist_ok=True)
    settings = [part for part in line.settings if not part.startswith("sft.")]
    run, finished = place / "run", place / "finished"
    if not finished.exists():
        places = [f"actor.model.model_path={policy}", f"runner.logger.log_path={run}"]
        go_on = ["runner.resume_dir=auto"] if run.exists() else []
        limits = [f"runner.max_epochs={steps // line.envs}", "runner.save_interval=-1", "runner.val_check_interval=-1"]
        call("train", RECIPE, *places, *limits, *settings, *go_on, log=place / "train.log")
        finished.touch()
    rows = [row for row in read_jsonl(run / "metrics.jsonl") if SUCCESS in row]
    judged = [part for part in settings if not part.startswith("runner.seed=")]  # by the same noise
    shared = not line.imitation and not line.acts_otherwise
    before = evaluate(folder / "before" if shared else place / "before", policy, [] if shared else judged)
    after = evaluate(place / "after", run, judged)
    trial = Trial(
        axis=line.axis,
        settings=list(line.settings),
        before=_counts(before),
        after=_counts(after),
        last=round(sum(row[SUCCESS] for row in rows[-10:]) / len(rows[-10:]), 4),
        steps=len(rows),
        seconds=round(sum(row["time/step"] for row in rows), 1),
    )
    return trial, after


def _counts(result: Result) -> list[int]:
    return [int(result.success["successes"]), int(result.success["trials"])]


def shown(trial: Trial) -> str:
    """A line of the table."""
    told = f"{trial.axis}: {' '.join(trial.settings) or 'as it is'}"
    ends = f"{Rate(*trial.before)!s:>32} -> {Rate(*trial.after)}"
    return f"{told}\n{ends}, {100 * trial.last:.1f} % with noise, {trial.steps} steps, {trial.seconds:.0f} s"


def joined(made: list[Trial], results: Path) -> Study:
    """The study in RESULTS with these trials beside or instead of its own, which began with the same policy."""
    there = [study for study in read_studies(results) if study.name == NAME]
    if not there:
        sys.exit(f"--add: {results} holds no study {NAME}")
    trials = (*there[0].trials, *made)
    starts = {tuple(trial.before) for trial in trials if trial.axis in ("the recipe", "noise level", NOISE_FOR)}
    if len(starts) > 1:
        sys.exit(f"--add: these trainings began with another policy than those of {results}: {sorted(starts)}")
    order = [(line.axis, list(line.settings)) for line in lines()]
    named = {(trial.axis, *trial.settings): trial for trial in trials}
    return replace(there[0], trials=tuple(sorted(named.values(), key=lambda t: order.index((t.axis, t.settings)))))


def main() -> None:
    """Make what is missing of the study, and show it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("logs/study"), help="where the trainings are")
    parser.add_argument("--steps", type=int, default=24, help="training steps of a line with the recipe's environments")
    parser.add_argument("--only", help="this axis alone; nothing is written to RESULTS without --add")
    parser.add_argument("--so-far", action="store_true", help="the trainings that are complete, and no other")
    parser.add_argument("--add", action="store_true", help="keep the other lines of the file in RESULTS")
    parser.add_argument("--results", type=Path, default=Path("results"), help="folder of the rows")
    args = parser.parse_args()
    wanted = [line for line in lines() if args.only in (None, line.axis)]
    if not wanted:
        sys.exit(f"--only {args.only} is no axis: {', '.join(dict.fromkeys(line.axis for line in lines()))}")
    if args.so_far:
        wanted = [line for line in wanted if results_of_run(args.folder / line.folder / "after")]
        if not wanted:
            sys.exit(f"--folder {args.folder} holds no complete training")
    trials = []
    for line in wanted:
        trial, result = train(line, args.folder.absolute(), args.steps)
        trials.append(trial)
        print(shown(trial), flush=True)
    if args.add:
        print(write_study(joined(trials, args.results), args.results))
    elif args.only is None:
        device, commit = str(result.device.get("name", "CPU")), str(result.provenance.get("commit") or "")[:12]
        command = f"python benchmarks/study.py --steps {args.steps}"
        print(write_study(Study(NAME, RECIPE, NOTE, command, device, commit, tuple(trials)), args.results))


if __name__ == "__main__":
    main()
