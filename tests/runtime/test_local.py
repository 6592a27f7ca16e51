"""One process: what is shared is made once, and a plan for more than one accelerator is refused."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from rlinf.config.derived import make_plan
from rlinf.config.load import load_config
from rlinf.errors import UserError
from rlinf.runtime.cluster import check_backend
from rlinf.runtime.local import LocalCluster
from rlinf.runtime.worker import Process


def test_ranks_set_up_at_once_share_one_object():
    process = Process(torch.device("cpu"))

    def make() -> object:
        time.sleep(0.05)  # long enough for the other thread to ask too
        return object()

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: process.shared("policy", make), range(2))
    assert first is second


def test_components_on_several_accelerators_need_more_than_one_process():
    placed = ["cluster.component_placement={actor: 0, env: 1, rollout: 1}"]
    cfg = load_config("toy_ppo_compact", placed, devices=[2])
    plan = make_plan(cfg, [2])
    assert not plan.one_process
    assert [p.workers for p in plan.processes] == [(("env", 0), ("rollout", 0)), (("actor", 0),)]
    assert plan.process_groups == {"actor": (1,), "sync": (1, 0)}
    with pytest.raises(UserError, match=r"backend=local runs one actor rank .* 1 actor ranks, 2 accelerators"):
        load_config("toy_ppo_compact", [*placed, "cluster.backend=local"], devices=[2])


def test_without_ray_a_plan_of_several_processes_says_what_to_install(monkeypatch):
    cfg = load_config("toy_ppo_compact", ["cluster.component_placement={actor: 0, env: 1, rollout: 1}"], devices=[2])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"2 processes, which Ray runs.*\[ray\]"):
        check_backend(make_plan(cfg, [2]))


def test_the_process_takes_the_accelerator_of_the_plan(monkeypatch):
    cfg = load_config("toy_ppo_compact", ["cluster.component_placement={'actor,env,rollout': 1}"], devices=[2])
    plan = make_plan(cfg, [2])
    check_backend(plan)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert LocalCluster(cfg, plan).process.device == torch.device("cuda", 1)
    virtual = replace(cfg, cluster=replace(cfg.cluster, virtual_devices=2))
    assert LocalCluster(virtual, plan).process.device == torch.device("cpu")
