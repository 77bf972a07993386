"""The embedded engine: the contract, and what only it promises."""

from __future__ import annotations

import asyncio
import random
import weakref
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from agentrl.engines.contract import EngineError, Generation, RequestError, SamplingParams
from agentrl.engines.embedded import attention as embedded_attention
from agentrl.engines.embedded import blocked
from agentrl.engines.embedded import step as embedded_step
from agentrl.engines.embedded.engine import EmbeddedEngine
from agentrl.engines.weights import Weights
from agentrl.errors import ConfigError
from agentrl.model.attend import attend_part_plainly
from agentrl.model.layout import flat_layout
from agentrl.model.packed import load_model, token_logprobs
from tests.devices import DEVICES
from tests.engines.contract import (
    GREEDY,
    MAX_MODEL_LEN,
    MAX_NUM_SEQS,
    EngineContract,
    greedy_ids,
    logprobs_of,
    params_of,
    prompt_of,
    until_running,
)
from tests.naming import Names, naming


@pytest.mark.parametrize("device", DEVICES)
class TestEmbeddedContract(EngineContract):
    @pytest.fixture
    async def engine(
        self, model_dir: Path, tokenizer: PreTrainedTokenizerBase, device: str
    ) -> AsyncIterator[EmbeddedEngine]:
        engine = EmbeddedEngine(
            load_model(str(model_dir), device=device),
            max_num_seqs=MAX_NUM_SEQS,
            max_model_len=MAX_MODEL_LEN,
            stop_decode=lambda ids: str(tokenizer.decode(ids)),
        )
        yield engine
        await engine.close()


def engine_of(model: PreTrainedModel, **options: int) -> EmbeddedEngine:
    return EmbeddedEngine(model, **{"max_num_seqs": 16, "max_model_len": 512, **options})  # type: ignore[arg-type]


