"""vLLM's client, by the contract of all."""

from __future__ import annotations

from typing import Any

import aiohttp

from agentrl.engines.servers.client import ServerClient
from agentrl.engines.vllm.client import VLLMClient
from tests.engines.servers.contract import ClientContract, Piece


class TestVLLM(ClientContract):
    routes = VLLMClient.routes
    begin, end, refused = "start_weight_update", "finish_weight_update", "a weight update is already active"
    version = "0"

    def client(self, url: str, http: aiohttp.ClientSession) -> ServerClient:
        return VLLMClient(url, http)

    def written(self, piece: Piece) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "token_ids": list(piece.ids),
            "finish_reason": piece.finish,
            "stop_reason": piece.matched,
        }
        choice["logprobs"] = {"content": [{"token_id": 0, "logprob": logprob} for logprob in piece.told]}
        choice["weight_versions"] = piece.versions
        usage = {
            "prompt_tokens": piece.prompt,
            "prompt_tokens_details": piece.cached and {"cached_tokens": piece.cached},
        }
        return {
            "request_id": f"generate-tokens-{piece.rid}",
            "choices": [choice],
            "usage": usage if piece.finish else None,
        }

    def asked(self, body: dict[str, Any]) -> tuple[list[int], list[str]]:
        return body["token_ids"], [one["url"] for one in body.get("content_parts", [])]
