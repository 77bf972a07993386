"""Generations as they are written down, to be given again after a kill (`agentrl.system.call_journal`)."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, fields
from operator import attrgetter

import orjson

from agentrl.engines.contract import FinishReason, Generation, SamplingParams
from agentrl.system.call_journal import Codec, digest
from agentrl.trajectory import PlacedImage, VersionSpan


@dataclass(frozen=True, slots=True)
class TimedGeneration:
    """A generation, and the seconds that it took when it was sampled."""

    generation: Generation
    seconds: float


_DECIDING = attrgetter(*(one.name for one in fields(SamplingParams) if one.name not in ("priority", "adapter")))
"""The parameters that decide which tokens one model samples."""


def request_key(ids: Sequence[int], params: SamplingParams, images: Sequence[PlacedImage]) -> str:
    """Digest what decides which tokens are sampled, the weights aside: prompt, images, parameters and seed."""
    places = b"".join(placed.start.to_bytes(8, "little") + placed.image.digest for placed in images)
    model = () if params.adapter is None else (params.adapter.encode(),)
    return digest(b"engine", array("q", ids).tobytes(), repr(_DECIDING(params)).encode(), places, *model)


def _write(one: TimedGeneration) -> bytes:
    found = one.generation
    if found.experts is not None:
        raise ValueError("the experts of tokens are not written down")
    reason, spans = found.finish_reason, [[span.version, span.start, span.end] for span in found.versions]
    told = [reason.kind, reason.matched, spans, found.cached_tokens, one.seconds]
    # Log-probs in the precision in which batches and records hold them.
    return orjson.dumps(told) + b"\n" + array("i", found.ids).tobytes() + array("f", found.logprobs).tobytes()


def _read(content: bytes) -> TimedGeneration:
    told, _, numbers = content.partition(b"\n")
    kind, matched, spans, cached_tokens, seconds = orjson.loads(told)
    ids, logprobs = array("i"), array("f")
    ids.frombytes(numbers[: len(numbers) // 2])
    logprobs.frombytes(numbers[len(numbers) // 2 :])
    versions = [VersionSpan(version, start, end) for version, start, end in spans]
    reason = FinishReason(kind, matched)
    return TimedGeneration(Generation(ids.tolist(), logprobs.tolist(), reason, versions, cached_tokens), seconds)


def _versions(one: TimedGeneration) -> tuple[int, int] | None:
    found = [span.version for span in one.generation.versions]
    return (min(found), max(found)) if found else None


GENERATIONS = Codec(_write, _read, _versions)
