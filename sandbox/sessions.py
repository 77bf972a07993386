"""Stateful sessions: one interpreter a trajectory, that keeps its variables and files from cell to cell.

A session's memory is limited, and counted, over its whole life. It ends when it is closed, when nobody used it for a
while, when a limit ends it, or when its interpreter exits. The next cell under the same name starts a new one and says
so.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from pydantic import BaseModel, ValidationError

from sandbox.limits import Limit, Limits
from sandbox.pool import Command, Job, Outcome, Pool, Run

LIFETIME = 24 * 3600.0
"""Seconds after which a session ends in any case."""
AFTER_INTERRUPT = 1.0
"""Seconds that a cell has to end after it was interrupted, before the session is killed."""
_LARGEST_ANSWER = 96 << 20
_LENGTH = struct.Struct("!I")


class TooManySessions(Exception):
    """The cap is reached, and none of the sessions is idle for long enough."""


@dataclass(frozen=True, slots=True)
class Cell:
    code: str
    seconds: float
    files: Mapping[str, bytes] = field(default_factory=dict)
    fetch: Sequence[str] = ()


class CellError(BaseModel):
    """An exception, as a notebook shows it."""

    ename: str
    evalue: str
    traceback: list[str]


class _Answer(BaseModel):
    """What the session's interpreter sent. It is the program's own word."""

    result: str | None
    error: CellError | None
    files: dict[str, str]
    refused: dict[str, str]


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
        """In use now; None in tiers that do not count it."""
        group = self.run.group
        try:
            return group.memory_now() if group and self.alive else None
        except OSError:
            return None

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
            return await self._ended(limits, started)
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
        assert self.run.channel is not None
        loop = asyncio.get_running_loop()
        files = {path: base64.b64encode(content).decode() for path, content in cell.files.items()}
        encoded = json.dumps({"code": cell.code, "files": files, "fetch": list(cell.fetch)}).encode()
        await loop.sock_sendall(self.run.channel, _LENGTH.pack(len(encoded)) + encoded)
        size = _LENGTH.unpack(await self._exactly(_LENGTH.size))[0]
        if size > _LARGEST_ANSWER:
            raise ValueError("an answer of this size is not read")
        return _Answer.model_validate_json(await self._exactly(size))

    async def _exactly(self, size: int) -> bytes:
        assert self.run.channel is not None
        data = bytearray()
        while len(data) < size:
            part = await asyncio.get_running_loop().sock_recv(self.run.channel, min(1 << 20, size - len(data)))
            if not part:
                raise EOFError
            data += part
        return bytes(data)

    async def _ended(self, limits: list[Limit], started: float) -> CellOutcome:
        """The interpreter is gone, or will not answer: what it left."""
        await asyncio.wait({self._finish}, timeout=0.0 if limits else 1.0)
        outcome: Outcome | None = None
        if self._finish.done():
            outcome = self._finish.result()
        stdout, stderr = (bytes(drain.kept) for drain in self.run.drains)
        cut = [name for name, drain in zip(("stdout", "stderr"), self.run.drains, strict=True) if drain.cut]
        ended = CellOutcome(False, False, stdout, stderr, cut, time.monotonic() - started, limits=limits, code=-9)
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


class Sessions:
    """Sessions by name, at most `cap`, each ended after `idle_seconds` without a cell."""

    def __init__(self, pool: Pool, cap: int, idle_seconds: float) -> None:
        self.pool, self.cap, self.idle_seconds = pool, cap, idle_seconds
        self._by_name: dict[str, Session] = {}
        self._opening = 0

    def __len__(self) -> int:
        return len(self._by_name)

    @property
    def memory_bytes(self) -> int:
        return sum(session.memory_bytes or 0 for session in self._by_name.values())

    async def execute(self, name: str, cell: Cell, limits: Limits) -> CellOutcome:
        """Run a cell in the session `name`, opened with `limits` if there is none. Raises TooManySessions,
        SandboxFault.

        Cells of one session wait for each other. On cancellation the session ends: its state is unknown.
        """
        while True:
            session, created = await self._get(name, limits)
            async with session.lock:
                if self._by_name.get(name) is not session or not session.alive:  # ended while this cell waited
                    await self._forget(name, session)
                    continue
                try:
                    outcome = await session.execute(cell)
                except BaseException:
                    await self._forget(name, session)
                    raise
                if not outcome.alive:
                    await self._forget(name, session)
                return replace(outcome, created=created)

    async def _get(self, name: str, limits: Limits) -> tuple[Session, bool]:
        if session := self._by_name.get(name):
            return session, False
        if len(self._by_name) + self._opening >= self.cap:
            raise TooManySessions(f"all {self.cap} sessions are in use")
        self._opening += 1
        try:
            session = await Session.open(self.pool, limits)
        finally:
            self._opening -= 1
        if other := self._by_name.get(name):  # opened by another cell meanwhile
            await session.close()
            return other, False
        self._by_name[name] = session
        return session, True

    async def _forget(self, name: str, session: Session) -> None:
        if self._by_name.get(name) is session:
            del self._by_name[name]
        await session.close()

    async def close(self, name: str) -> bool:
        """End a session; whether there was one."""
        session = self._by_name.pop(name, None)
        if session is None:
            return False
        await session.close()
        return True

    async def close_all(self) -> None:
        await asyncio.gather(*(self.close(name) for name in list(self._by_name)))

    async def end_idle(self) -> None:
        """Forever: end sessions that nobody uses, or that have died."""
        while True:
            await asyncio.sleep(min(1.0, self.idle_seconds / 4))
            now = time.monotonic()
            for name, session in list(self._by_name.items()):
                if not session.lock.locked() and (not session.alive or now - session.used > self.idle_seconds):
                    await self._forget(name, session)

    def memory_of(self, name: str) -> int | None:
        """Bytes that a session uses now; None where there is none, or the tier does not count."""
        session = self._by_name.get(name)
        return session.memory_bytes if session else None
