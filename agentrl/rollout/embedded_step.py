"""One step of the embedded engine: new tokens go through the model, and each running request gets one token."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from agentrl.model.layout import tree_layout
from agentrl.model.packed import forward_packed, token_logits
from agentrl.rollout.embedded_attention import DecodeBatch, Segments, StepAttention
from agentrl.rollout.embedded_cache import Prefix, Session, SessionCache
from agentrl.rollout.embedded_sampling import Sampler
from agentrl.rollout.engine import Generation, SamplingParams


@dataclass(slots=True, eq=False)
class Request:
    """One call of generate. Its sampled ids are the session's tokens from `start` on."""

    session: Session
    params: SamplingParams
    seed: int
    future: asyncio.Future[Generation]
    start: int
    stop_ids: frozenset[int]
    stop_window: int
    """Tokens at the end that can hold a stop string which the last token completes."""
    logprobs: list[float] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)
    """(version, first token that it sampled)"""
    cached_tokens: int = -1
    """Tokens of the prompt found in the cache; -1 before the request is first scheduled."""
    in_place: bool = False
    """It was paused with its keys and values kept, and has not gone on yet."""


@dataclass(slots=True)
class _Steady:
    """What stays the same while the same requests decode."""

    requests: list[Request]
    decode: DecodeBatch
    attention: StepAttention
    sampler: Sampler


class StepRunner:
    """Runs steps over a model and a cache. All requests given to `run` have been attached to the cache."""

    def __init__(self, model: PreTrainedModel, cache: SessionCache) -> None:
        self.model = model
        self.cache = cache
        self._steady: _Steady | None = None

    def disturb(self) -> None:
        """The running requests or their rows have changed."""
        self._steady = None

    @torch.inference_mode()
    def run(self, running: Sequence[Request]) -> tuple[list[Request], list[int], list[float]]:
        """Requests in the order of the step, the token sampled for each and its log-prob."""
        steady = self._steady
        if steady is None:
            return self._mixed(running)
        decode = steady.decode
        decode.prepare()
        ids = torch.tensor([request.session.ids[-1] for request in steady.requests], device=self.cache.own.device)
        logits = token_logits(self.model, forward_packed(self.model, ids, decode.positions, steady.attention))
        decode.advance()
        lengths = []
        for request in steady.requests:
            session = request.session
            session.cached += 1
            lengths.append(len(session.ids))
        return steady.requests, *steady.sampler.sample(logits, lengths)

    def _mixed(self, running: Sequence[Request]) -> tuple[list[Request], list[int], list[float]]:
        cache, device = self.cache, self.cache.own.device
        prompts = self._start_prompts(running)
        missing = [len(request.session.ids) - request.session.cached for request in running]
        decoding = [request for request, count in zip(running, missing, strict=True) if count == 1]
        extending = [request for request, count in zip(running, missing, strict=True) if count > 1]
        waiting = [request for request, count in zip(running, missing, strict=True) if count == 0]

        decode = self._decode_batch(decoding) if decoding else None  # first, since it moves rows
        segments = Segments([r.session for r in extending], cache.own, cache.shared) if extending else None
        order = {id(session): place for place, session in enumerate(segments.sessions)} if segments else {}
        extending.sort(key=lambda request: order[id(request.session)])
        layout, ids, positions = None, [], []
        if decode is not None:
            decode.prepare()
            decoding.sort(key=lambda request: request.session.row)
            ids.append(torch.tensor([request.session.ids[-1] for request in decoding], device=device))
            positions.append(decode.positions)
        if segments is not None:
            ids.append(torch.tensor(segments.ids, device=device))
            positions.append(segments.positions)
        if prompts:
            flat = torch.tensor([token for prefix in prompts for token in prefix.ids], device=device)
            offsets = torch.tensor([0, *(len(prefix.ids) for prefix in prompts)]).cumsum(0)
            layout = tree_layout(flat, offsets)
            ids.append(flat[layout.stored])
            positions.append(layout.positions)

        last: list[int] = list(range(len(decoding)))  # rows of the hidden states to sample from
        attention = StepAttention(decode, segments, prompts, layout, cache.own, cache.shared)
        if ids:
            hidden = forward_packed(self.model, torch.cat(ids), torch.cat(positions), attention)
        if segments is not None:
            last += [len(decoding) + end - 1 for _, end in segments.spans]
        if layout is not None:
            ends = layout.expand[offsets[1:].to(device) - 1] + attention.continuing
            for prefix, row in zip(prompts, hidden.index_select(0, ends), strict=True):
                prefix.hidden = row.clone()
        wanted = [hidden[last]] if last else []
        wanted += [request.session.prefix.hidden[None] for request in waiting]  # type: ignore[union-attr,index]

        requests = decoding + extending + waiting
        sampler = Sampler([r.params for r in requests], [r.seed for r in requests], device)
        for request in requests:
            request.session.cached = len(request.session.ids)
        if decode is not None:
            decode.advance()
            if len(requests) == len(decoding):
                self._steady = _Steady(requests, decode, attention, sampler)
        logits = token_logits(self.model, torch.cat(wanted))
        return requests, *sampler.sample(logits, [len(request.session.ids) for request in requests])

    def _start_prompts(self, running: Sequence[Request]) -> list[Prefix]:
        """The prompts that this step has to compute; their sessions count them as cached from here on."""
        prompts: list[Prefix] = []
        for request in running:
            session, prefix = request.session, request.session.prefix
            assert prefix is not None
            if not prefix.ready:
                prefix.ready = True
                prompts.append(prefix)
            session.cached = max(session.cached, session.prompt_length)
        if prompts:
            self.cache.shared.reserve(0, max(len(prefix.ids) for prefix in prompts))
        return prompts

    def _decode_batch(self, decoding: Sequence[Request]) -> DecodeBatch:
        sessions = [request.session for request in decoding]
        prefixes = {id(session.prefix): session.prefix for session in sessions if session.prefix is not None}
        self.cache.own.arrange(sessions)
        self.cache.shared.arrange(list(prefixes.values()))
        return DecodeBatch(sorted(sessions, key=lambda session: session.row), self.cache.own, self.cache.shared)
