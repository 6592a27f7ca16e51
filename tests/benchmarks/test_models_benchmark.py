"""benchmarks/models.py on a CPU with compact networks: every table is complete, and promises are judged rightly."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import model_report
import models
import pytest
import torch
from model_cases import CASES, Subject

BATCHES = [1, 2]
PROMISES = 7


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, str]:
    """The numbers and the text of one run."""
    folder: Path = tmp_path_factory.mktemp("run")
    batches = ",".join(map(str, BATCHES))
    words = ["--size", "compact", "--device", "cpu", "--batches", batches, "--seconds", "0", "--eager"]
    models.main([*words, "--json", str(folder / "run.json"), "--markdown", str(folder / "run.md")])
    return json.loads((folder / "run.json").read_text()), (folder / "run.md").read_text()


def test_every_number_is_there(output):
    results, _ = output
    assert results["errors"] == {}
    assert [(row["model"], row["batch"]) for row in results["predict"]] == [(k, b) for k in CASES for b in BATCHES]
    for row in results["predict"]:
        assert min(row["eval_ms"], row["train_ms"], row["eager_ms"]) > 0
        assert row["floor_ms"] == pytest.approx(sum(row["phases_ms"].values()))
        assert 0 < row["floor_ms"] < min(row["eval_ms"], row["train_ms"])
    assert [row["prefix"] for row in results["update"]] == ["cached", "recomputed"]
    assert [row["model"] for row in results["lora"]] == ["openvla", "oft"]
    assert all(row["samples_per_s"] > 0 for row in (*results["update"], *results["lora"]))
    assert results["sync"] == {key: {"waits": None} for key in CASES}
    assert results["gap"].keys() == CASES.keys()
    gaps = [gap for row in results["gap"].values() for gap in row.values()]
    assert max(gaps + [row["logprob_gap"] for row in results["lora"]]) <= 5e-5
    assert all("cached_logprob" in results["gap"][key] for key in ("pi0", "pi0_3cam", "pi05"))
    assert min(results["ceilings"]["tflops"], results["ceilings"]["gb_per_s"]) > 0


def test_the_text_is_a_section_of_the_docs(output):
    results, text = output
    assert text.startswith("## Models on one GPU\n")
    assert all(case.title in text for case in CASES.values())
    tables = [block.splitlines() for block in text.split("\n\n") if block.startswith("|")]
    assert len(tables) == len(CASES) + 5  # predict; update, LoRA, gap, sync, promises
    assert all(line.count("|") == table[0].count("|") for table in tables for line in table)
    assert len(tables[-1]) == 2 + PROMISES
    assert model_report.broken(results) == []  # a compact network on a CPU has promised nothing


def test_prompts_have_the_length_of_their_case():
    cpu = torch.device("cpu")
    assert {
        key: Subject.build(key, "compact", cpu).prompt - case.prompt for key, case in CASES.items()
    } == dict.fromkeys(CASES, 0)


def test_a_broken_promise_is_named(output):
    results = copy.deepcopy(output[0]) | {"size": "base", "device": "GPU"}

    def row(model: str, batch: int, ms: float) -> dict:
        return {"model": model, "batch": batch, "eval_ms": ms, "train_ms": ms, "floor_ms": 10.0, "phases_ms": {}}

    good = [row("pi0", 1, 8.0), row("pi0", 64, 150.0), row("oft", 64, 15.0), row("openvla", 16, 20.0)]
    results["update"][0]["samples_per_s"] = 1500.0
    results["lora"][0]["peak_gib"] = 90.0
    results["sync"] = {"pi0": {"waits": False}}
    kept = model_report.checks(results | {"predict": good})
    assert [check.kept for check in kept] == [True] * PROMISES
    for i in range(len(good)):
        slow = [r | {"eval_ms": 1.01 * r["eval_ms"]} if j == i else r for j, r in enumerate(good)]
        assert len(model_report.broken(results | {"predict": slow})) == 1
    results["update"][0]["samples_per_s"] = 1499.0
    results["sync"] = {"pi0": {"waits": "called a synchronizing operation"}}
    results["errors"] = {"openvla LoRA": "OutOfMemoryError: 1 GiB"}
    assert len(model_report.broken(results | {"predict": good})) == 4  # the error itself, and the promise it breaks
    full = [r | {"reason": "out of memory"} for r in good]
    assert len(model_report.broken(results | {"predict": full})) == 4 + len(good)


def test_unknown_names_are_refused(capsys):
    with pytest.raises(SystemExit):
        models.parse(["--models", "pi0,pi1"])
    assert "pi1" in capsys.readouterr().err
