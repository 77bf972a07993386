"""Transcripts of one trajectory at the embedded engine: a new one begins with what another one has in the cache."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from agentrl.engines.contract import Generation, SamplingParams, trajectory_of
from agentrl.engines.embedded.engine import EmbeddedEngine
from agentrl.engines.weights import Weights
from tests.engines.contract import logprobs_of, params_of, prompt_of, until_running
from tests.model.families import SIZES, make_model

WAYS = pytest.mark.parametrize("graphs", [False, True], ids=["rows", "pages"])


def engine_of(model: PreTrainedModel, **options: int | None) -> EmbeddedEngine:
    return EmbeddedEngine(model, **{"max_num_seqs": 16, "max_model_len": 512, **options})  # type: ignore[arg-type]


def test_a_trajectory_is_named_by_its_sessions() -> None:
    names = ["train/3/17/5.0", "train/3/17/5.0.2", "train/3/17/5.1.2", "a.b/c", "a.b/d.1", "solo"]
    found = [trajectory_of(name) for name in names]
    assert found == ["train/3/17/5"] * 3 + ["a.b/c", "a.b/d", "solo"]


@WAYS
async def test_a_transcript_computes_what_no_other_one_has(
    model: PreTrainedModel, reference: PreTrainedModel, graphs: bool
) -> None:
    engine = engine_of(model, graphs=graphs)
    first = prompt_of(150)
    said = await engine.generate(first, params_of(30), "t/0.0")
    whole = first + said.ids
    forks = {
        "t/0.0.0": [*whole[:170], *prompt_of(20)],  # in the middle of a turn
        "t/0.0.1": [*whole[:100], *prompt_of(40)],  # within the first prompt
        "t/0.0.2": whole[:140],  # a beginning
        "t/0.0.3": [*whole[:179], 7],  # nearly all of it: the last sampled token has no keys and values
        "t/0.0.4": [*whole[:30], *prompt_of(150)],  # too little in common
        "t/1.0": [*whole[:170], *prompt_of(20)],  # of another trajectory
        "t/0.0.5": first,  # the same prompt
    }
    cached = {"t/0.0.0": 170, "t/0.0.1": 100, "t/0.0.2": 139, "t/0.0.3": 179, "t/0.0.4": 0, "t/1.0": 0, "t/0.0.5": 150}
    found = await asyncio.gather(*[engine.generate(ids, params_of(12), name) for name, ids in forks.items()])
    for (name, ids), generation in zip(forks.items(), found, strict=True):
        assert generation.cached_tokens == cached[name], name
        expected = logprobs_of(reference, ids, generation.ids, 1.0)
        assert torch.allclose(torch.tensor(generation.logprobs), expected, atol=1e-4, rtol=0)
    for name in [*forks, "t/0.0"]:
        await engine.release(name)
    await engine.flush_cache()
    assert engine._cache.own.used == engine._cache.shared.used == 0


@WAYS
async def test_keys_and_values_of_older_weights_are_not_taken(model: PreTrainedModel, graphs: bool) -> None:
    engine = engine_of(model, graphs=graphs)
    running = asyncio.create_task(engine.generate(prompt_of(60), params_of(200), "t/0.0"))
    await until_running(engine, 1)
    await engine.pause("in_place")
    await engine.update_weights(Weights.from_tensors(model.named_parameters()), 1)
    await engine.resume()
    after = await engine.generate([*prompt_of(60), 5, 6], params_of(4), "t/0.0.0")
    assert after.cached_tokens == 0
    other = await engine.generate([*prompt_of(60), 5, 7], params_of(4), "t/0.0.1")
    assert other.cached_tokens == 61
    assert len((await running).versions) == 2


@pytest.mark.parametrize("seed", range(6))
@WAYS
async def test_no_transcript_disturbs_another_one(
    model: PreTrainedModel, reference: PreTrainedModel, model_dir: Path, seed: int, graphs: bool
) -> None:
    """Forks of forks under a storm of aborts, flushes and updates: every token has the log-prob of its version."""
    versions = [reference, AutoModelForCausalLM.from_pretrained(model_dir, attn_implementation="eager")]
    draw = random.Random(seed)
    limit = draw.choice([2 * 10**6, 10**9])
    engine = engine_of(model, max_num_seqs=draw.choice([3, 16]), max_cache_bytes=limit, graphs=graphs)
    record: list[tuple[list[int], Generation]] = []

    async def trajectory(number: int) -> None:
        known = [prompt_of(40 + number)]
        for turn in range(6):
            base = draw.choice(known)
            cut = base[: draw.randint(20, len(base))]
            ids = [*cut, *(draw.randrange(3, 100) for _ in range(draw.choice([1, 5, 40])))]
            for _ in range(draw.randint(1, 2)):
                generation = await engine.generate(ids, SamplingParams(8, seed=turn), f"t/{number}.0.{turn}")
                record.append((ids, generation))
                ids = [*ids, *generation.ids, 9]
            known.append(ids)
            if draw.random() < 0.2:
                await engine.release(f"t/{number}.0.{draw.randint(0, turn)}")

    async def storm() -> None:
        for number in range(1, 20):
            for _ in range(draw.randrange(40)):
                await asyncio.sleep(0)
            match draw.randrange(4):
                case 0:
                    await engine.flush_cache()
                case 1:
                    await engine.update_weights(Weights.from_tensors(versions[number % 2].named_parameters()), number)
                case _:
                    await engine.pause("retract")
                    await asyncio.sleep(0)
                    await engine.resume()

    await asyncio.gather(storm(), *[trajectory(number) for number in range(6)])
    for ids, generation in record:
        for span in generation.versions:
            expected = logprobs_of(versions[span.version % 2], ids, generation.ids, 1.0)[span.start : span.end]
            assert torch.allclose(torch.tensor(generation.logprobs[span.start : span.end]), expected, atol=1e-4, rtol=0)
    assert sum(generation.cached_tokens for _, generation in record) > 300


async def test_recorded_experts_are_those_of_the_first_computation() -> None:
    engine = engine_of(make_model("qwen3-moe"), records_experts=True, max_model_len=200)
    ids = [3 + place % 50 for place in range(60)]
    first = await engine.generate(ids, params_of(20), "t/0.0")
    for name, cut in (("t/0.0.0", 70), ("t/0.0.1", 40)):
        fork = [*(ids + first.ids)[:cut], 5, 6, 7]
        found = await engine.generate(fork, params_of(6), name)
        alone = await engine.generate(fork, params_of(6), f"u/{cut}")
        assert (found.cached_tokens, alone.cached_tokens) == (cut, 0)
        assert found.experts is not None and alone.experts is not None and first.experts is not None
        assert len(found.experts) == len(fork) + len(found.ids) - 1
        assert (found.experts[:cut] == first.experts[:cut]).all()
        assert (found.experts == alone.experts).mean() > 0.95


async def test_a_model_with_a_state_computes_each_transcript_whole() -> None:
    engine = engine_of(make_model("lfm2"), max_model_len=200)
    ids = [3 + place % (SIZES["vocab_size"] - 3) for place in range(60)]
    first = await engine.generate(ids, params_of(8), "t/0.0")
    assert (await engine.generate([*ids, *first.ids, 5], params_of(4), "t/0.0.0")).cached_tokens == 0
