"""Link to an MCP server on standard streams, with limits on what it may write.

The SDK's own transport (mcp 2.3) joins a line of any length in memory, passes the server's stderr on to the terminal,
and leaves a server that reads no end of file running when its starter is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import anyio
import mcp_types
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.client._transport import TransportStreams
from mcp.shared.message import SessionMessage

from agentrl.system.cancellation import completed
from tools.mcp.servers import StdioServer

logger = logging.getLogger(__name__)

EXIT_SECONDS = 1.0
"""Seconds between the end of the server's stdin and SIGKILL."""
_LAUNCHER = str(Path(__file__).with_name("launch.py"))
_CHUNK = 1 << 16
_TAIL = 2000
"""Bytes of stderr that are kept."""
_KEPT = 256
"""Bytes that are kept of either end of a line that is too long."""
_ID = re.compile(rb'^\{"jsonrpc":\s*"2\.0",\s*"id":\s*(\d+)\s*,|"id":\s*(\d+)\s*\}\s*$')


class StdioLink:
    """One process of the server, from its start to its end."""

    def __init__(self, server: StdioServer, max_answer_bytes: int) -> None:
        self.server = server
        self.ended = asyncio.Event()
        """Event that is set when the server can no longer be spoken to."""
        self.last_heard = time.monotonic()
        """Time (monotonic) at which the server last wrote a line."""
        self.pid: int | None = None
        """Process group of the server."""
        self._lines = Lines(max_answer_bytes)
        self._stderr = b""
        self._garbage = 0

    @property
    def stderr(self) -> str:
        """End of what the server wrote to stderr."""
        return self._stderr.decode(errors="replace").strip()

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[TransportStreams]:
        """Start the server; when this is left, it has ended or was killed, with all that it has started."""
        starting = asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", _LAUNCHER, str(os.getpid()), *self.server.command),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=self.server.env,
            cwd=self.server.cwd,
            start_new_session=True,  # Ctrl-C in the terminal is ours
        )
        process = await completed(starting, lambda one: one._transport.close())  # type: ignore[attr-defined]
        self.pid = process.pid
        incoming, read = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        write, outgoing = anyio.create_memory_object_stream[SessionMessage](0)
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        tasks = [
            asyncio.create_task(self._read(process.stdout, incoming)),
            asyncio.create_task(self._write(process.stdin, outgoing)),
            asyncio.create_task(self._drain(process.stderr)),
        ]
        try:
            yield read, write
        finally:
            with anyio.CancelScope(shield=True):
                await self._end(process, tasks)

    async def _end(self, process: asyncio.subprocess.Process, tasks: list[asyncio.Task[None]]) -> None:
        """Close its stdin, give it time to end by itself, kill what is left of it."""
        assert process.stdin is not None
        try:
            process.stdin.close()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(EXIT_SECONDS):
                    await process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            try:
                await asyncio.wait(tasks, timeout=EXIT_SECONDS)  # for its last words on stderr
                await process.wait()
            finally:
                for task in tasks:
                    task.cancel()
                process._transport.close()  # type: ignore[attr-defined]  # else its pipes wait for the collector

    async def _read(
        self, stdout: asyncio.StreamReader, incoming: MemoryObjectSendStream[SessionMessage | Exception]
    ) -> None:
        try:
            async with incoming:
                while chunk := await stdout.read(_CHUNK):
                    for line in self._lines.feed(chunk):
                        if (message := self._message(line)) is not None:
                            await incoming.send(SessionMessage(message))
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass  # the session is gone
        finally:
            self.ended.set()

    def _message(self, line: bytes | Cut) -> mcp_types.JSONRPCMessage | None:
        self.last_heard = time.monotonic()
        if isinstance(line, Cut):
            logger.warning("MCP server %s wrote a line of more than %d bytes", self.server.name, line.most)
            if line.id is None:
                return None
            problem = mcp_types.ErrorData(
                code=mcp_types.PARSE_ERROR, message=f"the answer is longer than {line.most} bytes"
            )
            return mcp_types.JSONRPCError(jsonrpc="2.0", id=line.id, error=problem)
        try:
            return mcp_types.jsonrpc_message_adapter.validate_json(line, by_name=False)
        except ValueError:
            if line.strip():
                self._garbage += 1
                if self._garbage == 1:
                    logger.warning("MCP server %s wrote to stdout what is no message: %r", self.server.name, line[:200])
            return None

    async def _write(self, stdin: asyncio.StreamWriter, outgoing: MemoryObjectReceiveStream[SessionMessage]) -> None:
        try:
            async with outgoing:
                async for message in outgoing:
                    stdin.write(message.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n")
                    await stdin.drain()
        except (ConnectionError, RuntimeError):
            self.ended.set()

    async def _drain(self, stderr: asyncio.StreamReader) -> None:
        while chunk := await stderr.read(_CHUNK):
            self._stderr = (self._stderr + chunk)[-_TAIL:]


class Cut:
    """Line that was too long to keep. `id`: of the request that it answers, as far as that can be seen."""

    def __init__(self, most: int, ends: bytes) -> None:
        self.most = most
        found = _ID.search(ends)
        self.id = int(found[1] or found[2]) if found else None


class Lines:
    """Splitter of a stream of bytes into lines, none of them longer than `most`."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._rest = bytearray()
        self._is_cut = False

    def feed(self, chunk: bytes) -> Iterator[bytes | Cut]:
        """Take the next bytes; iterate over the lines that they complete."""
        *ended, rest = chunk.split(b"\n")
        for part in ended:
            self._add(part)
            line, is_cut = bytes(self._rest), self._is_cut
            self._rest, self._is_cut = bytearray(), False
            yield Cut(self.most, line) if is_cut else line
        self._add(rest)

    def _add(self, part: bytes) -> None:
        self._rest += part
        if len(self._rest) > self.most or (self._is_cut and len(self._rest) > 2 * _KEPT):
            self._is_cut = True
            del self._rest[_KEPT:-_KEPT]
