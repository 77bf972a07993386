"""The embedded engine over pages and programs of fixed buffers, which a GPU replays as graphs.

On a CPU the programs run operation by operation. What a capture would refuse is looked for by a dispatch mode.
"""

from __future__ import annotations

import asyncio
import functools
import math
import random
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agentrl.engines.contract import Generation, PauseMode, SamplingParams
from agentrl.engines.embedded.cache import CacheFull, Memory, Prefix, Session
from agentrl.engines.embedded.decoding import DecodingProgram
from agentrl.engines.embedded.engine import EmbeddedEngine
from agentrl.engines.embedded.paged_attention import PagedTokens, agrees, attend_copies, attend_in_place, kernel_for
from agentrl.engines.embedded.pages import SPARE, PagedRows, PagePool
from agentrl.engines.embedded.sampling import sample_rows, uniforms, uniforms_on_device
from agentrl.engines.weights import Weights
from agentrl.model.attend import Rule
from agentrl.model.packed import hidden_states, load_model, token_logits, token_logprobs
from tests.engines.contract import MAX_MODEL_LEN, MAX_NUM_SEQS, EngineContract, prompt_of
from tests.model.families import make_model


@pytest.mark.slice(12, "matrix")
class TestContractOverPages(EngineContract):
    @pytest.fixture
    async def engine(self, model_dir: Path, tokenizer: PreTrainedTokenizerBase) -> AsyncIterator[EmbeddedEngine]:
        engine = EmbeddedEngine(
            load_model(str(model_dir)),
            max_num_seqs=MAX_NUM_SEQS,
            max_model_len=MAX_MODEL_LEN,
            stop_decode=lambda ids: str(tokenizer.decode(ids)),
            graphs=True,
        )
        yield engine
        await engine.close()


async def test_a_request_is_not_taken_for_another_that_has_ended(model: PreTrainedModel) -> None:
    """Its object may lie where an ended request's did; it waited then until the others of that batch had ended."""
    engine = EmbeddedEngine(model, max_num_seqs=8, max_model_len=512, graphs=True)
    others = [asyncio.create_task(answer(engine, f"long{k}", SamplingParams(120, seed=k))) for k in range(3)]
    for k in range(5):
        await answer(engine, f"short{k}", SamplingParams(4, seed=k))
        assert not any(one.done() for one in others)
    await engine.close()
    await asyncio.gather(*others)


# A step is one program

_READS = ("_local_scalar_dense", "nonzero", "lift_fresh", "is_nonzero", "unique", "masked_select", "item")
"""Operations that wait for a device, or whose result's shape follows from values; and a tensor of a host's numbers."""


