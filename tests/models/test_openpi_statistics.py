"""norm_stats.json: round trip, and files that would silently give wrong numbers."""

from __future__ import annotations

import json
import re

import pytest
import torch

from rlinf.errors import UserError
from rlinf.models.files.statistics import fit_columns
from rlinf.models.openpi.statistics import Statistics, load_statistics, save_statistics

ASSET = "lerobot/metaworld_mt50"
NAN = float("nan")


@pytest.fixture
def stored(tmp_path):
    """A folder with good statistics and the path of their file."""
    stats = {key: Statistics.fit(torch.randn(50, 3), floor=0.01) for key in ("state", "actions")}
    save_statistics(tmp_path, ASSET, stats)
    return tmp_path, tmp_path / ASSET / "norm_stats.json", stats


@pytest.mark.parametrize("quantile", [False, True])
def test_round_trip(stored, quantile):
    folder, _, stats = stored
    again = load_statistics(folder, ASSET, quantile=quantile)
    for key, want in stats.items():
        assert all(torch.equal(a, b) for a, b in zip(again[key].buffers(), want.buffers(), strict=True))


@pytest.mark.parametrize(
    ("quantile", "change", "message"),
    [
        (False, {"mean": [0.0, NAN, 0.0]}, "column 1 has mean=nan, std=1; they must be finite"),
        (False, {"std": [1.0, 1.0, float("inf")]}, "column 2 has mean=0, std=inf; they must be finite"),
        (False, {"std": [-0.5, 1.0, 1.0]}, "column 0 has mean=0, std=-0.5; std must not be negative"),
        (True, {"q01": [-1.0, -1.0, NAN]}, "column 2 has q01=nan, q99=1; they must be finite"),
        (True, {"q01": [-1.0, 2.0, -1.0]}, "column 1 has q01=2, q99=1; q01 must not exceed q99"),
        (False, {"std": [1.0]}, "different numbers of columns: {'mean': 3, 'std': 1, 'q01': 3, 'q99': 3}"),
        (False, {"mean": None}, "lacks 'mean'; it has: mean, std, q01, q99"),
        (False, {"mean": [0.0, "1", 2.0]}, "'mean' must be a list of numbers, got [0.0, '1', 2.0]"),
    ],
)
def test_refusals_name_file_key_and_column(stored, quantile, change, message):
    folder, path, _ = stored
    entry = {"mean": [0.0] * 3, "std": [1.0] * 3, "q01": [-1.0] * 3, "q99": [1.0] * 3}
    path.write_text(json.dumps({"norm_stats": {"state": entry, "actions": entry | change}}))
    with pytest.raises(UserError, match=re.escape(f"{path}: statistics of 'actions'") + ".*" + re.escape(message)):
        load_statistics(folder, ASSET, quantile=quantile)


@pytest.mark.parametrize("quantile", [False, True])
def test_the_rule_not_used_may_be_odd(stored, quantile):
    folder, path, _ = stored
    content = json.loads(path.read_text())
    unused = ("mean", "std") if quantile else ("q01", "q99")
    content["norm_stats"]["state"] |= dict.fromkeys(unused, [NAN] * 3)
    path.write_text(json.dumps(content))
    stats = load_statistics(folder, ASSET, quantile=quantile)["state"]
    assert stats.normalize(torch.zeros(2, 3), quantile=quantile).isfinite().all()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"norm_stats": {"state"', "norm_stats.json is not valid JSON"),
        ("[]", "norm_stats.json holds a list, expected an object"),
        ('{"norm_stats": 3}', "norm_stats.json lacks the object 'norm_stats'"),
        ('{"stats": {}}', "norm_stats.json lacks the object 'norm_stats'"),
        ('{"norm_stats": {"state": []}}', "norm_stats.json lacks the entry 'state'; it has: state"),
        ('{"norm_stats": {"action": {}}}', "norm_stats.json lacks the entry 'state'; it has: action"),
    ],
)
def test_broken_files(stored, text, message):
    folder, path, _ = stored
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        load_statistics(folder, ASSET, quantile=False)


def test_quantiles_of_long_data_are_taken_from_a_part():
    rows = torch.linspace(0, 1, 5_000_000)[:, None].expand(-1, 4)
    fitted = fit_columns(rows, floor=0.01)
    assert fitted["q01"].tolist() == pytest.approx([0.01] * 4, abs=1e-5)
    assert fitted["q99"].tolist() == pytest.approx([0.99] * 4, abs=1e-5)
