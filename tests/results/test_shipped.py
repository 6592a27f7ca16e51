"""The policies in results/checkpoints: few bytes, whole, and as good as their rows say."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import torch

from rlinf.commands import jobs
from rlinf.commands.record import measured_of
from rlinf.config.load import load_config
from rlinf.metrics.stats import Rate
from rlinf.models.files.tensor_files import read_headers
from rlinf.results.headline import Headline, Shipped, check_sizes, read_headlines, shared_protocol
from rlinf.results.identity import files_hash
from rlinf.results.result import read_result

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"
SHIPPED = [(row, row.shipped) for row in read_headlines(RESULTS) if row.shipped is not None]


def test_all_policies_together_are_small_and_belong_to_rows() -> None:
    assert 0 < check_sizes(RESULTS) <= 60_000_000
    assert {folder.name for folder in (RESULTS / "checkpoints").iterdir()} == {
        Path(s.checkpoint).name for _, s in SHIPPED
    }


@pytest.mark.parametrize(("row", "shipped"), SHIPPED, ids=lambda one: getattr(one, "name", ""))
def test_a_policy_is_the_one_that_its_row_was_measured_with(row: Headline, shipped: Shipped) -> None:
    folder = RESULTS / shipped.checkpoint
    assert files_hash((folder,)) == shipped.measured.policy
    dtypes = {header.dtype for file in folder.glob("*.safetensors") for header in read_headers(file).values()}
    assert dtypes == {"BF16"}
    assert f"runner.ckpt_path=results/{shipped.checkpoint}" in shipped.measured.command.split()


@pytest.mark.slow
@pytest.mark.parametrize(("row", "shipped"), SHIPPED, ids=lambda one: getattr(one, "name", ""))
def test_a_policy_scores_as_its_row_says(
    row: Headline, shipped: Shipped, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same counts on the same kind of machine; on others, 95 % intervals that overlap."""
    want = shipped.measured
    if want.device["kind"] == "cuda" and not torch.cuda.is_available():
        pytest.skip("the row was measured on a GPU")
    monkeypatch.chdir(ROOT)
    _, command, recipe, *settings = shlex.split(want.command)
    assert command == "eval"
    jobs.evaluate(load_config(recipe, [*settings, f"runner.logger.log_path={tmp_path}"], purpose="eval"))
    result = read_result(tmp_path)
    got = measured_of(result)
    if (got.machine, shared_protocol(result.protocol)) == (want.machine, row.protocol):
        assert (got.success, got.tasks, got.table) == (want.success, want.tasks, want.table)
    else:
        a, b = (Rate(int(m.success["successes"]), int(m.success["trials"])) for m in (got, want))
        assert a.low <= b.high
        assert b.low <= a.high
