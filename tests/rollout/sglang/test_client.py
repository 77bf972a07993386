"""Answers that end badly, from a server that is made to give them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
import pytest
from aiohttp import web

from agentrl.http import http_client
from agentrl.rollout.engine import RequestError, SamplingParams
from agentrl.rollout.sglang.client import Part, ServerFailed, SGLangClient


def chunk(ids: Sequence[int], **meta: Any) -> dict[str, Any]:
    logprobs = [[-1.0, token, None] for token in ids]
    return {
        "output_ids": list(ids),
        "meta_info": {"finish_reason": None, "weight_version": "3", "output_token_logprobs": logprobs, **meta},
    }


END: dict[str, Any] = {"finish_reason": {"type": "length", "length": 3}}


async def answered(chunks: Sequence[dict[str, Any]], part: Part, *, break_off: bool = False) -> Any:
    """What the client makes of a stream of `chunks`."""

    async def generate(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for event in chunks:
            await response.write(b"data: " + orjson.dumps(event) + b"\n\n")
        if break_off:
            assert request.transport is not None
            request.transport.close()
        return response

    app = web.Application()
    app.router.add_post("/generate", generate)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    http = http_client()
    try:
        client = SGLangClient(f"http://127.0.0.1:{runner.addresses[0][1]}", http)
        return await client.generate("0" * 32, [5], SamplingParams(3), cache_key="v3", part=part)
    finally:
        await http.close()
        await runner.cleanup()


async def test_an_answer_in_pieces() -> None:
    part = Part()
    spans = [{"version": "3", "start": 0, "end": 3}]
    generation = await answered([chunk([7, 8]), chunk([9], weight_versions=spans, cached_tokens=4, **END)], part)
    assert (generation.ids, generation.cached_tokens) == ([7, 8, 9], 4)
    assert generation.finish_reason.kind == "length" and generation.versions[0].version == 3


async def test_what_came_before_a_break_is_kept() -> None:
    part = Part()
    with pytest.raises(ServerFailed):
        await answered([chunk([7, 8])], part, break_off=True)
    assert (part.ids, part.logprobs, part.weight_version) == ([7, 8], [-1.0, -1.0], "3")


@pytest.mark.parametrize(
    "last",
    [
        chunk([9], **END),  # no versions
        chunk([9], weight_versions=[{"version": "default", "start": 0, "end": 3}], **END),
        chunk([9], weight_versions=[{"version": "3", "start": 0, "end": 2}], **END),
        chunk([9], output_token_logprobs=[], **END),
        chunk([9], output_token_logprobs=[[None, 9, None]], **END),
    ],
)
async def test_nothing_is_kept_of_an_answer_that_makes_no_sense(last: dict[str, Any]) -> None:
    part = Part()
    with pytest.raises(ServerFailed, match="makes no sense"):
        await answered([chunk([7, 8]), last], part)
    assert part.ids == part.logprobs == []


async def test_a_refusal_is_the_requests_fault() -> None:
    with pytest.raises(RequestError, match="too long"):
        await answered([{"error": {"message": "too long", "code": 400}}], Part())
