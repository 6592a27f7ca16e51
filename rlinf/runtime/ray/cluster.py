"""Several processes: each is a Ray actor, each of its workers a queue of that actor; values pass from actor to actor.

The only file that imports Ray. Ray runs the calls of a concurrency group in the order they were issued, and those of
different groups independently: with one group of size 1 per worker, calls behave as in runtime/local.py. A call that
waits for the value of one that failed fails with the same error.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from ipaddress import ip_address
from pathlib import Path
from typing import Any, NamedTuple

import ray
from packaging.version import Version
from ray._private import services as ray_services
from ray._private import worker as ray_driver
from ray._raylet import Config as RayEnvironment  # type: ignore[attr-defined]  # its stub lacks it
from ray.exceptions import AuthenticationError, GetTimeoutError, RayError, RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from rlinf.config.schema import Config
from rlinf.errors import UserError, WorkerDiedError
from rlinf.placement.grammar import COMPONENTS
from rlinf.placement.plan import Plan
from rlinf.runtime.cluster import Route
from rlinf.runtime.ray import session
from rlinf.runtime.ray.devices import sort_devices, wanted_devices
from rlinf.runtime.ray.worker_process import EXPLAINED, ProcessInfo, WorkerProcess
from rlinf.runtime.worker import Worker

OLDEST_RAY = "2.59"  # orders calls by concurrency group, and starts clusters behind a token
HEAD = "node:__internal_head__"  # a resource of the head only
ZERO_COPY = {"RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "1"}  # processes send CPU tensors as buffers, read where they lie
NODES_DEADLINE_S = 15.0  # for all nodes of a cluster to show up
RESERVE_DEADLINE_S = 30.0  # for Ray to give the accelerators
ANSWER_DEADLINE_S = 5.0  # of a process that is asked whether it is alive
CLOSE_DEADLINE_S = 30.0  # for workers to free what they hold
CLOSE_FAILED_DEADLINE_S = 3.0  # the same after a failure or an interrupt: some may wait for a dead process
LISTEN_S = 0.5  # while the driver waits for values, it looks this often for warnings and for dead processes

logger = logging.getLogger(__name__)


class Future(NamedTuple):
    """A value that some process is making."""

    ref: Any  # ray.ObjectRef
    process: int


class RayGroup:
    """The ranks of one worker class, each in some process."""

    def __init__(self, actors: Sequence[Any], processes: Sequence[int], role: str) -> None:
        self._calls = [_method(actors[p], role, "call") for p in processes]
        self._processes, self._role = processes, role

    def __len__(self) -> int:
        return len(self._calls)

    def one(self, rank: int, method: str, *args: Any, **kwargs: Any) -> Future:
        return self._submit(rank, method, args, kwargs)

    def call(self, method: str, *args: Any, **kwargs: Any) -> list[Future]:
        return [self.one(rank, method, *args, **kwargs) for rank in range(len(self))]

    def map(self, method: str, futures: Sequence[Future], routes: Sequence[Route], **kwargs: Any) -> list[Future]:
        return [
            self._submit(rank, method, [futures[piece.rank] for piece in route], kwargs, route)
            for rank, route in enumerate(routes)
        ]

    def _submit(self, rank: int, method: str, args: Sequence, kwargs: dict, route: Route | None = None) -> Future:
        sources = [arg.process if isinstance(arg, Future) else None for arg in args]
        values = [arg.ref if isinstance(arg, Future) else arg for arg in args]  # Ray waits for the values of refs
        ref = self._calls[rank].remote(self._role, method, kwargs, sources, route, *values)
        return Future(ref, self._processes[rank])


class RayCluster:
    """The processes of a plan on a Ray cluster that was started for this run, or joined."""

    def __init__(self, cfg: Config, plan: Plan) -> None:
        self.cfg, self.plan = cfg, plan
        self.processes: list[ProcessInfo] = []
        self._actors: list[Any] = []
        self._warnings: list[Any] = []  # for each process, the future of its next warning; fails when it dies
        self._shown: set[str] = set()
        self._groups: list[RayGroup] = []
        self._failed = self._closed = False
        self._session = ExitStack()
        self.nodes = self._session.enter_context(open_session(cfg))
        try:
            self._start_processes()
        except BaseException:
            self.shutdown()
            raise

    def launch(self, worker_cls: type[Worker], role: str) -> RayGroup:
        """Construct every rank of `role` in its process and set it up."""
        try:
            places = [self.plan.process_of(role, rank) for rank in range(len(self.plan.slots(role)))]
            adds = [_method(self._actors[p], "control", "add") for p in places]
            self._get([add.remote(worker_cls, role, rank) for rank, add in enumerate(adds)])
            self._groups.append(RayGroup(self._actors, places, role))
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
        """End every process; workers that are not stuck free what they hold first."""
        if self._closed:
            return
        self._closed = True
        try:
            stops = [_method(actor, "control", "stop").remote() for actor in self._actors]
            closes = [future.ref for group in self._groups for future in group.call("close")]
            _wait([*stops, *closes], CLOSE_FAILED_DEADLINE_S if self._failed else CLOSE_DEADLINE_S)
        finally:
            for actor in self._actors:
                ray.kill(actor)
            _wait(self._warnings, CLOSE_FAILED_DEADLINE_S)  # those of dead processes are ready
            self._session.close()

    def _start_processes(self) -> None:
        wanted = {} if self.cfg.cluster.virtual_devices else wanted_devices(self.plan)
        ids = self._session.enter_context(reserve_devices(self.nodes, wanted)) if wanted else None
        # Two threads for control: a process that waits for others can still be asked whether it is alive.
        queues = {**dict.fromkeys(COMPONENTS, 1), "control": 2, "warnings": 1}
        options: dict[str, Any] = {"num_cpus": 0, "concurrency_groups": queues, "enable_task_events": False}
        remote: Any = ray.remote(**options, runtime_env={"env_vars": ZERO_COPY})(WorkerProcess)
        for index, process in enumerate(self.plan.processes):
            node = self.nodes[process.slot.node]
            name = " ".join(f"{w.role}-{w.rank}" for w in process.workers)
            placed = remote.options(name=name, scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False))
            devices = None if ids is None else [ids[process.slot.node][d] for d in process.slot.devices]
            about = {"address": node.address, "folder": Path.cwd(), "devices": devices}
            self._actors.append(placed.remote(self.cfg, self.plan, index, **about))
        self.processes = self._ask("describe")
        self._warnings = [_method(actor, "warnings", "next_warning").remote() for actor in self._actors]
        self._ask("connect", self.nodes[self.plan.processes[0].slot.node].address, self.processes[0].port)

    def _ask(self, method: str, *args: Any) -> list[Any]:
        """Every process's answer to a control method."""
        return self._get([_method(actor, "control", method).remote(*args) for actor in self._actors])

    def _get(self, refs: Sequence[Any]) -> list[Any]:
        """The values of `refs`; the first that fails is raised at once, and so is the death of any process."""
        values: dict[Any, Any] = {}
        waiting = list(dict.fromkeys(refs))
        try:
            while waiting:
                self._show_warnings()
                ready, waiting = ray.wait(waiting, timeout=LISTEN_S, fetch_local=False)
                values.update(zip(ready, ray.get(ready), strict=True))
            return [values[ref] for ref in refs]
        except BaseException as error:
            self._failed = True
            if isinstance(error, RayError):
                raise self._explain(error) from None
            raise

    def _show_warnings(self) -> None:
        """Log the warnings that processes have sent, each text once; raises if a process is dead."""
        for ref in _wait(self._warnings, 0):
            record, index = ray.get(ref), self._warnings.index(ref)
            self._warnings[index] = _method(self._actors[index], "warnings", "next_warning").remote()
            if record.getMessage() not in self._shown:
                self._shown.add(record.getMessage())
                logger.warning("%s: %s", record.threadName, record.getMessage())

    def _explain(self, error: RayError) -> Exception:
        """The error to show for what Ray raised: the worker's own, or which process is dead."""
        cause = error.cause if isinstance(error, RayTaskError) else error
        if isinstance(cause, EXPLAINED):
            return cause
        dead, silent = self._find_lost()  # whoever waits for a dead process fails too, often first
        if dead or (silent and isinstance(cause, RayError)):
            return WorkerDiedError("; ".join(self._describe(i, reason) for i, reason in (dead or silent).items()))
        return cause

    def _find_lost(self) -> tuple[dict[int, str], dict[int, str]]:
        """Processes that are dead, with what Ray says of them, and others that do not answer."""
        answers = [_method(actor, "control", "describe").remote() for actor in self._actors]
        _wait(answers, ANSWER_DEADLINE_S)
        dead, silent = {}, {}
        for index, answer in enumerate(answers):
            try:
                ray.get(answer, timeout=0)
            except GetTimeoutError:
                silent[index] = f"it did not answer for {ANSWER_DEADLINE_S:.0f} s"
            except RayError as error:
                dead[index] = str(error).strip().splitlines()[-1]
        return dead, silent

    def _describe(self, index: int, reason: str) -> str:
        """Who is dead: workers, node, machine, pid and log; `reason` is what Ray says."""
        process = self.plan.processes[index]
        where = f"{' and '.join(f'{w.role} rank {w.rank}' for w in process.workers)} on node {process.slot.node}"
        if index >= len(self.processes):
            return f"{where} did not start: {reason}"
        info = self.processes[index]
        return f"{where} ({info.machine}, pid {info.pid}) died; its log is {info.log}; Ray says: {reason}"


