"""The HTTP API of one vLLM server (0.32), typed. The engine has checked requests and weights before they come here.

No other file knows the paths and fields of that API.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import aiohttp
from pydantic import AliasPath, BaseModel, Field, JsonValue

from agentrl.engines.contract import FinishReason, Generation, PauseMode, RequestError, SamplingParams
from agentrl.engines.servers.client import (
    GroupInvitation,
    Memory,
    PartialAnswer,
    ServerInfo,
    WeightChecksums,
    WrongServer,
    describe,
)
from agentrl.engines.servers.http import Answer, AnswerStream, Routes, ServerHTTP, VersionInfo, read
from agentrl.engines.servers.images import data_urls, with_one_token_each
from agentrl.engines.servers.sync.buckets import Bucket
from agentrl.engines.vllm.handle import place
from agentrl.engines.vllm.plugin import ARCHITECTURE, BACKEND, CHECKSUMS, HELD
from agentrl.system.json_value import JSON
from agentrl.trajectory import PlacedImage

UNNAMED = "default"
"""A server's version of the weights before the first update."""
LOOK_EVERY = 0.05
"""Seconds between two tries to empty a cache that requests hold."""
PROGRESS_EVERY = 1.0
"""Seconds between two looks at the number of sampled tokens, while a check waits for a place."""
SAMPLED = b"vllm:generation_tokens_total{"
"""Begins the lines with that number in the answer of `metrics`, one for each engine of the server."""


# Answers, with those fields that are read.


class TokenLogprob(BaseModel):
    """Log-prob of a sampled token."""

    logprob: float


class Choice(BaseModel):
    """New tokens of an answer; the last ones with the reason of its end and the versions of all."""

    token_ids: list[int]
    logprobs: list[TokenLogprob] = Field([], validation_alias=AliasPath("logprobs", "content"))
    finish_reason: Literal["stop", "length", "abort"] | None = None
    stop_reason: int | str | None = None
    weight_versions: list[VersionInfo] | None = None


class Chunk(BaseModel):
    """A piece of a streamed answer; or the server's refusal. The counts of tokens come last."""

    request_id: str = ""
    choices: list[Choice] = []
    prompt_tokens: int | None = Field(None, validation_alias=AliasPath("usage", "prompt_tokens"))
    cached_tokens: int | None = Field(
        None, validation_alias=AliasPath("usage", "prompt_tokens_details", "cached_tokens")
    )
    error: JsonValue = None


class WeightAnswer(BaseModel):
    """Answer of `weight_info`."""

    weight_version: str


class FlushAnswer(BaseModel):
    """Answer of `reset_prefix_cache`."""

    success: bool


class RPCAnswer(BaseModel):
    """Answer of `collective_rpc`: one result of each rank."""

    results: list[str] = Field(min_length=1)


class ArrivedAnswer(BaseModel):
    """Answer of `collective_rpc`: the checksums of each rank."""

    results: list[dict[str, str]] = Field(min_length=1)


def _setting(section: str, name: str) -> AliasPath:
    return AliasPath("vllm_config", section, name)


class SettingsAnswer(BaseModel):
    """Answer of `server_info`: the server's settings."""

    model: str = Field(validation_alias=_setting("model_config", "model"))
    max_model_len: int = Field(validation_alias=_setting("model_config", "max_model_len"))
    quantization: str | None = Field(None, validation_alias=_setting("model_config", "quantization"))
    tensor_parallel: int = Field(validation_alias=_setting("parallel_config", "tensor_parallel_size"))
    device: str = Field(validation_alias=_setting("device_config", "device"))
    transfer_backend: str | None = Field(None, validation_alias=_setting("weight_transfer_config", "backend"))
    max_lora_rank: int = Field(0, validation_alias=_setting("lora_config", "max_lora_rank"))


