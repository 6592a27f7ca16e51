"""`rlinf compare`: which of several policies is better, on the same trials, with as few of them as the answer needs."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from rlinf.commands.contestants import COMPARISON as FILE
from rlinf.commands.contestants import Recorded, find_contestants
from rlinf.commands.run_folders import new_folder
from rlinf.config.schema import TIME
from rlinf.envs.spec import env_spec, eval_trials
from rlinf.errors import UserError, writing
from rlinf.metrics.console import showing_progress
from rlinf.metrics.stats import Rate
from rlinf.results.comparison import MOST_POLICIES, Comparison, PairFinding, common_trials, compare_outcomes
from rlinf.results.protocol import differences, of_benchmark
from rlinf.results.schedule import batches, rounds
from rlinf.results.sequential import ALPHA, Finding
from rlinf.simulators.contract import task_number
from rlinf.storage.atomic_folder import first_free, write_file
from rlinf.storage.provenance import describe_start
from rlinf.storage.redaction import redacted
from rlinf.storage.run_folder import locked

if TYPE_CHECKING:
    from rlinf.commands.played import Played

Contestant: TypeAlias = "Recorded | Played"
SCHEMA, VERSION = "rlinf-comparison", 1
OUTPUT = f"logs/{TIME}-compare"
VERDICT, ALL_TRIALS, INTERRUPTED = "verdict", "all trials", "interrupted"  # why a comparison ended
logger = logging.getLogger(__name__)


def run_compare(
    arguments: Sequence[str],
    *,
    recipe: str | None = None,
    overrides: Sequence[str] = (),
    max_pairs: int | None = None,
    seed: int = 0,
    alpha: float = ALPHA,
    output: Path | None = None,
) -> Comparison:
    """Compare what the arguments name; plays what has no result yet, prints and writes what was found."""
    if not 2 <= len(arguments) <= MOST_POLICIES:
        raise UserError(f"{len(arguments)} to compare; name 2 to {MOST_POLICIES} policies or results")
    if not 0 < alpha < 1:
        raise UserError(f"alpha={alpha} must lie between 0 and 1; 0.05 is usual")
    contestants = find_contestants(arguments, recipe, overrides)
    check_protocols(contestants)
    players = [c for c in contestants if not isinstance(c, Recorded)]
    trials = _trials(contestants, max_pairs)
    for player in players:
        player.check()
    _warn_of_equal_policies(contestants)
    with _output_folder(output) as folder:
        taken: set[Path] = set()
        for player in players:
            own = first_free(
                folder / (re.sub(r"[^\w.-]+", "-", player.name).strip("-") or "policy"), taken.__contains__
            )
            taken.add(own)
            player.write_to(own)
        stopped = INTERRUPTED
        try:
            stopped = play_until_decided(contestants, rounds(trials, seed), alpha)
        finally:  # what was played is kept, however it ended
            for player in players:
                player.write()
            found = _compared(contestants, alpha)
            if found.played:
                about = {"stopped": stopped, "seed": seed, "max_pairs": len(trials)}
                _write(folder / FILE, contestants, found, about)
            if stopped == INTERRUPTED:
                _print_so_far(found, folder, players)
        print_comparison(found)
        if players and stopped == ALL_TRIALS and not all(pair.decided for pair in found.pairs):
            print("all trials were played; --max-pairs N plays more where the benchmark holds out more")
        return replace(found, folder=folder)


def check_protocols(contestants: Sequence[Contestant]) -> None:
    """Refuse results and policies of different benchmarks; say in which settings of their own policies differ.

    Which trials were played is no reason: those that both have are compared.
    """
    first, *others = contestants
    for other in others:
        found = differences(_of_trial(first), _of_trial(other))
        if found:
            listed = "\n".join(f"  {difference}" for difference in found)
            played = [c for c in (first, other) if not isinstance(c, Recorded)]
            advice = (
                "settings as KEY=VALUE, or --recipe NAME, let the policies play alike"
                if len(played) == 2
                else "evaluate one again with the other's settings, or name the policies in place of the results, with "
                "--recipe NAME: both are then played alike"
            )
            raise UserError(
                f"{first.name} and {other.name} are of different protocols, so their trials are not the same:\n"
                f"{listed}\n{advice}"
            )
        own = [d for d in differences(_acting(first), _acting(other)) if None not in (d.first, d.second)]
        if own:
            print(f"{first.name} and {other.name} act under settings of their own; {', '.join(map(str, own))}")


def _warn_of_equal_policies(contestants: Sequence[Contestant]) -> None:
    """Say which policies have the same files, wherever these lie."""
    known: dict[str, str] = {}
    for contestant in contestants:
        digest = contestant.identity.sha256
        if digest is not None and (first := known.setdefault(digest, contestant.name)) != contestant.name:
            print(f"warning: {first} and {contestant.name} are the same policy, file by file")


def _of_trial(contestant: Contestant) -> dict[str, Any]:
    """The keys of a protocol that decide what one trial is."""
    return {k: v for k, v in of_benchmark(contestant.protocol).items() if not k.startswith("trials.")}


def _acting(contestant: Contestant) -> dict[str, Any]:
    """The keys of a protocol that say how a policy acts; an expert has none."""
    kept = of_benchmark(contestant.protocol)
    return {key: value for key, value in contestant.protocol.items() if key not in kept}


def _trials(contestants: Sequence[Contestant], max_pairs: int | None) -> dict[int, object]:
    """Reset ids that all play, with their tasks: those that all results hold, else the benchmark's own.

    Of results, the trials that are not compared are dropped.
    """
    recorded = [c for c in contestants if isinstance(c, Recorded)]
    if not recorded:
        return _benchmark_trials(next(c for c in contestants if not isinstance(c, Recorded)), max_pairs)
    common = sorted(common_trials({c.name: c.outcomes for c in recorded}), key=lambda trial: trial[2])
    for contestant in recorded:
        print(f"{contestant.name}: {len(contestant.outcomes)} trials, {len(common)} of them in all results")
    if not common:
        raise UserError("these results have no trial in common: no suite, task and reset id is in all of them")
    wanted = min(max_pairs or len(common), len(common))
    kept = [common[i * len(common) // wanted] for i in range(wanted)]
    for contestant in recorded:
        contestant.outcomes = {trial: contestant.outcomes[trial] for trial in kept}
    return {reset_id: task for _, task, reset_id in kept}


def _benchmark_trials(player: Played, max_pairs: int | None) -> dict[int, object]:
    """The held-out trials of a policy's evaluation, or as many as were asked for."""
    env = player.cfg.env.eval
    spec = env_spec(env, "env.eval")
    if max_pairs is not None:
        if max_pairs > (held_out := len(spec.reset_ids["eval"])):
            raise UserError(f"--max-pairs={max_pairs} must be at most {held_out}, the held-out trials of {spec.suite}")
        env = replace(env, num_trials=max_pairs, reset_ids=[])
    return {reset_id: task_number(reset_id) for reset_id in eval_trials(env, spec)}


