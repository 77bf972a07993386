"""The HTTP API of one SGLang server (0.5.23), typed. The engine has checked requests and weights before they come here.

No other file knows the paths and fields of that API.
"""

from __future__ import annotations

import asyncio
import base64
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from agentrl.engines.contract import (
    EngineError,
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
    ServerFailed,
    ServerInfo,
    WeightChecksums,
    describe,
)
from agentrl.engines.servers.sync.buckets import Bucket
from agentrl.engines.sglang.bucket_handle import serialize
from agentrl.trajectory import PlacedImage, VersionSpan

STREAM_TOKENS = 64
"""Tokens that a server sends at a time: as many are lost at most when it dies."""
CONTROL_TIMEOUT = 60.0
"""Seconds for a call that generates and loads nothing."""
JSON = {"content-type": "application/json"}
FAULTS = (aiohttp.ClientError, OSError, TimeoutError)


class SGLangClient:
    """Implements `agentrl.engines.servers.client.ServerClient`."""

    def __init__(self, url: str, http: aiohttp.ClientSession) -> None:
        self.url = url.rstrip("/")
        self._http = http

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
        answer = AnswerStream(PartialAnswer() if partial is None else partial)
        body = {
            "rid": rid,
            "input_ids": with_one_token_each(ids, images) if images else ids,
            "sampling_params": sampling_params(params),
            "return_logprob": True,
            "stream": True,
            "extra_key": cache_key,
        }
        if images:
            body["image_data"] = [data_url(one.image.encoded) for one in images]
        try:
            url, content = f"{self.url}/generate", orjson.dumps(body)
            async with self._http.post(url, data=content, headers=JSON) as response:
                if response.status != 200:
                    raise self._error(response.status, await response.read(), "generate")
                buffer = b""
                async for piece in response.content.iter_any():
                    *events, buffer = (buffer + piece).split(b"\n\n")
                    for event in events:
                        if event.startswith(b"data: {"):
                            answer.take(self._parsed(event[6:]))
            if images and answer.prompt_tokens != len(ids):
                raise RequestError(
                    f"{self.url} makes {answer.prompt_tokens} tokens of a prompt with images that has {len(ids)} here: "
                    "it has another image processor than actor_rollout_ref.model.path"
                )
            return answer.generation()
        except RequestError:
            raise
        except FAULTS as error:
            raise ServerFailed(self.url, describe(error)) from error
        except (KeyError, TypeError, ValueError, IndexError) as error:
            answer.discard()
            raise ServerFailed(self.url, f"its answer makes no sense: {describe(error)}") from error

    def _parsed(self, text: bytes) -> Any:
        answer = orjson.loads(text)
        if "error" in answer:
            code = answer["error"].get("code") if isinstance(answer["error"], dict) else None
            raise self._error(code if isinstance(code, int) else 400, text, "generate")
        return answer

    async def abort(self, rid: str | None = None) -> None:
        """End one request, or all; each returns with what it has. Unknown is no error."""
        await self.post("abort_request", {"abort_all": True} if rid is None else {"rid": rid})

    # Control

    async def pause(self, mode: PauseMode) -> None:
        """See `RolloutEngine.pause`."""
        await self.post("pause_generation", {"mode": mode})

    async def resume(self) -> None:
        """See `RolloutEngine.resume`."""
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
        """Undo `release_memory`; weights come back with any content."""
        await self.post("resume_memory_occupation", {"tags": list(tags)})

    async def check(self, timeout: float | None) -> None:
        """Have the server generate a token. Raises ServerFailed when it does not within `timeout` seconds, if any."""
        await self._call("GET", "health_generate", None, timeout)

    async def info(self) -> ServerInfo:
        """See `WeightReceiver.info`. Raises ServerFailed where no SGLang server answers."""
        model = await self._call("GET", "model_info", None, CONTROL_TIMEOUT)
        server = await self._call("GET", "server_info", None, CONTROL_TIMEOUT)
        try:
            length = server["context_length"]
            if length is None:
                length = server["internal_states"][0].get("max_req_input_len", 0)
            return ServerInfo(
                model["model_path"],
                (model.get("architectures") or [None])[0],
                str(server["version"]),
                int(length),
                int(server["tp_size"]),
                str(model["weight_version"]),
                bool(server.get("enable_deterministic_inference")),
                bool(server.get("incremental_streaming_output")),
                str(server["device"]),
            )
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise ServerFailed(self.url, f"is no SGLang server that agentrl knows: {describe(error)}") from error

    # Weights

    async def begin_weight_update(self, timeout: float) -> None:
        """See `WeightReceiver.begin_weight_update`. SGLang takes tensors only between begin and end."""
        try:
            await self._update("/begin_weight_update", {}, timeout)
        except Exception as error:
            if "already open" not in str(error):
                raise
            await self._update("/end_weight_update", {}, timeout)
            await self._update("/begin_weight_update", {}, timeout)

    async def end_weight_update(self, timeout: float) -> None:
        """See `WeightReceiver.end_weight_update`."""
        await self._update("/end_weight_update", {}, timeout)

    async def update_from_memory(self, bucket: Bucket, version: int, *, ranks: int, timeout: float) -> None:
        """See `WeightReceiver.update_from_memory`."""
        body = {
            "serialized_named_tensors": [serialize(bucket) for _ in range(ranks)],
            "load_format": "flattened_bucket",
            "flush_cache": False,
            "weight_version": str(version) if bucket.last else None,
        }
        await self._update("/update_weights_from_tensor", body, timeout)

    async def join_weight_group(self, invitation: GroupInvitation, timeout: float) -> None:
        """See `WeightReceiver.join_weight_group`."""
        body = {
            "master_address": invitation.address,
            "master_port": invitation.port,
            "rank_offset": invitation.first_rank,
            "world_size": invitation.world_size,
            "group_name": invitation.name,
            "backend": invitation.backend,
        }
        await self._update("/init_weights_update_group", body, timeout)

    async def update_from_broadcast(self, bucket: Bucket, version: int, *, group: str, timeout: float) -> None:
        """See `WeightReceiver.update_from_broadcast`."""
        body = {
            "names": [entry.name for entry in bucket.entries],
            "dtypes": [str(entry.dtype).removeprefix("torch.") for entry in bucket.entries],
            "shapes": [list(entry.shape) for entry in bucket.entries],
            "group_name": group,
            "load_format": "flattened_bucket",
            "flush_cache": False,
            "weight_version": str(version) if bucket.last else None,
        }
        await self._update("/update_weights_from_distributed", body, timeout)

    async def leave_weight_group(self, group: str, timeout: float) -> None:
        """See `WeightReceiver.leave_weight_group`."""
        await self.post("/destroy_weights_update_group", {"group_name": group}, timeout=timeout)

    async def update_from_disk(self, folder: Path, version: int, timeout: float) -> None:
        """See `WeightReceiver.update_from_disk`. SGLang reads every `*.safetensors` file of the folder, no other."""
        body = {
            "model_path": str(folder),
            "load_format": "safetensors",
            "weight_version": str(version),
            "flush_cache": False,
            "abort_all_requests": False,
        }
        await self._update("/update_weights_from_disk", body, timeout)

    async def weight_checksums(self, timeout: float) -> WeightChecksums:
        """See `WeightReceiver.weight_checksums`."""
        answer = await self._update("/weights_checker", {"action": "checksum"}, timeout)
        try:
            ranks = {_rank_name(rank["parallelism_info"][0]): dict(rank["checksums"]) for rank in answer["ranks"]}
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise EngineError(f"{self.url}: /weights_checker: unexpected answer {answer!r:.500}") from error
        return WeightChecksums(ranks, predictable=(await self.info()).device == "cpu")

    async def _update(self, path: str, body: Mapping[str, Any], timeout: float) -> Any:
        """POST a step of a weight update. SGLang answers some failures with status 200: raises EngineError."""
        answer = await self.post(path, body, timeout=timeout)
        if isinstance(answer, Mapping) and answer.get("success") is False:
            raise EngineError(str(answer.get("message", answer)))
        return answer

    # HTTP

    async def post(self, path: str, body: Mapping[str, Any], *, timeout: float | None = CONTROL_TIMEOUT) -> Any:
        """POST `body` as JSON; the parsed answer, or its text. Raises RequestError with the server's own message."""
        return await self._call("POST", path, body, timeout)

    async def _call(self, method: str, path: str, body: Mapping[str, Any] | None, timeout: float | None) -> Any:
        content = None if body is None else orjson.dumps(body)
        headers = {} if body is None else JSON
        try:
            async with asyncio.timeout(timeout):
                url = f"{self.url}/{path.lstrip('/')}"
                async with self._http.request(method, url, data=content, headers=headers) as response:
                    answer = await response.read()
        except FAULTS as error:
            raise ServerFailed(self.url, f"{path}: {describe(error)}") from error
        if response.status != 200:
            raise self._error(response.status, answer, path)
        try:
            return orjson.loads(answer)
        except orjson.JSONDecodeError:
            return answer.decode(errors="replace")

    def _error(self, status: int, content: bytes, path: str) -> EngineError | RequestError:
        text = content.decode(errors="replace")
        try:
            error = orjson.loads(content)
            error = error.get("error", error.get("message", error))
            text = error["message"] if isinstance(error, dict) else str(error)
        except (orjson.JSONDecodeError, AttributeError, KeyError):
            pass
        if status in (400, 422):
            return RequestError(f"{self.url}: {path}: {text[:2000]}")
        return ServerFailed(self.url, f"{path}: status {status}: {text[:2000]}")