async def dialogues(engine: EmbeddedEngine, count: int) -> list[list[int]]:
    """Two-turn trajectories of different lengths, in groups of four with the same prompt."""

    async def dialogue(i: int) -> list[int]:
        ids = prompt_of(20 + i // 4)
        for turn in range(2):
            generation = await engine.generate(ids, SamplingParams(4 + i % 9, seed=i), f"d{i}")
            ids = ids + generation.ids + prompt_of(2 + i % 5 + 40 * (turn == 0 and i % 6 == 0))
        await engine.release(f"d{i}")
        return ids

    return list(await asyncio.gather(*[dialogue(i) for i in range(count)]))


async def test_the_same_calls_give_the_same_bits(model: PreTrainedModel) -> None:
    engine = engine_of(model)
    first = await dialogues(engine, 24)
    await engine.update_weights(Weights.from_tensors([]), 1)
    again = await dialogues(engine, 24)
    generations = [await engine.generate(prompt_of(9), SamplingParams(8, seed=1), f"x{i}") for i in range(2)]
    assert first == again
    assert generations[0].logprobs == generations[1].logprobs


async def test_what_other_devices_run_does_the_same(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = await dialogues(engine_of(model), 24)
    monkeypatch.setattr(embedded_attention, "attend_part", attend_part_plainly)
    monkeypatch.setattr(embedded_attention.Segments, "attend", embedded_attention.Segments._attend_one_by_one)
    monkeypatch.setattr(embedded_step, "make_layout", lambda ids, offsets: flat_layout(offsets, ids.device))
    assert await dialogues(engine_of(model), 24) == ours


async def test_a_session_goes_back_to_what_it_has_in_common_with_another(model: PreTrainedModel) -> None:
    """The beginning of another session's prompt is shared, and no state after its last token is known."""
    engine, begin = engine_of(model), prompt_of(40)
    await engine.generate([*begin, 5, 6, 7], SamplingParams(4, seed=1), "t/0/1.0")
    other = await engine.generate([*begin, 8, 9], SamplingParams(4, seed=1), "t/0/1.0.1")
    assert other.cached_tokens == len(begin)
    found = await engine.generate(begin, SamplingParams(4, seed=1), "t/0/1.0.1")
    assert found.ids == (await engine.generate(begin, SamplingParams(4, seed=1), "alone")).ids


@pytest.mark.slice(6, "matrix")
class TestBlockedContract(TestEmbeddedContract):
    """The contract with blocked weights, which tiny models do not have by themselves."""

    @pytest.fixture(autouse=True)
    def at_any_size(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(blocked, "LEAST", 0)


async def test_blocked_weights_follow_the_model_and_leave_it_as_it_was(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = await dialogues(engine_of(model), 8)
    monkeypatch.setattr(blocked, "LEAST", 0)
    made: list[torch.Size] = []
    reorder = blocked._reorder

    def counted(weight: torch.Tensor) -> torch.Tensor:
        made.append(weight.shape)
        return reorder(weight)

    monkeypatch.setattr(blocked, "_reorder", counted)
    engine = engine_of(model)
    assert await dialogues(engine, 8) == plain
    layers = [layer for layer in model.modules() if isinstance(layer, torch.nn.Linear)]
    assert len(made) == len(layers)  # once for all steps
    assert not any("forward" in layer.__dict__ for layer in layers)
    with torch.no_grad():  # as a trainer that holds the same model
        for layer in layers:
            layer.weight.mul_(1.5)
    ids = prompt_of(50)  # no prompt of before, whose keys are still there
    generation = await engine.generate(ids, SamplingParams(8, seed=1), "later")
    assert len(made) == 2 * len(layers)
    whole = torch.tensor(ids + generation.ids)
    scored = token_logprobs(model, whole, torch.tensor([0, len(whole)])).logprobs[len(ids) :]
    assert generation.logprobs == pytest.approx(scored.tolist(), abs=1e-4)
    await engine.sleep()
    await engine.wake()
    await engine.generate(ids, SamplingParams(2, seed=1), "awake")
    assert len(made) == 3 * len(layers)


async def test_groups_of_very_different_sizes(model: PreTrainedModel, reference: PreTrainedModel) -> None:
    lengths = [20] * 24 + list(range(21, 33))
    engine = engine_of(model, max_num_seqs=64)
    calls = [engine.generate(prompt_of(n), params_of(5 + i % 9), f"{i}") for i, n in enumerate(lengths)]
    expected = {n: greedy_ids(reference, prompt_of(n), 14) for n in set(lengths)}
    for i, generation in enumerate(await asyncio.gather(*calls)):
        assert generation.ids == expected[lengths[i]][: 5 + i % 9]


async def test_more_requests_than_rows_evict_parked_sessions(model: PreTrainedModel) -> None:
    roomy = await dialogues(engine_of(model, max_num_seqs=64), 40)
    tight = await dialogues(engine_of(model, max_num_seqs=2), 40)
    assert tight == roomy


async def test_a_small_cache_lets_fewer_requests_run(model: PreTrainedModel) -> None:
    free = await dialogues(engine_of(model), 24)
    # Two layers of one head, keys and values of 32 float32: 512 bytes a token; rows come in steps of 64 tokens.
    engine = engine_of(model, max_cache_bytes=8 * 64 * 512)
    assert await dialogues(engine, 24) == free
    with naming(EngineError, "do not fit"):
        await engine.generate(prompt_of(400), params_of(100), "too long for the cache")
    assert len((await engine.generate(prompt_of(20), GREEDY, "short")).ids) == 12


@pytest.mark.parametrize("seed", range(6))
async def test_nothing_that_happens_in_mid_flight_changes_a_probability(
    model: PreTrainedModel, reference: PreTrainedModel, model_dir: Path, seed: int
) -> None:
    """Dialogues under a storm of aborts, pauses, flushes and updates: every token has the log-prob of its version."""
    versions = [reference, AutoModelForCausalLM.from_pretrained(model_dir, attn_implementation="eager")]
    rng = random.Random(seed)
    engine = engine_of(model, max_num_seqs=rng.choice([3, 16]), max_cache_bytes=rng.choice([10**6, 10**9]))
    record: list[tuple[list[int], Generation]] = []

    async def dialogue(i: int) -> None:
        ids = prompt_of(20 + i % 3)
        for turn in range(3):
            generation = await engine.generate(ids, SamplingParams(12, seed=i), f"d{i}")
            record.append((ids, generation))
            ids = ids + generation.ids + prompt_of(1 + 17 * ((i + turn) % 3))

    async def storm() -> None:
        for number in range(1, 30):
            for _ in range(rng.randrange(30)):
                await asyncio.sleep(0)
            match rng.randrange(5):
                case 0:
                    await engine.abort(f"d{rng.randrange(16)}")
                case 1:
                    await engine.flush_cache()
                case 2:
                    await engine.update_weights(Weights.from_tensors(versions[number % 2].named_parameters()), number)
                case _:
                    await engine.pause("retract")
                    await asyncio.sleep(0)
                    await engine.resume()

    await asyncio.gather(storm(), *[dialogue(i) for i in range(16)])
    assert len(record) == 48
    for ids, generation in record:
        for span in generation.versions:
            expected = logprobs_of(versions[span.version % 2], ids, generation.ids, 1.0)[span.start : span.end]
            given = torch.tensor(generation.logprobs[span.start : span.end])
            assert torch.allclose(given, expected, atol=1e-4, rtol=0)
    assert sum(len(generation.ids) for _, generation in record) > 200
    await engine.flush_cache()
    assert engine._cache.own.used == engine._cache.shared.used == 0


async def test_one_module_for_trainer_and_engine(model: PreTrainedModel) -> None:
    engine = engine_of(model)
    model.train()
    old = await engine.generate(prompt_of(30), GREEDY, "a")
    ids = torch.tensor(prompt_of(30) + old.ids)
    offsets = torch.tensor([0, len(ids)])
    logprobs, *_ = token_logprobs(model, ids, offsets)
    assert torch.allclose(logprobs[30:], torch.tensor(old.logprobs), atol=1e-5)
    (-logprobs.sum()).backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    await engine.update_weights(Weights.from_tensors(model.named_parameters()), 1)  # the engine's own tensors
    new = await engine.generate(prompt_of(30), GREEDY, "a")
    now, *_ = token_logprobs(model, torch.tensor(prompt_of(30) + new.ids), offsets)
    assert new.ids != old.ids and new.cached_tokens == 0
    assert torch.allclose(now[30:], torch.tensor(new.logprobs), atol=1e-5)


async def test_a_step_that_raises_fails_its_requests_only(model: PreTrainedModel, reference: PreTrainedModel) -> None:
    engine = engine_of(model)
    fail = False

    def failing_forward(*_: object) -> None:
        if fail:
            raise RuntimeError("planted fault")

    model.base_model.register_forward_pre_hook(failing_forward)
    tasks = [asyncio.create_task(engine.generate(prompt_of(9 + i), params_of(90), f"{i}")) for i in range(3)]
    await until_running(engine, 3)
    fail = True
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, EngineError) and "planted fault" in str(result) for result in results)
    fail = False
    assert (await engine.generate(prompt_of(9), GREEDY, "0")).ids == greedy_ids(reference, prompt_of(9), 12)


async def test_broken_weights_are_an_engine_error_and_leave_no_trace(
    model: PreTrainedModel, reference: PreTrainedModel
) -> None:
    engine = engine_of(model)
    name = "model.layers.0.self_attn.v_proj.weight"
    await engine.update_weights(
        Weights.from_tensors([(name, torch.full_like(model.get_parameter(name), float("nan")))]), 1
    )
    with pytest.raises(EngineError, match="not finite"):
        await engine.generate(prompt_of(20), GREEDY, "a")
    await engine.update_weights(Weights.from_tensors([(name, reference.get_parameter(name))]), 2)
    assert (await engine.generate(prompt_of(20), GREEDY, "a")).ids == greedy_ids(reference, prompt_of(20), 12)


async def test_tied_weights_that_differ_are_refused(model: PreTrainedModel) -> None:
    engine = engine_of(model)
    embedding = model.get_parameter("model.embed_tokens.weight")
    tensors = [("model.embed_tokens.weight", embedding * 2), ("lm_head.weight", embedding * 3)]
    with naming(ValueError, "tied"):
        await engine.update_weights(Weights.from_tensors(tensors), 1)
    assert (await engine.health()).version == 0


async def test_weights_are_taken_as_they_are_made(model: PreTrainedModel) -> None:
    """A policy that merges adapters makes each tensor for the engine; all at once they would be a second model."""
    made: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def read() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal most
        for name, param in model.named_parameters():
            tensor = param.detach() * 2
            made.append(weakref.ref(tensor))
            most = max(most, sum(one() is not None for one in made))
            yield name, tensor
            del tensor

    engine = engine_of(model)
    doubled = {name: param.detach() * 2 for name, param in model.named_parameters()}
    shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
    report = await engine.update_weights(Weights(shapes, read), 1)
    assert most == 2, "the one that is made, and the one before it, which the engine's loop still names"
    assert all(torch.equal(param, doubled[name]) for name, param in model.named_parameters())
    assert report.bytes == sum(param.nbytes for param in model.parameters())


async def test_sleep_frees_the_cache_and_refuses_while_requests_run(model: PreTrainedModel) -> None:
    engine = engine_of(model)
    task = asyncio.create_task(engine.generate(prompt_of(20), params_of(60), "a"))
    await until_running(engine)
    with naming(EngineError, "1 requests"):
        await engine.sleep()
    await task
    await engine.sleep()
    assert engine._cache.own.memory.used == 0
    waiting = asyncio.create_task(engine.generate(prompt_of(20), GREEDY, "b"))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    await engine.wake()
    assert len((await waiting).ids) == 12


async def test_a_session_has_one_request_at_a_time(model: PreTrainedModel) -> None:
    engine = engine_of(model)
    task = asyncio.create_task(engine.generate(prompt_of(20), params_of(60), "a"))
    await until_running(engine)
    with naming(RequestError, "'a'"):
        await engine.generate(prompt_of(20), GREEDY, "a")
    await engine.release("a")
    assert (await task).finish_reason.kind == "abort"
    await engine.close()
    with pytest.raises(EngineError, match="closed"):
        await engine.generate(prompt_of(20), GREEDY, "a")


async def test_of_those_that_wait_the_smallest_number_goes_first(model: PreTrainedModel) -> None:
    """And among equals the one that came first."""
    engine, ended = engine_of(model, max_num_seqs=1), list[str]()

    async def ask(name: str, priority: int) -> None:
        await engine.generate(prompt_of(20), SamplingParams(3, temperature=0.0, priority=priority), name)
        ended.append(name)

    asked = [("runs", 9), ("c", 2), ("a", 1), ("d", 2), ("b", 1), ("e", 3)]
    await asyncio.gather(*(ask(name, priority) for name, priority in asked))
    assert [name for name in ended if name != "runs"] == list("abcde")
    await engine.close()


async def test_an_idle_engine_has_no_task(model: PreTrainedModel) -> None:
    engine = engine_of(model)
    await engine.generate(prompt_of(20), GREEDY, "a")
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) == 1


@pytest.mark.parametrize(
    ("family", "options", "why"),
    [
        ("mamba", {}, "packed sequences"),
        ("llama", {"max_position_embeddings": 100}, "100 positions"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "dynamic rotary"),
    ],
)
def test_models_that_the_cache_cannot_serve_are_refused(family: str, options: dict[str, Any], why: Names) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = AutoConfig.for_model(family, vocab_size=64, num_key_value_heads=1, head_dim=16, **sizes, **options)
    with naming(ConfigError, why):
        engine_of(AutoModelForCausalLM.from_config(config))