class Watch(TorchDispatchMode):
    """Counts operations, and collects those that a capture would refuse."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.refused: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += 1
        name = func.overloadpacket.__name__
        by_mask = name.startswith("index") and any(
            isinstance(one, torch.Tensor) and one.dtype == torch.bool
            for part in args
            if isinstance(part, list)
            for one in part
        )
        if name in _READS or by_mask:
            self.refused.append(str(func))
        return func(*args, **(kwargs or {}))


async def answer(engine: EmbeddedEngine, name: str, params: SamplingParams, size: int = 20) -> Generation:
    return await engine.generate(prompt_of(size), params, name)


KINDS = {
    "sampled": [SamplingParams(200, seed=1), SamplingParams(190, temperature=0.5, seed=2)],
    "greedy and likeliest": [SamplingParams(200, temperature=0.0), SamplingParams(190, top_p=0.8, top_k=30, seed=4)],
}


@pytest.mark.parametrize("kind", KINDS)
async def test_a_step_reads_nothing_makes_no_tensor_of_the_hosts_and_moves_no_buffer(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    seen: dict[int, set[tuple[int, ...]]] = {}
    counts: dict[int, set[int]] = {}
    watched: list[str] = []
    run = DecodingProgram.run

    def watch(program: DecodingProgram) -> None:
        pool = program._pool
        buffers = (program.table, program.tokens, program.logprobs, *pool.keys, *pool.values)
        with Watch() as found:
            run(program)
        watched.extend(found.refused)
        seen.setdefault(id(program), set()).add(tuple(buffer.data_ptr() for buffer in buffers))
        counts.setdefault(id(program), set()).add(found.count)

    monkeypatch.setattr(DecodingProgram, "run", watch)
    kept: list[DecodingProgram] = []  # so that no other program takes an identity
    made = DecodingProgram.__init__

    def keep(program: DecodingProgram, *given: Any) -> None:
        kept.append(program)
        made(program, *given)

    monkeypatch.setattr(DecodingProgram, "__init__", keep)
    engine = EmbeddedEngine(model, max_num_seqs=16, max_model_len=512, graphs=True)
    await asyncio.gather(*(answer(engine, f"{i}", p, 20 + 130 * i) for i, p in enumerate(KINDS[kind])))
    assert sum(map(len, counts.values())) == len(kept) <= 8  # the same operations in each step of a program
    assert watched == []
    assert all(len(addresses) == 1 for addresses in seen.values())


@pytest.mark.slice(1, "matrix")
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt-oss", "qwen3"])
def test_a_step_compiles_without_a_break_into_one_program_a_bucket(family: str) -> None:
    model = make_model(family)
    engine = EmbeddedEngine(model, max_num_seqs=4, max_model_len=256, graphs=True)
    pool = engine._cache.own.pool  # type: ignore[attr-defined]
    pool.take(3)
    frames: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        frames.append(len(inputs))
        return graph.forward

    torch._dynamo.reset()
    with torch.inference_mode():
        programs = [
            DecodingProgram(model, pool, attend_copies, rows, 2, likeliest)
            for rows, likeliest in ((2, False), (4, True))
        ]
        for program in programs:
            plain = program.compute
            plain()
            before = program.tokens.clone(), program.logprobs.clone()
            compiled = torch.compile(plain, fullgraph=True, backend=backend, dynamic=False)
            for _ in range(3):
                compiled()
            assert torch.equal(program.tokens, before[0])
            assert torch.allclose(program.logprobs, before[1], atol=1e-6)
    assert len(frames) == 2


# Token for token the engine over rows


def other(model_dir: Path, scale: float) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(int(scale * 100))
    weights = load_model(str(model_dir)).named_parameters()
    return {n: torch.randn(w.shape, generator=generator) * scale if w.ndim == 2 else w.detach() for n, w in weights}


@torch.no_grad()
def own_logprobs(model: PreTrainedModel, prompt: list[int], ids: list[int], temperature: float) -> list[float]:
    """Log-probs of ids after a prompt by one packed forward pass."""
    whole = torch.tensor(prompt + ids)
    scores = token_logprobs(model, whole, torch.tensor([0, len(whole)]), temperature=temperature)
    return scores.logprobs[len(prompt) :].tolist()


@torch.no_grad()
def drawn_near(model: PreTrainedModel, ids: list[int], params: SamplingParams) -> set[int]:
    """Draw the token after `ids` with numbers a hundred thousandth below and above that of its place."""
    logits = token_logits(model, hidden_states(model, torch.tensor(ids), torch.tensor([0, len(ids)])))[-1:]
    number = float(uniforms(np.array([(params.seed or 0) % (1 << 64)], np.uint64), np.array([len(ids)], np.uint64))[0])
    likeliest = torch.tensor([[params.top_p]], dtype=torch.float64), torch.tensor([[params.top_k]])
    temperature, greedy = torch.tensor([[params.temperature or 1.0]]), torch.tensor([params.temperature == 0])
    near = [torch.tensor([[number + shift]], dtype=torch.float64) for shift in (-1e-5, 1e-5)]
    return {int(sample_rows(logits, one, temperature, greedy, likeliest)[0]) for one in near}


class Play:
    """A random schedule: trajectories of several turns, and what happens meanwhile."""

    def __init__(self, model: PreTrainedModel, seed: int, *, crowded: bool = False) -> None:
        """crowded: more trajectories than the cache has room for."""
        self.random = random.Random(seed)
        most = 16 if crowded else self.random.choice([2, 5, 16])
        self.count = 20 if crowded else self.random.choice([1, 4, 20])
        cells = 400_000 if crowded or seed % 2 else 1 << 30
        self.engine = EmbeddedEngine(model, max_num_seqs=most, max_model_len=512, graphs=True, max_cache_bytes=cells)
        self.found: list[tuple[list[int], SamplingParams, Generation]] = []

    def params(self) -> SamplingParams:
        draw = self.random
        kind = {"temperature": draw.choice([0.0, 0.7, 1.0, 1.0])}
        if draw.random() < 0.2:
            kind |= {"top_p": 0.9, "top_k": 20}
        stops = tuple(draw.sample(range(3, 60), 3)) if draw.random() < 0.3 else ()
        return SamplingParams(draw.choice([1, 2, 7, 30]), seed=draw.randrange(1 << 70), stop_token_ids=stops, **kind)  # type: ignore[arg-type]

    async def trajectory(self, name: str) -> None:
        draw = self.random
        ids = prompt_of(draw.choice([1, 2, 20, 127, 128, 129, 140]))
        for _ in range(draw.choice([1, 2, 3])):
            for _ in range(draw.randrange(12)):
                await asyncio.sleep(0)
            params = self.params()
            got = await self.engine.generate(ids, params, name)
            self.found.append((ids, params, got))
            ids = ids + got.ids
            if draw.random() < 0.2 and len(ids) > 4:  # a turn that takes some of the last tokens back
                ids = ids[: -draw.choice([1, 2, 3])]
            ids = ids + draw.choices(range(3, 60), k=draw.choice([1, 3, 31, 40]))
        if draw.random() < 0.7:
            await self.engine.release(name)

    async def meddle(self, update: Callable[[], Any] | None) -> None:
        draw = self.random
        for _ in range(6):
            for _ in range(draw.randrange(20)):
                await asyncio.sleep(0)
            modes: list[PauseMode] = ["abort", "retract", "in_place"] if update is None else ["abort", "retract"]
            match draw.randrange(4):
                case 0:
                    await self.engine.abort(draw.choice([None, "t0", "t1", "t2"]))
                case 1:
                    await self.engine.pause(draw.choice(modes))
                    for _ in range(draw.randrange(4)):
                        await asyncio.sleep(0)
                    if update is not None:
                        await update()
                    await self.engine.resume()
                case 2:
                    await self.engine.flush_cache()
                case 3 if update is not None:
                    await update()

    async def run(self, update: Callable[[], Any] | None = None) -> None:
        trajectories = (self.trajectory(f"t{i}") for i in range(self.count))
        await asyncio.wait_for(asyncio.gather(self.meddle(update), *trajectories), 300)
        await self.engine.close()


SCHEDULES = 8


@pytest.mark.slice(1, "soak")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(250))
async def test_whatever_happens_tokens_are_those_of_the_engine_over_rows(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    full: list[CacheFull] = []
    relieve = EmbeddedEngine._relieve

    def relieved(engine: EmbeddedEngine, error: CacheFull) -> None:
        full.append(error)
        relieve(engine, error)

    monkeypatch.setattr(EmbeddedEngine, "_relieve", relieved)
    plain = EmbeddedEngine(model, max_num_seqs=1, max_model_len=512, graphs=False)
    first, edges = part * SCHEDULES, 0
    for seed in range(first, first + SCHEDULES):
        play = Play(model, seed, crowded=seed == first)
        await play.run()
        for ids, params, got in play.found:
            expected = await plain.generate(ids, params, "one")
            count = len(got.ids)
            same = next(
                (i for i, pair in enumerate(zip(got.ids, expected.ids, strict=False)) if len(set(pair)) > 1), count
            )
            assert got.logprobs[:same] == pytest.approx(expected.logprobs[:same], abs=2e-4), seed
            if same < count:  # both have rounded the probabilities, and the number lies between the two sums
                assert drawn_near(model, ids + got.ids[:same], params) == {got.ids[same], expected.ids[same]}, seed
                edges += 1
            elif got.finish_reason.kind == "abort":
                assert count < params.max_new_tokens
            else:
                assert (count, got.finish_reason) == (len(expected.ids), expected.finish_reason), seed
    assert full and edges <= 1


async def test_each_token_is_of_the_weights_that_its_step_began_with(model: PreTrainedModel, model_dir: Path) -> None:
    states = [other(model_dir, scale) for scale in (0.15, 0.2, 0.25)]
    plain = [load_model(str(model_dir)) for _ in states]
    for one, state in zip(plain, states, strict=True):
        one.load_state_dict(state, strict=False)  # the tied head is its embedding
    changed = 0
    for seed in range(12):
        play = Play(model, 2 * seed)
        await play.engine.update_weights(Weights.from_tensors(states[0].items()), 0)
        version = 0

        async def update() -> None:
            nonlocal version
            version += 1
            await play.engine.update_weights(Weights.from_tensors(states[version % 3].items()), version)  # noqa: B023

        await play.run(update)
        for ids, params, got in play.found:
            assert got.versions[-1].end == len(got.ids) if got.ids else not got.versions
            changed += len(got.versions) > 1
            for span in got.versions:
                expected = own_logprobs(plain[span.version % 3], ids, got.ids[: span.end], params.temperature or 1.0)
                assert got.logprobs[span.start : span.end] == pytest.approx(expected[span.start :], abs=2e-4), seed
    assert changed > 10


# Attention over pages

GROUPS, HEADS, WIDTH = 3, 2, 16
RULES = {
    "plain": Rule(0.2),
    "window": Rule(0.2, window=40),
    "soft cap": Rule(0.2, softcap=5.0),
    "sinks": Rule(0.2, sinks=torch.linspace(-1, 1, HEADS * GROUPS)),
}


class Paged:
    """Sessions of several lengths over shared prompts, whose cache is filled with random keys and values."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.pool = PagePool([(HEADS, WIDTH, WIDTH)], dtype, torch.device("cpu"), Memory(1 << 30))
        self.own, self.shared = PagedRows(self.pool), PagedRows(self.pool)
        self.sessions: list[Session] = []
        for length in (1, 127, 128, 129, 300):
            prefix = Prefix(tuple(range(length)), ready=True)
            self.shared.place(prefix)
            self.shared.extend([prefix], [length])
            for held, new in ((0, 3), (130, 20), (255, 1)):
                ids = list(range(length + held + new))
                session = Session(f"{length} {held}", ids, length + held, length, prefix)
                self.own.place(session)
                self.sessions.append(session)
        self.part = PagedTokens(self.sessions, self.own, self.shared, attend_copies)
        generator = torch.Generator().manual_seed(0)
        for tensor in (*self.pool.keys, *self.pool.values):
            tensor[2:] = torch.randn(tensor[2:].shape, generator=generator, dtype=dtype)
        self.query = torch.randn(HEADS * GROUPS, self.part.size, WIDTH, generator=generator, dtype=dtype)

    def attended(self, rule: Rule) -> torch.Tensor:
        """[T, H, D] by plain softmax over each token's keys, put together token by token."""
        found, token = [], 0
        for session in self.sessions:
            assert session.prefix is not None
            held = session.held + len(session.ids) - session.cached
            parts = self.shared.read(0, session.prefix.row, session.prompt_length), self.own.read(0, session.row, held)
            key, value = (torch.cat(both, dim=1).repeat_interleave(GROUPS, 0) for both in zip(*parts, strict=True))
            for end in range(session.cached + 1, len(session.ids) + 1):
                start = 0 if rule.window is None else max(0, end - rule.window)
                scores = torch.einsum("hd,hld->hl", self.query[:, token], key[:, start:end]) * rule.scale
                if rule.softcap is not None:
                    scores = torch.tanh(scores / rule.softcap) * rule.softcap
                total = scores.logsumexp(-1, keepdim=True)
                if rule.sinks is not None:
                    total = torch.logaddexp(total, rule.sinks[:, None].to(total.dtype))
                found.append(torch.einsum("hl,hld->hd", (scores - total).exp(), value[:, start:end]))
                token += 1
        return torch.stack(found)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_attention_over_pages_is_dense_attention(rule: Rule) -> None:
    paged = Paged(torch.float64)
    expected = paged.attended(rule)
    for tensor in (*paged.pool.keys, *paged.pool.values):
        tensor[SPARE] = math.nan  # rows without a request write what they like
    found = paged.part.attend(0, paged.query, rule)
    # Capped scores, and shares of sinks, are in float32 on every device.
    exact = rule.softcap is None and rule.sinks is None
    assert float((found - expected).abs().max()) < (1e-12 if exact else 1e-6)