class AnswerStream:
    """Reads the chunks of one streamed answer into a PartialAnswer."""

    def __init__(self, partial: PartialAnswer) -> None:
        self._partial = partial
        self._last: dict[str, Any] = {}
        """Meta data of the last chunk."""

    @property
    def prompt_tokens(self) -> int | None:
        """Length of the prompt as the server counts it."""
        return self._last.get("prompt_tokens")

    def discard(self) -> None:
        """Drop the tokens, which cannot be trusted."""
        self._partial.ids, self._partial.logprobs = [], []

    def take(self, chunk: dict[str, Any]) -> None:
        """Add a chunk, which holds new tokens only. Raises ValueError or KeyError when it makes no sense."""
        self._last = meta = chunk["meta_info"]
        self._partial.weight_version = str(meta.get("weight_version"))
        ids, logprobs = chunk.get("output_ids", []), [entry[0] for entry in meta.get("output_token_logprobs", [])]
        if len(ids) != len(logprobs):
            raise ValueError(f"{len(ids)} ids but {len(logprobs)} log-probs")
        if not all(isinstance(token, int) for token in ids) or not all(map(math.isfinite, logprobs)):
            raise ValueError("ids or log-probs that are no numbers")
        self._partial.ids += ids
        self._partial.logprobs += logprobs

    def generation(self) -> Generation:
        """Return the whole answer. Raises OSError when the server broke off, ValueError when it makes no sense."""
        reason = self._last.get("finish_reason")
        if reason is None:
            raise ConnectionError("the server broke off in the middle of an answer")
        kind = reason["type"]
        if kind == "abort" and reason.get("status_code"):
            raise ValueError(f"aborted: {reason.get('message')} (status {reason['status_code']})")
        spans = [
            VersionSpan(int(span["version"]), int(span["start"]), int(span["end"]))
            for span in self._last.get("weight_versions") or []
            if span["end"] > span["start"]
        ]
        ids = self._partial.ids
        if ids and (not spans or spans[0].start != 0 or spans[-1].end != len(ids)):
            raise ValueError(f"version spans {spans} for {len(ids)} ids")
        finish = FinishReason(kind, reason.get("matched") if kind == "stop" else None)
        if finish.kind not in ("stop", "length", "abort"):
            raise ValueError(f"finish reason {reason}")
        return Generation(ids, self._partial.logprobs, finish, spans, int(self._last.get("cached_tokens") or 0))