class VLLMClient(ServerHTTP):
    """Implements `agentrl.engines.servers.client.ServerClient`.

    The server must run with the plugin (`agentrl.engines.vllm.plugin`), and in its development mode, which has the
    routes that pause it and exchange its weights.
    """

    routes = Routes(
        begin_update="start_weight_update",
        end_update="finish_weight_update",
        already_begun="already active",
        load_adapter="v1/load_lora_adapter",
        unload_adapter="v1/unload_lora_adapter",
    )

    def __init__(self, url: str, http: aiohttp.ClientSession, key: str | None = None) -> None:
        super().__init__(url, http, key)
        self._version = "0"
        """Version of the weights that it was last sent."""
        self._coming = "0"
        self._open = False
        """True while an update is open."""
        self._frees = False
        """True if it can free memory, which a CPU cannot."""

    # Requests

    async def generate(
        self,
        rid: str,
        ids: Sequence[int],
        params: SamplingParams,
        *,
        cache_key: str,
        partial: PartialAnswer | None = None,
        images: Sequence[PlacedImage] = (),
    ) -> Generation:
        """Continue `ids` as `ServerClient.generate` says.

        The server is sent image files and one token for each, which its own image processor expands.
        """
        stream, version = AnswerStream(partial), self._version  # only whole answers say theirs
        body: dict[str, JSON] = {
            "request_id": rid,
            "token_ids": with_one_token_each(ids, images) if images else list(ids),
            "sampling_params": sampling_params(params),
            "stream": True,
            "stream_options": {"include_usage": True},
            "cache_salt": cache_key,
            "priority": params.priority,
        }
        if (adapter := params.adapter or self._adapter) is not None:
            body["model"] = adapter
        if images:
            body["content_parts"] = [{"type": "image_url", "url": url} for url in data_urls(images)]

        def take(event: bytes) -> None:
            chunk = read(Chunk, event)
            self.check_event(chunk.error, event)
            add_chunk(stream, chunk, rid, version)

        path, expanded = "inference/v1/generate", len(ids) if images else None
        return await self.answer(path, body, stream, take, expanded=expanded)

    async def abort(self, rid: str | None = None) -> None:
        """End one request, or all. vLLM puts the kind of a request before its id."""
        await self.post("abort_requests", {} if rid is None else {"request_ids": [f"generate-tokens-{rid}"]})

    # Control

    async def pause(self, mode: PauseMode) -> None:
        await self.post("pause?mode=abort" if mode == "abort" else "pause?mode=keep&clear_cache=false", {})
        if mode == "retract":
            await self.post("reset_prefix_cache?reset_running_requests=true", {})

    async def resume(self) -> None:
        await self.post("resume", {})

    async def flush_cache(self, wait: float = 0.0) -> bool:
        loop = asyncio.get_running_loop()
        end = loop.time() + wait
        path = "reset_prefix_cache"
        while not self.read(FlushAnswer, await self.post(path, {}), path).success:
            if loop.time() >= end:
                return False
            await asyncio.sleep(LOOK_EVERY)
        return True

    async def release_memory(self, tags: Sequence[Memory]) -> None:
        """Free memory of an idle server. A CPU's memory stays."""
        if self._frees:
            await self.post("sleep?level=2&mode=keep" if "weights" in tags else "release_kv_cache_memory", {})

    async def resume_memory(self, tags: Sequence[Memory]) -> None:
        if self._frees:
            await self.post("wake_up?" + "&".join(f"tags={tag}" for tag in tags), {})

    async def check(self, timeout: float | None) -> None:
        """Have a token sampled, which waits while all places are taken. Further tokens of other requests do as well."""
        body: dict[str, JSON] = {"token_ids": [0], "sampling_params": {"max_tokens": 1}}
        asking = asyncio.create_task(self.post("inference/v1/generate", body, timeout=timeout))
        before: float | None = None
        try:
            while not (await asyncio.wait([asking], timeout=PROGRESS_EVERY))[0]:
                now = await self.sampled_tokens(timeout)
                if before is not None and now > before:
                    return
                before = now
            asking.result()
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    async def sampled_tokens(self, timeout: float | None) -> float:
        """Ask how many tokens the server has sampled since its start; 0 where it does not count."""
        lines = (await self.get("metrics", timeout)).splitlines()
        return sum(float(line.rsplit(b" ", 1)[1]) for line in lines if line.startswith(SAMPLED))

    async def info(self) -> ServerInfo:
        """Ask for the model and settings. Raises WrongServer where no vLLM server with agentrl's plugin answers."""
        try:
            told = read(SettingsAnswer, await self.get("server_info?config_format=json"))
            version = read(WeightAnswer, await self.get("weight_info")).weight_version
            if told.transfer_backend != BACKEND:
                raise ValueError(f"its weight transfer is {told.transfer_backend}, expected {BACKEND}")
            asked: dict[str, JSON] = {"method": ARCHITECTURE}
            [architecture, *_] = read(RPCAnswer, await self.post("collective_rpc", asked)).results
        except (ValueError, RequestError) as error:
            raise WrongServer(self.url, f"is no vLLM server that agentrl can use: {describe(error)}") from error
        if version == UNNAMED:
            await self.post("update_weight_version", {"new_version": "0"})
            version = "0"
        device = told.device.partition(":")[0]
        self._frees = device != "cpu"
        return ServerInfo(
            told.model,
            architecture,
            told.max_model_len,
            told.tensor_parallel,
            version,
            deterministic=device == "cpu",
            incremental=True,
            device=device,
            quantized=told.quantization is not None,
            max_lora_rank=told.max_lora_rank,
        )

    # Weights

    async def begin_weight_update(self, timeout: float) -> None:
        """Open an update, until whose end the server must not generate."""
        await super().begin_weight_update(timeout)
        self._open = True

    async def end_weight_update(self, timeout: float) -> None:
        await self.update("finish_weight_update", {"weight_version": self._coming}, timeout)
        self._open, self._version = False, self._coming

    async def update_from_memory(self, bucket: Bucket, version: int, *, ranks: int, timeout: float) -> None:
        whole: dict[str, JSON] = {**entries(bucket), "size": bucket.data.untyped_storage().nbytes()}
        # A handle of CUDA memory counts its users, so each rank needs one of its own.
        places: list[JSON] = [whole | place(bucket) for _ in range(ranks)]
        await self._update(places[0] if ranks == 1 else places, version, timeout)

    async def join_weight_group(self, invitation: GroupInvitation, timeout: float) -> None:
        if self._open:  # an earlier group broke off in mid-update: all weights come again
            await self.post("finish_weight_update", {}, timeout=timeout)
        group: dict[str, JSON] = {
            "name": invitation.name,
            "backend": invitation.backend,
            "address": invitation.address,
            "port": invitation.port,
            "first_rank": invitation.first_rank,
            "world_size": invitation.world_size,
        }
        await self.post("init_weight_transfer_engine", {"init_info": group}, timeout=timeout)
        if self._open:
            await self.begin_weight_update(timeout)

    async def update_from_broadcast(self, bucket: Bucket, version: int, *, group: str, timeout: float) -> None:
        await self._update({**entries(bucket), "size": bucket.data.numel()}, version, timeout)

    async def leave_weight_group(self, group: str, timeout: float) -> None:
        await self.post("shutdown_weight_transfer_engine", {}, timeout=timeout)

    async def update_from_disk(self, folder: Path, version: int, timeout: float) -> None:
        await self.begin_weight_update(timeout)
        await self._update({"entries": [], "folder": str(folder)}, version, timeout)
        await self.end_weight_update(timeout)

    async def use_adapter(self, name: str | None, folder: Path | None, version: int, timeout: float) -> None:
        await super().use_adapter(name, folder, version, timeout)
        if name is not None:
            self._version = str(version)

    async def weight_checksums(self, timeout: float, leave_out: Sequence[str] = ()) -> WeightChecksums:
        """Ask for the checksums of the weights as they arrived: vLLM's own are of weights in its own layout.

        Raises RequestError where the server keeps no weights: it does so for updates by changes only.
        """
        answer = await self._ask_ranks(ArrivedAnswer, CHECKSUMS, timeout)
        if not all(answer.results):
            raise RequestError(
                f"{self.url}: a vLLM server tells checksums of the weights that it was sent only with "
                "update_weights_delta=true"
            )
        one, *others = answer.results
        kept = [one] if all(other == one for other in others) else answer.results  # each rank keeps all weights
        ranks = {
            str(rank): {name: value for name, value in sums.items() if name not in leave_out}
            for rank, sums in enumerate(kept)
        }
        return WeightChecksums(ranks, predictable=True)

    async def held_weights(self, timeout: float) -> str:
        """See `WeightReceiver.held_weights`. Empty where the ranks hold different ones."""
        answer = await self._ask_ranks(RPCAnswer, HELD, timeout)
        return answer.results[0] if len(set(answer.results)) == 1 else ""

    async def _ask_ranks(self, kind: type[Answer], method: str, timeout: float) -> Answer:
        """Call a method of the plugin on each rank. Raises ServerFailed where the answer makes no sense."""
        return self.read(kind, await self.post("collective_rpc", {"method": method}, timeout=timeout), method)

    async def _update(self, content: JSON, version: int, timeout: float) -> None:
        self._coming = str(version)
        await self.update("update_weights", {"update_info": content}, timeout)