@pytest.mark.slice(0, "long run")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["plain", "window", "soft cap"])
def test_attention_in_place_is_that_over_copies(kind: str) -> None:
    """By torch's compiler for the CPU, which wants a place for every page in each list, and gives no log-sum-exp."""
    paged, rule = Paged(torch.float32), RULES[kind]
    tokens = paged.part._tokens
    wide = functools.partial(torch.nn.functional.pad, pad=(0, paged.pool.count - tokens.pages.shape[1]))
    tokens.pages, tokens.first, tokens.end = wide(tokens.pages), wide(tokens.first, value=10**6), wide(tokens.end)
    query = paged.query.unflatten(0, (HEADS, -1)).permute(2, 0, 1, 3)
    flex: Any = torch.compile(torch.nn.attention.flex_attention.flex_attention, dynamic=False)
    with torch.inference_mode():
        found = attend_in_place(paged.pool, 0, tokens, query, rule, flex=flex)
    assert float((found.flatten(1, 2) - paged.attended(rule)).abs().max()) < 1e-5


def test_a_kernel_that_fails_or_differs_is_left_out_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Faults injected: a compiler's error, results that are off, and results that are no numbers."""
    pool = PagePool([(0, 0, 0), (HEADS, WIDTH, WIDTH)], torch.float32, torch.device("cpu"), Memory(0))

    def fails(*given: object) -> torch.Tensor:
        raise ValueError("no such kernel\nmore")

    assert agrees(attend_copies, pool) and not caplog.messages
    assert not agrees(fails, pool)
    assert not agrees(lambda *given: attend_copies(*given) + 0.1, pool)
    assert not agrees(lambda *given: attend_copies(*given) * math.nan, pool)
    assert [message.partition(": ")[2] for message in caplog.messages] == [
        "ValueError: no such kernel",
        "its results differ by 0.1",
        "its results differ by nan",
    ]
    assert kernel_for(pool) is attend_copies


# Numbers


def test_a_device_draws_the_numbers_of_the_host() -> None:
    generator = np.random.default_rng(0)
    seeds = generator.integers(0, 1 << 64, 100_000, dtype=np.uint64)
    seeds[:4] = (0, 1, (1 << 63) - 1, (1 << 64) - 1)
    places = generator.integers(0, 1 << 31, 100_000, dtype=np.uint64)
    on_device = uniforms_on_device(*(torch.from_numpy(words.astype(np.int64)) for words in (seeds, places)))
    assert np.array_equal(on_device.numpy(), uniforms(seeds, places))