class Node(NamedTuple):
    """A machine (or one of several raylets on it)."""

    id: str
    address: str


@contextmanager
def open_session(cfg: Config) -> Iterator[list[Node]]:
    """The nodes of the cluster at cluster.ray_address, or of one that is started for the block and nobody can enter."""
    if Version(ray.__version__) < Version(OLDEST_RAY):
        raise UserError(f"ray {ray.__version__} is too old; pip install 'ray>={OLDEST_RAY}'")
    if ray.is_initialized():
        raise UserError("this process is connected to a Ray cluster already; call ray.shutdown() first")
    address, num_nodes = cfg.cluster.ray_address, cfg.cluster.num_nodes
    if address is None and num_nodes > 1:
        raise UserError(
            f"cluster.num_nodes={num_nodes} needs a Ray cluster to join: `ray start --head` here, `ray start "
            "--address=HEAD:6379` on the other machines, then cluster.ray_address=auto"
        )
    require_token()
    ray_driver._worker_logs_enabled = False  # private: else Ray prints a paragraph on each death, beside our line
    os.environ["RAY_IGNORE_UNHANDLED_ERRORS"] = "1"
    session.ignore_read_only_warnings()
    with ExitStack() as stack:
        sigterm = signal.getsignal(signal.SIGTERM)
        # Ray's processes never get the signals that a cluster sends to every process at once: they must still save.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGHUP))
        try:
            if address is None:
                folder = stack.enter_context(session.private_folder())
                stack.callback(ray.shutdown, wait_for_processes=True)
                _start(cfg, folder)
                _kill_at_shutdown()
            else:
                stack.callback(ray.shutdown)
                _join(address)
        finally:
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, sigterm)  # ray.init has put its own there
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        yield find_nodes(cfg)


