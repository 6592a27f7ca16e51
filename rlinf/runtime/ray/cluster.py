"""Several processes: each is a Ray actor, each of its workers a queue of it; values pass from actor to actor.

The only file that imports Ray. Ray runs the calls of a concurrency group in the order they were issued, and those of
different groups independently: with one group of size 1 per worker, calls behave as in runtime/local.py.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import ray
import torch
from ray._private import services as ray_services
from ray._private import worker as ray_driver
from ray._raylet import Config as RayEnvironment  # type: ignore[attr-defined]  # its stub lacks it
from ray.exceptions import AuthenticationError, GetTimeoutError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from rlinf.config.schema import Config
from rlinf.errors import SimulatorError, UserError, WorkerDiedError
from rlinf.placement.grammar import COMPONENTS
from rlinf.placement.plan import Plan
from rlinf.runtime.cluster import Routed
from rlinf.runtime.ray.devices import sort_devices, wanted_devices
from rlinf.runtime.ray.host import Failure, Host, HostInfo, Notice, cause_of_death, first_line
from rlinf.runtime.ray.messages import Call, Hole, pack, unpack
from rlinf.runtime.ray.session import LOOPBACK, PrivateFolder, check_reachable, make_secret
from rlinf.runtime.worker import Worker

OLDEST_RAY = (2, 59)  # orders calls by concurrency group, and starts clusters behind a token
HEAD = "node:__internal_head__"  # a resource of the head only
NODES_DEADLINE_S = 15.0  # for all nodes of a cluster to show up
RESERVE_DEADLINE_S = 30.0  # for Ray to give the accelerators
ANSWER_DEADLINE_S = 5.0  # of a process that is asked whether it is alive
CLOSE_DEADLINE_S = 30.0  # for workers to give everything back
HASTY_DEADLINE_S = 3.0  # the same after a failure or an interrupt: some may wait for the dead

logger = logging.getLogger(__name__)


class Future(NamedTuple):
    """A value that some process is making."""

    ref: Any  # ray.ObjectRef
    process: int


class Actor(Host):
    """Host as Ray runs it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        send_tensors_as_buffers()
        super().__init__(*args, **kwargs)


class RayGroup:
    """The ranks of one worker class, each in some process."""

    def __init__(self, hosts: Sequence[Any], processes: Sequence[int], role: str) -> None:
        self._calls = [_method(hosts[p], role, "call") for p in processes]
        self._processes, self._role = processes, role

    def __len__(self) -> int:
        return len(self._calls)

    def one(self, rank: int, method: str, *args: Any, **kwargs: Any) -> Future:
        futures: list[Future] = []
        holes = tuple(_dig(arg, futures) for arg in args)
        return self._submit(rank, Call(method, holes, kwargs, tuple(f.process for f in futures)), futures)

    def call(self, method: str, *args: Any, **kwargs: Any) -> list[Future]:
        return [self.one(rank, method, *args, **kwargs) for rank in range(len(self))]

    def map(self, method: str, routed: Routed, **kwargs: Any) -> list[Future]:
        results = []
        for rank, route in enumerate(routed.routes):
            pieces = [routed.futures[source] for source, _, _ in route]
            cuts = tuple((lo, hi) for _, lo, hi in route)
            call = Call(method, (), kwargs, tuple(f.process for f in pieces), cuts)
            results.append(self._submit(rank, call, pieces))
        return results

    def _submit(self, rank: int, call: Call, futures: Sequence[Future]) -> Future:
        ref = self._calls[rank].remote(self._role, call, *(f.ref for f in futures))
        return Future(ref, self._processes[rank])


