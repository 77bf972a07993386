"""The HTTP API of one SGLang server (0.5.23), typed. The engine has checked requests and weights before they come here.

No other file knows the paths and fields of that API.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Literal

from pydantic import AliasPath, BaseModel, Field, JsonValue, RootModel

from agentrl.engines.contract import (
    FinishReason,
    Generation,
    PauseMode,
    RequestError,
    SamplingParams,
)
from agentrl.engines.servers.client import (
    GroupInvitation,
    Memory,
    PartialAnswer,
    ServerInfo,
    WeightChecksums,
    WrongServer,
    describe,
)
from agentrl.engines.servers.http import AnswerStream, Routes, ServerHTTP, VersionInfo, read
from agentrl.engines.servers.images import data_urls, with_one_token_each
from agentrl.engines.servers.sync.buckets import Bucket
from agentrl.engines.sglang.bucket_handle import serialize
from agentrl.engines.sglang.delta_loader import CANNOT, HELD, LOADER
from agentrl.system.json_value import JSON
from agentrl.trajectory import PlacedImage

STREAM_TOKENS = 64
"""Tokens that a server sends at a time: as many are lost at most when it dies."""
HEARD_TOKENS = 8
"""The same for an answer that somebody hears."""


# Answers, with those fields that are read.


class FinishInfo(BaseModel):
    """Reason for the end of a request."""

    type: Literal["stop", "length", "abort"]
    matched: int | str | None = None
    message: str | None = None
    status_code: int | None = None


class MetaInfo(BaseModel):
    """Data of a chunk on its request."""

    id: str | None = None
    """The request's."""
    finish_reason: FinishInfo | None = None
    weight_version: str | None = None
    weight_versions: list[VersionInfo] | None = None
    output_token_logprobs: list[tuple[float, int, str | None]] = []
    """(log-prob, id, text) of each token."""
    prompt_tokens: int | None = None
    """Length of the prompt as the server counts it."""
    cached_tokens: int | None = None


class Chunk(BaseModel):
    """A piece of a streamed answer, with new tokens only; or the server's refusal."""

    output_ids: list[int] = []
    meta_info: MetaInfo | None = None
    error: JsonValue = None


class ModelAnswer(BaseModel):
    """Answer of `model_info`."""

    model_path: str
    architectures: list[str] | None = None
    weight_version: str


class ServerAnswer(BaseModel):
    """Answer of `server_info`."""

    version: str
    context_length: int | None
    max_input: int | None = Field(None, validation_alias=AliasPath("internal_states", 0, "max_req_input_len"))
    tp_size: int
    enable_deterministic_inference: bool | None = None
    incremental_streaming_output: bool | None = None
    device: str
    quantization: str | None = None
    disable_overlap_schedule: bool = False
    enable_lora: bool | None = None
    max_lora_rank: int | None = None
    custom_weight_loader: list[str] | None = None


class Codes(RootModel[list[float]]):
    """Answer of `get_weights_by_name`."""


class RankChecksums(BaseModel):
    """Checksums of one rank of a server, and the rank's place."""

    role: str = Field(validation_alias=AliasPath("parallelism_info", 0, "role"))
    tp_rank: int = Field(validation_alias=AliasPath("parallelism_info", 0, "tp_rank"))
    pp_rank: int = Field(validation_alias=AliasPath("parallelism_info", 0, "pp_rank"))
    checksums: dict[str, str]


class ChecksumsAnswer(BaseModel):
    """Answer of `weights_checker`."""

    ranks: list[RankChecksums]


