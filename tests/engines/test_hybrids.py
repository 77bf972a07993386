"""Models with states (linear attention, Mamba, convolutions) in the embedded engine."""

from __future__ import annotations

import asyncio
import functools
import math
import random
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from agentrl.engines.contract import Generation, SamplingParams
from agentrl.engines.embedded.cache import KVRows
from agentrl.engines.embedded.engine import EmbeddedEngine
from agentrl.engines.weights import Weights
from agentrl.errors import ConfigError
from agentrl.model.packed import token_logprobs, use_packed_attention
from agentrl.model.stateful import stateful_mixers, unbound_time_steps
from tests.model.families import HYBRIDS, make_model

FEW = ["qwen3.5", "falcon-h1"]
"""A family with one kind of layer each, and a family whose every layer has a state and attention."""


def engine_of(model: PreTrainedModel, **options: int) -> EmbeddedEngine:
    return EmbeddedEngine(model, **{"max_num_seqs": 16, "max_model_len": 256, **options})  # type: ignore[arg-type]


def model_of(family: str, scale: float = 0.4) -> PreTrainedModel:
    """A model with smaller weights, whose log-probs float32 holds to 1e-5."""
    model = make_model(family)
    unbound_time_steps(model)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim >= 2:
                weight.mul_(scale)
    return model


@functools.cache
def plain(family: str, scale: float = 0.4) -> PreTrainedModel:
    """The family's model with transformers' own forward."""
    return model_of(family, scale)


def words(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, 61), k=count)


@torch.no_grad()
def own_logprobs(model: PreTrainedModel, ids: list[int], start: int) -> torch.Tensor:
    """Log-probs of the tokens from `start` on by transformers' forward of the whole sequence."""
    scores = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, start - 1 : -1].float().log_softmax(-1)
    return scores.gather(1, torch.tensor(ids[start:])[:, None])[:, 0]


def check(model: PreTrainedModel, ids: list[int], found: Generation) -> None:
    expected = own_logprobs(model, ids + found.ids, len(ids))
    assert torch.allclose(torch.tensor(found.logprobs), expected, atol=1e-5, rtol=0)


