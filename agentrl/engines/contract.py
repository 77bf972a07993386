"""The contract of a rollout engine. `tests/engines/contract.py` holds every implementation to it.

Conventions, the same as SGLang's: log-probs are of log_softmax(logits / temperature) over the whole vocabulary, not
renormalised for top-p or top-k; at temperature 0 (greedy) of plain log_softmax(logits). A stop token stays in the ids.
With a stop string the ids end with the token that completed it. An aborted request returns what it had.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, SupportsFloat, TypeAlias, runtime_checkable

from agentrl.engines.weights import SyncReport, Weights
from agentrl.errors import InfrastructureError
from agentrl.system.metrics import Metrics
from agentrl.trajectory import PlacedImage, VersionSpan

if TYPE_CHECKING:
    from agentrl.trajectory.trajectory import Experts

PauseMode = Literal["abort", "in_place", "retract"]
Listener: TypeAlias = Callable[[Sequence[int]], None]
"""Is called with a request's sampled ids as they arrive, on the event loop. It must be quick and raise nothing."""


class EngineError(InfrastructureError):
    """Raised when the engine failed, not the request: the trajectory may be retried."""


class RequestError(ValueError):
    """Raised for a request that can never be served: bad id or parameter, context too long."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters of sampling: `top_k` -1 means all tokens, temperature 0 greedy."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    seed: int | None = None
    """The same seed, ids and weights give the same tokens, with any other requests in the batch."""
    priority: int = 0
    """Place in the queue: the smallest number goes first. An engine may not read it."""
    adapter: str | None = None
    """Name of a frozen adapter (`agentrl.config.adapters.frozen_adapters`) that answers; None: the policy."""

    def check(self) -> None:
        """Raise RequestError for a value out of its range."""
        if self.max_new_tokens < 1:
            raise RequestError(f"max_new_tokens is {self.max_new_tokens}; expected at least 1")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise RequestError(f"temperature is {self.temperature}; expected 0 (greedy) or more")
        if not 0 < self.top_p <= 1:
            raise RequestError(f"top_p is {self.top_p}; expected more than 0 and at most 1")
        if self.top_k != -1 and self.top_k < 1:
            raise RequestError(f"top_k is {self.top_k}; expected -1 (all) or at least 1")


def check_request(ids: Sequence[int], params: SamplingParams, max_model_len: int) -> None:
    """Raise RequestError for a request that no engine with contexts of `max_model_len` tokens can serve."""
    if not ids:
        raise RequestError("the prompt is empty")
    params.check()
    if len(ids) + params.max_new_tokens > max_model_len:
        raise RequestError(
            f"{len(ids)} prompt tokens and max_new_tokens={params.max_new_tokens} exceed the context of "
            f"{max_model_len} tokens"
        )


def outside_vocabulary(ids: Sequence[int], size: int) -> RequestError:
    """Build the error that names the first id outside the vocabulary of `size` ids; there must be one."""
    bad = next(place for place, token in enumerate(ids) if not 0 <= token < size)
    return RequestError(f"id {ids[bad]} at place {bad} is outside the vocabulary of {size}")


@dataclass(frozen=True, slots=True)
class FinishReason:
    """Reason for the end of generation: a stop token (`matched`: its id), a stop string (itself), length or abort."""

    kind: Literal["stop", "length", "abort"]
    matched: int | str | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """Sampled tokens. `versions` says which weights sampled which of `ids`; its spans cover all of them."""

    ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    versions: list[VersionSpan]
    cached_tokens: int = 0
    """Number of the prompt's tokens that came from the KV cache."""
    experts: Experts | None = None
    """[n, L, k] uint8 or int16: the k experts of a mixture that each of the n tokens before the last one was sent to,
    in each of the L layers with experts, prompt included. None: not recorded, or nothing was sampled."""
    seed: int | None = None
    """Seed of the request that it answers, from what the engine holds of the request; None: the engine does not say."""


def contract_fault(found: object) -> str | None:
    """Describe an answer that is no `Generation`, or has fields of other kinds: an error of the engine's code."""
    if not isinstance(found, Generation):
        return f"it must return an agentrl.engines.contract.Generation, found {found!r:.80}"
    wanted = {"ids": "the sampled ids", "logprobs": "a log-prob for each id", "versions": "spans of the ids by version"}
    for name, what in wanted.items():
        if not isinstance(value := getattr(found, name), list):
            return f"{name} of its Generation must be a list, {what}; found {value!r:.80}"
    odd = next((one for one in found.logprobs if not isinstance(one, SupportsFloat)), 0.0)
    return None if isinstance(odd, SupportsFloat) else f"logprobs of its Generation must be numbers, found {odd!r:.80}"