def play_until_decided(contestants: Sequence[Contestant], played: Sequence[Sequence[int]], alpha: float) -> str:
    """Play batch after batch until every pair is decided or all trials are played; returns which of the two it was.

    A policy whose comparisons are all decided plays no more.
    """
    players = [c for c in contestants if not isinstance(c, Recorded)]
    unit, total = max((p.cfg.env.eval.total_num_envs for p in players), default=0), 0
    for batch in batches(played, unit) if players else ():
        with showing_progress():
            for player in players:
                player.play(batch)
        total += len(batch)
        found = _compared(contestants, alpha)
        _print_progress(total, contestants, found)
        undecided = {name for pair in found.pairs if not pair.decided for name in (pair.a, pair.b)}
        players = [player for player in players if player.name in undecided]
        if not players:
            return VERDICT
    return ALL_TRIALS


def _compared(contestants: Sequence[Contestant], alpha: float) -> Comparison:
    return compare_outcomes({c.name: c.outcomes for c in contestants}, alpha)


def _print_progress(total: int, contestants: Sequence[Contestant], found: Comparison) -> None:
    standings = {s.name: s for s in found.standings}
    rates = ", ".join(f"{c.name} {standings[c.name].successes}/{standings[c.name].trials}" for c in contestants)
    decided = f"{sum(pair.decided for pair in found.pairs)} of {len(found.pairs)} comparisons decided"
    print(
        f"{total} trials: {rates}; {points(found.pairs[0].overall) if len(found.pairs) == 1 else decided}", flush=True
    )


