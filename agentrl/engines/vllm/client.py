"""The HTTP API of one vLLM server (0.32), typed. The engine has checked requests and weights before they come here.

No other file knows the paths and fields of that API.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Literal

import aiohttp
import pydantic
from pydantic import BaseModel, JsonValue

from agentrl.engines.contract import FinishReason, Generation, PauseMode, RequestError, SamplingParams
from agentrl.engines.servers.client import (
    GroupInvitation,
    Memory,
    PartialAnswer,
    ServerFailed,
    ServerInfo,
    WeightChecksums,
    describe,
)
from agentrl.engines.servers.http import ServerHTTP, VersionInfo, read, version_spans
from agentrl.engines.servers.images import check_expanded, data_urls, with_one_token_each
from agentrl.engines.servers.sync.buckets import Bucket
from agentrl.engines.vllm.handle import place
from agentrl.engines.vllm.plugin import ARCHITECTURE, BACKEND, CHECKSUMS, HELD, NEEDED
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


class Logprobs(BaseModel):
    """Log-probs of the tokens of a chunk."""

    content: list[TokenLogprob]


class Choice(BaseModel):
    """New tokens of an answer; the last ones with the reason of its end and the versions of all."""

    token_ids: list[int]
    logprobs: Logprobs | None = None
    finish_reason: Literal["stop", "length", "abort"] | None = None
    stop_reason: int | str | None = None
    weight_versions: list[VersionInfo] | None = None


class CachedTokens(BaseModel):
    """Part of the usage."""

    cached_tokens: int = 0


class Usage(BaseModel):
    """Counts of tokens, which come last."""

    prompt_tokens: int | None = None
    """Length of the prompt as the server counts it."""
    prompt_tokens_details: CachedTokens | None = None


class Chunk(BaseModel):
    """A piece of a streamed answer; or the server's refusal."""

    request_id: str = ""
    choices: list[Choice] = []
    usage: Usage | None = None
    error: JsonValue = None


class WeightAnswer(BaseModel):
    """Answer of `weight_info`."""

    weight_version: str


class FlushAnswer(BaseModel):
    """Answer of `reset_prefix_cache`."""

    success: bool


class RPCAnswer(BaseModel):
    """Answer of `collective_rpc`: one result of each rank."""

    results: list[str]


class ArrivedAnswer(BaseModel):
    """Answer of `collective_rpc`: the checksums of each rank."""

    results: list[dict[str, str]]


class ModelPart(BaseModel):
    """The model, in a server's settings."""

    model: str
    max_model_len: int
    quantization: str | None = None


class ParallelPart(BaseModel):
    """The ranks, in a server's settings."""

    tensor_parallel_size: int


class DevicePart(BaseModel):
    """The device, in a server's settings."""

    device: str


class TransferPart(BaseModel):
    """The exchange of weights, in a server's settings."""

    backend: str


class LoraPart(BaseModel):
    """Adapters, in a server's settings."""

    max_lora_rank: int


class Settings(BaseModel):
    """A server's settings."""

    model: ModelPart = pydantic.Field(alias="model_config")  # a name that pydantic keeps to itself
    parallel_config: ParallelPart
    device_config: DevicePart
    weight_transfer_config: TransferPart | None = None
    lora_config: LoraPart | None = None


class SettingsAnswer(BaseModel):
    """Answer of `server_info`."""

    vllm_config: Settings


