"""benchmarks/memory.py with compact networks: every number is there, and what must not change is watched."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import memory
import memory_report
import pytest
import torch


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """The numbers of one run."""
    file: Path = tmp_path_factory.mktemp("run") / "run.json"
    memory.main(["--size", "compact", "--json", str(file)])
    return json.loads(file.read_text())


def test_offload_moves_the_optimiser_and_changes_nothing(results: dict) -> None:
    shared = results["shared"]
    off, on = shared["runs"]
    assert {off["mode"], on["mode"]} == {"shared"}
    assert off["sync_bytes"] == on["sync_bytes"] == off["offload_bytes"] == off["offload_s"] == 0
    counters, rest = divmod(on["offload_bytes"] - 2 * 2 * 4 * shared["trainable"], 2 * 4)  # out and back, two moments
    assert rest == 0
    assert 0 < counters < 200  # one of fp32 for each tensor
    assert memory_report.grad_norm(shared) > 0
    if not torch.cuda.is_available():
        assert shared["difference"] == shared["difference_by_itself"] == 0


def test_fsdp_on_one_rank_learns_the_same(results: dict) -> None:
    plain, *sharded = results["fsdp"]
    assert [row["strategy"] for row in results["fsdp"]] == [strategy.name for strategy in memory.STRATEGIES]
    assert plain["moved"]["max"] > 1e-5
    assert max(row[key]["max"] for row in sharded for key in ("fp32_gap", "weight_gap")) < 1e-5
    assert min(row["update_s"] for row in results["fsdp"]) > 0


def test_a_copy_leaves_whole_and_comes_back_equal(results: dict) -> None:
    found = results["copy"]
    assert found["offload_bytes"] == found["onload_bytes"] == found["parameter_bytes"] > 1_000_000
    assert found["equal"]
    assert found["first_equal"]


def test_the_report_shows_every_row(results: dict) -> None:
    lines = memory_report.report(results).splitlines()
    header = next(i for i, line in enumerate(lines) if line.startswith("shared"))
    assert len({len(line) for line in lines[header - 1 : header + 3]}) == 1
    header = next(i for i, line in enumerate(lines) if line.startswith("one rank"))
    assert len({len(line) for line in lines[header - 1 : header + 1 + len(memory.STRATEGIES)]}) == 1


def test_what_changed_is_named(results: dict) -> None:
    assert memory_report.broken(results) == []
    bad = copy.deepcopy(results)
    bad["shared"] |= {"difference": 1e-3, "difference_by_itself": 0.0}
    bad["shared"]["runs"][1] |= {"sync_bytes": 4.0, "offload_bytes": 0.0}
    bad["fsdp"][2]["fp32_gap"]["mean"] = bad["fsdp"][0]["moved"]["mean"]
    bad["copy"] |= {"equal": False, "onload_bytes": 1}
    bad["errors"] = {"fsdp": "OutOfMemoryError: 1 GiB"}
    assert len(memory_report.broken(bad)) == 7
    bad["shared"]["difference_by_itself"] = 1e-3  # kernels that add in any order
    assert len(memory_report.broken(bad)) == 6


def test_unknown_sections_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        memory.main(["--size", "compact", "--sections", "shared,fdsp"])
    assert "fdsp" in capsys.readouterr().err
