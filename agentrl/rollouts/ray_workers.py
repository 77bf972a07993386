"""The rollout workers of a run under Ray: started, replaced, called, and heard.

A rollout worker keeps no state that is not sent to it again. When one dies, its replacement is given the weights and
repeats its part of the step. Where the others continue while it starts, another worker does that part.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import ray

from agentrl.engines.weights import Weights
from agentrl.errors import WorkerDied
from agentrl.observe.display import Display
from agentrl.rollouts.local import LocalRollouts
from agentrl.rollouts.ray_placing import WorkerMaker
from agentrl.rollouts.ray_worker import RolloutWorker, StatusUpdate, Work
from agentrl.runtime.ray.network import is_gone
from agentrl.runtime.ray.pool import ROOM_WITHIN, WeightReader, ask, end, raised
from agentrl.runtime.ray.rank import Failure, Place
from agentrl.runtime.ray.session import death_of
from agentrl.runtime.ray.watch import GONE
from agentrl.runtime.stall import Stall

if TYPE_CHECKING:
    from ray.actor import ActorProxy

T = TypeVar("T")
LOOK_EVERY = 0.25
"""Seconds between two looks at how far the workers are."""
ROOM_TOLD = 5.0
"""Seconds after which the user is warned that a worker waits for a machine."""
SILENT_TOLD, SILENT_FOR = 60.0, 600.0
"""Seconds without an answer to a call that workers answer at once: until the user is warned, and until the worker
counts as dead."""
SILENT = "it is stopped, unreachable, or in native code that lets no other thread run"
CLOSED_WITHIN = 30.0
"""Seconds that a worker has to end its rollouts, or its servers and tools."""


@dataclass(slots=True)
class Starting:
    """A worker that takes another's place, and that nothing waits for while it starts."""

    call: ray.ObjectRef[object]
    """Answered when it has."""
    begun: float = field(default_factory=time.monotonic)
    is_told: bool = False
    """True where the user was warned that no machine has room for it."""


