"""Weights in flight with `keep_kv_cache`: what runs goes on from its keys and values, and nobody else is given them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from agentrl.engines.contract import Generation
from agentrl.engines.servers.client import ServerFailed
from agentrl.engines.servers.fleet import FleetState
from agentrl.engines.sglang.client import SGLangClient
from agentrl.engines.sglang.engine import SGLangEngine
from agentrl.engines.sglang.options import SGLangArguments
from agentrl.engines.sglang.process import SGLangProcess
from agentrl.engines.weights import Weights
from tests.engines.contract import GREEDY, MAX_NUM_SEQS, greedy_ids, logprobs_of, params_of, prompt_of
from tests.sglang.engines import engine_of

LONG = 900
"""Tokens of an answer that lasts over two updates."""


@pytest.fixture(scope="module")
def other(model_dir: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model_dir, attn_implementation="eager")
    return model


@pytest.fixture
async def engine(server: SGLangProcess, reference: PreTrainedModel) -> AsyncIterator[SGLangEngine]:
    """Keeps caches; with the reference's weights, version 1."""
    engine = engine_of([server], reference, keep_kv_cache=True)
    await engine.update_weights(Weights.from_tensors(reference.named_parameters()), 1)
    yield engine
    await engine.close()


def ask(engine: SGLangEngine, prompt: Sequence[int], tokens: int, session: str) -> asyncio.Task[Generation]:
    return asyncio.create_task(engine.generate(prompt, params_of(tokens), session))


async def until_arrived(engine: SGLangEngine, count: int, tokens: int = 1) -> None:
    """Until so many requests have so many tokens."""
    while sum(len(call.partial.ids) >= tokens for call in engine._calls.values()) < count:
        await asyncio.sleep(0.002)


@torch.no_grad()
def logprobs_mixed(
    parts: Sequence[tuple[PreTrainedModel, int]], prompt: Sequence[int], ids: Sequence[int]
) -> torch.Tensor:
    """[len(ids)]: log-probs of ids after prompt, computed by several models with one cache.

    parts: (model, end) in order: the model reads what is before ids[end - 1], which the next one reads.
    """
    cache, found, begin, whole = DynamicCache(), [], 0, torch.tensor([[*prompt, *ids]])
    for model, end in parts:
        last = len(prompt) + end - 1
        found.append(model(input_ids=whole[:, begin:last], past_key_values=cache, use_cache=True).logits[0])
        begin = last
    logits = torch.cat(found)[len(prompt) - 1 :]
    return logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.allclose(found, expected, atol=1e-4, rtol=0)


async def test_a_request_keeps_its_cache_through_two_updates(
    engine: SGLangEngine, reference: PreTrainedModel, other: PreTrainedModel
) -> None:
    """Its log-probs are those of three models that share one cache, and each token is of the one that sampled it."""
    prompt, models = prompt_of(100), {1: reference, 2: other, 3: reference}
    task = ask(engine, prompt, LONG, "a")
    await until_arrived(engine, 1, 65)
    await engine.update_in_flight(Weights.from_tensors(other.named_parameters()), 2)
    begun = ask(engine, prompt, 12, "b")
    beside = await begun
    have = len(engine._calls["a"].partial.ids)
    await until_arrived(engine, 1, have + 64)
    await engine.update_in_flight(Weights.from_tensors(reference.named_parameters()), 3)
    answer = await task
    assert [span.version for span in answer.versions] == [1, 2, 3]
    parts = [(models[span.version], span.end) for span in answer.versions]
    given, cut = torch.tensor(answer.logprobs), answer.versions[0].end
    assert close(given, logprobs_mixed(parts, prompt, answer.ids))
    for version in (2, 3):
        span = answer.versions[version - 1]
        anew = logprobs_of(models[version], prompt, answer.ids[: span.end], 1.0)
        assert not close(given[span.start : span.end], anew[span.start :])
    assert 65 <= cut < LONG
    # What began behind the first update, from the same prompt, is of its weights alone.
    assert (beside.cached_tokens, {span.version for span in beside.versions}) == (0, {2})
    assert beside.ids == greedy_ids(other, prompt, 12)
    # And the next turn of the session finds nothing of what the answer left.
    ids = prompt + answer.ids[:-20]
    then = await engine.generate(ids, GREEDY, "a")
    assert (then.cached_tokens, then.ids) == (0, greedy_ids(reference, ids, 12))
    again = await engine.generate(ids, GREEDY, "c")
    assert again.cached_tokens > 0.9 * len(ids), "requests under the same weights share as before"
    assert (await engine.health()).metrics["failovers"] == 0