def require_token() -> None:
    """Only those who know the token may enter, unless the user has set RAY_AUTH_MODE=disabled."""
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    RayEnvironment.initialize("")  # private: Ray has read its environment when it was imported


def _start(cfg: Config, folder: Path) -> None:
    """A cluster of one node, on loopback, behind a token of its own, with nothing outside its folder."""
    session.make_token()
    resolve = ray_services.resolve_ip_for_localhost
    # private: else Ray would replace the loopback address by the machine's outer one, and listen there
    ray_services.resolve_ip_for_localhost = lambda host: host
    try:
        ray.init(
            address="local",
            num_cpus=1,  # processes do not count as users of CPUs: any number fits
            num_gpus=0 if cfg.cluster.virtual_devices else None,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _temp_dir=str(folder / "ray"),
            _node_ip_address=session.LOOPBACK,
        )
    finally:
        ray_services.resolve_ip_for_localhost = resolve


def _kill_at_shutdown() -> None:
    """Let ray.shutdown kill Ray's processes, which have SIGTERM blocked, instead of waiting a second for each."""
    node: Any = ray_driver._global_node  # private
    end = node.kill_all_processes
    node.kill_all_processes = lambda **how: end(**how | {"allow_graceful": False})


def _join(address: str) -> None:
    """A running cluster of which this machine is a node."""
    try:
        # private: where Ray will look for `auto`; None lets Ray itself say that it finds nothing
        found = ray_services.canonicalize_bootstrap_address("auto") if address == "auto" else address
        if found is not None:
            session.check_reachable(found)
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, AuthenticationError) as error:
        raise UserError(
            f"cluster.ray_address={address}: {str(error).strip().splitlines()[0]}; is the head running (`ray start "
            "--head`), this machine one of its nodes (`ray start --address=HEAD:PORT`), and its token here "
            "(RAY_AUTH_TOKEN or ~/.ray/auth_token; RAY_AUTH_MODE=disabled for a cluster without)?"
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
    alive.sort(key=lambda n: (HEAD not in n["Resources"], ip_address(n["NodeManagerAddress"]), n["NodeManagerPort"]))
    return [Node(n["NodeID"], n["NodeManagerAddress"]) for n in alive[:wanted]]


@contextmanager
def reserve_devices(nodes: Sequence[Node], wanted: dict[int, int]) -> Iterator[dict[int, list[str]]]:
    """Hold so many accelerators of each node for the block; their ids by node, in the order of the plan's numbers."""
    places = [node for node, count in wanted.items() for _ in range(count)]
    selectors = [{"ray.io/node-id": nodes[node].id} for node in places]
    held = placement_group([{"GPU": 1}] * len(places), bundle_label_selector=selectors)
    try:
        if not held.wait(RESERVE_DEADLINE_S):
            need = " and ".join(f"{count} on node {node}" for node, count in wanted.items())
            raise UserError(
                f"cluster: the plan needs accelerators ({need}) that Ray does not have free; see `ray status`"
            )
        probe: Any = ray.remote(num_cpus=0, num_gpus=1, max_retries=0)(_device_id)
        bundles = [PlacementGroupSchedulingStrategy(held, i) for i in range(len(places))]
        granted = ray.get([probe.options(scheduling_strategy=bundle).remote() for bundle in bundles])
        yield sort_devices(list(zip(places, granted, strict=True)))
    finally:
        remove_placement_group(held)


def _device_id() -> str:
    """The accelerator that Ray has given to the calling task."""
    return str(ray.get_gpu_ids()[0])


def _wait(refs: Sequence[Any], seconds: float) -> list[Any]:
    """Those of `refs` that are ready within so many seconds."""
    return ray.wait(list(refs), num_returns=len(refs), timeout=seconds)[0] if refs else []


def _method(actor: Any, queue: str, name: str) -> Any:
    """A method of a process, bound to the queue it runs in."""
    return getattr(actor, name).options(concurrency_group=queue)
