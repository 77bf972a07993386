"""One step of the embedded engine: new tokens go through the model, and each running request gets one token."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers import PreTrainedModel

from agentrl.engines.embedded.attention import Part, RowBatch, Segments, StepAttention
from agentrl.engines.embedded.blocked import BlockedLayers
from agentrl.engines.embedded.cache import KVRows, Prefix, Session, SessionCache
from agentrl.engines.embedded.decoding import Decoder, Sampled, decodes
from agentrl.engines.embedded.paged_attention import PagedTokens, attend_copies, kernel_for
from agentrl.engines.embedded.pages import PAGE, PagedRows
from agentrl.engines.embedded.request import Request
from agentrl.engines.embedded.sampling import Sampler
from agentrl.engines.embedded.states import StepStates
from agentrl.engines.embedded.vision import Span, StepImages
from agentrl.model.head_product import head_of
from agentrl.model.layout import PackedLayout, flat_layout
from agentrl.model.packed import forward_packed, make_layout
from agentrl.model.routing import Routes

if TYPE_CHECKING:
    from agentrl.trajectory.trajectory import Experts

_SHORT = 32
"""Up to so many new tokens a session shares a padded batch with others; more get attention calls of their own."""


@dataclass(slots=True)
class _DecodingBatch:
    """The parts of a step that stay the same while the same requests decode."""

    requests: list[Request]
    decode: RowBatch
    attention: StepAttention
    sampler: Sampler


@dataclass(frozen=True, slots=True)
class _NewPrompts:
    """The prompts that a step computes, after the tokens that continue sessions; common beginnings stored once."""

    prefixes: list[Prefix]
    layout: PackedLayout
    ids: torch.Tensor
    """[P] int64: the layout's stored tokens."""
    ends: torch.Tensor
    """[N] int64: place in the step of the last token of each prompt."""

    @classmethod
    def make(
        cls, prefixes: list[Prefix], images: StepImages | None, continuing: int, device: torch.device, flat: bool
    ) -> _NewPrompts | None:
        """Lay out the prompts of a step that has `continuing` tokens before them. None without prompts.

        flat: they share no beginnings.
        """
        if not prefixes:
            return None
        ids = torch.tensor([token for prefix in prefixes for token in prefix.ids], device=device)
        offsets = torch.tensor([0, *(len(prefix.ids) for prefix in prefixes)]).cumsum(0)
        if flat:
            layout = flat_layout(offsets, device)
        else:
            layout = make_layout(ids if images is None else images.told_apart(ids, continuing), offsets)
        ends = layout.expand[offsets[1:].to(device) - 1] + continuing
        return cls(prefixes, layout, ids[layout.stored], ends)

    def images_of(self, images: StepImages, continuing: int) -> StepImages:
        """Leave out the images of prompts' tokens that another prompt shares; `continuing` tokens come before them."""
        before = torch.arange(continuing, device=self.ids.device)
        return images.select(torch.cat([before, continuing + self.layout.stored]))

    def keep_experts(self, rows: Sequence[bytes], continuing: int) -> None:
        """Keep the experts of each prompt's tokens, of the step's tokens, which has `continuing` before the prompts."""
        places = iter((self.layout.expand + continuing).tolist())
        for prefix in self.prefixes:
            prefix.experts = [rows[place] for place in itertools.islice(places, len(prefix.ids))]

    def keep_last(self, hidden: torch.Tensor) -> None:
        """Keep the last state of each prompt, from the step's `hidden` [T, H]. Its images are not needed again."""
        for prefix, row in zip(self.prefixes, hidden.index_select(0, self.ends), strict=True):
            prefix.hidden = row
            prefix.images, prefix.rope = [], None


