"""One step of the embedded engine: new tokens go through the model, and each running request gets one token."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from agentrl.engines.contract import Generation, SamplingParams
from agentrl.engines.embedded.attention import RowBatch, Segments, StepAttention
from agentrl.engines.embedded.cache import Prefix, Session, SessionCache
from agentrl.engines.embedded.sampling import Sampler
from agentrl.engines.embedded.vision import Span, StepImages
from agentrl.model.packed import forward_packed, make_layout, token_logits

_SHORT = 32
"""Up to so many new tokens a session shares a padded batch with others; more get attention calls of their own."""


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
    decode: RowBatch
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
        decode.advance()
        ids = torch.tensor([request.session.ids[-1] for request in steady.requests], device=self.cache.own.device)
        logits = token_logits(self.model, forward_packed(self.model, ids, decode.positions, steady.attention))
        return steady.requests, *self._sample(steady.requests, steady.sampler, logits)

    def _sample(self, requests: list[Request], sampler: Sampler, logits: torch.Tensor) -> tuple[list[int], list[float]]:
        lengths = []
        for request in requests:
            session = request.session
            session.cached = len(session.ids)
            lengths.append(session.cached)
        return sampler.sample(logits, lengths)

    def _mixed(self, running: Sequence[Request]) -> tuple[list[Request], list[int], list[float]]:
        """A step in which requests do different things."""
        cache, device = self.cache, self.cache.own.device
        prompts = self._start_prompts(running)
        missing = {id(request): len(request.session.ids) - request.session.cached for request in running}
        ready = [r for r in running if missing[id(r)] == 0]  # their prompt's last hidden state says how to go on
        decoding = [r for r in running if missing[id(r)] == 1]
        short = [r for r in running if 1 < missing[id(r)] <= _SHORT]
        long = [r for r in running if missing[id(r)] > _SHORT]
        self._arrange(decoding)
        decoding.sort(key=lambda r: r.session.row)
        short.sort(key=lambda r: r.session.row)
        long.sort(key=lambda r: (r.session.prefix.row if r.session.prefix else -1, r.session.row))
        parts = [
            kind([r.session for r in group], cache.own, cache.shared)
            for kind, group in ((RowBatch, decoding), (RowBatch, short), (Segments, long))
            if group
        ]
        spans: list[Span] = [(s, s.cached, len(s.ids)) for part in parts for s in part.sessions]
        spans += [(prefix, 0, len(prefix.ids)) for prefix in prompts]
        images = StepImages.of(spans, device) if any(holder.images for holder, _, _ in spans) else None
        ids = [torch.tensor(part.ids, device=device) for part in parts]
        positions = [part.positions for part in parts]
        layout = None
        if prompts:
            continuing = sum(part.size for part in parts)
            flat = torch.tensor([token for prefix in prompts for token in prefix.ids], device=device)
            offsets = torch.tensor([0, *(len(prefix.ids) for prefix in prompts)]).cumsum(0)
            layout = make_layout(flat if images is None else images.told_apart(flat, continuing), offsets)
            ids.append(flat[layout.stored])
            positions.append(layout.positions)
            if images is not None:
                before = torch.arange(continuing, device=device)
                images = images.select(torch.cat([before, continuing + layout.stored]))
        attention = StepAttention(parts, prompts, layout, cache.own, cache.shared)
        wanted = []
        if ids:
            hidden = self._forward(torch.cat(ids), torch.cat(positions), attention, images)
            for prefix in prompts:
                prefix.images, prefix.rope = [], None
            last = torch.tensor([missing[id(r)] for r in (*decoding, *short, *long)], dtype=torch.int64).cumsum(0) - 1
            wanted.append(hidden.index_select(0, last.to(device)))
        if layout is not None:
            ends = layout.expand[offsets[1:].to(device) - 1] + attention.continuing
            for prefix, row in zip(prompts, hidden.index_select(0, ends), strict=True):
                prefix.hidden = row
        wanted += [
            r.session.prefix.hidden[None] for r in ready if r.session.prefix and r.session.prefix.hidden is not None
        ]
        requests = decoding + short + long + ready
        sampler = Sampler([r.params for r in requests], [r.seed for r in requests], device)
        if len(decoding) == len(requests) and not prompts:
            decode = parts[0]
            assert isinstance(decode, RowBatch)
            self._steady = _Steady(requests, decode, attention, sampler)
        logits = token_logits(self.model, torch.cat(wanted))
        return requests, *self._sample(requests, sampler, logits)

    def _forward(
        self, ids: torch.Tensor, positions: torch.Tensor, attention: StepAttention, images: StepImages | None
    ) -> torch.Tensor:
        if images is None:
            return forward_packed(self.model, ids, positions, attention)
        ids = torch.where(images.rows < 0, ids, self.model.config.image_token_id)
        positions = positions if images.positions is None else images.positions
        return forward_packed(self.model, ids, positions, attention, images.placed(self.model))

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

    def _arrange(self, decoding: Sequence[Request]) -> None:
        """Bring the rows of the sessions that decode, and of their prompts, to the front of the stores."""
        sessions = [request.session for request in decoding]
        prefixes = {id(session.prefix): session.prefix for session in sessions if session.prefix is not None}
        self.cache.own.arrange(sessions)
        self.cache.shared.arrange(list(prefixes.values()))