def add_chunk(stream: AnswerStream, chunk: Chunk, rid: str, version: str) -> None:
    """Add a chunk of the answer to the request `rid`, of weights of `version`. Raises ValueError when it is wrong."""
    if not chunk.request_id.endswith(rid):
        raise ValueError(f"it answers the request {chunk.request_id!r}, and was asked {rid!r}")
    stream.prompt_tokens = chunk.prompt_tokens or stream.prompt_tokens
    stream.cached_tokens = chunk.cached_tokens or stream.cached_tokens
    for choice in chunk.choices:
        stream.add(choice.token_ids, [one.logprob for one in choice.logprobs], version)
        if (kind := choice.finish_reason) is not None:
            stream.finish = FinishReason(kind, choice.stop_reason if kind == "stop" else None)
            stream.versions = choice.weight_versions


def entries(bucket: Bucket) -> dict[str, list[JSON]]:
    """Describe the tensors of a bucket as `receiver.Tensors` reads them."""
    return {
        "entries": [
            [entry.name, str(entry.dtype).removeprefix("torch."), list(entry.shape), entry.start, entry.end]
            for entry in bucket.entries
        ]
    }


def sampling_params(params: SamplingParams) -> dict[str, JSON]:
    """Convert to vLLM's `SamplingParams`. The server ignores unknown names."""
    written: dict[str, JSON] = {
        "max_tokens": params.max_new_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "stop_token_ids": list(params.stop_token_ids),
        "stop": list(params.stop),
        "detokenize": bool(params.stop),
        "skip_special_tokens": False,
        "ignore_eos": True,  # the stop tokens are given
        "logprobs": 0,  # of the sampled token alone
    }
    if params.seed is not None:
        written["seed"] = params.seed - (1 << 64) if params.seed >= 1 << 63 else params.seed
    return written
