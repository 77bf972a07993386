"""What the client of every server software does: answers, refusals and faults, from servers that are made to give them.

A module of tests subclasses `ClientContract`, and says how the software writes an answer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import aiohttp
import numpy as np
import orjson
import pytest
from aiohttp import web

from agentrl.engines.contract import EngineError, Generation, RequestError, SamplingParams
from agentrl.engines.servers.client import PartialAnswer, ServerClient, ServerFailed
from agentrl.engines.servers.http import Routes
from agentrl.system.http import http_client
from agentrl.trajectory import Image, PlacedImage, VersionSpan
from tests.naming import naming
from tests.remote.conftest import FaultyServer, Handler

RID = "0" * 32
ENDS: dict[str, Any] = {"finish": "length", "spans": [(3, 0, 3)]}


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of an answer, whatever the software."""

    ids: Sequence[int]
    logprobs: Sequence[object] | None = None
    """None: a tenth of each id, negated."""
    finish: str | None = None
    matched: int | str | None = None
    spans: Sequence[tuple[object, int, int]] = ()
    rid: str = RID
    prompt: int | None = None
    cached: int | None = None

    @property
    def versions(self) -> list[dict[str, object]]:
        return [{"version": str(one), "start": start, "end": end} for one, start, end in self.spans]

    @property
    def told(self) -> Sequence[object]:
        return [-one / 10 for one in self.ids] if self.logprobs is None else self.logprobs