class SGLangClient(ServerHTTP):
    """Implements `agentrl.engines.servers.client.ServerClient`.

    Its key is the server's --api-key, or its --admin-api-key next to the same --api-key.
    """

    routes = Routes(
        begin_update="begin_weight_update",
        end_update="end_weight_update",
        already_begun="already open",
        load_adapter="load_lora_adapter",
        unload_adapter="unload_lora_adapter",
        further={"abort_all_requests": False},
    )

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
        """See `ServerClient.generate`.

        `rid` must have a fixed length: SGLang's abort ends every request whose id begins with the one it is given. The
        server is sent image files and one token for each, which its own image processor expands.
        """
        stream = AnswerStream(partial)
        body: dict[str, JSON] = {
            "rid": rid,
            "input_ids": with_one_token_each(ids, images) if images else ids,
            "sampling_params": sampling_params(params, HEARD_TOKENS if stream.is_heard else STREAM_TOKENS),
            "return_logprob": True,
            "stream": True,
            "extra_key": cache_key,
            "priority": params.priority,
        }
        if (adapter := params.adapter or self._adapter) is not None:
            body["lora_path"] = adapter
        if images:
            body["image_data"] = list[JSON](data_urls(images))

        def take(event: bytes) -> None:
            chunk = read(Chunk, event)
            self.check_event(chunk.error, event)
            add_chunk(stream, chunk, rid)

        return await self.answer("generate", body, stream, take, expanded=len(ids) if images else None)

    async def abort(self, rid: str | None = None) -> None:
        await self.post("abort_request", {"abort_all": True} if rid is None else {"rid": rid})

    # Control

    async def pause(self, mode: PauseMode) -> None:
        await self.post("pause_generation", {"mode": mode})

    async def resume(self) -> None:
        await self.post("continue_generation", {})

    async def flush_cache(self, wait: float = 0.0) -> bool:
        """Empty the prefix cache; False when the server refuses, as it does when requests hold a part of it and do not
        end within `wait` seconds."""
        try:
            await self.post(f"flush_cache?timeout={wait:g}", {})
        except RequestError:
            return False
        return True

    async def release_memory(self, tags: Sequence[Memory]) -> None:
        """Free the memory of `kv_cache` or `weights`. The server must be idle: it dies of it otherwise."""
        await self.post("release_memory_occupation", {"tags": list(tags)})

    async def resume_memory(self, tags: Sequence[Memory]) -> None:
        await self.post("resume_memory_occupation", {"tags": list(tags)})

    async def check(self, timeout: float | None) -> None:
        await self.get("health_generate", timeout)

    async def info(self) -> ServerInfo:
        """See `WeightReceiver.info`. Raises WrongServer where no SGLang server answers."""
        said = await self.get("model_info")
        told = await self.get("server_info")
        try:
            model, server = read(ModelAnswer, said), read(ServerAnswer, told)
            length = server.max_input if server.context_length is None else server.context_length
            if length is None:
                raise ValueError("neither context_length nor max_req_input_len of internal_states")
        except ValueError as error:
            raise WrongServer(self.url, f"is no SGLang server that agentrl knows: {describe(error)}") from error
        return ServerInfo(
            model.model_path,
            model.architectures[0] if model.architectures else None,
            length,
            server.tp_size,
            model.weight_version,
            bool(server.enable_deterministic_inference),
            bool(server.incremental_streaming_output),
            server.device,
            server.quantization is not None,
            not server.disable_overlap_schedule,
            (server.max_lora_rank or 0) if server.enable_lora else 0,
        )

    # Weights

    async def end_weight_update(self, timeout: float) -> None:
        await self.update("end_weight_update", {}, timeout)

    async def update_from_memory(self, bucket: Bucket, version: int, *, ranks: int, timeout: float) -> None:
        body: dict[str, JSON] = {
            "serialized_named_tensors": [serialize(bucket) for _ in range(ranks)],
            "load_format": "flattened_bucket",
            "flush_cache": False,
            "weight_version": str(version) if bucket.last else None,
        }
        await self.update("update_weights_from_tensor", body, timeout)

    async def join_weight_group(self, invitation: GroupInvitation, timeout: float) -> None:
        body: dict[str, JSON] = {
            "master_address": invitation.address,
            "master_port": invitation.port,
            "rank_offset": invitation.first_rank,
            "world_size": invitation.world_size,
            "group_name": invitation.name,
            "backend": invitation.backend,
        }
        await self.update("init_weights_update_group", body, timeout)

    async def update_from_broadcast(self, bucket: Bucket, version: int, *, group: str, timeout: float) -> None:
        body: dict[str, JSON] = {
            "names": [entry.name for entry in bucket.entries],
            "dtypes": [str(entry.dtype).removeprefix("torch.") for entry in bucket.entries],
            "shapes": [list(entry.shape) for entry in bucket.entries],
            "group_name": group,
            "load_format": "flattened_bucket",
            "flush_cache": False,
            "weight_version": str(version) if bucket.last else None,
        }
        await self.update("update_weights_from_distributed", body, timeout)

    async def leave_weight_group(self, group: str, timeout: float) -> None:
        await self.post("destroy_weights_update_group", {"group_name": group}, timeout=timeout)

    async def update_from_disk(self, folder: Path, version: int, timeout: float) -> None:
        """See `WeightReceiver.update_from_disk`. SGLang reads every `*.safetensors` file of the folder, no other."""
        body: dict[str, JSON] = {
            "model_path": str(folder),
            "load_format": "safetensors",
            "weight_version": str(version),
            "flush_cache": False,
            "abort_all_requests": False,
        }
        await self.update("update_weights_from_disk", body, timeout)

    async def weight_checksums(self, timeout: float, leave_out: Sequence[str] = ()) -> WeightChecksums:
        body: dict[str, JSON] = {"action": "checksum", "skip_tensor_list": list(leave_out)}
        answer = await self.update("weights_checker", body, timeout)
        found = self.read(ChecksumsAnswer, answer, "weights_checker").ranks
        info = await self.info()
        ranks = {f"{rank.role}/{rank.tp_rank}/{rank.pp_rank}": rank.checksums for rank in found}
        return WeightChecksums(ranks, predictable=info.device == "cpu", quantized=info.quantized)

    async def held_weights(self, timeout: float) -> str:
        """Ask as `WeightReceiver.held_weights` says. A server that has just started is given its half first."""
        try:
            said = await self.post("get_weights_by_name", {"name": HELD}, timeout=timeout)
        except RequestError:
            await self._install_loader(timeout)
            return ""
        codes = self.read(Codes, said, "get_weights_by_name").root
        if codes == CANNOT:
            raise RequestError(f"{self.url}: the model's loader at the server does not copy the weights that it gets")
        return "".join(chr(int(code)) for code in codes)

    async def _install_loader(self, timeout: float) -> None:
        """Have the server's model take changed elements. Raises RequestError where the server cannot."""
        server = read(ServerAnswer, await self.get("server_info", timeout))
        if LOADER not in (server.custom_weight_loader or []):
            raise RequestError(f"start it with --custom-weight-loader {LOADER}, and agentrl installed there")
        if server.quantization is not None:
            raise RequestError(f"it holds the weights rounded (quantization {server.quantization})")
        nothing = base64.b64encode(ForkingPickler.dumps([])).decode()
        body: dict[str, JSON] = {"serialized_named_tensors": [nothing] * server.tp_size, "load_format": LOADER}
        await self.begin_weight_update(timeout)
        await self.update("update_weights_from_tensor", body | {"flush_cache": False}, timeout)
        await self.end_weight_update(timeout)


