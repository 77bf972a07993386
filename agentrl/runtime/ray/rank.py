"""One rank: a Ray actor that holds its part of some roles' models, in one process group with the others of its pool."""

from __future__ import annotations

import functools
import gc
import math
import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Concatenate, ParamSpec, TypeVar

import ray
import torch
import torch.distributed as dist
from ray.exceptions import ObjectLostError
from torch._C._distributed_c10d import TCPStore

from agentrl.config.columns import column
from agentrl.engines.weights import Adapter
from agentrl.errors import UserError, WorkerDied
from agentrl.observe.bars import bars_as_stages
from agentrl.parallel.store import listening_store
from agentrl.runtime.placement import Role
from agentrl.runtime.profiler import Profile, nvtx_range, profiled
from agentrl.runtime.ranks import CachedColumns, RankWeights
from agentrl.runtime.ray.loading import Loaded, Loading
from agentrl.runtime.ray.network import use_cluster_network
from agentrl.runtime.ray.reading import Parts, Readers, Turn
from agentrl.runtime.ray.session import Surroundings
from agentrl.runtime.ray.stored import ColumnArrays, StoredBatch, put_column
from agentrl.runtime.stall import Position, position_of
from agentrl.system.metrics import Numbers
from agentrl.trajectory.batch import RaggedBatch

