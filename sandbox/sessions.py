"""Stateful sessions: one interpreter a trajectory, that keeps its variables and files from cell to cell.

A session's memory is limited, and counted, over its whole life. It ends when it is closed, when nobody used it for a
while, when a limit ends it, or when its interpreter exits. The next cell under the same name starts a new one and says
so. Names are a client's own.

A session holds its limit of the memory that all runs may have together while a cell runs. Between cells it holds what
it uses and a margin, and the kernel limits it to that; where no control group counts, it goes on holding its limit.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import math
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

from pydantic import BaseModel, Field, ValidationError

from sandbox.fair import FairQueue, before
from sandbox.interpreter import MARK, PIECE, packets
from sandbox.limits import MAX_FETCHED, MIB, Limit, Limits
from sandbox.pool import Command, Job, Outcome, Pool, Run

LIFETIME = 24 * 3600.0
"""Seconds after which a session ends in any case."""
AFTER_INTERRUPT = 1.0
"""Seconds that a cell has to end after it was interrupted, before the session is killed."""
AT_REST = 16 * MIB
"""Bytes that a session may grow by between two cells, where all runs share a budget."""
SHARE = 0.5
"""Part of all runs' memory that sessions may hold together, so that programs do not wait for idle sessions."""
_LARGEST_ANSWER = 96 << 20
_MOST_DROPPED = 1 << 20
"""Bytes of packets that are of no answer, each with _PACKET, after which the session is ended."""
_PACKET = 64


class TooManySessions(Exception):
    """A cap is reached, and none of the sessions is idle for long enough."""


@dataclass(frozen=True, slots=True)
class Cell:
    code: str
    seconds: float
    files: Mapping[str, bytes] = field(default_factory=dict)
    fetch: Sequence[str] = ()


class CellError(BaseModel):
    """An exception, as a notebook shows it."""

    ename: Annotated[str, Field(max_length=10_000)]
    evalue: Annotated[str, Field(max_length=100_000)]
    traceback: Annotated[list[Annotated[str, Field(max_length=10_000)]], Field(max_length=200)]


class _Answer(BaseModel):
    """An answer of the session's interpreter, as the program itself may have written it."""

    result: Annotated[str, Field(max_length=1_000_000)] | None
    error: CellError | None
    files: dict[str, str]
    refused: dict[str, Annotated[str, Field(max_length=1000)]]

    def to(self, cell: Cell) -> _Answer:
        """Return the part that answers the cell. Raises ValueError where its files are no base64, or too large."""
        files = {path: content for path, content in self.files.items() if path in cell.fetch}
        if sum(len(base64.b64decode(content, validate=True)) for content in files.values()) > MAX_FETCHED:
            raise ValueError("files of this size are not read")
        named = {path: why for path, why in self.refused.items() if path in cell.fetch or path in cell.files}
        return self.model_copy(update={"files": files, "refused": named})


@dataclass(slots=True)
class CellOutcome:
    created: bool
    """The session began with this cell: nothing of earlier cells is there."""
    alive: bool
    stdout: bytes
    stderr: bytes
    cut: list[str]
    seconds: float
    result: str | None = None
    error: CellError | None = None
    limits: list[Limit] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    """base64."""
    refused: dict[str, str] = field(default_factory=dict)
    code: int | None = None
    """How the interpreter ended: exit status, or minus the signal's number; None while it lives."""