class StepRunner:
    """Runs steps over a model and a cache.

    All requests given to `run` have been attached to the cache. While the same ones decode, their masks and rows are
    advanced from step to step, not rebuilt.
    """

    def __init__(
        self, model: PreTrainedModel, cache: SessionCache, *, max_model_len: int, records_experts: bool = False
    ) -> None:
        """records_experts: of a model that has been given to `follow_routes`."""
        self.model = model
        self.cache = cache
        self.records_experts = records_experts
        self.blocked = BlockedLayers.from_model(model)
        self._head = head_of(model)
        self._many = partial(Segments, own=cache.own, shared=cache.shared)
        self._of_token: tuple[tuple[int, ...], torch.dtype] | None = None
        """Shape and type of a token's experts, once some were recorded."""
        self._steady: _DecodingBatch | None = None
        self._decoder: Decoder | None = None
        """Runs all decoding where keys and values are in pages."""
        own, shared = cache.own, cache.shared
        if isinstance(own, PagedRows) and isinstance(shared, PagedRows):
            attend = kernel_for(own.pool)
            # The last page of a prompt, and the last of a session, may be part-filled.
            pages = None if attend is attend_copies else -(-max_model_len // PAGE) + 1
            self._decoder = Decoder(model, own, shared, attend, pages)
            self._few: Callable[[Sequence[Session]], Part] = partial(PagedTokens, own=own, shared=shared, attend=attend)
        else:
            assert isinstance(own, KVRows) and isinstance(shared, KVRows)
            self._few = partial(RowBatch, own=own, shared=shared)

    def experts_of(self, session: Session) -> Experts | None:
        """Return the experts of all tokens but the last: [n, L, k] uint8 or int16; None if they are not recorded."""
        if self._of_token is None:
            return None
        shape, dtype = self._of_token
        rows = b"".join([*session.prompt_experts, *session.experts][: len(session.ids) - 1])
        numbers = np.frombuffer(rows, np.uint8) if dtype == torch.uint8 else np.frombuffer(rows, np.int16)
        return numbers.reshape(-1, *shape)

    def disturb(self) -> None:
        """Note that the running requests or their rows have changed."""
        self._steady = None

    def settle(self) -> Sampled | None:
        """Return the results of a step that runs already, whose requests are still those that run; None without one.

        What changes weights, or rows of requests that run, calls this first.
        """
        return None if self._decoder is None else self._decoder.settle()

    def drop(self) -> None:
        """Free what only helps to compute, and forget a step that runs already."""
        if self.blocked is not None:
            self.blocked.drop()
        if self._decoder is not None:
            self._decoder.drop()
        self.disturb()

    @torch.inference_mode()
    def run(self, running: Sequence[Request]) -> Sampled:
        """Run a step. Return the requests in its order, the token sampled for each, and the token's log-prob.

        Over pages, requests that decode wait while others compute more than one token.
        """
        if self._decoder is not None:
            found = self._decoder.step(running)
            if found is not None:
                return found
            running = [request for request in running if not decodes(request)]
        with nullcontext() if self.blocked is None else self.blocked.used():
            if self._steady is None:
                requests, sampler, hidden = self._mixed(running)
            else:
                requests, sampler = self._steady.requests, self._steady.sampler
                hidden = self._decoded(self._steady)
            logits = self._head(hidden)
        for request in requests:
            request.session.cached = len(request.session.ids)
        return requests, *sampler.sample(logits, [request.session.cached for request in requests])

    def _decoded(self, steady: _DecodingBatch) -> torch.Tensor:
        """Run a step of the requests of the last one: the last hidden state of each, [R, H]."""
        steady.decode.advance()
        ids = torch.tensor([request.session.ids[-1] for request in steady.requests], device=self.cache.own.device)
        routes = Routes() if self.records_experts else None
        hidden = forward_packed(self.model, ids, steady.decode.positions, steady.attention, None, routes)
        if routes is not None:
            _keep_experts([request.session for request in steady.requests], self._rows_of(routes))
        return hidden

    def _rows_of(self, routes: Routes) -> list[bytes]:
        """Split the recorded experts by token."""
        recorded = routes.recorded()
        self._of_token = tuple(recorded.shape[1:]), recorded.dtype
        width, whole = recorded[0].nbytes, recorded.numpy().tobytes()
        return [whole[at : at + width] for at in range(0, len(whole), width)]

    def _mixed(self, running: Sequence[Request]) -> tuple[list[Request], Sampler, torch.Tensor]:
        """Run a step in which requests do different things. Return them in its order, and their last states [R, H]."""
        cache, device = self.cache, self.cache.own.device
        prompts = self._prepare_rows(running)
        by_row = sorted(running, key=lambda r: r.session.row)
        decoding = [r for r in by_row if r.new_tokens == 1]  # the token that was sampled last
        short = [r for r in by_row if 1 < r.new_tokens <= _SHORT]
        long = [r for r in by_row if r.new_tokens > _SHORT]
        long.sort(key=lambda r: r.session.prefix.row if r.session.prefix else -1)  # `Segments` joins them by prompt
        ready = [r for r in running if r.new_tokens == 0]  # sample from the last hidden state of their prompt
        kinds = ((self._few, decoding), (self._few, short), (self._many, long))
        parts: list[Part] = [kind([r.session for r in group]) for kind, group in kinds if group]
        continuing = sum(part.size for part in parts)
        images = _step_images(parts, prompts, device)
        stateful = bool(cache.own.states)
        # Equal prompts are computed once anyway, and a device would compile a kernel for what else they share.
        new = _NewPrompts.make(prompts, images, continuing, device, stateful or device.type == "cuda")
        if new is not None and images is not None:
            images = new.images_of(images, continuing)
        sessions = [session for part in parts for session in part.sessions]
        states = None
        if stateful and (parts or prompts):
            states = StepStates(self.model.config, sessions, prompts, cache.own, cache.shared)
        layout = None if new is None else new.layout
        attention = StepAttention(parts, prompts, layout, cache.own, cache.shared, states)
        requests = decoding + short + long + ready
        ends = torch.tensor([r.new_tokens for r in requests if r.new_tokens], dtype=torch.int64).cumsum(0) - 1
        last = []
        asked = [r.session for r in running if r.new_tokens and len(r.session.ids) == r.start] if stateful else []
        for session in asked:  # by a new turn's prompt
            if session.held:
                cache.save(session, session.cached)
        if parts or new is not None:
            hidden = self._forward(parts, new, attention, images)
            last.append(hidden.index_select(0, ends.to(device)))
            if new is not None:
                new.keep_last(hidden)
        for session in asked:
            cache.save(session, len(session.ids))
        if states is not None:
            states.settle()
        if self.records_experts:
            _give_prompt_experts(requests)
        sampler = Sampler([r.params for r in requests], [r.seed for r in requests], device)
        if len(decoding) == len(requests) and new is None and isinstance(parts[0], RowBatch):
            self._steady = _DecodingBatch(requests, parts[0], attention, sampler)
        prefixes = [r.session.prefix for r in ready]
        last += [prefix.hidden[None] for prefix in prefixes if prefix and prefix.hidden is not None]
        return requests, sampler, torch.cat(last)

    def _forward(
        self,
        parts: Sequence[Part],
        new: _NewPrompts | None,
        attention: StepAttention,
        images: StepImages | None,
    ) -> torch.Tensor:
        """Run the step's T tokens through the model: last hidden states [T, H]."""
        routes = Routes() if self.records_experts else None
        tokens = [token for part in parts for s in part.sessions for token in s.ids[s.cached :]]
        rows = [torch.tensor(tokens, dtype=torch.int64, device=self.cache.own.device)]
        places = [part.positions for part in parts]
        if new is not None:
            rows.append(new.ids)
            places.append(new.layout.positions)
        ids, positions = torch.cat(rows), torch.cat(places)
        features = None
        if images is not None:
            # Image tokens are numbers beyond the vocabulary in the cache; the model's own stands for them here.
            ids = torch.where(images.rows < 0, ids, self.model.config.image_token_id)
            positions = positions if images.positions is None else images.positions
            features = images.placed(self.model)
        hidden = forward_packed(self.model, ids, positions, attention, features, routes)
        if routes is not None:
            experts = self._rows_of(routes)
            _keep_experts([session for part in parts for session in part.sessions], experts)
            if new is not None:
                new.keep_experts(experts, len(tokens))
        return hidden

    def _prepare_rows(self, running: Sequence[Request]) -> list[Prefix]:
        """Find the prompts that this step has to compute; their sessions count them as cached from here on.

        The rows of the sessions that decode, and of their prompts, move to the front of the stores.
        """
        prompts: list[Prefix] = []
        for request in running:
            session, prefix = request.session, request.session.prefix
            assert prefix is not None
            if not prefix.ready:
                prefix.ready = True
                prompts.append(prefix)
            session.cached = max(session.cached, session.prompt_length)
        if prompts:
            self.cache.shared.extend(prompts, [len(prefix.ids) for prefix in prompts])
        decoding = [request.session for request in running if request.new_tokens == 1]
        prefixes = {id(session.prefix): session.prefix for session in decoding if session.prefix is not None}
        self.cache.own.arrange(decoding)  # may move the rows of all others, too
        self.cache.shared.arrange(list(prefixes.values()))
        return prompts


def _give_prompt_experts(requests: Sequence[Request]) -> None:
    """Give sessions the experts of their prompts' tokens."""
    for session in (request.session for request in requests):
        assert session.prefix is not None
        session.prompt_experts = session.prompt_experts or session.prefix.experts


def _keep_experts(sessions: Sequence[Session], rows: Sequence[bytes]) -> None:
    """Keep the experts of sessions' new tokens, which come first in `rows`; known experts stay."""
    place = 0
    for session in sessions:
        new = rows[place : place + len(session.ids) - session.cached]
        session.experts += new[len(session.experts) + session.prompt_length - session.cached :]
        place += len(new)


def _step_images(parts: Sequence[Part], prompts: Sequence[Prefix], device: torch.device) -> StepImages | None:
    """Find the images among the new tokens of sessions and in new prompts; None without images."""
    spans: list[Span] = [(s, s.cached, len(s.ids)) for part in parts for s in part.sessions]
    spans += [(prefix, 0, len(prefix.ids)) for prefix in prompts]
    return StepImages.from_spans(spans, device) if any(holder.images for holder, _, _ in spans) else None
