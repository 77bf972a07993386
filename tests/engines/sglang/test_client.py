"""SGLang's client, by the contract of all, and what its server alone says."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import orjson
import pytest
from aiohttp import web

from agentrl.engines.contract import EngineError
from agentrl.engines.servers.client import PartialAnswer, ServerClient, ServerFailed
from agentrl.engines.sglang.client import SGLangClient
from agentrl.system.json_value import JSON
from tests.engines.servers.contract import ClientContract, Piece
from tests.naming import Names, naming


def chunk(ids: Sequence[int], **meta: Any) -> dict[str, Any]:
    logprobs = [[-1.0, token, None] for token in ids]
    return {
        "output_ids": list(ids),
        "meta_info": {"finish_reason": None, "weight_version": "3", "output_token_logprobs": logprobs, **meta},
    }


MODEL: dict[str, JSON] = {
    "model_path": "/m",
    "architectures": ["Qwen3ForCausalLM"],
    "weight_version": "3",
    "is_generation": True,
}
SERVER: dict[str, JSON] = {
    "version": "0.5.23",
    "context_length": None,
    "internal_states": [{"max_req_input_len": 90, "waiting": []}],
    "tp_size": 2,
    "enable_deterministic_inference": False,
    "incremental_streaming_output": True,
    "device": "cpu",
}
CHECKSUMS: dict[str, JSON] = {
    "success": True,
    "message": "Success.",
    "ranks": [{"checksums": {"norm": "00ff"}, "parallelism_info": [{"role": "target", "tp_rank": 0, "pp_rank": 0}]}],
}


class TestSGLang(ClientContract):
    routes = SGLangClient.routes
    begin, end, refused = "begin_weight_update", "end_weight_update", "a weight update is already open"
    version = "3"

    def client(self, url: str, http: aiohttp.ClientSession) -> ServerClient:
        return SGLangClient(url, http)

    def written(self, piece: Piece) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": piece.rid,
            "weight_version": "3",
            "prompt_tokens": piece.prompt,
            "cached_tokens": piece.cached,
        }
        meta["output_token_logprobs"] = [[logprob, 0, None] for logprob in piece.told]
        meta["finish_reason"] = None if piece.finish is None else {"type": piece.finish, "matched": piece.matched}
        meta["weight_versions"] = piece.versions
        return {"output_ids": list(piece.ids), "meta_info": meta}

    def asked(self, body: dict[str, Any]) -> tuple[list[int], list[str]]:
        return body["input_ids"], body.get("image_data", [])

    @pytest.mark.parametrize(
        ("ids", "logprobs"),
        [
            ([8], [-1.0, -2.0]),
            ([8, 8], [-2.0, -1.0, -2.0]),  # with a chunk that was not yet sent
        ],
    )
    async def test_what_the_abort_of_a_waiting_request_tells_again_is_not_taken_twice(
        self, ids: list[int], logprobs: list[float]
    ) -> None:
        """The last token and all log-probs, as SGLang 0.5.23 tells them of a request that it retracted."""
        partial = PartialAnswer()
        told = [[one, 0, None] for one in logprobs]
        meta = {"finish_reason": {"type": "abort"}, "weight_versions": [{"version": "3", "start": 0, "end": 2}]}
        sent = [7, 8][: 3 - len(ids)]
        first = chunk(sent, output_token_logprobs=[[-1.0 - place, one, None] for place, one in enumerate(sent)])
        generation = await self.answered([first, chunk(ids, output_token_logprobs=told, **meta)], partial)
        assert (generation.ids, generation.logprobs) == ([7, 8], [-1.0, -2.0])
        assert generation.finish_reason.kind == "abort"

    @asynccontextmanager
    async def telling(self, **answers: JSON) -> AsyncIterator[ServerClient]:
        """A client of a server that answers each path so."""

        async def answer(request: web.Request) -> web.Response:
            return web.Response(body=orjson.dumps(answers[request.match_info["path"]]))

        async with self.serving(answer) as client:
            yield client

    async def test_what_a_server_says_of_itself_is_read(self) -> None:
        async with self.telling(model_info=MODEL, server_info=SERVER, weights_checker=CHECKSUMS) as client:
            info = await client.info()
            assert (info.architecture, info.context_length, info.tensor_parallel) == ("Qwen3ForCausalLM", 90, 2)
            assert (info.weight_version, info.deterministic, info.incremental) == ("3", False, True)
            found = await client.weight_checksums(5.0)
        assert found.ranks == {"target/0/0": {"norm": "00ff"}} and found.predictable

    @pytest.mark.parametrize(
        ("server", "told"),
        [
            ({**SERVER, "tp_size": "many"}, ("tp_size", "found 'many'")),
            ({"version": "0.5.23"}, ("key 'context_length'", "missing")),
            ({**SERVER, "internal_states": []}, ("context_length", "max_req_input_len")),
            (["something else"], "found ['something else']"),
        ],
    )
    async def test_a_server_that_says_something_else_is_at_fault(self, server: JSON, told: Names) -> None:
        async with self.telling(model_info=MODEL, server_info=server, weights_checker={"success": True}) as client:
            with naming(ServerFailed, "SGLang", told):
                await client.info()
            with pytest.raises(EngineError, match="weights_checker: unexpected answer"):
                await client.weight_checksums(5.0)
