"""The HTTP API of one SGLang server (0.5.23), typed. What it asks of a request is checked by the engine before."""

from __future__ import annotations

import asyncio
import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from agentrl.trajectory import PlacedImage, VersionSpan

STREAM_TOKENS = 64
"""Tokens that a server sends at a time: as many are lost at most when it dies."""
CONTROL_TIMEOUT = 60.0
"""Seconds for a call that generates and loads nothing."""
JSON = {"content-type": "application/json"}
FAULTS = (aiohttp.ClientError, OSError, TimeoutError)


class ServerFailed(EngineError):
    """A server is at fault: it cannot be reached, broke off, or its answer makes no sense."""

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(f"{url}: {reason}")
        self.url = url


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What a server says of itself."""

    model_path: str
    architecture: str | None
    """The model's class."""
    sglang: str
    """Its version of SGLang."""
    context_length: int
    tensor_parallel: int
    weight_version: str
    deterministic: bool
    """It honours seeds."""
    incremental: bool
    """It streams new tokens only."""
    device: str
    """cpu or cuda."""


class SGLangClient:
    """One server. Raises ServerFailed when it is at fault and RequestError when it refuses a request."""

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
        part: Part | None = None,
        images: Sequence[PlacedImage] = (),
    ) -> Generation:
        """Continue `ids`. Cancelling the call leaves the request running there: `abort` it.

        Args:
            rid: of a fixed length and unique: `abort` ends every request whose id begins with the one it is given.
            cache_key: requests with different keys share nothing of the prefix cache.
            part: filled while tokens arrive.
            images: all that stand in `ids`. The server is sent their files, and one token for each, of which it makes
                as many as its own image processor says.
        """
        part = part if part is not None else Part()
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
                            part.take(self._parsed(event[6:]))
            if images and part.prompt_tokens != len(ids):
                raise RequestError(
                    f"{self.url} makes {part.prompt_tokens} tokens of a prompt with images that has {len(ids)} here: "
                    "it has another image processor than actor_rollout_ref.model.path"
                )
            return part.generation()
        except RequestError:
            raise
        except FAULTS as error:
            raise ServerFailed(self.url, describe(error)) from error
        except (KeyError, TypeError, ValueError, IndexError) as error:
            part.ids, part.logprobs = [], []  # who knows what they are
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

    async def release_memory(self, tags: Sequence[str]) -> None:
        """Free the memory of `kv_cache` or `weights`. The server must be idle: it dies of it otherwise."""
        await self.post("release_memory_occupation", {"tags": list(tags)})

    async def resume_memory(self, tags: Sequence[str]) -> None:
        """Undo `release_memory`; weights come back with any content."""
        await self.post("resume_memory_occupation", {"tags": list(tags)})

    async def check(self, timeout: float | None) -> None:
        """Have the server generate a token. Raises ServerFailed when it does not within `timeout` seconds, if any."""
        await self._call("GET", "health_generate", None, timeout)

    async def info(self) -> ServerInfo:
        """What it serves."""
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


class Part:
    """An answer while it arrives."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self._last: dict[str, Any] = {}

    @property
    def weight_version(self) -> str:
        """Of the server when it sent the last tokens, as it says."""
        return str(self._last.get("weight_version"))

    @property
    def prompt_tokens(self) -> int | None:
        """How many the server counts."""
        return self._last.get("prompt_tokens")

    def take(self, chunk: dict[str, Any]) -> None:
        """The next chunk; each brings only new tokens. Raises ValueError or KeyError when it makes no sense."""
        self._last = meta = chunk["meta_info"]
        ids, logprobs = chunk.get("output_ids", []), [entry[0] for entry in meta.get("output_token_logprobs", [])]
        if len(ids) != len(logprobs):
            raise ValueError(f"{len(ids)} ids but {len(logprobs)} log-probs")
        if not all(isinstance(token, int) for token in ids) or not all(map(math.isfinite, logprobs)):
            raise ValueError("ids or log-probs that are no numbers")
        self.ids += ids
        self.logprobs += logprobs

    def generation(self) -> Generation:
        """The whole answer. Raises OSError when the server broke off, ValueError when it makes no sense."""
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
        if self.ids and (not spans or spans[0].start != 0 or spans[-1].end != len(self.ids)):
            raise ValueError(f"version spans {spans} for {len(self.ids)} ids")
        finish = FinishReason(kind, reason.get("matched") if kind == "stop" else None)
        if finish.kind not in ("stop", "length", "abort"):
            raise ValueError(f"finish reason {reason}")
        return Generation(self.ids, self.logprobs, finish, spans, int(self._last.get("cached_tokens") or 0))


def sampling_params(params: SamplingParams) -> dict[str, Any]:
    """Ours as SGLang writes them."""
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
    """`ids` with only the first of the tokens that stand for an image."""
    kept: list[int] = []
    start = 0
    for one in images:
        kept += ids[start : one.start + 1]
        start = one.start + one.image.tokens
    return [*kept, *ids[start:]]


def data_url(file: bytes) -> str:
    """An image file as SGLang takes it in JSON; it finds out the format by itself."""
    return f"data:image;base64,{base64.b64encode(file).decode()}"


def describe(error: BaseException) -> str:
    """One line, also for errors without a text."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