def add_chunk(stream: AnswerStream, chunk: Chunk, rid: str) -> None:
    """Add a chunk of the answer to the request `rid`. Raises ValueError when it makes no sense."""
    meta = chunk.meta_info
    if meta is None:
        raise ValueError("key 'meta_info' is missing")
    if meta.id not in (None, rid):
        raise ValueError(f"it answers the request {meta.id!r}, and was asked {rid!r}")
    logprobs = [logprob for logprob, _, _ in meta.output_token_logprobs]
    stream.add(*_unrepeated(meta, len(stream), chunk.output_ids, logprobs), str(meta.weight_version))
    stream.versions, stream.prompt_tokens = meta.weight_versions, meta.prompt_tokens
    stream.cached_tokens = meta.cached_tokens or 0
    if (reason := meta.finish_reason) is not None:
        if reason.type == "abort" and reason.status_code:
            raise ValueError(f"aborted: {reason.message} (status {reason.status_code})")
        stream.finish = FinishReason(reason.type, reason.matched if reason.type == "stop" else None)


def _unrepeated(meta: MetaInfo, before: int, ids: list[int], logprobs: list[float]) -> tuple[list[int], list[float]]:
    """Return the new tokens of a chunk, after `before` others; spans give the total number.

    When a retracted, waiting request is aborted, its last token and all log-probs come again.
    """
    reason, spans = meta.finish_reason, meta.weight_versions
    new = spans[-1].end - before if spans else len(ids)
    if reason is None or reason.type != "abort" or len(ids) <= new:
        return ids, logprobs
    return ids[:new], logprobs[len(logprobs) - new :]


def sampling_params(params: SamplingParams, interval: int = STREAM_TOKENS) -> dict[str, JSON]:
    """Convert to SGLang's `sampling_params`. `interval`: tokens that are sent at once."""
    written: dict[str, JSON] = {
        "max_new_tokens": params.max_new_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "stop_token_ids": list(params.stop_token_ids),
        "stop": list(params.stop),
        "skip_special_tokens": False,
        # True, it would ignore stop_token_ids as well; false, the model's own end token also ends a turn.
        "ignore_eos": not params.stop_token_ids,
        "stream_interval": interval,
    }
    if params.seed is not None:
        written["sampling_seed"] = params.seed - (1 << 64) if params.seed >= 1 << 63 else params.seed
    return written