class VLLMClient(ServerHTTP):
    """Implements `agentrl.engines.servers.client.ServerClient`.

    The server must run with the plugin (`agentrl.engines.vllm.plugin`), and in its development mode, which has the
    routes that pause it and exchange its weights.
    """

    def __init__(self, url: str, http: aiohttp.ClientSession, key: str | None = None) -> None:
        super().__init__(url, http, key)
        self._version = "0"
        """Version of the weights that it was last sent."""
        self._coming = "0"
        self._open = False
        """True while an update is open."""
        self._frees = False
        """True if it can free memory, which a CPU cannot."""
        self._adapter: str | None = None
        """Name of the adapter that requests are answered with."""

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
        answer = AnswerStream(PartialAnswer() if partial is None else partial, self._version)
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
        with self.blamed(answer.discard):
            async with aclosing(self.events("inference/v1/generate", body)) as events:
                async for event in events:
                    chunk = read(Chunk, event)
                    self.check_event(chunk.error, event)
                    if not chunk.request_id.endswith(rid):
                        raise ValueError(f"it answers the request {chunk.request_id!r}, and was asked {rid!r}")
                    answer.take(chunk)
            if images:
                check_expanded(answer.prompt_tokens, len(ids), self.url)
            return answer.generation()

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
        while not read(FlushAnswer, await self.post("reset_prefix_cache", {})).success:
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
        """Ask for the model and settings. Raises ServerFailed where no vLLM server with agentrl's plugin answers."""
        try:
            told = read(SettingsAnswer, await self.get("server_info?config_format=json")).vllm_config
            version = read(WeightAnswer, await self.get("weight_info")).weight_version
            if told.weight_transfer_config is None or told.weight_transfer_config.backend != BACKEND:
                raise ValueError(f"start it with {' '.join(NEEDED)}, and agentrl installed there")
            asked: dict[str, JSON] = {"method": ARCHITECTURE}
            [architecture, *_] = read(RPCAnswer, await self.post("collective_rpc", asked)).results
        except (ValueError, RequestError) as error:
            raise ServerFailed(self.url, f"is no vLLM server that agentrl can use: {describe(error)}") from error
        if version == UNNAMED:
            await self.post("update_weight_version", {"new_version": "0"})
            version = "0"
        device = told.device_config.device.partition(":")[0]
        self._frees = device != "cpu"
        return ServerInfo(
            told.model.model,
            architecture,
            told.model.max_model_len,
            told.parallel_config.tensor_parallel_size,
            version,
            deterministic=device == "cpu",
            incremental=True,
            device=device,
            quantized=told.model.quantization is not None,
            max_lora_rank=0 if told.lora_config is None else told.lora_config.max_lora_rank,
        )

    # Weights

    async def begin_weight_update(self, timeout: float) -> None:
        """Open an update, until whose end the server must not generate."""
        try:
            await self.post("start_weight_update", {}, timeout=timeout)
        except ServerFailed as error:
            if "already active" not in str(error):
                raise
            await self.post("finish_weight_update", {}, timeout=timeout)
            await self.post("start_weight_update", {}, timeout=timeout)
        self._open = True

    async def end_weight_update(self, timeout: float) -> None:
        await self.post("finish_weight_update", {"weight_version": self._coming}, timeout=timeout)
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
        """Load an adapter as `WeightReceiver.use_adapter` says. vLLM drops the adapter that was used longest ago."""
        if name is not None:
            named: dict[str, JSON] = {"lora_name": name, "lora_path": str(folder)}
            await self.post("v1/load_lora_adapter", named, timeout=timeout)
        before, self._adapter = self._adapter, name
        if before is not None:
            with contextlib.suppress(RequestError):  # a server that has been started again does not have it
                await self.post("v1/unload_lora_adapter", {"lora_name": before}, timeout=timeout)
        if name is not None:
            await self.post("update_weight_version", {"new_version": str(version)}, timeout=timeout)
            self._version = str(version)

    async def weight_checksums(self, timeout: float, leave_out: Sequence[str] = ()) -> WeightChecksums:
        """Ask for the checksums of the weights as they arrived: vLLM's own are of weights in its own layout.

        Raises RequestError where the server keeps no weights: it does so for updates by changes only.
        """
        answer = read(ArrivedAnswer, await self.post("collective_rpc", {"method": CHECKSUMS}, timeout=timeout))
        if not all(answer.results):
            raise RequestError(
                f"{self.url}: a vLLM server tells checksums of the weights that it was sent only with "
                "update_weights_delta=true"
            )
        one, *others = answer.results
        told = [one] if all(other == one for other in others) else answer.results  # each rank keeps all weights
        ranks = {
            str(rank): {name: value for name, value in sums.items() if name not in leave_out}
            for rank, sums in enumerate(told)
        }
        return WeightChecksums(ranks, predictable=True)

    async def held_weights(self, timeout: float) -> str:
        """See `WeightReceiver.held_weights`. Empty where the ranks hold different ones."""
        answer = read(RPCAnswer, await self.post("collective_rpc", {"method": HELD}, timeout=timeout))
        return answer.results[0] if len(set(answer.results)) == 1 else ""

    async def _update(self, content: JSON, version: int, timeout: float) -> None:
        self._coming = str(version)
        await self.post("update_weights", {"update_info": content}, timeout=timeout)


class AnswerStream:
    """Reads the chunks of one streamed answer into a PartialAnswer."""

    def __init__(self, partial: PartialAnswer, version: str) -> None:
        """`version`: of the weights that the server was last sent, as only whole answers say theirs."""
        self._partial = partial
        self._version = version
        self._last: Choice | None = None
        self._cached = 0
        self.prompt_tokens: int | None = None
        """Length of the prompt as the server counts it."""

    def take(self, chunk: Chunk) -> None:
        """Add the tokens of a chunk. Raises ValueError where ids and log-probs do not match."""
        if chunk.usage is not None:
            self.prompt_tokens = chunk.usage.prompt_tokens
            if chunk.usage.prompt_tokens_details is not None:
                self._cached = chunk.usage.prompt_tokens_details.cached_tokens
        for choice in chunk.choices:
            logprobs = [] if choice.logprobs is None else [one.logprob for one in choice.logprobs.content]
            if len(logprobs) != len(choice.token_ids):
                raise ValueError(f"{len(choice.token_ids)} ids with {len(logprobs)} log-probs")
            self._partial.weight_version = self._version
            self._partial.ids += choice.token_ids
            self._partial.logprobs += logprobs
            if choice.finish_reason is not None:
                self._last = choice

    def discard(self) -> None:
        """Drop the tokens, which cannot be trusted."""
        self._partial.ids, self._partial.logprobs = [], []

    def generation(self) -> Generation:
        """Return the whole answer. Raises OSError when the server broke off, ValueError when it makes no sense."""
        if self._last is None or self._last.finish_reason is None:
            raise ConnectionError("the server broke off in the middle of an answer")
        ids = self._partial.ids
        spans = version_spans(self._last.weight_versions, len(ids))
        kind = self._last.finish_reason
        finish = FinishReason(kind, self._last.stop_reason if kind == "stop" else None)
        return Generation(ids, self._partial.logprobs, finish, spans, self._cached)


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