async def test_what_waits_at_the_server_begins_anew_under_the_new_weights(
    engine: SGLangEngine, reference: PreTrainedModel, other: PreTrainedModel
) -> None:
    """Requests in its queue, and those that are made while it is sent weights, have the prompts of what runs."""
    prompts = [prompt_of(40 + number) for number in range(MAX_NUM_SEQS)]
    running = [ask(engine, prompt, 300, f"runs/{number}") for number, prompt in enumerate(prompts)]
    await until_arrived(engine, MAX_NUM_SEQS)
    waiting = [ask(engine, prompt, 4, f"waits/{number}") for number, prompt in enumerate(prompts)]
    while len(engine._calls) < 2 * MAX_NUM_SEQS or any(call.server is None for call in engine._calls.values()):
        await asyncio.sleep(0)
    update = asyncio.create_task(engine.update_in_flight(Weights.from_tensors(other.named_parameters()), 2))
    late: list[asyncio.Task[Generation]] = []
    while not update.done():
        if len(late) < MAX_NUM_SEQS:
            late.append(ask(engine, prompts[len(late)], 4, f"late/{len(late)}"))
        await asyncio.sleep(0.002)
    await update
    for prompt, answer in zip(prompts, await asyncio.gather(*running), strict=True):
        cut = answer.versions[0].end
        assert [span.version for span in answer.versions] == [1, 2]
        mixed = logprobs_mixed([(reference, cut), (other, 300)], prompt, answer.ids)
        assert close(torch.tensor(answer.logprobs), mixed)
    anew = zip([*prompts, *prompts], await asyncio.gather(*waiting, *late), strict=False)
    for prompt, answer in anew:
        assert {span.version for span in answer.versions} == {2}
        assert close(torch.tensor(answer.logprobs), logprobs_of(other, prompt, answer.ids, 1.0))
    assert (await engine.health()).metrics["failovers"] == 0
    assert engine._supervisor.fleet.serving, "no server is dead of requests that were asked again"


async def test_what_older_weights_left_goes_by_age(engine: SGLangEngine, other: PreTrainedModel) -> None:
    """Three times what the cache holds, while a request runs that keeps the server from being flushed."""
    arguments = SGLangArguments("", device="cpu", context_length=1024, max_num_seqs=MAX_NUM_SEQS)
    words = arguments.argv(0)
    room = int(words[words.index("--max-total-tokens") + 1])
    long, read, version = asyncio.create_task(_endless(engine)), 0, 1
    await until_arrived(engine, 1)
    weights = Weights.from_tensors(other.named_parameters())
    while read < 3 * room:
        version += 1
        await engine.update_in_flight(weights, version)
        prompts = [[7 + version % 200, 7 + number, *prompt_of(998)] for number in range(40)]
        answers = await asyncio.gather(
            *[engine.generate(prompt, params_of(1), f"{version}/{number}") for number, prompt in enumerate(prompts)]
        )
        assert all(answer.cached_tokens <= 2 for answer in answers)
        read += 40 * 1000
    long.cancel()
    assert greedy_ids(other, prompts[0], 1) == answers[0].ids


async def _endless(engine: SGLangEngine) -> None:
    while True:
        await engine.generate(prompt_of(20), params_of(LONG), "runs")


async def test_a_server_that_fails_an_update_runs_nothing(
    engine: SGLangEngine, reference: PreTrainedModel, other: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paused in place, with some of the new weights, until it has taken all of a later version."""
    (asked,) = engine._supervisor.servers.values()
    refusing, resumed = True, 0

    async def end(client: SGLangClient, timeout: float) -> None:
        if refusing:
            raise ServerFailed(client.url, "planted")
        await SGLangClient.post(client, "/end_weight_update", {}, timeout=timeout)

    async def resume(client: SGLangClient) -> None:
        nonlocal resumed
        resumed += 1
        await SGLangClient.post(client, "/continue_generation", {})

    task = ask(engine, prompt_of(30), LONG, "a")
    await until_arrived(engine, 1, 65)
    monkeypatch.setattr(SGLangClient, "end_weight_update", end)
    monkeypatch.setattr(SGLangClient, "resume", resume)
    with pytest.raises(Exception, match="no server took the weights"):
        await engine.update_in_flight(Weights.from_tensors(other.named_parameters()), 2)
    await engine.lock_weights()
    assert engine._supervisor.fleet.state(asked.url) is FleetState.STALE
    await asyncio.sleep(1.2)
    assert (resumed, task.done()) == (0, False)
    refusing = False
    await engine.update_in_flight(Weights.from_tensors(reference.named_parameters()), 3)
    answer = await task
    assert resumed == 1 and {span.version for span in answer.versions} <= {1, 3}
    assert close(torch.tensor(answer.logprobs), logprobs_of(reference, prompt_of(30), answer.ids, 1.0))