class RayCluster:
    """Processes of a plan on a Ray cluster that was started for this run, or joined."""

    def __init__(self, cfg: Config, plan: Plan) -> None:
        self.cfg, self.plan = cfg, plan
        self._hosts: list[Any] = []
        self._infos: list[HostInfo] = []
        self._alarms: list[Any] = []  # one per process: ready when it has something to say, or is dead
        self._groups: list[RayGroup] = []
        self._lock = threading.Lock()
        self._raised: set[tuple[int, int]] = set()
        self._warned: set[str] = set()
        self._hasty = self._closed = False
        self._reserved: PlacementGroup | None = None
        self._session = open_session(cfg)
        try:
            self._start_processes()
        except BaseException:
            self.shutdown()
            raise

    def launch(self, worker_cls: type[Worker], role: str) -> RayGroup:
        """Add every rank of `role` to its process and set it up."""
        try:
            places = [self.plan.process_of(role, rank) for rank in range(len(self.plan.slots(role)))]
            adds = [_method(self._hosts[p], "control", "add") for p in places]
            self._get([add.remote(worker_cls, role, rank) for rank, add in enumerate(adds)])
            self._groups.append(RayGroup(self._hosts, places, role))
            self.get(self._groups[-1].call("setup"))
            return self._groups[-1]
        except BaseException:
            self.shutdown()
            raise

    def get(self, futures: Sequence[Future]) -> list[Any]:
        return self._get([f.ref for f in futures])

    def drain_bytes(self) -> int:
        return sum(self._ask("drain_bytes"))

    def shutdown(self) -> None:
        """End every process; workers that are not stuck give back what they hold first."""
        if self._closed:
            return
        self._closed = True
        try:
            stops = [_method(host, "control", "stop").remote() for host in self._hosts]
            closes = [future.ref for group in self._groups for future in group.call("close")]
            deadline = HASTY_DEADLINE_S if self._hasty else CLOSE_DEADLINE_S
            if stops:
                ray.wait([*stops, *closes], num_returns=len(stops) + len(closes), timeout=deadline)
        finally:
            for host in self._hosts:
                ray.kill(host)
            if self._alarms:  # those of dead processes are ready
                ray.wait(self._alarms, num_returns=len(self._alarms), timeout=HASTY_DEADLINE_S)
            if self._reserved is not None:
                remove_placement_group(self._reserved)
            self._session.close()

    def _start_processes(self) -> None:
        nodes = self._session.nodes
        wanted = {} if self.cfg.cluster.virtual_devices else wanted_devices(self.plan)
        ids = None
        if wanted:
            self._reserved, ids = reserve_devices(nodes, wanted)
        # Two threads for control: a process that waits for others can still be asked whether it lives.
        queues = {**dict.fromkeys(COMPONENTS, 1), "control": 2, "watch": 1}
        options: dict[str, Any] = {"num_cpus": 0, "concurrency_groups": queues, "enable_task_events": False}
        actor: Any = ray.remote(**options)(Actor)
        for index, process in enumerate(self.plan.processes):
            node = nodes[process.slot.node]
            name = " ".join(f"{w.role}-{w.rank}" for w in process.workers)
            placed = actor.options(name=name, scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False))
            devices = None if ids is None else [ids[process.slot.node][d] for d in process.slot.devices]
            about = {"address": node.address, "folder": Path.cwd(), "devices": devices}
            self._hosts.append(placed.remote(self.cfg, self.plan, index, **about))
        self._infos = self._ask("describe")
        self._alarms = [_method(host, "watch", "watch").remote() for host in self._hosts]
        port = 0
        if any(len(members) > 1 for members in self.plan.teams.values()):
            (port,) = self._get([_method(self._hosts[0], "control", "open_store").remote()])
        self._ask("connect", nodes[self.plan.processes[0].slot.node].address, port)

    def _ask(self, method: str, *args: Any) -> list[Any]:
        """Every process's answer to a control method."""
        return self._get([_method(host, "control", method).remote(*args) for host in self._hosts])

    def _get(self, refs: Sequence[Any]) -> list[Any]:
        """Values of `refs`; what any process says meanwhile is heard, its death too."""
        try:
            waiting = list(dict.fromkeys(refs))
            while waiting:
                ready, _ = ray.wait([*waiting, *self._alarms], num_returns=1, fetch_local=False)
                for index in [i for i, alarm in enumerate(self._alarms) if alarm in ready]:
                    self._hear(index)
                _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=0, fetch_local=False)
            values = ray.get(list(refs))
            for value in values:
                if isinstance(value, Failure):
                    self._raise(value)
            return values
        except RayError:
            self._hasty = True
            dead, silent = self._roll_call()
            if dead or silent:
                raise self._obituary(dead or silent) from None
            raise
        except BaseException:
            self._hasty = True
            raise

    def _hear(self, index: int) -> None:
        """Take what process `index` had to say, and listen again."""
        with self._lock:
            event = ray.get(self._alarms[index])
            self._alarms[index] = _method(self._hosts[index], "watch", "watch").remote()
        if isinstance(event, Notice):
            if event.text not in self._warned:
                self._warned.add(event.text)
                logger.warning("%s: %s", event.where, event.text)
        elif (event.process, event.number) not in self._raised:
            self._raise(event)

    def _raise(self, failure: Failure) -> NoReturn:
        """The error of a worker, as if it had happened here, with the worker's name."""
        self._raised.add((failure.process, failure.number))
        error = failure.error
        if isinstance(error, UserError | SimulatorError | FloatingPointError):
            error.args = (f"{error} ({failure.where})",)
            raise error
        dead, silent = self._roll_call()
        if dead:  # whoever talked to a process that died fails too, and is often heard first
            raise self._obituary(dead) from None
        error.add_note(f"in {failure.where}:\n{failure.trace}")
        if silent:
            error.add_note(f"{self._obituary(silent)}")
        raise error

    def _roll_call(self) -> tuple[dict[int, str], dict[int, str]]:
        """Processes that are dead, with what Ray says of them, and others that do not answer."""
        pings = [_method(host, "control", "describe").remote() for host in self._hosts]
        ray.wait(pings, num_returns=len(pings), timeout=ANSWER_DEADLINE_S)
        dead, silent = {}, {}
        for index, ping in enumerate(pings):
            try:
                ray.get(ping, timeout=0)
            except GetTimeoutError:
                silent[index] = "unavailable"
            except RayError as error:
                dead[index] = str(error)
        return dead, silent

    def _obituary(self, dead: dict[int, str]) -> WorkerDiedError:
        """Who died, and of what, as far as it can be known."""
        told = []
        for index, reason in dead.items():
            slot, workers = self.plan.processes[index].slot, self.plan.processes[index].workers
            names = " and ".join(f"{w.role} rank {w.rank}" for w in workers)
            if index < len(self._infos):
                machine, pid, log = self._infos[index].machine, self._infos[index].pid, self._infos[index].log
                told.append(f"{names} on node {slot.node} ({machine}, pid {pid}) died: {cause_of_death(reason, log)}")
            else:
                told.append(f"{names} on node {slot.node} did not start: {cause_of_death(reason, None)}")
        return WorkerDiedError("; ".join(told))


