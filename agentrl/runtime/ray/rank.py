"""One rank: a Ray actor that holds its part of some roles' models, in one process group with the others of its pool."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray.exceptions import ObjectLostError

from agentrl.engines.weights import Weights
from agentrl.errors import TrainingError, UserError, WorkerDied
from agentrl.runtime.profiler import Profile, profiled
from agentrl.runtime.ray.session import work_in
from agentrl.runtime.ray.stored import StoredBatch, put_column
from agentrl.runtime.stall import Position, position_of
from agentrl.trajectory.batch import RaggedBatch
from agentrl.workers.roles import Role

Tensors = list[tuple[str, torch.Tensor]]
HELD_FOR = 60.0
"""Seconds after which a reader that takes no more weights has lost its turn."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception as it travels: what is the user's to mend by its class and message, anything else whole."""

    kind: str
    message: str
    trace: str

    @staticmethod
    def of(error: BaseException) -> Failure:
        if isinstance(error, ObjectLostError):
            return Failure(WorkerDied.__name__, "a process died that held a part of the batch", "")
        kind = type(error).__name__ if isinstance(error, UserError) else ""
        said = str(error) if kind else f"{type(error).__name__}: {error}"
        return Failure(kind, said, "" if kind else traceback.format_exc())


@dataclass(frozen=True, slots=True)
class Shapes:
    """Stands for a `Weights`, whose tensors stay where they are until they are read."""

    shapes: dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Kept:
    """Stands for a token column, which stays in the object store."""

    ref: Any


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank runs."""

    pid: int
    node: str
    host: str


class Rank:
    """Every method returns what the driver is to see: a value, or a Failure."""

    def __init__(self, rank: int, ranks: int, device: str, make_worker: Callable[[Role], Any]) -> None:
        self.rank, self.ranks, self.device, self.make_worker = rank, ranks, device, make_worker
        self.workers: dict[str, Any] = {}
        self._weights: dict[str, Weights] = {}
        self._reading: Iterator[tuple[str, torch.Tensor]] = iter(())
        self._reading_for: str | None = None
        self._reader: str | None = None
        self._taken = 0.0
        self._thread: int | None = None

    def address(self) -> str:
        """Where the process group may meet: this machine, a port that is free now."""
        host = os.environ.get("AGENTRL_RENDEZVOUS_HOST") or socket.gethostbyname(socket.gethostname())
        with socket.socket() as free:
            free.bind((host, 0))
            return f"tcp://{host}:{free.getsockname()[1]}"

    def connect(self, address: str, timeout: float, folder: str) -> Failure | Place:
        """Join the process group, in which a collective call may take `timeout` seconds. `folder`: see `work_in`."""
        work_in(folder)
        self._thread = threading.get_ident()  # in which Ray runs every method but `where`
        try:
            if self.device == "cuda":
                torch.cuda.set_device(0)  # Ray shows each actor its own
            backend = "nccl" if self.device == "cuda" else "gloo"
            limit = timedelta(seconds=timeout)
            dist.init_process_group(backend, init_method=address, rank=self.rank, world_size=self.ranks, timeout=limit)
        except Exception as error:
            return Failure.of(error)
        return Place(os.getpid(), ray.get_runtime_context().get_node_id(), socket.gethostname())

    @ray.method(concurrency_group="watch")
    def where(self) -> Position | None:
        """Where the thread of all other methods is; None: it has not begun."""
        frame = None if self._thread is None else sys._current_frames().get(self._thread)
        return None if frame is None else position_of(frame)

    def make(self, role: Role) -> Failure | None:
        """Load this rank's part of a role."""
        try:
            self.workers[role] = self.make_worker(role)
        except Exception as error:
            return Failure.of(error)
        return None

    def call(
        self,
        role: Role,
        method: str,
        batch: StoredBatch | None,
        load: bool,
        kwargs: dict[str, Any],
        profile: Profile | None,
    ) -> Any:
        """A method of the role's worker; with `load` it is given the batch's tokens, else the stored batch."""
        try:
            bound = getattr(self.workers[role], method)
            with profiled(profile, self.rank):
                if batch is None:
                    value = bound(**kwargs)
                elif load:
                    loaded = batch.load()
                    return _kept(bound(loaded, **kwargs), loaded)
                else:
                    value = bound(batch, **kwargs)
        except Exception as error:
            return Failure.of(error)
        if isinstance(value, Weights):
            self._weights[role] = value
            return Shapes(dict(value.shapes))
        return value

    def compute(self, function: Callable[..., Any], batch: StoredBatch, arguments: tuple[Any, ...]) -> Any:
        """(columns by field, what else it returns) of a function that needs the tokens of the whole batch."""
        try:
            loaded = batch.load()
            columns, rest = function(loaded, *arguments)
            return {name: _kept(column, loaded) for name, column in columns.items()}, rest
        except Exception as error:
            return Failure.of(error)

    def reserve(self, reader: str) -> bool:
        """Weights are read by one reader at a time. Asked of the first rank."""
        if self._reader not in (None, reader) and time.monotonic() - self._taken < HELD_FOR:
            return False
        self._reader, self._taken = reader, time.monotonic()
        return True

    def release(self, reader: str) -> None:
        if self._reader == reader:
            self._reader = None

    def ready(self) -> None:
        """Answers when what was asked before is done."""

    def begin_reading(self, role: Role, reader: str) -> None:
        """Read the weights that the last `call` stood for, from the first one."""
        self._reading, self._reading_for = iter(self._weights[role].read()), reader

    def read(self, size: int, reader: str) -> Failure | Tensors | None:
        """The next tensors, about `size` bytes; none at the end. All ranks must be asked; the first has the answer.

        A failure for a reader that lost its turn, whose next tensors would be those of another reading.
        """
        if reader != self._reading_for:
            return Failure(TrainingError.__name__, f"a reader that takes no weights for {HELD_FOR:g} s has to go", "")
        found: Tensors = []
        taken = 0
        self._taken = time.monotonic()
        try:
            while taken < size and (item := next(self._reading, None)) is not None:
                name, tensor = item
                taken += tensor.nbytes
                if self.rank == 0:
                    found.append((name, tensor.cpu()))
        except Exception as error:
            return Failure.of(error)
        return found if self.rank == 0 else None


def _kept(value: Any, batch: RaggedBatch) -> Any:
    """A worker's answer for `batch`, with its tensors put into the store."""
    if isinstance(value, torch.Tensor):
        return Kept(put_column(value, batch))
    return tuple(_kept(part, batch) for part in value) if isinstance(value, tuple) else value