class Session:
    """One interpreter. `open`, then `execute` one cell at a time, then `close`."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.lock = asyncio.Lock()
        self.used = time.monotonic()
        self._finish = asyncio.create_task(run.finish())
        self._finish.add_done_callback(lambda task: task.cancelled() or task.exception())

    @classmethod
    async def open(cls, pool: Pool, limits: Limits) -> Session:
        """Raises SandboxFault."""
        job = Job([Command(None, LIFETIME)], warm="sympy")
        return cls(await Run.begin(pool, job, limits, session=True))

    @property
    def alive(self) -> bool:
        return not self._finish.done()

    @property
    def memory_bytes(self) -> int | None:
        """Bytes in use now; None in tiers that do not count them."""
        group = self.run.group
        try:
            return group.memory_now() if group and self.alive else None
        except OSError:
            return None

    def rest(self) -> int:
        """No cell runs for now: the bytes that the session is limited to until `wake`."""
        most = self.run.limits.memory_bytes
        used = self.memory_bytes
        if used is None or used + AT_REST >= most:
            return most
        try:
            self.run.group.limit_memory(used + AT_REST)  # type: ignore[union-attr]
        except OSError:
            return most
        return used + AT_REST

    def wake(self) -> None:
        """The session's own limit counts again."""
        if self.run.group and self.alive:
            self.run.group.limit_memory(self.run.limits.memory_bytes)

    async def execute(self, cell: Cell) -> CellOutcome:
        """Run a cell to its end, or to the end of the session. Raises SandboxFault. If it is cancelled, the session
        has to be closed.
        """
        started = time.monotonic()
        asking = asyncio.create_task(self._ask(cell))
        limits: list[Limit] = []
        try:
            await asyncio.wait({asking, self._finish}, timeout=cell.seconds, return_when=asyncio.FIRST_COMPLETED)
            if not asking.done() and self.alive:
                limits.append(Limit.WALL_TIME)
                self.run.interrupt()
                await asyncio.wait({asking, self._finish}, timeout=AFTER_INTERRUPT, return_when=asyncio.FIRST_COMPLETED)
            answer = None
            if asking.done():
                with contextlib.suppress(OSError, EOFError, ValueError, RecursionError, ValidationError):
                    answer = asking.result()
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        if answer is None:
            return await self.ended(limits, started)
        (stdout, cut_out), (stderr, cut_err) = (drain.take() for drain in self.run.drains)
        cut = [name for name, is_cut in (("stdout", cut_out), ("stderr", cut_err)) if is_cut]
        self.used = time.monotonic()
        return CellOutcome(
            False,
            True,
            stdout,
            stderr,
            cut,
            self.used - started,
            answer.result,
            answer.error,
            limits,
            answer.files,
            answer.refused,
        )

    async def _ask(self, cell: Cell) -> _Answer:
        """The answer to this cell: only packets that bear its mark, which nobody has known before, are of it. What
        others the program wrote, before or meanwhile, is dropped.
        """
        assert self.run.channel is not None
        loop = asyncio.get_running_loop()
        mark = secrets.token_bytes(MARK)
        files = {path: base64.b64encode(content).decode() for path, content in cell.files.items()}
        asked = {"mark": mark.hex(), "code": cell.code, "files": files, "fetch": list(cell.fetch)}
        for packet in packets(json.dumps(asked).encode()):
            await loop.sock_sendall(self.run.channel, packet)
        answer, dropped = bytearray(), 0
        while True:
            packet = await loop.sock_recv(self.run.channel, 2 * PIECE)
            await asyncio.sleep(0)  # sock_recv does not wait while there is something
            if not packet:
                raise EOFError
            if packet.startswith(mark) and len(packet) > MARK:
                answer += packet[MARK + 1 :]
                if packet[MARK]:
                    return _Answer.model_validate_json(bytes(answer)).to(cell)
            else:
                dropped += len(packet) + _PACKET
            if len(answer) > _LARGEST_ANSWER or dropped > _MOST_DROPPED:
                raise ValueError("an answer of this size is not read")

    async def ended(self, limits: Sequence[Limit] = (), started: float | None = None) -> CellOutcome:
        """The interpreter is gone, or will not answer: what it left."""
        await asyncio.wait({self._finish}, timeout=0.0 if limits else 1.0)
        outcome: Outcome | None = None
        if self._finish.done() and not self._finish.cancelled():  # cancelled: the session was closed meanwhile
            outcome = self._finish.result()
        stdout, stderr = (bytes(drain.kept) for drain in self.run.drains)
        cut = [name for name, drain in zip(("stdout", "stderr"), self.run.drains, strict=True) if drain.cut]
        seconds = time.monotonic() - started if started is not None else 0.0
        ended = CellOutcome(False, False, stdout, stderr, cut, seconds, limits=list(limits), code=-9)
        if outcome is not None:
            last = outcome.commands[-1]
            ended.limits += [limit for limit in last.limits if limit not in limits]
            ended.code = last.code if last.signal is None else -last.signal
        await self.close()
        return ended

    async def close(self) -> None:
        """All its processes are gone, but for the moment that the kernel takes."""
        if not self.run.closed:
            self._finish.cancel()
            await asyncio.gather(self._finish, return_exceptions=True)
            await self.run.close()


@dataclass(slots=True, eq=False)
class _Place:
    """The session of a name, and what it holds. Cells of one session wait for its lock."""

    limits: Limits
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    session: Session | None = None
    """None until its first cell has its turn."""
    held: int = 0
    """Bytes of the memory of all runs that it holds between cells."""

    @property
    def lives(self) -> bool:
        return self.session is not None and self.session.alive