@pytest.mark.slice(2, "matrix")
@pytest.mark.parametrize("family", HYBRIDS)
async def test_turns_of_sessions_with_one_prompt(family: str) -> None:
    """Log-probs are those of transformers and of the trainer; a turn computes its new tokens alone."""
    model = model_of(family)
    engine = engine_of(model)

    async def dialogue(i: int) -> None:
        ids, cached = words(9 + 11 * (i // 3), i // 3), 0
        for more in (words(1 + i % 2, i), words(35 + 8 * (i % 2), i), []):
            found = await engine.generate(ids, SamplingParams(5 + 3 * (i % 2), seed=i), f"{i}")
            check(plain(family), ids, found)
            assert found.cached_tokens == cached
            cached = len(ids) + len(found.ids) - 1
            ids = ids + found.ids + more
        offsets = torch.tensor([0, len(ids)])
        with torch.no_grad():
            trained = token_logprobs(model, torch.tensor(ids), offsets).logprobs[-len(found.ids) :]
        assert torch.allclose(torch.tensor(found.logprobs), trained, atol=1e-5, rtol=0)

    await asyncio.gather(*(dialogue(i) for i in range(6)))
    later = await engine.generate(words(20, 1), SamplingParams(4, seed=1), "later")
    assert later.cached_tokens == 20, "the prompt's states are those after its end, whatever its sessions did since"
    check(plain(family), words(20, 1), later)
    greedy = await engine.generate(words(13, 2), SamplingParams(10, temperature=0.0), "greedy")
    alone: Any = plain(family)
    whole = alone.generate(torch.tensor([words(13, 2)]), max_new_tokens=10, do_sample=False, eos_token_id=None)
    assert greedy.ids == whole[0, 13:].tolist()


@pytest.mark.slice(1, "matrix")
@pytest.mark.parametrize("family", FEW)
async def test_a_session_that_diverges_continues_from_saved_states(family: str) -> None:
    engine, model = engine_of(model_of(family)), plain(family)

    async def ask(ids: list[int], cached: int) -> list[int]:
        found = await engine.generate(ids, SamplingParams(8, seed=len(ids)), "a")
        check(model, ids, found)
        assert found.cached_tokens == cached
        return found.ids

    first = words(12, 0)
    second = first + await ask(first, 0) + words(5, 1)
    await ask(second, 19)
    answer = await ask(second, 19)  # the end of the first turn: the last token of the prompt has to run again
    third = second + answer[:3] + words(4, 2)
    await ask(third, len(second))  # the end of the second turn's prompt
    await ask(third, len(second))
    await ask(first + words(9, 3), 12)  # the end of the first prompt
    await ask(first, 12)
    await ask(first[:6] + words(3, 4), 0)


@pytest.mark.slice(1, "soak")
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("family", FEW)
async def test_nothing_that_happens_in_mid_flight_changes_a_probability(family: str, seed: int) -> None:
    """Dialogues under a storm of aborts, pauses, flushes, updates and sleeps, in a roomy and in a small cache."""
    versions = [plain(family), plain(family, 0.3)]
    rng = random.Random(seed)
    engine = engine_of(model_of(family), max_num_seqs=[3, 16][seed], max_cache_bytes=[10**9, 3 * 10**5][seed])
    cache = engine._cache
    record: list[tuple[list[int], Generation]] = []
    events = set[int]()

    async def dialogue(i: int) -> None:
        ids = words(20 + i % 3, i % 3)
        for turn in range(3):
            found = await engine.generate(ids, SamplingParams(12, seed=i), f"d{i}")
            record.append((ids, found))
            ids = ids + found.ids + words(1 + 17 * ((i + turn) % 3), i)

    async def storm() -> None:
        for number in range(1, 16):
            for _ in range(rng.randrange(20)):
                await asyncio.sleep(0)
                stores = [rows for rows in (cache.own, cache.shared, cache.saved) if isinstance(rows, KVRows)]
                tensors = [t for rows in stores for t in (*rows.keys, *rows.values)]
                tensors += [t for rows in stores for t in rows.states]
                held = sum(tensor.nbytes for tensor in tensors)
                assert held == cache.own.memory.used + cache.saved.memory.used <= [10**9, 3 * 10**5][seed]
            events.add(event := rng.randrange(5))
            match event:
                case 0:
                    await engine.abort(f"d{rng.randrange(9)}")
                case 1:
                    await engine.flush_cache()
                case 2:
                    await engine.update_weights(Weights.from_tensors(versions[number % 2].named_parameters()), number)
                case 3:
                    await engine.pause("retract")
                    await engine.sleep()
                    await engine.wake()
                    await engine.resume()
                case _:
                    await engine.pause("retract")
                    await asyncio.sleep(0)
                    await engine.resume()

    await asyncio.gather(storm(), *[dialogue(i) for i in range(9)])
    assert len(record) == 27 and len(events) == 5
    for ids, found in record:
        for span in found.versions:
            expected = own_logprobs(versions[span.version % 2], ids + found.ids, len(ids))[span.start : span.end]
            assert torch.allclose(torch.tensor(found.logprobs[span.start : span.end]), expected, atol=1e-5, rtol=0)
    assert sum(len(found.ids) for _, found in record) > 150
    await engine.flush_cache()
    assert cache.own.used == cache.shared.used == cache.saved.used == 0


async def test_a_request_that_was_paused_in_place_continues() -> None:
    family = "qwen3.5"
    engine = engine_of(model_of(family))
    task = asyncio.create_task(engine.generate(words(20, 0), SamplingParams(30, seed=1), "a"))
    while not (await engine.health()).running:
        await asyncio.sleep(0)
    for _ in range(12):
        await asyncio.sleep(0)
    await engine.pause("in_place")
    await engine.resume()
    found = await task
    check(plain(family), words(20, 0), found)
    assert found.cached_tokens == 0 and len(found.ids) == 30


def test_a_mixer_that_steps_otherwise_than_it_runs_is_refused() -> None:
    """transformers bounds the time steps of Nemotron-H where several tokens run, and not where one runs."""
    bound = make_model("nemotron-h")
    least = bound.config.time_step_min
    for mixer in stateful_mixers(use_packed_attention(bound)):
        mixer.time_step_limit = (least, math.inf)  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"NemotronHMamba2Mixer \(0\.0\d+\).*rollout.name=sglang"):
        engine_of(bound)
    engine_of(make_model("nemotron-h"))  # as it is loaded, without the bound
