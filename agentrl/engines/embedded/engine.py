"""The embedded engine: generation in this process with a Hugging Face model on the CPU or one GPU.

Requests join and leave the running batch between steps. The engine runs on the event loop itself, one step at a time
and without threads, so that the same sequence of calls gives the same results bit for bit. Between two steps it lets
the other coroutines run. Every change of its state (abort, pause, new weights) thus falls between two steps.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from transformers import PreTrainedModel

from agentrl.engines.contract import (
    EngineError,
    EngineHealth,
    FinishReason,
    Generation,
    Listener,
    PauseMode,
    RequestError,
    SamplingParams,
    check_request,
    outside_vocabulary,
)
from agentrl.engines.embedded.cache import CacheFull, SessionCache
from agentrl.engines.embedded.pages import in_pages, paged_cache
from agentrl.engines.embedded.request import Request
from agentrl.engines.embedded.shapes import cache_shapes, free_memory
from agentrl.engines.embedded.step import StepRunner
from agentrl.engines.embedded.vision import ImageNumbers, hold_images
from agentrl.engines.inspection import Comparison, Difference, checksum
from agentrl.engines.weights import SyncReport, Weights
from agentrl.model.checkpoint_names import CheckpointNames
from agentrl.model.packed import use_packed_attention
from agentrl.model.routing import follow_routes
from agentrl.model.vision import takes_images
from agentrl.trajectory import PlacedImage, VersionSpan

logger = logging.getLogger(__name__)

_TURNS_OF_LOOP = 6
"""Turns of the event loop after a request has ended: enough for a tool in this process to answer and come back."""
_STEP_TOKENS = 16384
"""New tokens beyond which no further request joins a step."""


class EmbeddedEngine:
    """Implements `agentrl.engines.contract.RolloutEngine`."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_num_seqs: int,
        max_model_len: int,
        stop_decode: Callable[[list[int]], str] | None = None,
        version: int = 0,
        seed: int = 0,
        max_cache_bytes: int | None = None,
        records_experts: bool = False,
        graphs: bool | None = None,
    ) -> None:
        """Build an engine over a model, which a trainer may hold, too.

        Args:
            model: a causal LM; packed attention is selected if it is not yet.
            max_num_seqs: requests that run at once; others wait.
            max_model_len: tokens of the longest context, prompt and response together.
            stop_decode: ids to text, for stop strings.
            version: version of the weights that the model has now.
            seed: seeds the requests that bring no seed of their own.
            max_cache_bytes: memory for keys, values and states; None: half of the free memory. With less than the
                running requests need, fewer run at once.
            records_experts: return the experts of a mixture to which each token was sent.
            graphs: keep keys and values in pages, and decode by programs of fixed buffers, which a GPU replays as
                graphs; None: on a GPU. Models with states, and recorded experts, run without.

        Raises ConfigError when the model's attention cannot be run from the engine's cache, or its experts cannot be
        recorded.
        """
        self.model = use_packed_attention(model)
        if records_experts:
            follow_routes(self.model)
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self._vocab_size = model.get_output_embeddings().weight.shape[0]
        self._stop_decode = stop_decode
        self._version = version
        self._next_seed = (1 << 63) + (seed << 32)
        shapes, states = cache_shapes(self.model, max_model_len)
        limit = free_memory(model.device) // 2 if max_cache_bytes is None else max_cache_bytes
        rows, where = 2 * max_num_seqs, (model.dtype, model.device)
        paged, against = in_pages(model.device.type, graphs, has_states=bool(states), records_experts=records_experts)
        if against:
            logger.warning("%s: decoding runs without graphs, for a model with %s", type(model).__name__, against)
        if paged:
            self._cache = paged_cache(shapes, *where, max_rows=rows, max_bytes=limit)
        else:
            self._cache = SessionCache.of_rows(shapes, *where, max_rows=rows, max_bytes=limit, state_shapes=states)
        self._most = max_num_seqs  # requests that run at once, fewer after the cache was full
        self._runner = StepRunner(self.model, self._cache, max_model_len=max_model_len, records_experts=records_experts)
        self._numbers = ImageNumbers()
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._paused = self._asleep = self._closed = False
        self._task: asyncio.Task[None] | None = None

    # Requests

    async def generate(
        self,
        ids: Sequence[int],
        params: SamplingParams,
        session: str,
        images: Sequence[PlacedImage] = (),
        listener: Listener | None = None,
    ) -> Generation:
        """See `RolloutEngine.generate`. While the engine is paused or asleep the request waits."""
        if self._closed:
            raise EngineError("the engine is closed")
        request = self._accept(list(ids), params, session, images)
        request.listener = listener
        place = len(self._waiting)
        while place and self._waiting[place - 1].params.priority > params.priority:
            place -= 1
        self._waiting.insert(place, request)
        self._kick()
        try:
            return await request.future
        except asyncio.CancelledError:
            self._leave([request])
            raise

    def _accept(self, ids: list[int], params: SamplingParams, name: str, images: Sequence[PlacedImage]) -> Request:
        check_request(ids, params, self.max_model_len)
        if params.stop and self._stop_decode is None:
            raise RequestError("stop strings need an engine made with stop_decode")
        known = self._cache.sessions.get(name)
        if known is not None and known.busy:
            raise RequestError(f"session {name!r} is generating already; one request a session at a time")
        if images and not takes_images(self.model):
            raise RequestError(f"the request has {len(images)} images, and {type(self.model).__name__} takes none")
        session, same = self._cache.take(name, self._numbers.replaced(ids, images) if images else ids)
        hold_images(self.model, session, ids, images)
        new = ids[same:]
        if new and not 0 <= min(new) <= max(new) < self._vocab_size:
            self._cache.forget(session)
            raise outside_vocabulary(ids, self._vocab_size)
        session.busy = True
        seed = params.seed
        if seed is None:
            seed, self._next_seed = self._next_seed, self._next_seed + 1
        # A stop string of B bytes takes at most B tokens; the rest is context for decoding the first of them.
        window = max((len(text.encode()) for text in params.stop), default=0) + 4
        future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        return Request(session, params, seed, future, len(ids), frozenset(params.stop_token_ids), window)

    # The loop

    def _kick(self) -> None:
        """Start the step loop if it does not run and there is work. It ends when no work is left."""
        if self._ready() and (self._task is None or self._task.done()):
            self._task = asyncio.get_running_loop().create_task(self._run())

    def _ready(self) -> bool:
        return bool(self._running or self._waiting) and not (self._paused or self._asleep or self._closed)

    async def _run(self) -> None:
        turns = _TURNS_OF_LOOP  # also at the start, so that requests made together begin together
        while True:
            for _ in range(turns):
                await asyncio.sleep(0)
            if not self._ready():
                return
            turns = _TURNS_OF_LOOP if self._step() else 1

    def _step(self) -> bool:
        """Run one step; True when a request ended."""
        try:
            self._admit()
            if self.model.training:
                self.model.eval()
            ended = self._record(*self._runner.run(self._running))
        except CacheFull as error:
            self._relieve(error)
            return True
        except Exception as error:
            self._fail(error)
            return True
        if ended:
            self._leave(ended)
        return bool(ended)

    def _record(self, requests: Sequence[Request], tokens: Sequence[int], logprobs: Sequence[float]) -> list[Request]:
        """Record a step's sampled tokens. Return the requests that have ended."""
        if not math.isfinite(sum(logprobs)):
            raise FloatingPointError("the model's logits are not finite")
        sampled = zip(requests, tokens, logprobs, strict=True)
        return [request for request, token, logprob in sampled if self._append(request, token, logprob)]

    def _settle(self) -> None:
        """Record the step that runs ahead, if any, before something changes that it depends on."""
        found = self._runner.settle()
        if found is None:
            return
        try:
            self._leave(self._record(*found))
        except Exception as error:
            self._fail(error)

    def _admit(self) -> None:
        """Let waiting requests join, while there is room in the batch and in the step."""
        if not self._waiting or len(self._running) >= self._most:
            return
        room = _STEP_TOKENS
        prompts = set()
        while self._waiting and len(self._running) < self._most and room > 0:
            request = self._waiting.popleft()
            session = request.session
            self._running.append(request)
            self._cache.attach(session)
            if request.cached_tokens < 0:
                request.cached_tokens = session.cached
            room -= len(session.ids) - session.cached
            if session.prefix in prompts:
                room += session.prompt_length
            elif not session.cached:
                prompts.add(session.prefix)
        self._runner.disturb()

    def _append(self, request: Request, token: int, logprob: float) -> bool:
        """Record a sampled token; True, with the future resolved, when it was the last."""
        count = len(request.logprobs)
        if not request.versions or request.versions[-1][0] != self._version:
            request.versions.append((self._version, count))
        ids = request.session.ids
        ids.append(token)
        request.logprobs.append(logprob)
        if request.listener is not None and not request.future.done():
            request.listener((token,))
        if token in request.stop_ids:
            self._resolve(request, FinishReason("stop", token))
            return True
        if request.params.stop:
            assert self._stop_decode is not None
            text = self._stop_decode(ids[max(request.start, len(ids) - request.stop_window) :])
            for stop in request.params.stop:
                if stop in text:
                    self._resolve(request, FinishReason("stop", stop))
                    return True
        if count + 1 == request.params.max_new_tokens:
            self._resolve(request, FinishReason("length"))
            return True
        return False

    def _resolve(self, request: Request, reason: FinishReason) -> None:
        if request.future.done():
            return
        ends = [start for _, start in request.versions[1:]] + [len(request.logprobs)]
        spans = [VersionSpan(v, start, end) for (v, start), end in zip(request.versions, ends, strict=False)]
        ids = request.session.ids[request.start :]
        cached = min(max(request.cached_tokens, 0), request.start)
        experts = self._runner.experts_of(request.session) if ids else None
        found = Generation(ids, request.logprobs, reason, spans, cached, experts, request.params.seed)
        request.future.set_result(found)

    def _leave(self, requests: Sequence[Request]) -> None:
        """Remove requests from queue and batch; their sessions keep keys and values."""
        gone = set(map(id, requests))
        self._running = [request for request in self._running if id(request) not in gone]
        self._waiting = deque(request for request in self._waiting if id(request) not in gone)
        for request in requests:
            request.session.busy = request.session.pinned = False
            if request.session.stale:
                self._cache.drop(request.session)
        self._runner.disturb()

    def _fail(self, error: Exception) -> None:
        """Fail the requests of a failed step, and drop the cache, whose content cannot be trusted."""
        failed = self._running
        for request in failed:
            if not request.future.done():
                failure = EngineError(f"the step failed: {type(error).__name__}: {error}")
                failure.__cause__ = error
                request.future.set_exception(failure)
        self._leave(failed)
        self._cache.free()
        self._runner.drop()

    def _relieve(self, error: CacheFull) -> None:
        """Start over with half as many requests at once, since the cache is full; until the next flush."""
        alone = len(self._running) == 1 and self._cache.own.used <= 1 and self._cache.shared.used <= 1
        self._most = max(1, len(self._running) // 2)
        self._cache.max_rows = 2 * self._most
        if alone:
            self._fail(error)
        self._retract(self._running)
        self._cache.free()

    # Control

    async def abort(self, session: str | None = None) -> None:
        self._settle()
        self._abort([r for r in (*self._running, *self._waiting) if session is None or r.session.name == session])

    def _abort(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._resolve(request, FinishReason("abort"))
        self._leave(requests)

    async def release(self, session: str) -> None:
        """See `RolloutEngine.release`. A request of the session that still runs is aborted."""
        known = self._cache.sessions.get(session)
        if known is not None:
            if known.busy:
                await self.abort(session)
            self._cache.forget(known)
        self._runner.disturb()

    async def pause(self, mode: PauseMode = "abort") -> None:
        """See `RolloutEngine.pause`. abort ends the requests that wait, too."""
        self._paused = True
        self._settle()
        if mode == "abort":
            self._abort([*self._running, *self._waiting])
        elif mode == "in_place":
            for request in self._running:
                request.in_place = True
        else:
            self._retract(self._running)

    async def resume(self) -> None:
        self._paused = False
        for request in self._running:
            request.in_place = False
        self._kick()

    def _retract(self, requests: Sequence[Request]) -> None:
        """Put running requests back to the head of the queue, without keys and values."""
        gone = set(map(id, requests))
        self._running = [request for request in self._running if id(request) not in gone]
        self._waiting.extendleft(reversed(requests))
        for request in requests:
            request.in_place = False
            self._cache.drop(request.session)
        self._runner.disturb()

    async def update_weights(self, weights: Weights, version: int) -> SyncReport:
        """See `RolloutEngine.update_weights`. A part of the weights may be given; tied ones under any of their names.

        Requests that run without a pause are computed again from their tokens with the new weights.
        """
        began = time.perf_counter()
        state = self.model.state_dict(keep_vars=True)
        known = CheckpointNames(self.model, state).views(state)
        names: dict[int, list[str]] = {}
        for name, shape in weights.shapes.items():
            if name not in known:
                raise ValueError(f"update_weights: the model has no parameter {name!r}; nothing was changed")
            target = known[name]
            if tuple(target.shape) != tuple(shape):
                raise ValueError(
                    f"update_weights: {name} has shape {tuple(target.shape)} in the engine but "
                    f"{tuple(shape)} was given; nothing was changed"
                )
            names.setdefault(id(target), []).append(name)
        self._check_tied(weights, [group for group in names.values() if len(group) > 1])
        self._settle()
        size = 0
        with torch.no_grad():
            for name, tensor in weights.read():  # one at a time: they may be made as they are read
                if name == names[id(known[name])][0]:
                    known[name].copy_(tensor)
                    size += known[name].nbytes
        self._version = version
        self._most, self._cache.max_rows = self.max_num_seqs, 2 * self.max_num_seqs
        kept = [request for request in self._running if request.in_place]
        self._retract([request for request in self._running if not request.in_place])
        self._cache.outdate(request.session for request in kept)
        self._runner.disturb()
        return SyncReport(size, time.perf_counter() - began)

    def held_in(self, name: str) -> str:
        return name

    async def compare(self, sent: Mapping[str, torch.Tensor], names: Collection[str]) -> Comparison:
        """Compare weights [S] as `InspectableEngine.compare` says, without weights of another dtype."""
        state = self.model.state_dict(keep_vars=True)
        known = CheckpointNames(self.model, state).views(state)
        tied = self.model.get_input_embeddings().weight, self.model.get_output_embeddings().weight
        both = [name for name, view in known.items() if any(view is one for one in tied)]
        found, compared = list[Difference](), 0
        for name, tensor in sent.items():
            wanted = checksum(tensor)
            for place in both if self.model.config.tie_word_embeddings and name in both else [name]:
                its = known.get(place)
                if its is None or its.dtype != tensor.dtype:
                    continue
                compared += 1
                if checksum(its) != wanted:
                    found.append(Difference(place if place == name else f"{place}, which is tied to {name},", place))
        return Comparison(compared, found)

    @staticmethod
    def _check_tied(weights: Weights, groups: list[list[str]]) -> None:
        """Raise ValueError when names of one tensor come with different values. Reads weights only where needed."""
        tied = {name for group in groups for name in group}
        given = {name: tensor for name, tensor in weights.read() if name in tied} if tied else {}
        for first, *others in groups:
            for name in others:
                if not torch.equal(given[first], given[name]):
                    raise ValueError(f"update_weights: {first} and {name} are tied but differ; nothing was changed")

    async def flush_cache(self) -> None:
        self._settle()
        self._most, self._cache.max_rows = self.max_num_seqs, 2 * self.max_num_seqs
        self._cache.flush(request.session for request in self._running)
        self._runner.disturb()

    async def sleep(self) -> None:
        """See `RolloutEngine.sleep`. The weights stay, without their blocked copies, and programs go."""
        self._settle()
        if self._running:
            raise EngineError(f"sleep: {len(self._running)} requests are running; pause with mode abort or retract")
        self._asleep = True
        self._cache.free()
        self._runner.drop()

    async def wake(self) -> None:
        self._asleep = False
        self._kick()

    async def health(self) -> EngineHealth:
        return EngineHealth(self._version, len(self._running), len(self._waiting), self._paused, self._asleep)

    async def close(self) -> None:
        self._closed = True
        self._abort([*self._running, *self._waiting])
        self._cache.free()
        self._runner.drop()
