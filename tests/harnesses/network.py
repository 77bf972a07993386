"""The way between a program and the endpoint, which breaks at a chosen place of an answer."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit


class Network:
    """Passes connections on. Behind `breaks_at` in an answer it ends that connection, once, at both ends."""

    def __init__(self, breaks_at: bytes) -> None:
        self.breaks_at, self.is_whole = breaks_at, True
        self._server: asyncio.Server | None = None
        self._target: tuple[str | None, int | None] = ("", 0)

    async def before(self, url: str) -> str:
        """Open the way to a server; return the address that leads there."""
        address = urlsplit(url)
        self._target = (address.hostname, address.port)
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers, requests = await asyncio.open_connection(*self._target)
        passing = [asyncio.create_task(self._pass(*ends)) for ends in ((reader, requests), (answers, writer))]
        await asyncio.wait(passing, return_when=asyncio.FIRST_COMPLETED)
        for one in (requests, writer):
            one.close()
        await asyncio.gather(*passing, return_exceptions=True)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(1 << 16):
            writer.write(piece)
            await writer.drain()
            if self.is_whole and self.breaks_at in piece:
                self.is_whole = False
                return

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