class RolloutWorkers:
    """The processes of all rollout workers.

    Where one dies, all wait until a new one has taken its place, unless they `continue`.

    Args:
        continues: while a replacement starts, the others do its work, and nothing waits for it. It takes part from
            the first weights that are sent once it has started (`join`).
        on_join: called when a replacement has the weights, or will be sent them with all others, to bring it to the
            state of the others.
    """

    def __init__(self, maker: WorkerMaker, display: Display, on_join: Callable[[], None], *, continues: bool) -> None:
        """Raises every error that keeps a worker from starting."""
        self.maker, self.display, self.count = maker, display, maker.count
        self.weights: tuple[Weights, int] | None = None
        """Weights that a replacement is given, and their version."""
        self._on_join, self._continues, self._is_open = on_join, continues, False
        self._restarts = maker.config.trainer.max_worker_restarts
        self._places: dict[int, Place] = {}
        """Processes and machines of the workers that have started, by their numbers."""
        self.actors: list[ActorProxy[RolloutWorker]] = []
        self._starting: dict[int, Starting] = {}
        """By number: idle workers, which get no call yet while others continue."""
        self._asked: dict[ray.ObjectRef[StatusUpdate], tuple[int, Stall]] = {}
        """Unanswered calls, by worker: a worker hands out messages with an answer, so no call may be dropped."""
        try:
            self.actors = [maker.make(number) for number in range(self.count)]
            with display.stage("start rollout workers"):
                self._open()
        except BaseException:
            self.close()
            raise
        self._is_open = True

    @property
    def living(self) -> list[int]:
        """Return the numbers of the workers that are not just starting in another's place."""
        return [number for number in range(self.count) if number not in self._starting]

    def parts(self, count: int) -> Iterator[tuple[int, tuple[int, int], int, int]]:
        """Divide `count` things among the workers: (number of the worker, (part, parts), start, end)."""
        living = self.living
        bounds = [count * part // len(living) for part in range(len(living) + 1)]
        for part, number in enumerate(living):
            yield number, (part + 1, len(living)), bounds[part], bounds[part + 1]

    def broadcast(self, work: Work[T]) -> list[T]:
        """Call all workers that live. A worker that dies and is not replaced at once gives no answer."""
        what = getattr(work, "func", work).__name__
        return self.call([(number, work) for number in self.living], what=what, moves=False)

    def call(self, works: Sequence[tuple[int, Work[T]]], *, what: str, moves: bool = True) -> list[T]:
        """Have workers, by number, do their work, and return the answers. A worker that dies is replaced, and its
        replacement is asked. While the replacement starts, another worker is asked if the work `moves`; otherwise the
        work waits.

        Raises the error of a worker, and WorkerDied when one died once more than trainer.max_worker_restarts allows,
        once the others' work has ended.
        """
        answers: dict[int, T] = {}
        running: dict[ray.ObjectRef[T | Failure], tuple[int, int, ActorProxy[RolloutWorker]]] = {}
        """Position of the work, and number and process of the worker that does it."""

        def begin(place: int) -> None:
            number, work = works[place]
            if number in self._starting:
                if not moves:
                    return
                living = self.living
                number = living[place % len(living)]
            actor = self.actors[number]
            running[ask(actor, RolloutWorker.call, work)] = place, number, actor

        try:
            for place in range(len(works)):
                begin(place)
            while running:
                for call in ray.wait(list(running), num_returns=len(running), timeout=LOOK_EVERY)[0]:
                    place, number, actor = running.pop(call)
                    try:
                        answers[place] = answer_of(call, f"rollout worker {number + 1} of {self.count}, {what}")
                    except GONE as error:
                        if self.actors[number] is actor:  # else another of its calls has told of it
                            self.replace(number, f"rollout worker {number + 1} died in {what}: {death_of(error)}")
                        begin(place)
                self._poll()
        except BaseException:  # Ctrl-C among them
            if running:
                ray.wait(list(running), num_returns=len(running), timeout=CLOSED_WITHIN)
            raise
        return [answers[place] for place in range(len(works)) if place in answers]

    def replace(self, number: int, death: str) -> None:
        """Replace a worker that died. Raises WorkerDied where no replacement is allowed."""
        if self._continues and self._is_open:  # else all start at once
            self._begin_replacement(number, death)
            if not self.living:
                self._wait_for_one()
            return
        self._remake(number, death)
        try:
            self._wait_for_room(number)
            self._finish_start(number, self.maker.open(number, self.actors[number]))
            self._give_weights(number)
        except GONE as error:
            self.replace(number, f"rollout worker {number + 1} died at its start: {death_of(error)}")
            return
        if self._is_open:
            self._on_join()

    def restart_dead(self) -> None:
        """Replace workers that died while they were idle. All are in one state then, and must be sent weights again."""
        self.weights = None
        for number in self.living:
            try:
                ray.get(self.actors[number].status_update.remote()).show(self.display)
            except GONE as error:
                self.replace(number, f"rollout worker {number + 1} died: {death_of(error)}")
        self._on_join()  # also for replacements that lived while the rank died whose weights they were to read

    def join(self) -> list[int]:
        """Have replacements that have started since take part; their numbers. They have no weights yet."""
        joins = []
        for number, one in list(self._starting.items()):
            if not ray.wait([one.call], timeout=0)[0]:
                waited = time.monotonic() - one.begun
                if waited > ROOM_TOLD and not one.is_told and not self.maker.has_room(number, 0.1):
                    one.is_told = True
                    self._warn_of_room(number, "the worker takes part then")
                continue
            try:
                self._finish_start(number, one.call)
            except GONE as error:
                self._begin_replacement(number, f"rollout worker {number + 1} died at its start: {death_of(error)}")
                continue
            del self._starting[number]
            joins.append(number)
            self.display.note(f"rollout worker {number + 1} has started, and takes part from now on")
        return joins

    def close(self) -> None:
        """End all workers."""
        opened = [actor for number, actor in enumerate(self.actors) if number not in self._starting]
        closing = [ask(actor, RolloutWorker.close) for actor in opened]
        if closing:
            ray.wait(closing, num_returns=len(closing), timeout=CLOSED_WITHIN)
        for actor in self.actors:
            end(actor)
        self.actors = []
        self.maker.close()

    def _poll(self) -> None:
        """Ask the workers for messages, and show them."""
        busy = {number for number, _ in self._asked.values()}
        for number in self.living:
            if number not in busy:
                self._asked[self.actors[number].status_update.remote()] = number, Stall(SILENT_TOLD, SILENT_FOR)
        asked = list(self._asked)
        ready, _ = ray.wait(asked, num_returns=len(asked), timeout=LOOK_EVERY)
        for call in ready:
            number, _ = self._asked.pop(call)
            try:
                ray.get(call).show(self.display)
            except GONE:
                continue  # told where its answer is waited for
        for number, stall in self._asked.values():
            if stall.due():
                self.display.warn(f"rollout worker {number + 1} has not answered for {stall.seconds:.0f} s: {SILENT}")
            if stall.over:
                end(self.actors[number])

    def _remake(self, number: int, death: str, meanwhile: str = "") -> None:
        """Make a new process for a worker that died, and warn the user. Raises WorkerDied where that is not allowed.

        meanwhile: text about the work that continues while it starts.
        """
        if self._restarts == 0:
            raise WorkerDied(death)
        self._restarts -= 1
        place = self._places.pop(number, None)
        if place is not None and self.weights is not None and isinstance(self.weights[0].read, WeightReader):
            self.weights[0].read.check(place)
        if place is not None and is_gone(place.node):
            death = f"{death}, and its machine is gone"
            if self.maker.nodes is not None and place.node in self.maker.nodes():  # so are the ranks that were there
                raise WorkerDied(death)
        self.display.warn(f"{death}; a new one takes its place{meanwhile}")
        end(self.actors[number])  # an answer that is lost with its machine does not say that the process is dead
        self.actors[number] = self.maker.make(number)
        self._asked = {call: other for call, other in self._asked.items() if other[0] != number}

    def _begin_replacement(self, number: int, death: str) -> None:
        """Start a replacement for a worker that died, without waiting for it. Raises WorkerDied."""
        others = set(self.living) - {number}
        self._remake(number, death, ", and the others go on meanwhile" if others else "")
        self._starting[number] = Starting(self.maker.open(number, self.actors[number]))

    def _wait_for_one(self) -> None:
        """Wait until one of the replacements can take part, and give it the weights. Raises WorkerDied."""
        begun = time.monotonic()
        while not (joins := self.join()):
            is_late = time.monotonic() - begun > ROOM_WITHIN
            if is_late and not any(self.maker.has_room(number, 0.1) for number in self._starting):
                raise WorkerDied(f"the cluster had no room for any rollout worker in {ROOM_WITHIN:g} s")
            ray.wait([one.call for one in self._starting.values()], num_returns=1, timeout=1.0)
        for number in joins:
            try:
                self._give_weights(number)
            except GONE as error:
                self.replace(number, f"rollout worker {number + 1} died at its start: {death_of(error)}")
        self._on_join()

    def _wait_for_room(self, number: int) -> None:
        """Wait until a machine has room for a worker that takes another's place. Raises WorkerDied."""
        begun, is_told = time.monotonic(), False
        while not self.maker.has_room(number, 1.0):  # in short pieces, for it cannot be interrupted
            waited = time.monotonic() - begun
            if waited > ROOM_WITHIN:
                raise WorkerDied(f"rollout worker {number + 1}: the cluster had no room for it in {ROOM_WITHIN:g} s")
            if waited > ROOM_TOLD and not is_told:
                is_told = True
                self._warn_of_room(number, f"the run continues then, and ends after {ROOM_WITHIN:g} s without one")

    def _warn_of_room(self, number: int, then: str) -> None:
        """Warn that no machine has room for a worker."""
        self.display.warn(
            f"no machine of the cluster has room for rollout worker {number + 1} until one joins "
            f"(ray start --address=...): {then}"
        )

    def _open(self) -> None:
        """Start all workers' engines and tools at once."""
        running = {self.maker.open(number, actor): number for number, actor in enumerate(self.actors)}
        while running:
            for call in ray.wait(list(running), num_returns=len(running), timeout=LOOK_EVERY)[0]:
                number = running.pop(call)
                try:
                    self._finish_start(number, call)
                except GONE as error:
                    self.replace(number, f"rollout worker {number + 1} died in its start: {death_of(error)}")
            self._poll()

    def _finish_start(self, number: int, opening: ray.ObjectRef[object]) -> None:
        """Wait until a worker has opened. Raises the error that it met, or one of `GONE`."""
        answer_of(opening, f"rollout worker {number + 1} of {self.count}, its start")
        self._places[number] = ray.get(self.actors[number].place.remote())

    def _give_weights(self, number: int) -> None:
        if self.weights is not None:
            weights, version = self.weights
            update = partial(LocalRollouts.update_weights, weights=weights, version=version)
            call = ask(self.actors[number], RolloutWorker.call, update)
            answer_of(call, f"rollout worker {number + 1}, its start")


def answer_of(call: ray.ObjectRef[T | Failure], worker: str) -> T:
    """Wait for a worker's answer. Raises the error that it met, or one of `GONE`."""
    answer = ray.get(call)
    if isinstance(answer, Failure):
        raise raised(answer, worker)
    return answer