def check_generation(found: Generation) -> None:
    """Raise EngineError for an answer that cannot be recorded: nothing may be trained on it."""
    if len(found.ids) != len(found.logprobs):
        raise EngineError(f"the engine answered {len(found.ids)} ids with {len(found.logprobs)} log-probs")
    bad = next((place for place, one in enumerate(found.logprobs) if not math.isfinite(one)), None)
    if bad is not None:
        raise EngineError(f"the engine gave the log-prob {found.logprobs[bad]} for its token {bad}")
    if not covers(found.versions, len(found.ids)):
        raise EngineError(
            f"the engine gave the versions {found.versions} for {len(found.ids)} ids, not for each id once"
        )


def covers(spans: Sequence[VersionSpan], count: int) -> bool:
    """Say whether spans have each of `count` tokens, once and in order."""
    ends = [0, *(span.end for span in spans)]
    return ends[-1] == count and all(begin == span.start <= span.end for begin, span in zip(ends, spans, strict=False))


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """State and load of an engine, as it reports them."""

    version: int
    running: int
    waiting: int
    paused: bool
    asleep: bool
    metrics: Metrics = field(default_factory=Metrics)
    """The engine's own numbers, e.g. of healthy servers; they become metrics of each training step."""


def trajectory_of(session: str) -> str:
    """Name the trajectory that a session belongs to: the session's name up to the first dot after its last slash.

    "train/3/17/5" of "train/3/17/5.0.2", which is a further transcript of the trajectory's first try.
    """
    group, slash, last = session.rpartition("/")
    return group + slash + last.partition(".")[0]


class RolloutEngine(Protocol):
    """Generates tokens for many sessions at once. All methods are coroutines of one event loop."""

    async def generate(
        self,
        ids: Sequence[int],
        params: SamplingParams,
        session: str,
        images: Sequence[PlacedImage] = (),
        listener: Listener | None = None,
    ) -> Generation:
        """Continue `ids`. `session` names the transcript, so that its KV cache is found again on the next turn. An
        engine may find there what another session of the trajectory (`trajectory_of`) has in common with it.

        `images`: all images in `ids`. Loops leave the argument out without images, so an engine for text only needs
        no such parameter. `listener`: hears each id of the answer once and in order, before the answer is returned;
        an answer that an engine cannot give as it was heard is an EngineError. Engines without such a parameter are
        not given one (`takes_listener`).

        Raises RequestError (this request can never be served) or EngineError (the engine failed).
        """
        ...

    async def abort(self, session: str | None = None) -> None:
        """End one session's running request, or all; each returns the tokens it has. An unknown session is no error."""
        ...

    async def release(self, session: str) -> None:
        """End a session: its KV cache may be dropped."""
        ...

    async def pause(self, mode: PauseMode = "abort") -> None:
        """Stop sampling. Running requests: abort ends them, in_place keeps them and their KV, retract drops the KV."""
        ...

    async def resume(self) -> None:
        """Continue after `pause`, with the requests that were made meanwhile, too."""
        ...

    async def update_weights(self, weights: Weights, version: int) -> SyncReport:
        """Replace weights by Hugging Face parameter name, either all or no weight.

        Unknown names or shapes raise ValueError before anything is changed. KV caches of the old weights are dropped,
        except for requests paused in_place. Sampling stops between two steps for the exchange; running requests
        then continue with the new version.

        The engine may read `weights` again until the next update, as long as requests run.
        """
        ...

    async def flush_cache(self) -> None:
        """Drop all KV that no running request uses."""
        ...

    async def sleep(self) -> None:
        """Free the memory of the KV cache, and of the weights where the engine has its own copy on a shared device.

        Requests that were retracted by `pause` keep the tokens that they have, and continue after `wake` and `resume`.
        Raises EngineError when others are running. Until `wake` new requests wait; `abort`, `release` and `close` end
        any as ever.
        """
        ...

    async def wake(self) -> None:
        """Undo `sleep`, which leaves a pause as it is. Where weights were freed, `update_weights` must come first."""
        ...

    async def health(self) -> EngineHealth:
        """Report state and load."""
        ...

    async def close(self) -> None:
        """End all requests with an abort and free everything."""
        ...


def takes_listener(engine: RolloutEngine) -> bool:
    """Say whether an engine reports tokens as they arrive."""
    known = inspect.signature(engine.generate).parameters
    return "listener" in known or any(one.kind is one.VAR_KEYWORD for one in known.values())


@runtime_checkable
class InFlightEngine(RolloutEngine, Protocol):
    """An engine with devices of its own, which samples while the policy is updated."""

    async def update_in_flight(self, weights: Weights, version: int) -> SyncReport:
        """Replace weights while requests run: an answer begun before may end with the new weights.

        Each token has the version of the weights that sampled it; weights without a known version sample no token.
        After the return, all new tokens have `version`. Raises as `update_weights` does.
        """
        ...

    async def lock_weights(self) -> None:
        """Read the weights of the last update no more, for they are about to change."""
        ...

    async def unlock_weights(self, weights: Weights, version: int) -> None:
        """Allow, after `lock_weights`, to read weights for servers that return; sampling servers keep theirs."""
        ...


RENAMED = {"release_weights": "lock_weights", "offer_weights": "unlock_weights"}
"""Names of methods that an engine of a user's may have instead."""
