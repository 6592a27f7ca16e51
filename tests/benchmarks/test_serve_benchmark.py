"""benchmarks/serve.py: its promises are judged rightly, and it runs on a CPU with a compact network."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("websockets")

import serve


def results(p50: float, rate: float) -> dict:
    row = {"p99_ms": 1.0, "infer_ms": 9.0, "batch": 1.0, "requests": 1}
    served = [row | {"clients": 1, "p50_ms": p50, "per_second": 80.0}]
    served += [row | {"clients": n, "p50_ms": 150.0, "per_second": rate} for n in (8, 64)]
    predict = [{"batch": 1, "ms": 9.0, "per_second": 111.0}, {"batch": 64, "ms": 146.0, "per_second": 438.0}]
    return {"predict": predict, "served": served, "unequal": 0}


def test_promises():
    assert [kept for _, _, kept in serve.promises(results(12.9, 395.0))] == [True, True, True]
    assert [kept for _, _, kept in serve.promises(results(13.1, 394.0))] == [True, False, False]
    text = serve.section(results(12.9, 394.0))
    assert "| one client: at most 4 ms above predict | 3.90 ms | PASS |" in text
    assert "| 64 clients: at least 90% of predict's rate | 90.0% | FAIL |" in text


@pytest.mark.slow
def test_it_runs_on_a_cpu(tmp_path: Path, capsys):
    words = ["--size", "compact", "--device", "cpu", "--clients", "1,3", "--seconds", "2"]
    serve.main([*words, "--json", str(tmp_path / "serve.json")])
    found = json.loads((tmp_path / "serve.json").read_text())
    assert [row["batch"] for row in found["predict"]] == [1, 3]
    assert [row["clients"] for row in found["served"]] == [1, 3]
    assert all(0 < row["infer_ms"] < row["p50_ms"] <= row["p99_ms"] for row in found["served"])
    assert found["served"][0]["batch"] == 1
    assert found["unequal"] == 0
    assert serve.section(found) in capsys.readouterr().out


def test_wrong_words_are_refused(capsys):
    with pytest.raises(SystemExit):
        serve.parse(["--clients", "0"])
    assert "must be positive" in capsys.readouterr().err
