"""The placement grammar as a table, and the routes as properties."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from rlinf.config.derived import make_plan, visible_accelerators
from rlinf.config.load import load_config
from rlinf.data.layout import EnvLayout
from rlinf.errors import UserError
from rlinf.placement.grammar import Slot, place_components
from rlinf.placement.plan import Plan

REST = {"rollout": "0", "actor": "0"}


def gpus(*ids: int, node: int = 0) -> tuple[Slot, ...]:
    """One process per accelerator."""
    return tuple(Slot(node, (i,)) for i in ids)


def place_env(
    value: object, devices: list[int], node_groups: list[dict[str, object]] | None = None
) -> tuple[Slot, ...]:
    return place_components({"env": value, **REST}, devices, node_groups or [])["env"]


@pytest.mark.parametrize(
    ("value", "devices", "slots"),
    [
        ("all", [4], gpus(0, 1, 2, 3)),
        ("2", [4], gpus(2)),
        (2, [4], gpus(2)),
        ("1-3", [4], gpus(1, 2, 3)),
        ("0-1,3", [4], gpus(0, 1, 3)),
        (" 0 - 1 , 3 ", [4], gpus(0, 1, 3)),
        ("0-1:0-3", [2], gpus(0, 0, 1, 1)),
        ("0-3:0-1", [4], (Slot(0, (0, 1)), Slot(0, (2, 3)))),
        ("all:0-1", [4], (Slot(0, (0, 1)), Slot(0, (2, 3)))),
        ("0-1:0-3,3-5,7-10:7-14", [11], gpus(0, 0, 1, 1, 3, 4, 5, 7, 7, 8, 8, 9, 9, 10, 10)),
        ("0-3:0-7", [4], gpus(0, 0, 1, 1, 2, 2, 3, 3)),
        ("0-7:0-3", [8], (Slot(0, (0, 1)), Slot(0, (2, 3)), Slot(0, (4, 5)), Slot(0, (6, 7)))),
        ("0-1,2-3:2", [4], (*gpus(0, 1), Slot(0, (2, 3)))),
        ("0-3", [2, 2], gpus(0, 1) + gpus(0, 1, node=1)),
        ("0-3:0-1", [2, 2], (Slot(0, (0, 1)), Slot(1, (0, 1)))),
        ("all", [2, 0, 1], gpus(0, 1) + gpus(0, node=2)),
        ("all:0-3", [0, 0], (Slot(0, ()), Slot(0, ()), Slot(1, ()), Slot(1, ()))),
        ("6-9", [8, 8], gpus(6, 7) + gpus(0, 1, node=1)),
        ("all", [0], (Slot(0, ()),)),
        ("all", [0, 0], (Slot(0, ()), Slot(1, ()))),
        ("0:0-1", [0], (Slot(0, ()), Slot(0, ()))),
        ("0", [0, 4], gpus(0, node=1)),
    ],
)
def test_grammar(value: object, devices: list[int], slots: tuple[Slot, ...]) -> None:
    assert place_env(value, devices) == slots


@pytest.mark.parametrize(
    ("value", "slots"),
    [
        ({"node_group": "big", "placement": "0-1"}, gpus(0, 1, node=1)),
        ({"node_group": "big", "placement": "all"}, gpus(0, 1, node=1) + gpus(0, 1, node=2)),
        ({"node_group": "small,big", "placement": "1-2"}, gpus(0, 1, node=1)),
        ({"node_group": ["big", "small"], "placement": "0"}, gpus(0)),
        ({"node_group": "cluster", "placement": "4"}, gpus(1, node=2)),
        ({"node_group": "node", "placement": "1-2"}, (Slot(1, ()), Slot(2, ()))),
        ({"node_group": "node", "placement": "0:0-2"}, (Slot(0, ()),) * 3),
    ],
)
def test_node_groups(value: object, slots: tuple[Slot, ...]) -> None:
    groups = [{"label": "small", "node_ranks": 0}, {"label": "big", "node_ranks": "1-2"}]
    assert place_env(value, [1, 2, 2], groups) == slots


@pytest.mark.parametrize(
    ("value", "devices", "message"),
    [
        ("0-8", [8], "names accelerator 0-8, but there are 8 (0-7)"),
        ("8", [8], "names accelerator 8, but there are 8 (0-7)"),
        ("3-1", [8], "range 3-1 runs backwards; write 1-3"),
        ("some", [8], "'some' is no range; write n, a-b or all, with :n or :a-b for process ranks"),
        ("", [8], "'' is no range; write n, a-b or all, with :n or :a-b for process ranks"),
        ("-1", [8], "'-1' is no range; write n, a-b or all, with :n or :a-b for process ranks"),
        (240, [8], "YAML reads 4:0 as the number 240; if you mean 4:0, write it in quotes"),
        ("0-3:", [8], "'' is no range; write n, a-b or all, with :n or :a-b for process ranks"),
        ("0-1:all", [8], "'all' is no range; write n, a-b or all, with :n or :a-b for process ranks"),
        ("0-1,", [8], "'' is no range; write n, a-b or all, with :n or :a-b for process ranks"),
        ("0-1,all", [8], "resources must ascend without overlap, all follows 1"),
        ("2-17", [8, 8], "names accelerator 2-17, but there are 16 (0-15)"),
        ("0-3,2-5", [8], "resources must ascend without overlap, 2-5 follows 3"),
        ("4-5,0-1", [8], "resources must ascend without overlap, 0-1 follows 5"),
        ("0-3:1-4", [8], "process ranks must be continuous, 1-4 should begin at 0"),
        ("0-1:0-3,2-3:5-6", [8], "process ranks must be continuous, 5-6 should begin at 4"),
        ("0-3:0-2", [8], "3 processes cannot share 4 resources evenly"),
        ("0-1:0-2", [8], "3 processes cannot share 2 resources evenly"),
        ("1-2:0", [2, 2], "process 0 would span the nodes 0, 1"),
        ({"node_group": "x", "placement": "0"}, [8], "unknown node_group 'x'; known: cluster, node"),
        ({"placement": "0"}, [8], "expected the keys node_group and placement, got placement"),
    ],
)
def test_bad_values_are_one_line(value: object, devices: list[int], message: str) -> None:
    with pytest.raises(UserError) as error:
        place_env(value, devices)
    assert str(error.value) == f"cluster.component_placement: env={value!r}: {message}"


def test_cpu_machine_says_what_to_write() -> None:
    with pytest.raises(UserError) as error:
        place_env("0-7", [0])
    assert str(error.value) == (
        "cluster.component_placement: env='0-7': names resource 0-7, but without accelerators the 1 node(s) are the "
        "resources; to run on this machine add 'cluster.component_placement={\"actor,env,rollout\": all}'"
    )


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        ({"actor,env": "0"}, "component 'rollout' is not placed; placed are: actor, env"),
        ({}, "component 'env' is not placed; placed are: none"),
        ({"actor,env,rollout": "0", "env": "0"}, "component 'env' is placed twice"),
        ({"actr": "0"}, "unknown component 'actr' in 'actr' (did you mean 'actor'?); components: env, rollout, actor"),
        ({"x": "0"}, "unknown component 'x' in 'x'; components: env, rollout, actor"),
    ],
)
def test_components(placement: dict[str, str], message: str) -> None:
    with pytest.raises(UserError) as error:
        place_components(placement, [8])
    assert str(error.value) == f"cluster.component_placement: {message}"


def test_component_lists_may_hold_blanks() -> None:
    slots = place_components({"actor, env ,rollout": "0-1"}, [2])
    assert slots == {name: gpus(0, 1) for name in ("actor", "env", "rollout")}


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([{"label": "a"}], "cluster.node_groups[0]: expected the keys label and node_ranks, got label"),
        (
            [{"label": "a", "node_ranks": 0, "env_vars": {}}],
            "cluster.node_groups[0]: expected the keys label and node_ranks, got label, node_ranks, env_vars",
        ),
        (
            [{"label": "a", "node_ranks": 0}, {"label": "a", "node_ranks": 0}],
            "cluster.node_groups[1].label='a' is already taken",
        ),
        ([{"label": "node", "node_ranks": 0}], "cluster.node_groups[0].label='node' is already taken"),
        (
            [{"label": "a", "node_ranks": "0-1"}],
            "cluster.node_groups[0].node_ranks='0-1' must ascend and lie within 0-0 (cluster.num_nodes)",
        ),
    ],
)
def test_bad_node_groups(groups: list[dict[str, object]], message: str) -> None:
    with pytest.raises(UserError) as error:
        place_env("0", [1], groups)
    assert str(error.value) == message


def plan_of(env: int, rollout: int, actor: int, envs: int, eval_envs: int = 12) -> Plan:
    slots = {n: (Slot(0, ()),) * k for n, k in (("env", env), ("rollout", rollout), ("actor", actor))}
    return Plan(**slots, train_envs=EnvLayout(envs), eval_envs=EnvLayout(eval_envs))


@pytest.mark.parametrize(("src", "dst"), list(product((1, 2, 3, 4, 6), (1, 2, 3, 4, 6))))
def test_routes_keep_global_order_and_cover_exactly(src: int, dst: int) -> None:
    plan = plan_of(src, dst, 1, envs=24)
    for mode, envs in (("train", 24), ("eval", 12)):
        per_src = envs // src
        routes = plan.routes("env", "rollout", mode)
        assert [sum(hi - lo for _, lo, hi in pieces) for pieces in routes] == [envs // dst] * dst
        ids = [s * per_src + row for pieces in routes for s, lo, hi in pieces for row in range(lo, hi)]
        assert ids == list(range(envs))


def test_routes_of_the_sketch() -> None:
    plan = plan_of(2, 4, 1, envs=8)
    assert plan.routes("env", "rollout") == [[(0, 0, 2)], [(0, 2, 4)], [(1, 0, 2)], [(1, 2, 4)]]
    assert plan.routes("rollout", "env") == [[(0, 0, 2), (1, 0, 2)], [(2, 0, 2), (3, 0, 2)]]


NODE_0, NODE_1 = gpus(*range(8)), gpus(*range(8), node=1)


@pytest.mark.parametrize(
    ("devices", "placement", "mode", "env", "rollout", "actor"),
    [
        ([8], "{'env,rollout,actor': all}", "shared", NODE_0, NODE_0, NODE_0),
        ([8], "{env: 0-3, rollout: 4-7, actor: 0-7}", "hybrid", NODE_0[:4], NODE_0[4:], NODE_0),
        ([8], "{env: 0-1, rollout: 2-5, actor: 6-7}", "separate", NODE_0[:2], NODE_0[2:6], NODE_0[6:]),
        ([8, 8], "{env: 0-7, rollout: 8-15, actor: 0-15}", "hybrid", NODE_0, NODE_1, NODE_0 + NODE_1),
        ([8, 8], "{env: 0-3, rollout: 4-7, actor: 8-15}", "separate", NODE_0[:4], NODE_0[4:], NODE_1),
    ],
)
def test_every_placement_of_the_guides(
    devices: list[int],
    placement: str,
    mode: str,
    env: tuple[Slot, ...],
    rollout: tuple[Slot, ...],
    actor: tuple[Slot, ...],
) -> None:
    settings = ["actor.micro_batch_size=2", "rollout.pipeline_stage_num=2", "env.train.total_num_envs=32"]
    where = [f"cluster.component_placement={placement}", f"cluster.num_nodes={len(devices)}"]
    cfg = load_config("toy_ppo_compact", [*where, *settings], devices=devices)
    plan = make_plan(cfg, devices)
    assert (plan.env, plan.rollout, plan.actor) == (env, rollout, actor)
    assert plan.mode == mode
    assert not plan.one_process
    assert plan.rollout_copies == (() if mode == "shared" else tuple(range(len(rollout))))
    assert plan.num_envs("env") * len(plan.env) * plan.stages == 32
    virtual = load_config("toy_ppo_compact", [*where, *settings, "cluster.virtual_devices=8"])
    assert make_plan(virtual) == plan


def test_only_components_that_meet_others_offload() -> None:
    overrides = ["actor.enable_offload=true", "env.enable_offload=true", "actor.micro_batch_size=16"]
    placement = "cluster.component_placement={env: 0, rollout: 1, actor: 1}"
    cfg = load_config("toy_ppo_compact", [*overrides, placement], devices=[2])
    assert make_plan(cfg, [2]).offload == {"actor"}
    asynchronous = replace(cfg, runner=replace(cfg.runner, max_staleness=1))
    assert make_plan(asynchronous, [2]).offload == frozenset()  # nobody ever waits


def test_prefixes_are_kept_by_all_ranks_or_by_none() -> None:
    def plan(placement: str) -> Plan:
        return make_plan(load_config("toy_ppo_compact", [f"cluster.component_placement={placement}"], devices=[4]), [4])

    assert plan("{'env,rollout,actor': 0-1}").keeps_prefixes
    assert not plan("{env: 0, rollout: 0-1, actor: 0}").keeps_prefixes
    mixed = plan("{env: 0-1, rollout: '0,2', actor: 0-1}")  # rollout 0 shares the actor's process, rollout 1 does not
    assert mixed.rollout_copies == (1,)
    assert not mixed.keeps_prefixes


def test_number_of_nodes_must_match() -> None:
    cfg = load_config("toy_ppo_compact", devices=[0])
    with pytest.raises(UserError, match=r"cluster.num_nodes=2, but 1 nodes are present"):
        make_plan(replace(cfg, cluster=replace(cfg.cluster, num_nodes=2)), [1])


@pytest.mark.parametrize(("value", "count"), [("", 0), ("-1", 0), ("0", 1), ("0,2,5", 3)])
def test_visible_accelerators_follow_the_environment(monkeypatch: pytest.MonkeyPatch, value: str, count: int) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert visible_accelerators() == count