def sampling_params(params: SamplingParams) -> dict[str, Any]:
    """Convert to SGLang's `sampling_params`."""
    written: dict[str, Any] = {
        "max_new_tokens": params.max_new_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "stop_token_ids": list(params.stop_token_ids),
        "stop": list(params.stop),
        "skip_special_tokens": False,
        # True, it would ignore stop_token_ids as well; false, the model's own end token ends a turn beside them.
        "ignore_eos": not params.stop_token_ids,
        "stream_interval": STREAM_TOKENS,
    }
    if params.seed is not None:
        written["sampling_seed"] = params.seed - (1 << 64) if params.seed >= 1 << 63 else params.seed
    return written


def with_one_token_each(ids: Sequence[int], images: Sequence[PlacedImage]) -> list[int]:
    """Keep only the first of the tokens of each image."""
    kept: list[int] = []
    start = 0
    for one in images:
        kept += ids[start : one.start + 1]
        start = one.start + one.image.tokens
    return [*kept, *ids[start:]]


def data_url(file: bytes) -> str:
    """Encode an image file as the data URL that SGLang takes in JSON; it detects the format by itself."""
    return f"data:image;base64,{base64.b64encode(file).decode()}"


def _rank_name(place: Mapping[str, Any]) -> str:
    return f"{place['role']}/{place['tp_rank']}/{place['pp_rank']}"
