"""An HTTP engine server that samples with the embedded engine and fails on purpose.

It speaks those paths of SGLang's HTTP API that the trainer asks (`agentrl.engines.sglang.client`), streams its answers
in pieces, and takes weights from files, so that a run with `rollout.name=sglang` and `rollout.server_urls` goes the
whole way: client, fleet, router, supervisor and sender are the real ones. Only the sampling is not SGLang's.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import torch
from aiohttp import web
from safetensors.torch import load_file
from transformers import AutoTokenizer

from agentrl.engines.contract import Generation, SamplingParams
from agentrl.engines.embedded.engine import EmbeddedEngine
from agentrl.engines.weights import Weights
from agentrl.model.packed import load_model
from agentrl.trajectory import VersionSpan
from labs.fault_matrix.mark import mark
from labs.fault_matrix.scene import TORN_SERVED

EngineFault = Literal["killed", "hung", "slow", "wrong version", "garbage", "failed update"]
PIECE = 8
"""Tokens of a streamed piece."""
FIRST = 3
"""The request for tokens that meets the fault, counted from 1 since the server has the first step's weights."""
SLOW = 0.05
"""Seconds that a slow server adds to each piece."""
CONTEXT = 4096


class EngineServer:
    """One server. `fault`: happens once, to the first server of `folder` that comes to it; `slow` goes on from there.

    Each server of a run is given the fault: the router may send all requests to one of them.
    """

    def __init__(self, policy: Path, folder: Path, fault: EngineFault | None) -> None:
        self.policy, self.folder, self.fault = policy, folder, fault
        tokenizer = AutoTokenizer.from_pretrained(policy)
        self.engine = EmbeddedEngine(
            load_model(str(policy), device="cpu"),
            max_num_seqs=32,
            max_model_len=CONTEXT,
            stop_decode=lambda ids: str(tokenizer.decode(ids)),
        )
        self.requests, self.updates, self.version = 0, 0, "0"
        self.met = False
        """The fault has happened to this server."""
        self.torn = False
        """An update failed half way, so that nobody knows the weights until they were sent anew."""
        self.sessions: dict[str, set[str]] = {}

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 26)
        done: dict[str, Callable[[web.Request], Awaitable[object]]] = {
            "abort_request": self.abort,
            "pause_generation": lambda request: self.engine.pause("retract"),
            "continue_generation": self.resume,
            "flush_cache": lambda request: self.engine.flush_cache(),
            "update_weights_from_disk": self.update,
        }
        for path, act in done.items():
            app.router.add_post(f"/{path}", answering(act))
        app.router.add_post("/generate", self.generate)
        app.router.add_get("/health_generate", answering(self.check))
        app.router.add_get("/model_info", self.model_info)
        app.router.add_get("/server_info", self.server_info)
        return app

    async def model_info(self, request: web.Request) -> web.Response:
        return web.json_response({"model_path": str(self.policy), "weight_version": self.version})

    async def server_info(self, request: web.Request) -> web.Response:
        known = {"version": "embedded", "context_length": CONTEXT, "tp_size": 1, "device": "cpu"}
        return web.json_response(
            {**known, "enable_deterministic_inference": True, "incremental_streaming_output": True}
        )

    async def check(self, request: web.Request) -> None:
        await self.engine.generate([1], SamplingParams(1), "check")
        await self.engine.release("check")

    async def abort(self, request: web.Request) -> None:
        asked = await request.json()
        await self.engine.abort(None if asked.get("abort_all") else asked["rid"])

    async def update(self, request: web.Request) -> None:
        asked = await request.json()
        self.updates += 1
        if self.fault == "wrong version" and self.updates == 2 and self.meet():
            return  # it says that it has taken them
        tensors: dict[str, torch.Tensor] = {}
        for file in sorted(Path(asked["model_path"]).glob("*.safetensors")):
            tensors |= load_file(file)
        if self.fault == "failed update" and self.updates == 2 and self.meet():
            self.torn = True
            half = {name: tensors[name] * 1.5 for name in list(tensors)[::2]}
            await self.engine.update_weights(Weights.from_tensors(half.items()), int(asked["weight_version"]))
            raise RuntimeError("injected")
        await self.engine.update_weights(Weights.from_tensors(tensors.items()), int(asked["weight_version"]))
        self.version, self.torn = asked["weight_version"], False

    async def resume(self, request: web.Request) -> None:
        self.note_torn()
        await self.engine.resume()

    def note_torn(self) -> None:
        """Note that weights which nobody knows are asked for tokens."""
        if self.torn:
            (self.folder / TORN_SERVED).touch()

    def meet(self) -> bool:
        """Tell whether the fault happens now: it has happened to no server."""
        begins = mark(self.folder)
        self.met |= begins
        return begins

    def begin_fault(self) -> bool:
        """Meet the fault of a request for tokens, once; returns True where it happens now."""
        self.requests += self.version != "0"
        if self.requests < FIRST or self.fault not in ("killed", "hung", "slow", "garbage") or not self.meet():
            return False
        if self.fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.fault == "hung":
            os.kill(os.getpid(), signal.SIGSTOP)
        return True

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Stream an answer in pieces; each is a request of its own to the engine, after the tokens so far."""
        asked = await request.json()
        garbage = self.begin_fault() and self.fault == "garbage"
        params, rid = sampling(asked["sampling_params"]), asked["rid"]
        response = web.StreamResponse()
        await response.prepare(request)
        ids, left = list(asked["input_ids"]), params.max_new_tokens
        spans: list[VersionSpan] = []
        most = left if params.stop else PIECE  # a stop string may lie across two pieces
        while True:
            if self.fault == "slow" and self.met:
                await asyncio.sleep(SLOW)
            piece = replace(params, max_new_tokens=min(most, left), seed=(params.seed or 0) + left)
            found = await self.engine.generate(ids, piece, rid)
            self.note_torn()
            ids, left = ids + found.ids, left - len(found.ids)
            ended = found.finish_reason.kind != "length" or left == 0
            said = spans[-1].end if spans else 0
            spans += [VersionSpan(one.version, said + one.start, said + one.end) for one in found.versions]
            event = garbage_of(found) if garbage else self.event(found, spans, ended)
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            if ended:
                break
        await self.engine.release(rid)
        await response.write(b"data: [DONE]\n\n")
        return response

    def event(self, found: Generation, spans: Sequence[VersionSpan], ended: bool) -> dict[str, Any]:
        """Write a piece as SGLang does, with its new tokens, and the versions of all so far."""
        reason = {"type": found.finish_reason.kind, "matched": found.finish_reason.matched}
        return {
            "output_ids": found.ids,
            "meta_info": {
                "finish_reason": reason if ended else None,
                "weight_version": self.version,
                "weight_versions": [asdict(one) for one in spans],
                "output_token_logprobs": [
                    [logprob, token, None] for logprob, token in zip(found.logprobs, found.ids, strict=True)
                ],
            },
        }


def garbage_of(found: Generation) -> dict[str, Any]:
    """Write a piece whose log-probs are no numbers and fewer than its tokens."""
    return {"output_ids": found.ids, "meta_info": {"output_token_logprobs": [["NaN", -1, None]]}}


def answering(act: Callable[[web.Request], Awaitable[object]]) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def answer(request: web.Request) -> web.Response:
        await act(request)
        return web.json_response({"success": True})

    return answer


def sampling(asked: dict[str, Any]) -> SamplingParams:
    """Read SGLang's sampling parameters."""
    return SamplingParams(
        max_new_tokens=asked["max_new_tokens"],
        temperature=asked["temperature"],
        top_p=asked["top_p"],
        top_k=-1 if asked["top_k"] >= 1 << 20 else asked["top_k"],
        stop_token_ids=tuple(asked.get("stop_token_ids") or ()),
        stop=tuple(asked.get("stop") or ()),
        seed=asked.get("sampling_seed"),
    )


def serve(policy: Path, folder: Path, fault: EngineFault | None, port: int) -> None:
    """Serve until the process is ended."""
    torch.set_num_threads(1)
    server = EngineServer(policy, folder, fault)
    web.run_app(server.app(), host="127.0.0.1", port=port, print=None, access_log=None, handle_signals=False)