class Node(NamedTuple):
    """A machine (or one of several raylets on it)."""

    id: str
    address: str


class Session:
    """The connection to Ray, and the cluster itself where it is this run's own."""

    def __init__(self, nodes: Sequence[Node], folder: PrivateFolder | None) -> None:
        self.nodes, self._folder = nodes, folder

    def close(self) -> None:
        """Leave the cluster; a private one ends, with everything it has written."""
        ray.shutdown(wait_for_processes=self._folder is not None)
        if self._folder is not None:
            self._folder.close()


def open_session(cfg: Config) -> Session:
    """Join the cluster at cluster.ray_address, or start one on this machine that nobody else can enter."""
    if tuple(map(int, re.findall(r"\d+", ray.__version__)[:2])) < OLDEST_RAY:
        raise UserError(f"ray {ray.__version__} is too old; pip install 'ray>={OLDEST_RAY[0]}.{OLDEST_RAY[1]}'")
    if ray.is_initialized():
        raise UserError("this process is connected to a Ray cluster already; call ray.shutdown() first")
    address, num_nodes = cfg.cluster.ray_address, cfg.cluster.num_nodes
    if address is None and num_nodes > 1:
        raise UserError(
            f"cluster.num_nodes={num_nodes} needs a Ray cluster to join: `ray start --head` here, `ray start "
            "--address=HEAD:6379` on the other machines, then cluster.ray_address=auto"
        )
    require_token()
    ray_driver._worker_logs_enabled = False  # what Ray would print of a death, our one line says
    os.environ["RAY_IGNORE_UNHANDLED_ERRORS"] = "1"
    before = signal.getsignal(signal.SIGTERM)
    folder = PrivateFolder() if address is None else None
    try:
        if folder is not None:
            _start(cfg, folder)
        else:
            assert address is not None
            _join(address)
        send_tensors_as_buffers()
        nodes = find_nodes(cfg)
    except BaseException:
        Session((), folder).close()
        raise
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)  # ray.init has put its own there
    return Session(nodes, folder)


def require_token() -> None:
    """Only those who know the token may enter, unless the user has set RAY_AUTH_MODE=disabled."""
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    RayEnvironment.initialize("")  # Ray has read its environment when it was imported