P = ParamSpec("P")
R = TypeVar("R")
Shapes = dict[str, tuple[int, ...]]
Tensors = list[tuple[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception as it travels: a UserError by its class and message, anything else with its traceback."""

    kind: str
    message: str
    trace: str

    @staticmethod
    def from_error(error: BaseException) -> Failure:
        if isinstance(error, ObjectLostError):
            return Failure(WorkerDied.__name__, "a process died that held a part of the batch", "")
        kind = type(error).__name__ if isinstance(error, UserError) else ""
        said = str(error) if kind else f"{type(error).__name__}: {error}"
        return Failure(kind, said, "" if kind else traceback.format_exc())


@dataclass(frozen=True, slots=True)
class Place:
    """The process and machine of a Ray actor."""

    pid: int
    node: str
    host: str

    @classmethod
    def here(cls) -> Place:
        """Name this process."""
        return cls(os.getpid(), ray.get_runtime_context().get_node_id(), socket.gethostname())

    @property
    def readers(self) -> str:
        """Beginning of the names of all readers of weights in the process."""
        return f"{self.node}/{self.pid}/"


def reported(method: Callable[P, R]) -> Callable[P, R | Failure]:
    """Have a method of an actor return a Failure in place of the exception that it raises."""

    @functools.wraps(method)
    def run(*args: P.args, **kwargs: P.kwargs) -> R | Failure:
        try:
            return method(*args, **kwargs)
        except Exception as error:
            return Failure.from_error(error)

    return run


class Rank:
    """Every method returns a result for the driver: a value, or a Failure."""

    def __init__(self, rank: int, ranks: int, device: str) -> None:
        self.rank, self.ranks, self.device = rank, ranks, device
        self.workers: dict[str, object] = {}
        self._weights: dict[str, RankWeights] = {}
        self._readers = Readers()
        self._parts = Parts[ray.ObjectRef[Tensors | Failure]]()
        self._loading = Loading()
        self._thread: int | None = None
        self._store: TCPStore | None = None

    @reported
    def listen(self, timeout: float, alone: bool) -> tuple[str, int]:
        """Open the store at which the ranks meet, and return its host and port. Asked of the first rank.

        It listens at one address: loopback where all ranks are on this machine (`alone`), else the one by which the
        cluster knows the machine. `timeout`: seconds of a call of the store.
        """
        host = "127.0.0.1" if alone else ray.util.get_node_ip_address()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, 0), family=family, backlog=self.ranks + 16) as listening:
            port: int = listening.getsockname()[1]
            self._store = listening_store(listening, self.ranks, timedelta(seconds=timeout))
        return host, port

    @reported
    def connect(self, address: tuple[str, int], timeout: float, surroundings: Surroundings) -> Place:
        """Join the process group, in which a collective call may take `timeout` seconds."""
        surroundings.enter()
        use_cluster_network()
        self._thread = threading.get_ident()  # in which Ray runs every method but `where` and `loaded`
        if self.device == "cuda":
            torch.cuda.set_device(0)  # Ray shows each actor its own
        backend = "nccl" if self.device == "cuda" else "gloo"
        limit = timedelta(seconds=timeout)
        store = self._store or TCPStore(*address, self.ranks, is_master=False, timeout=limit)
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.ranks, timeout=limit)
        return Place.here()

    @ray.method(concurrency_group="watch")
    def where(self) -> Position | None:
        """Return the position of the thread that runs all other methods; None: it has not begun."""
        frame = None if self._thread is None else sys._current_frames().get(self._thread)
        return None if frame is None else position_of(frame)

    @ray.method(concurrency_group="watch")
    def loaded(self) -> Loaded | None:
        """Return the progress of the newest bar of `make`; None before the first."""
        return self._loading.newest

    @reported
    def make(self, role: Role[object]) -> None:
        """Load this rank's part of a role."""
        with bars_as_stages(self._loading):
            self.workers[role.name] = role.make()
        gc.freeze()  # what was imported and made, which full collections would visit

    def _call(self, role: str, method: str, profile: Profile | None, *args: object, **kwargs: object) -> object:
        with profiled(profile, self.rank), nvtx_range(f"{role}.{method}"):
            answer: object = getattr(self.workers[role], method)(*args, **kwargs)
            return answer

    @reported
    def call(
        self, role: str, method: str, args: tuple[object, ...], kwargs: dict[str, object], profile: Profile | None
    ) -> object:
        """Call a method of the role's worker. Returns its answer."""
        return self._call(role, method, profile, *args, **kwargs)

    @reported
    def column(
        self, role: str, method: str, batch: StoredBatch, profile: Profile | None
    ) -> tuple[ray.ObjectRef[ColumnArrays], Numbers]:
        """Call a method of the role's worker with the tokens of `batch`.

        It answers ([tokens] values, metrics). Returns the reference of the values in the object store, and the metrics.
        """
        with profiled(profile, self.rank), nvtx_range(f"{role}.{method}"):
            loaded = batch.load()
            values, metrics = getattr(self.workers[role], method)(loaded)
            return put_column(values, loaded), metrics

    @reported
    def kept(self, role: str, method: str) -> tuple[ray.ObjectRef[ColumnArrays], torch.Tensor]:
        """Call a method of the role's worker that answers `CachedColumns`: (reference of its values, rows [N])."""
        found = self._call(role, method, None)
        assert isinstance(found, CachedColumns)
        values = ColumnArrays(values=found.values.numpy(), offsets=found.offsets.numpy())
        return ray.put(values), found.rows

    @reported
    def weights(self, role: str, method: str, profile: Profile | None) -> tuple[Shapes, Adapter | None]:
        """Call a method of the role's worker that answers `RankWeights`, and keep them for readers.

        Returns the shapes, and of the first rank the adapter, which is read from the object store.
        """
        found = self._call(role, method, profile)
        assert isinstance(found, RankWeights)
        self._weights[role] = found
        self._readers.leave()  # none is left but those that hang: what they would read next is new
        adapter = None if found.adapter is None else self._put(found.adapter)
        return dict(found.shapes), adapter if self.rank == 0 else None

    @reported
    def compute(
        self,
        function: Callable[Concatenate[RaggedBatch, P], tuple[dict[str, torch.Tensor], R]],
        batch: StoredBatch,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> tuple[dict[str, ray.ObjectRef[ColumnArrays] | torch.Tensor], R]:
        """Call `function` with the tokens of the whole batch.

        It answers (columns, result). Returns references of the columns [T] by token, columns [N] by sequence, and the
        result.
        """
        loaded = batch.load()
        columns, result = function(loaded, *args, **kwargs)
        by_token = {name for name in columns if column(name).per == "token"}
        return {
            name: put_column(values, loaded) if name in by_token else values for name, values in columns.items()
        }, result

    @reported
    def turn(self, reader: str, role: str, number: int, expected: int) -> Turn | None:
        """Let `reader` take part `number` of the weights, or have it ask again (see `Readers`). Asked of the first
        rank."""
        return self._readers.turn(reader, role, number, expected)

    def leave(self, beginning: str) -> None:
        """Wait no longer for a reader, or for all whose names begin so. Asked of the first rank."""
        self._readers.leave(beginning)

    def ready(self) -> None:
        """Do nothing, after all that was asked before."""

    @reported
    def read(self, role: str, turn: Turn, number: int, elements: int) -> ray.ObjectRef[Tensors | Failure] | None:
        """Return a part of the weights that the last `weights` kept, of about so many elements, or None at the end.

        It holds those tensors that this rank hands over. All ranks must be asked, as they gather together.
        """
        return self._parts.part(turn, number, lambda: self._stored(self._weights[role], elements))

    def _put(self, adapter: Adapter) -> Adapter:
        """Gather an adapter on all ranks, and put it into the object store: it is small."""
        tensors = [(name, tensor.cpu()) for name, tensor in adapter.read()]
        return replace(adapter, read=functools.partial(_tensors, ray.put(tensors))) if self.rank == 0 else adapter

    @staticmethod
    def _stored(weights: RankWeights, elements: int) -> Iterator[ray.ObjectRef[Tensors | Failure]]:
        """Gather the tensors, and put them into the object store, about so many elements at a time."""
        found: Tensors = []
        taken, is_open = 0, False
        for name, tensor in weights.read():
            taken, is_open = taken + math.prod(weights.shapes[name]), True
            if tensor is not None:
                found.append((name, tensor.cpu()))
            if taken >= elements:
                yield ray.put(found)
                found, taken, is_open = [], 0, False
        if is_open:
            yield ray.put(found)


def _tensors(stored: ray.ObjectRef[Tensors]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors of the object store, in any process of the cluster."""
    yield from ray.get(stored)
