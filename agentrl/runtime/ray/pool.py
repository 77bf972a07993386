"""The ranks of one pool under Ray.

A fault of any rank is reported once, with its traceback. Ranks that wait for a failed rank are ended, since a
collective call has no other end.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar, cast

import ray
import torch
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from agentrl import errors
from agentrl.engines.weights import Adapter
from agentrl.errors import ConfigError, TrainingError, UserError, WorkerDied
from agentrl.runtime.placement import Pool
from agentrl.runtime.profiler import Profile
from agentrl.runtime.ray.loading import loading_shown
from agentrl.runtime.ray.network import GLOO, is_gone
from agentrl.runtime.ray.rank import Failure, Place, Rank, Shapes
from agentrl.runtime.ray.session import Surroundings, death_of
from agentrl.runtime.ray.stored import ColumnArrays, StoredBatch
from agentrl.runtime.ray.watch import GONE, CallWatch
from agentrl.runtime.stall import STALL_SECONDS, Stall
from agentrl.system.metrics import Numbers

if TYPE_CHECKING:
    from ray.actor import ActorHandle, ActorProxy

    from agentrl.system.reporter import Reporter

logger = logging.getLogger(__name__)
P = ParamSpec("P")
R = TypeVar("R")
Actor = TypeVar("Actor")
Worker = TypeVar("Worker")

PLACED_WITHIN = 60.0
"""Seconds in which a cluster has to find room."""
ROOM_WITHIN = 1800.0
"""Seconds that a machine that is gone may take to come back, or another to join."""
GRACE = 5.0
"""Seconds that the other ranks have after one failed: mostly they fail alike."""
READ_ELEMENTS = 128 << 20
"""Weights that travel at once, about: 256 MiB in bfloat16."""
READY_WITHIN = 60.0
"""Seconds in which a rank ends the part of a reading that it was asked for."""
ASK_AGAIN = 0.02
"""Seconds until a reader of weights that has to wait for others asks again."""
SAYS_WITHIN = 5.0
"""Seconds in which a rank answers how far it has loaded."""
ANSWERED_WITHIN = 7200.0
"""Seconds until ranks that have not answered count as dead: longer than any update or save that goes well."""
COLLECTIVE_GRACE = 60.0
"""Seconds by which a collective call may outlast the time for a call: the driver, which knows whose fault it is,
is to be first."""


class RankPool:
    """The actors of one pool, each with its part of every role."""

    def __init__(self, pool: Pool, device: str, reporter: Reporter | None = None) -> None:
        """Start the ranks, and show `reporter` what they load.

        Raises ConfigError when the cluster has no room, or a rank refuses the config.
        """
        self.pool, self.device, self._reporter = pool, device, reporter
        self.stall_seconds, self.timeout = STALL_SECONDS, ANSWERED_WITHIN
        self.profile: Profile | None = None
        """Profile of the calls that follow; None: no profile."""
        self.places: list[Place] = []
        self._groups: list[PlacementGroup] = []
        self._actors: list[ActorProxy[Rank]] = []
        try:
            self._start(PLACED_WITHIN)
        except BaseException:
            self.stop()
            raise

    def restart(self) -> None:
        self.stop()
        gone = [node for node in {place.node for place in self.places} if is_gone(node)]
        self._start(ROOM_WITHIN if gone else PLACED_WITHIN)

    def stop(self) -> None:
        for actor in self._actors:
            end(actor)
        for group in self._groups:
            remove_placement_group(group)
        self._actors, self._groups = [], []

    def everyone(
        self, method: Callable[Concatenate[Rank, P], R | Failure], *args: P.args, **kwargs: P.kwargs
    ) -> list[R]:
        """Call a method of every rank with the same arguments."""
        return self.collect([ask(actor, method, *args, **kwargs) for actor in self._actors], method.__name__)

    def first(self, method: Callable[Concatenate[Rank, P], R | Failure], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a method of the first rank."""
        return self.collect([ask(self._actors[0], method, *args, **kwargs)], method.__name__)[0]

    def call(
        self, role: str, method: Callable[Concatenate[Worker, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> list[R]:
        """Call a method of the role's worker on every rank (see `Rank.call`)."""
        name = method.__name__
        calls = [ask(actor, Rank.call, role, name, args, kwargs, self.profile) for actor in self._actors]
        return cast(list[R], self.collect(calls, f"{role}.{name}"))  # each rank called it by its name

    def column(
        self, role: str, method: str, batches: Sequence[StoredBatch]
    ) -> list[tuple[ray.ObjectRef[ColumnArrays], Numbers]]:
        """Call a method of the role's worker on every rank, with a batch for each (see `Rank.column`)."""
        calls = [
            ask(actor, Rank.column, role, method, batch, self.profile)
            for actor, batch in zip(self._actors, batches, strict=True)
        ]
        return self.collect(calls, f"{role}.{method}")

    def kept(self, role: str, method: str) -> list[tuple[ray.ObjectRef[ColumnArrays], torch.Tensor]]:
        """Call a method that answers `CachedColumns` on every rank: references of the values, and rows [N], by rank."""
        calls = [ask(actor, Rank.kept, role, method) for actor in self._actors]
        return self.collect(calls, f"{role}.{method}")

    def weights(self, role: str, method: str) -> tuple[Shapes, Adapter | None]:
        """Have every rank keep its worker's weights for `reader`; return their shapes, and the adapter."""
        calls = [ask(actor, Rank.weights, role, method, self.profile) for actor in self._actors]
        return self.collect(calls, f"{role}.{method}")[0]

    def reader(self, role: str) -> WeightReader:
        """Return the reader of the weights that `weights` kept."""
        return WeightReader(tuple(self._actors), role)

    def collect(self, calls: Sequence[ray.ObjectRef[R | Failure]], what: str) -> list[R]:
        """The ranks' answers in their order; see `collect`. Where not each of them answered, all ranks are ended."""
        watch = CallWatch(what, self._actors[: len(calls)], self.places, Stall(self.stall_seconds, self.timeout))
        return collect(calls, what, watch, abandon=self.stop)

    def _start(self, within: float) -> None:
        pool = self.pool
        self.places = []
        needs = {"CPU": 1.0, **({"GPU": 1.0} if self.device == "cuda" else {})}
        self._groups = placed(
            [[needs] * pool.n_gpus_per_node] * pool.nnodes,
            f"{pool.keys}.nnodes={pool.nnodes} x "
            f"{pool.keys}.n_gpus_per_node={pool.n_gpus_per_node} ranks on {self.device}",
            within,
        )
        actor = ray.remote(concurrency_groups={"watch": 1})(Rank)  # type: ignore[call-overload]  # not in Ray's types
        for rank in range(pool.ranks):
            node, place = divmod(rank, pool.n_gpus_per_node)
            options = actor.options(
                num_cpus=1,
                num_gpus=needs.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._groups[node], placement_group_bundle_index=place
                ),
                runtime_env={"env_vars": _environment(pool.nnodes, pool.n_gpus_per_node)},
            )
            self._actors.append(options.remote(rank, pool.ranks, self.device))
        limit = self.timeout + COLLECTIVE_GRACE
        address = self.first(Rank.listen, limit, pool.nnodes == 1)
        self.places = self.everyone(Rank.connect, address, limit, Surroundings.here())
        first = self._actors[0]
        with loading_shown(self._reporter, lambda: ray.get(first.loaded.remote(), timeout=SAYS_WITHIN)):
            for role in pool.roles:
                self.everyone(Rank.make, role)


def ask(
    actor: ActorProxy[Actor],
    method: Callable[Concatenate[Actor, P], R | Failure],
    *args: P.args,
    **kwargs: P.kwargs,
) -> ray.ObjectRef[R | Failure]:
    """Call a method of an actor, named by its function; returns at once."""
    call: ray.ObjectRef[R | Failure] = getattr(actor, method.__name__).remote(*args, **kwargs)
    return call


def end(actor: ActorProxy[Actor]) -> None:
    """End the process of an actor."""
    ray.kill(cast("ActorHandle[Actor]", actor))  # Ray's type of what it starts is wider than what its kill takes


def collect(
    calls: Sequence[ray.ObjectRef[R | Failure]],
    what: str,
    watch: CallWatch | None = None,
    *,
    abandon: Callable[[], None] = lambda: None,
) -> list[R]:
    """Wait for the ranks' answers, and return them in the order of the ranks; `watch` is looked at meanwhile.

    Raises the error of the first rank that failed, and WorkerDied when a rank is gone. `abandon()` is called first
    where some ranks have not answered and never will, since they wait for the failed rank.
    """
    ranks = len(calls)
    answers, death = _answers(calls, what, watch)
    if len(answers) < ranks:
        abandon()
    if death is not None:
        raise death
    found: list[R] = []
    for rank, answer in sorted(answers.items()):
        if isinstance(answer, Failure):
            raise raised(answer, f"rank {rank} of {ranks}, {what}")
        found.append(answer)
    return found


def _answers(
    calls: Sequence[ray.ObjectRef[R | Failure]], what: str, watch: CallWatch | None
) -> tuple[dict[int, R | Failure], WorkerDied | None]:
    """Wait for answers until all are there, a rank is gone, or the others have had GRACE seconds after a failure.

    Returns the answers by rank, and the death of the rank that is gone.
    """
    answers: dict[int, R | Failure] = {}
    waiting = {call: rank for rank, call in enumerate(calls)}
    ends: float | None = None
    while waiting:
        timeout = None if watch is None else watch.stall.next()
        if ends is not None:
            timeout = max(0.0, ends - time.monotonic())
        done, _ = ray.wait(list(waiting), num_returns=1, timeout=timeout)
        if done:
            rank = waiting.pop(done[0])
            try:
                answers[rank] = ray.get(done[0])
            except GONE as error:
                return answers, WorkerDied(f"rank {rank} of {len(calls)} died in {what}: {death_of(error)}")
            if isinstance(answers[rank], Failure) and ends is None:
                ends = time.monotonic() + GRACE
        elif watch is None or ends is not None:
            break
        else:
            try:
                watch.look(sorted(waiting.values()))
            except WorkerDied as death:
                return answers, death
    return answers, None


@dataclass(frozen=True, slots=True)
class WeightReader:
    """Reads a role's weights from its ranks, in any process of the cluster, about READ_ELEMENTS at a time."""

    actors: tuple[ActorProxy[Rank], ...]
    role: str
    readers: int = 1
    """Readers that are expected at the same time: parts gathered for one are given to all."""

    def __call__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Read all tensors: every rank reads, as gathering may need all of them, and some hand over."""
        first, me = self.actors[0], f"{Place.here().readers}{uuid.uuid4().hex}"
        try:
            for number in itertools.count():
                while (turn := self._asked([ask(first, Rank.turn, me, self.role, number, self.readers)])[0]) is None:
                    time.sleep(ASK_AGAIN)
                asked = [ask(actor, Rank.read, self.role, turn, number, READ_ELEMENTS) for actor in self.actors]
                parts = [part for part in self._asked(asked) if part is not None]
                if not parts:  # all ranks end at once
                    return
                for tensors in self._asked(parts):
                    yield from tensors
        finally:
            ask(first, Rank.leave, me)

    def check(self, died: Place) -> None:
        """After a process died that may have been reading: let the others continue.

        Raises WorkerDied when ranks wait for others that it did not get to ask.
        """
        ask(self.actors[0], Rank.leave, died.readers)
        calls = [ask(actor, Rank.ready) for actor in self.actors]
        _, waiting = ray.wait(calls, num_returns=len(calls), timeout=READY_WITHIN)
        if waiting:
            ranks = ", ".join(str(calls.index(call)) for call in waiting)
            raise WorkerDied(f"a reader of the {self.role}'s weights died, and ranks still read for it: {ranks}")

    def _asked(self, calls: list[ray.ObjectRef[R | Failure]]) -> list[R]:
        return collect(calls, f"{self.role}.weights")


def placed(nodes: Sequence[list[dict[str, float]]], what: str, within: float = PLACED_WITHIN) -> list[PlacementGroup]:
    """Room for the bundles of each node, each on one machine.

    Raises ConfigError when the cluster has not got it within so many seconds.
    """
    groups = [placement_group(bundles, strategy="STRICT_PACK") for bundles in nodes]
    ready = [group.ready() for group in groups]
    _, missing = ray.wait(ready, num_returns=len(ready), timeout=min(within, PLACED_WITHIN))
    if missing and within > PLACED_WITHIN:
        logger.warning(
            "the cluster has no room for %s: the run goes on when machines join it (ray start --address=...), and ends "
            "after %g s without",
            what,
            within,
        )
        _, missing = ray.wait(ready, num_returns=len(ready), timeout=within)
    if missing:
        for group in groups:
            remove_placement_group(group)
        has = (f"{name} {amount:g}" for name, amount in sorted(ray.cluster_resources().items()) if name.isupper())
        raise ConfigError(f"the Ray cluster has no room for {what}: it has {', '.join(has)}")
    return groups


def raised(failure: Failure, where: str) -> UserError:
    """The error that a rank met."""
    if failure.kind:
        kind = getattr(errors, failure.kind, TrainingError)
        error: UserError = kind(f"{failure.message} ({where})")
        return error
    return TrainingError(f"{where}: {failure.message}\n{failure.trace}")


def _environment(nodes: int, per_node: int) -> dict[str, str]:
    """Environment of a rank's process: its share of the cores; loopback where all ranks are on one machine."""
    variables = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // per_node)), "OMP_WAIT_POLICY": "PASSIVE"}
    if nodes == 1:
        variables |= {GLOO: "lo", "NCCL_SOCKET_IFNAME": "lo"}
    return variables