def _start(cfg: Config, folder: PrivateFolder) -> None:
    """A cluster of one node, on loopback, behind a token of its own, with nothing outside its folder."""
    make_secret()
    resolve = ray_services.resolve_ip_for_localhost
    ray_services.resolve_ip_for_localhost = lambda host: host  # it would take the machine's outer address instead
    try:
        ray.init(
            address="local",
            num_cpus=1,  # processes do not count as users of CPUs: any number fits
            num_gpus=0 if cfg.cluster.virtual_devices else None,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _temp_dir=str(folder.path / "ray"),
            _node_ip_address=LOOPBACK,
        )
    finally:
        ray_services.resolve_ip_for_localhost = resolve


def _join(address: str) -> None:
    """A running cluster of which this machine is a node."""
    try:
        check_reachable(ray_services.canonicalize_bootstrap_address("auto") or "" if address == "auto" else address)
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, AuthenticationError) as error:
        problem = first_line(error).split(". ")[0].rstrip(".")
        raise UserError(
            f"cluster.ray_address={address}: {problem}; is the head running (`ray start --head`), this machine one of "
            "its nodes (`ray start --address=HEAD:PORT`), and its token here (RAY_AUTH_TOKEN or ~/.ray/auth_token; "
            "RAY_AUTH_MODE=disabled for a cluster without)?"
        ) from None


def find_nodes(cfg: Config) -> list[Node]:
    """The first cluster.num_nodes machines: the head, then by address."""
    wanted, deadline = cfg.cluster.num_nodes, time.monotonic() + NODES_DEADLINE_S
    while len(alive := [n for n in ray.nodes() if n["Alive"]]) < wanted:
        if time.monotonic() > deadline:
            raise UserError(
                f"cluster.num_nodes={wanted}, but the Ray cluster has {len(alive)}; run `ray start "
                "--address=HEAD:PORT` on the missing machines"
            )
        time.sleep(0.2)
    alive.sort(key=lambda n: (HEAD not in n["Resources"], _numbers(n["NodeManagerAddress"]), n["NodeManagerPort"]))
    return [Node(n["NodeID"], n["NodeManagerAddress"]) for n in alive[:wanted]]


def reserve_devices(nodes: Sequence[Node], wanted: dict[int, int]) -> tuple[PlacementGroup, dict[int, list[str]]]:
    """Hold so many accelerators of each node; their ids by node, in the order of the plan's numbers."""
    places = [node for node, count in wanted.items() for _ in range(count)]
    selectors = [{"ray.io/node-id": nodes[node].id} for node in places]
    held = placement_group([{"GPU": 1}] * len(places), bundle_label_selector=selectors)
    if not held.wait(RESERVE_DEADLINE_S):
        remove_placement_group(held)
        need = " and ".join(f"{count} on node {node}" for node, count in wanted.items())
        raise UserError(f"cluster: the plan needs accelerators ({need}) that Ray does not have free; see `ray status`")
    probe: Any = ray.remote(num_cpus=0, num_gpus=1, max_retries=0)(_device_id)
    bundles = [PlacementGroupSchedulingStrategy(held, i) for i in range(len(places))]
    granted = ray.get([probe.options(scheduling_strategy=bundle).remote() for bundle in bundles])
    return held, sort_devices(list(zip(places, granted, strict=True)))


def _device_id() -> str:
    """The accelerator that Ray has given to the calling task."""
    return str(ray.get_gpu_ids()[0])


def send_tensors_as_buffers() -> None:
    """From this process, tensors travel without being pickled byte by byte."""
    ray.util.register_serializer(torch.Tensor, serializer=pack, deserializer=unpack)


def _method(host: Any, group: str, name: str) -> Any:
    """A method of a process, bound to the queue it runs in."""
    return getattr(host, name).options(concurrency_group=group)


def _dig(arg: Any, futures: list[Future]) -> Any:
    """`arg` with holes instead of its futures, which are added to `futures`."""
    if isinstance(arg, Future):
        futures.append(arg)
        return Hole(len(futures) - 1)
    if isinstance(arg, list):
        return [_dig(a, futures) for a in arg]
    return arg


def _numbers(address: str) -> list[int]:
    """An address by which nodes can be sorted."""
    return [int(part) for part in re.findall(r"\d+", address)]