class Sessions:
    """Sessions by client and name, at most `cap`, each ended after `idle_seconds` without a cell. Cells take their
    turns in `queue`. `each`: sessions of one client.
    """

    def __init__(self, pool: Pool, queue: FairQueue, cap: int, idle_seconds: float, each: float = math.inf) -> None:
        self.pool, self.queue, self.cap, self.idle_seconds, self.each = pool, queue, cap, idle_seconds, each
        self._places: dict[tuple[str, str], _Place] = {}

    def __len__(self) -> int:
        return len(self._places)

    @property
    def memory_bytes(self) -> int:
        return sum(self.memory_of(*key) or 0 for key in self._places)

    async def execute(
        self, client: str, name: str, cell: Cell, limits: Limits, begin_before: float | None = None
    ) -> CellOutcome:
        """Run a cell in the client's session `name`, opened with `limits` if there is none. Raises TooManySessions,
        QueueFull, NotBegun, SandboxFault.

        Cells of one session wait for each other. On cancellation of a cell that runs the session ends: its state is
        unknown.
        """
        key = (client, name)
        outcome = None
        while outcome is None:
            place = self._places.get(key) or self._new(key, limits)
            async with before(begin_before):
                await place.lock.acquire()
            try:
                if self._places.get(key) is place:  # else it ended while this cell waited
                    outcome = await self._turn(client, place, cell, begin_before)
            finally:
                place.lock.release()
                if self._places.get(key) is not place or not place.lives:
                    await self._forget(key, place)
        return outcome

    async def _turn(self, client: str, place: _Place, cell: Cell, begin_before: float | None) -> CellOutcome:
        """Wait for the cell's turn and run it. Where the session has ended by itself since its last cell, the outcome
        says how, and the cell is not run.
        """
        new = place.session is None
        async with self.queue.turn(client, place.limits.memory_bytes - place.held, begin_before):
            if place.session is None:
                place.session = await Session.open(self.pool, place.limits)
            session = place.session
            try:
                if not session.alive and not new:  # by what an earlier cell left running
                    return await session.ended()
                session.wake()
                outcome = await session.execute(cell)
            except BaseException:
                await session.close()
                raise
            if outcome.alive:
                self._hold(place, session.rest() if self.queue.most_memory < math.inf else 0)
            return replace(outcome, created=new)

    def _new(self, key: tuple[str, str], limits: Limits) -> _Place:
        if len(self._places) >= self.cap:
            raise TooManySessions(f"all {self.cap} sessions are in use")
        if sum(client == key[0] for client, _ in self._places) >= self.each:
            raise TooManySessions(f"all {self.each} sessions of this client are in use")
        living = (place for place in self._places.values() if place.session is None or place.session.alive)
        held = sum(place.held or place.limits.memory_bytes for place in living)
        if held + limits.memory_bytes > self.queue.most_memory * SHARE:
            raise TooManySessions(
                f"sessions hold {held // MIB} MiB; with {limits.memory_bytes // MIB} more it is too much"
            )
        self._places[key] = _Place(limits)
        return self._places[key]

    def _hold(self, place: _Place, memory: int) -> None:
        self.queue.hold(memory - place.held)
        place.held = memory

    async def _forget(self, key: tuple[str, str], place: _Place) -> None:
        if self._places.get(key) is place:
            del self._places[key]
        if place.session:
            await place.session.close()
        self._hold(place, 0)

    async def close(self, client: str, name: str) -> bool:
        """End a session; whether there was one."""
        place = self._places.get((client, name))
        if place is None:
            return False
        await self._forget((client, name), place)
        return True

    async def close_all(self) -> None:
        await asyncio.gather(*(self.close(*key) for key in list(self._places)))

    async def end_idle(self) -> None:
        """Forever: end sessions that nobody uses; of those that have died only a word for their next cell is kept."""
        while True:
            await asyncio.sleep(min(1.0, self.idle_seconds / 4))
            now = time.monotonic()
            for key, place in list(self._places.items()):
                if place.lock.locked():
                    continue
                if place.session is None or now - place.session.used > self.idle_seconds:
                    await self._forget(key, place)
                elif not place.session.alive:
                    await place.session.close()
                    self._hold(place, 0)

    def memory_of(self, client: str, name: str) -> int | None:
        """Bytes that a session uses now; None where there is none, or the tier does not count."""
        place = self._places.get((client, name))
        return place.session.memory_bytes if place and place.session else None