def print_comparison(found: Comparison) -> None:
    """Say who is better and by how much, task by task where there is enough; of several policies, the ranking."""
    print()
    if len(found.standings) > 2:
        width = max(len(s.name) for s in found.standings)
        print(f"rank  group  {'policy':<{width}}  success")
        for s in found.standings:
            print(f"{s.rank:>4}  {s.groups:<5}  {s.name:<{width}}  {Rate(s.successes, s.trials)}")
        print(f"policies that share a letter are not separable; all of it holds with {_percent(1 - found.alpha)}\n")
    for pair in found.pairs:
        print(sentence(pair))
        _print_tasks(pair)


def _print_so_far(found: Comparison, folder: Path, players: Sequence[Played]) -> None:
    """Say what an interrupted comparison has found, and where it lies."""
    if found.played:
        print_comparison(found)
        print(f"comparison so far: {folder / FILE}", flush=True)
    elif written := [str(player.file) for player in players if player.file is not None]:
        print(f"nothing was compared yet; what was played: {', '.join(written)}", flush=True)


def sentence(pair: PairFinding) -> str:
    """The verdict in words, e.g. `b is better than a: +65.6 points [+38.0, +84.1] after 32 pairs (...)`."""
    overall, n = pair.overall, pair.overall.pairs
    counts = (
        f"{n.only_b} solved by {pair.b} alone, {n.only_a} by {pair.a} alone, {n.both} by both, {n.neither} by neither"
    )
    if pair.decided:
        verdict = f"{pair.b} is {overall.verdict} than {pair.a}"
    else:
        verdict = f"{pair.b} and {pair.a} are not separable"
    return f"{verdict}: {points(overall)} after {n.count} pairs ({counts})"


def points(finding: Finding) -> str:
    """The effect and its interval in points of success, e.g. `+65.6 points [+38.0, +84.1]`."""
    return f"{100 * finding.effect:+.1f} points [{100 * finding.low:+.1f}, {100 * finding.high:+.1f}]"


def _print_tasks(pair: PairFinding) -> None:
    """The tasks with enough pairs, those with a verdict first."""
    if pair.too_few:
        print(f"  {pair.too_few} tasks have fewer than {pair.needed} pairs, too few for a verdict of their own")
    width = max(map(len, pair.tasks), default=0)
    for task, finding in sorted(pair.tasks.items(), key=lambda row: -row[1].evidence):
        print(f"  {task:<{width}}  {finding.verdict:<13}  {points(finding)}  {finding.pairs.count} pairs")


def _percent(share: float) -> str:
    return f"{100 * share:g} %"


def _write(path: Path, contestants: Sequence[Contestant], found: Comparison, about: dict[str, Any]) -> None:
    """Write comparison.json."""
    standings = {s.name: s for s in found.standings}
    policies = [
        {
            "name": c.name,
            "argument": c.argument,
            **asdict(c.identity),
            "result": _relative(c.file, path.parent),
            "success": asdict(Rate(standings[c.name].successes, standings[c.name].trials)),
            "acting": _acting(c),
        }
        for c in contestants
    ]
    content = {
        "schema": SCHEMA,
        "version": VERSION,
        **about,
        "policies": redacted(policies),
        **found.to_json(),
        "protocol": _of_trial(contestants[0]),
        "provenance": describe_start([]),
    }
    with writing(str(path)):
        write_file(path, json.dumps(content, indent=1) + "\n")


def _relative(file: Path | None, folder: Path) -> str | None:
    """A file's path, relative to a folder that it lies in."""
    if file is None:
        return None
    file, folder = file.absolute(), folder.absolute()
    return str(file.relative_to(folder) if file.is_relative_to(folder) else file)


@contextmanager
def _output_folder(output: Path | None) -> Iterator[Path]:
    """A folder that holds nothing yet, locked for the block."""
    if output is None:
        with new_folder(OUTPUT, key="--output") as folder:
            yield folder
        return
    folder = output.expanduser()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"--output={output} exists and is not an empty folder; choose another one")
    with locked(folder, logger.warning, key="--output"):
        yield folder
