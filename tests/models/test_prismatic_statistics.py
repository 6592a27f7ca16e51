"""Action and proprioception statistics: published layouts, both rules, refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from rlinf.errors import UserError
from rlinf.models.prismatic.folder import ColumnRanges, StatisticsTable

ENTRY = {"q01": [-1.0, 0.0, 2.0], "q99": [1.0, 0.5, 2.0], "min": [-2.0, -1.0, 1.0], "max": [2.0, 1.0, 3.0]}


def write(folder: Path, config: dict | None = None, dataset: dict | None = None) -> StatisticsTable:
    if config is not None:
        (folder / "config.json").write_text(json.dumps({"model_type": "openvla", "norm_stats": config}))
    if dataset is not None:
        (folder / "dataset_statistics.json").write_text(json.dumps(dataset))
    return StatisticsTable.read(folder)


def test_the_two_rules(tmp_path):
    table = write(tmp_path, {"a": {"action": ENTRY | {"mask": [True, True, False]}, "proprio": ENTRY}})
    x = torch.tensor([[-1.0, 0.0, 0.3], [1.0, 1.0, -7.0]])
    q99 = table.load("a", "action", kind="q99", columns=3)
    assert torch.allclose(q99.unnormalize(x), torch.tensor([[-1.0, 0.25, 0.3], [1.0, 0.5, -7.0]]))
    bounds = table.load("a", "action", kind="bounds", columns=3)
    assert torch.allclose(bounds.unnormalize(x), torch.tensor([[-2.0, 0.0, 0.3], [2.0, 1.0, -7.0]]))
    proprio = table.load("a", "proprio", kind="bounds", columns=3)  # without a mask every column counts
    got = proprio.normalize(torch.tensor([1.0, 5.0, 1.0]))
    assert got.tolist() == pytest.approx([0.5, 1.0, -1.0])  # 5 is clipped
    assert not q99.state_dict()


def test_the_published_epsilon():
    stats = ColumnRanges(torch.tensor([0.0, 5.0]), torch.tensor([0.0, 7.0]), torch.tensor([True, True]))
    x = torch.ones(2, dtype=torch.float64)
    assert stats.unnormalize(x).tolist() == [1e-8, 7.0 + 1e-8]
    assert stats.normalize(torch.zeros(2)).tolist() == [-1.0, -1.0]  # a constant column: no division by zero


def test_identity():
    x = torch.randn(5, 4)
    stats = ColumnRanges.identity(4)
    assert torch.equal(stats.normalize(x), x)
    assert torch.equal(stats.unnormalize(x), x)


def test_dataset_statistics_win_over_the_config(tmp_path):
    table = write(tmp_path, {"a": {"action": ENTRY}, "b": {"action": ENTRY}})
    assert table.load("a", "action", kind="q99", columns=3).high.tolist() == [1.0, 0.5, 2.0]
    table = write(tmp_path, dataset={"a": {"action": ENTRY | {"q99": [9.0, 9.0, 9.0]}}})
    assert table.load("a", "action", kind="q99", columns=3).high.tolist() == [9.0, 9.0, 9.0]
    assert table.load("b", "action", kind="q99", columns=3).high.tolist() == [1.0, 0.5, 2.0]
    table.save(tmp_path / "later")
    assert StatisticsTable.read(tmp_path / "later").entries == table.entries


def test_keys(tmp_path):
    table = write(tmp_path, {"libero_goal_no_noops": {"action": ENTRY}, "bridge_orig": {"action": ENTRY}})
    assert table.resolve("libero_goal") == "libero_goal_no_noops"
    assert table.resolve("bridge_orig") == "bridge_orig"
    with pytest.raises(
        UserError,
        match=r"unnorm_key='bridge' is not in .* \(did you mean 'bridge_orig'\?\); it has: libero_goal_no_noops,",
    ):
        table.resolve("bridge")
    with pytest.raises(UserError, match=r"unnorm_key is null, but .* has several; set one of: libero_goal_no_noops, "):
        table.resolve(None)
    only = write(tmp_path, {"a": {"action": ENTRY}})
    assert only.resolve(None) == only.resolve("b") == "a"
    for stored, wanted in (("place_empty_cup_1k", "place_empty_cup"), ("place_empty_cup", "place_empty_cup_1k")):
        robotwin = write(tmp_path, {"bridge_orig": {"action": ENTRY}, stored: {"action": ENTRY}})
        assert robotwin.resolve(wanted) == stored
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"holds no action statistics: expected norm_stats in config.json, or dataset_"):
        StatisticsTable.read(tmp_path).resolve("a")
    (tmp_path / "config.json").unlink()
    assert StatisticsTable.read(tmp_path).entries == {}


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q01": [-1.0, NAN, 2.0]}, "column 1 has q01=nan, q99=0.5; they must be finite"),
        ({"q99": [1.0, 0.5, INF]}, "column 2 has q01=2, q99=inf; they must be finite"),
        ({"q01": [1.5, 0.0, 2.0]}, "column 0 has q01=1.5, q99=1; q01 must not exceed q99"),
        ({"q99": [1.0, 0.5]}, "'q99' has 2 columns, actor.model.action_dim is 3"),
        ({"mask": [True]}, "'mask' has 1 columns, actor.model.action_dim is 3"),
        ({"mask": [1, 0, "x"]}, "'mask' must be a list of true and false, got [1, 0, 'x']"),
        ({"mask": "all"}, "'mask' must be a list of true and false, got all"),
        ({"q99": None}, "lacks 'q99'; it has: q01, q99, min, max"),
        ({"q01": "none"}, "'q01' must be a list of numbers, got none"),
        ({"q01": [1.0, "2", 3.0]}, "'q01' must be a list of numbers, got [1.0, '2', 3.0]"),
    ],
)
def test_refusals_name_file_key_and_column(tmp_path, change, message):
    table = write(tmp_path, dataset={"cup": {"action": ENTRY | change}})
    where = f"{tmp_path / 'dataset_statistics.json'}: action statistics of 'cup'"
    with pytest.raises(UserError, match=re.escape(where) + ".*" + re.escape(message)):
        table.load("cup", "action", kind="q99", columns=3)


def test_what_is_not_used_may_be_odd(tmp_path):
    change = {"q01": [NAN, 0.0, 2.0], "mask": [False, True, True], "max": [NAN, NAN, NAN]}
    stats = write(tmp_path, {"a": {"action": ENTRY | change}}).load("a", "action", kind="q99", columns=3)
    assert torch.allclose(stats.unnormalize(torch.tensor([0.7, 1.0, 0.0])), torch.tensor([0.7, 0.5, 2.0]))


def test_missing_proprio(tmp_path):
    table = write(tmp_path, {"a": {"action": ENTRY, "num_transitions": 3}})
    with pytest.raises(UserError, match="proprio statistics of 'a' are missing; the key has: action, num_transitions"):
        table.load("a", "proprio", kind="q99", columns=3)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("config.json", '{"norm_stats": {"a": ', r"config.json is not valid JSON \(.*\); copy it again"),
        ("config.json", '{"norm_stats": [1]}', "config.json: statistics must be an object per data set key"),
        ("dataset_statistics.json", "[]", "dataset_statistics.json holds a list, expected an object"),
        ("dataset_statistics.json", '{"a": 3}', "dataset_statistics.json: statistics must be an object per data set"),
        ("dataset_statistics.json", "\udcff", "dataset_statistics.json is not valid JSON"),
    ],
)
def test_broken_files(tmp_path, file, text, message):
    (tmp_path / file).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(UserError, match=message):
        StatisticsTable.read(tmp_path)


def test_fit(tmp_path):
    actions = torch.stack((torch.linspace(-1, 1, 201), torch.full((201,), 0.5)), 1)
    states = torch.linspace(0, 10, 201)[:, None]
    fitted = StatisticsTable.fit("mine", states, actions)
    fitted.save(tmp_path)
    table = StatisticsTable.read(tmp_path)
    q99 = table.load("mine", "action", kind="q99", columns=2)
    assert q99.low.tolist() == pytest.approx([-0.98, 0.4])  # a column that never moves gets a range of 0.2 around it
    assert q99.high.tolist() == pytest.approx([0.98, 0.6])
    assert q99.mask.tolist() == [True, True]
    bounds = table.load(None, "action", kind="bounds", columns=2)
    assert (bounds.low[0], bounds.high[0]) == (-1.0, 1.0)
    proprio = table.load("mine", "proprio", kind="q99", columns=1)
    got = proprio.normalize(torch.tensor([[5.0], [-3.0], [99.0]])).flatten().tolist()
    assert got == pytest.approx([0.0, -1.0, 1.0], abs=1e-6)
    assert table.entries["mine"]["num_transitions"] == 201
    assert table.entries["mine"]["action"]["std"][1] == 0.05
    inside = torch.rand(50, 2) * 0.2 + 0.4
    assert torch.allclose(q99.unnormalize(q99.normalize(inside)), inside, atol=1e-6)
    assert "proprio" not in StatisticsTable.fit("mine", None, actions).entries["mine"]