class ClientContract(ABC):
    """Tests of one client."""

    routes: ClassVar[Routes]
    begin: ClassVar[str]
    end: ClassVar[str]
    refused: ClassVar[str]
    """Refusal to begin an update that is open."""
    version: ClassVar[str]
    """Version of the weights that a piece of an answer is said to have."""

    def event(self, ids: Sequence[int], **given: Any) -> dict[str, Any]:
        return self.written(Piece(ids, **given))

    @abstractmethod
    def client(self, url: str, http: aiohttp.ClientSession) -> ServerClient: ...

    @abstractmethod
    def written(self, piece: Piece) -> dict[str, Any]:
        """Write a piece of an answer as the software does."""

    @abstractmethod
    def asked(self, body: dict[str, Any]) -> tuple[list[int], list[str]]:
        """Return ids and images of a request."""

    @asynccontextmanager
    async def serving(self, handler: Handler) -> AsyncIterator[ServerClient]:
        server, http = FaultyServer([handler]), http_client()
        await server.start()
        try:
            yield self.client(server.url.rstrip("/"), http)
        finally:
            await http.close()
            await server.stop()

    async def answered(
        self, events: Sequence[dict[str, Any]], partial: PartialAnswer, *, break_off: bool = False
    ) -> Generation:
        async def generate(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse()
            await response.prepare(request)
            for event in events:
                await response.write(b"data: " + orjson.dumps(event) + b"\n\n")
            if break_off:
                assert request.transport is not None
                request.transport.close()
            return response

        async with self.serving(generate) as client:
            return await client.generate(RID, [5], SamplingParams(3), cache_key="v3", partial=partial)

    async def test_an_answer_in_pieces(self) -> None:
        partial = PartialAnswer()
        last = self.event([9], finish="stop", matched=9, spans=[(3, 0, 2), (4, 2, 3)], cached=4)
        found = await self.answered([self.event([7, 8]), last], partial)
        assert (found.ids, found.logprobs, found.cached_tokens) == ([7, 8, 9], [-0.7, -0.8, -0.9], 4)
        assert found.versions == [VersionSpan(3, 0, 2), VersionSpan(4, 2, 3)]
        assert (found.finish_reason.kind, found.finish_reason.matched) == ("stop", 9)
        assert partial.weight_version == self.version

    @pytest.mark.parametrize("break_off", [True, False], ids=["broken", "ended"])
    async def test_what_came_before_a_break_is_kept(self, break_off: bool) -> None:
        partial = PartialAnswer()
        with pytest.raises(ServerFailed):
            await self.answered([self.event([7, 8])], partial, break_off=break_off)
        assert (partial.ids, partial.logprobs, partial.weight_version) == ([7, 8], [-0.7, -0.8], self.version)

    @pytest.mark.parametrize(
        "last",
        [
            {"finish": "length"},  # no versions
            {**ENDS, "spans": [("default", 0, 3)]},
            {**ENDS, "spans": [(3, 0, 2)]},
            {**ENDS, "logprobs": []},
            {**ENDS, "logprobs": [None]},
            {**ENDS, "logprobs": ["Infinity"]},
            {**ENDS, "rid": "1" * 32},
        ],
        ids=["no versions", "no number", "too few", "no log-probs", "null", "infinite", "of another request"],
    )
    async def test_nothing_is_kept_of_an_answer_that_makes_no_sense(self, last: dict[str, Any]) -> None:
        partial = PartialAnswer()
        with naming(ServerFailed, "no sense"):
            await self.answered([self.event([7, 8]), self.event([9], **last)], partial)
        assert partial.ids == partial.logprobs == []

    @pytest.mark.parametrize(("code", "fault"), [(400, RequestError), (500, ServerFailed), ("x", RequestError)])
    async def test_a_refusal_in_mid_stream(self, code: object, fault: type[Exception]) -> None:
        with pytest.raises(fault, match="too long"):
            await self.answered([{"error": {"message": "too long", "code": code}}], PartialAnswer())

    async def test_a_request_with_images_has_one_token_for_each(self) -> None:
        """The server makes as many tokens of each image as its own image processor says."""
        seen: list[tuple[list[int], list[str]]] = []
        images = [
            Image(np.zeros((8, 3), np.float32), (1, 2, 4), 2, b"a", b"PNG"),
            Image(np.zeros((4, 3), np.float32), (1, 2, 2), 1, b"b", b"JPEG"),
        ]
        placed = [PlacedImage(2, images[0]), PlacedImage(6, images[1])]
        ids = [5, 81, 83, 83, 82, 81, 83, 82, 6]

        async def generate(request: web.Request) -> web.Response:
            seen.append(self.asked(orjson.loads(await request.read())))
            counted = 9 if len(seen) == 1 else 8
            event = self.event([7], finish="length", spans=[(3, 0, 1)], prompt=counted)
            return web.Response(body=b"data: " + orjson.dumps(event) + b"\n\n")

        async with self.serving(generate) as client:
            generation = await client.generate(RID, ids, SamplingParams(3), cache_key="v3", images=placed)
            assert generation.ids == [7]
            assert seen[0] == ([5, 81, 83, 82, 81, 83, 82, 6], ["data:image;base64,UE5H", "data:image;base64,SlBFRw=="])
            with naming(RequestError, "8 tokens"):
                await client.generate(RID, ids, SamplingParams(3), cache_key="v3", images=placed)
            await client.generate(RID, ids, SamplingParams(3), cache_key="v3")
        assert seen[2] == (ids, [])

    @asynccontextmanager
    async def updating(self, refuse: dict[str, tuple[int, object]]) -> AsyncIterator[tuple[ServerClient, list[str]]]:
        """A client, and the paths that it asks; the server refuses those of `refuse` once, with status and body."""
        paths = list[str]()

        async def answer(request: web.Request) -> web.Response:
            paths.append(request.match_info["path"])
            status, body = refuse.pop(paths[-1], (200, {"success": True}))
            return web.Response(status=status, body=orjson.dumps(body))

        async with self.serving(answer) as client:
            yield client, paths

    async def test_an_update_that_was_left_open_is_closed_first(self) -> None:
        async with self.updating({self.begin: (500, {"error": {"message": self.refused}})}) as (client, paths):
            await client.begin_weight_update(5.0)
        assert paths == [self.begin, self.end, self.begin]

    async def test_an_update_that_does_not_begin(self) -> None:
        async with self.updating({self.begin: (500, {"error": {"message": "out of memory"}})}) as (client, paths):
            with naming(ServerFailed, self.begin, "status 500"):
                await client.begin_weight_update(5.0)
        assert paths == [self.begin]

    async def test_a_failure_that_is_told_with_status_200(self) -> None:
        async with self.updating({self.end: (200, {"success": False, "message": "no group"})}) as (client, _):
            with pytest.raises(EngineError, match=rf"^http://.*: {self.end}: no group$"):
                await client.end_weight_update(5.0)

    @pytest.mark.parametrize("status", [400, 404])
    async def test_an_adapter_takes_the_place_of_another_one(self, tmp_path: Path, status: int) -> None:
        gone = (status, {"error": {"message": "no such adapter"}})
        async with self.updating({self.routes.unload_adapter: gone}) as (client, paths):
            for version, name in enumerate(("a", "b", None), 1):
                await client.use_adapter(name, tmp_path if name else None, version, 5.0)
        load, unload = self.routes.load_adapter, self.routes.unload_adapter
        assert paths == [load, "update_weight_version", load, unload, "update_weight_version", unload]

    @pytest.mark.parametrize("ask", ["held_weights", "weight_checksums", "held_adapters", "info"])
    async def test_an_answer_of_another_form_is_the_servers_fault(self, ask: str) -> None:
        async def answer(request: web.Request) -> web.Response:
            return web.Response(body=b'{"results": [], "data": 3}')

        async with self.serving(answer) as client:
            with pytest.raises(ServerFailed):
                await getattr(client, ask)(*([5.0] if ask in ("held_weights", "weight_checksums") else []))

    async def test_an_adapter_that_is_refused_changes_nothing(self, tmp_path: Path) -> None:
        refused = (200, {"success": False, "message": "rank 64 is too large"})
        async with self.updating({self.routes.load_adapter: refused}) as (client, paths):
            with pytest.raises(EngineError, match="rank 64 is too large"):
                await client.use_adapter("a", tmp_path, 1, 5.0)
            await client.use_adapter(None, None, 1, 5.0)
        assert paths == [self.routes.load_adapter]
