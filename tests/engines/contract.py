"""The contract of `agentrl.engines.contract`, clause by clause. Every engine's test module subclasses `EngineContract`.

A subclass gives the fixture `engine`, started afresh or put back to the weights of `model_dir`, and inherits the tests.
Nothing here looks inside an engine: expectations come from a plain transformers forward of the same weights.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from agentrl.engines.contract import (
    EngineError,
    Generation,
    RequestError,
    RolloutEngine,
    SamplingParams,
    takes_listener,
)
from agentrl.engines.servers.fleet import Timings
from agentrl.engines.weights import Weights
from agentrl.trajectory import VersionSpan
from tests.naming import naming

MAX_MODEL_LEN = 3968  # less than the model of the tests, so that a job can need more
MAX_NUM_SEQS = 16
GREEDY = SamplingParams(max_new_tokens=12, temperature=0.0)
PATIENT = Timings(check_timeout=600.0)
"""For servers beside other work: a slow server is not a dead one."""


class EngineContract:
    """Tests of one engine."""

    long = 200
    """Tokens of an answer in whose middle something happens, and which then goes on to its end."""

    endless = 200
    """Tokens of an answer that is ended in its middle: as many as it may take that the test stands still."""

    block = 1
    """Tokens that the cache shares together."""

    first_of_stops = "listed"
    """Which of several stop strings counts that one token completes: the first in the list, or in the text."""

    async def until_running(self, engine: RolloutEngine, count: int = 1) -> None:
        await until_running(engine, count)

    @pytest.fixture
    async def sharp(self, engine: RolloutEngine, reference: PreTrainedModel) -> RolloutEngine:
        """The engine with the reference's weights, version 1."""
        await engine.update_weights(Weights.from_tensors(reference.named_parameters()), 1)
        return engine

    # Sampling

    @pytest.mark.parametrize(
        "params",
        [
            SamplingParams(24, temperature=1.0, seed=1),
            SamplingParams(24, temperature=0.5, top_p=0.7, top_k=20, seed=2),
            SamplingParams(24, temperature=1.7, top_k=5, seed=3),
            SamplingParams(24, temperature=1.0, top_p=0.3, seed=4),
            SamplingParams(24, temperature=0.0),
        ],
        ids=lambda p: f"T{p.temperature}-p{p.top_p}-k{p.top_k}",
    )
    async def test_logprobs_are_those_of_the_untruncated_scaled_softmax(
        self, sharp: RolloutEngine, reference: PreTrainedModel, params: SamplingParams
    ) -> None:
        prompt = prompt_of(17)
        generation = await sharp.generate(prompt, params, "a")
        assert len(generation.ids) == 24
        assert generation.finish_reason.kind == "length"
        expected = logprobs_of(reference, prompt, generation.ids, params.temperature or 1.0)
        assert torch.allclose(torch.tensor(generation.logprobs), expected, atol=1e-4, rtol=0)

    async def test_greedy_takes_the_likeliest_token(self, sharp: RolloutEngine, reference: PreTrainedModel) -> None:
        generation = await sharp.generate(prompt_of(17), GREEDY, "a")
        assert generation.ids == greedy_ids(reference, prompt_of(17), 12)

    async def test_top_k_and_top_p_bound_what_is_sampled(
        self, sharp: RolloutEngine, reference: PreTrainedModel
    ) -> None:
        prompt = prompt_of(9)
        logits = reference(input_ids=torch.tensor([prompt])).logits[0, -1]
        ranked = logits.softmax(-1).sort(descending=True)
        few = set(ranked.indices[:3].tolist())
        nucleus = set(ranked.indices[: int((ranked.values.cumsum(0) < 0.6).sum()) + 1].tolist())
        assert len(nucleus) > 3
        free = {token for (token,) in await self.sample_many(sharp, prompt, SamplingParams(1))}
        by_k = {token for (token,) in await self.sample_many(sharp, prompt, SamplingParams(1, top_k=3))}
        by_p = {token for (token,) in await self.sample_many(sharp, prompt, SamplingParams(1, top_p=0.6))}
        assert by_k == few
        assert by_p <= nucleus and len(by_p) > 1
        assert not free <= nucleus

    async def test_samples_follow_the_distribution(self, sharp: RolloutEngine, reference: PreTrainedModel) -> None:
        prompt = prompt_of(9)
        count = 600
        logits = reference(input_ids=torch.tensor([prompt])).logits[0, -1]
        expected = (logits / 0.7).softmax(-1)
        drawn = await self.sample_many(sharp, prompt, SamplingParams(1, temperature=0.7), count)
        seen = torch.bincount(torch.tensor(drawn)[:, 0], minlength=len(expected)) / count
        likely = expected > 0.02
        assert int(likely.sum()) >= 4
        error = (seen - expected)[likely].abs() / (expected * (1 - expected) / count).sqrt()[likely]
        assert error.max() < 4.5, "in standard deviations of a binomial count"

    async def sample_many(
        self, engine: RolloutEngine, prompt: list[int], params: SamplingParams, count: int = 60
    ) -> list[list[int]]:
        calls = [engine.generate(prompt, dataclasses.replace(params, seed=1000 + i), f"many{i}") for i in range(count)]
        return [generation.ids for generation in await asyncio.gather(*calls)]

    async def test_a_seed_repeats_whatever_else_runs(self, sharp: RolloutEngine) -> None:
        params = SamplingParams(16, temperature=1.0, seed=11)
        alone = await sharp.generate(prompt_of(20), params, "alone")
        others = [sharp.generate(prompt_of(5 + i), SamplingParams(20), f"o{i}") for i in range(8)]
        among, *_ = await asyncio.gather(sharp.generate(prompt_of(20), params, "among"), *others)
        other_seed = await sharp.generate(prompt_of(20), dataclasses.replace(params, seed=12), "other")
        assert among.ids == alone.ids
        assert among.logprobs == pytest.approx(alone.logprobs, abs=1e-4)
        assert other_seed.ids != alone.ids

    async def test_a_seed_repeats_where_prompts_are_read_in_parts(self, sharp: RolloutEngine) -> None:
        """Together the prompts have more tokens than servers read in one step. Later they are in the prefix cache."""
        lengths, params = range(1500, 1505), SamplingParams(8, temperature=1.0, seed=20)
        calls = [sharp.generate(prompt_of(length), params, f"together {length}") for length in lengths]
        together = await asyncio.gather(*calls)
        alone = [await sharp.generate(prompt_of(length), params, f"alone {length}") for length in lengths]
        assert [one.ids for one in together] == [one.ids for one in alone]

    async def test_without_a_seed_requests_differ(self, sharp: RolloutEngine) -> None:
        results = await asyncio.gather(*[sharp.generate(prompt_of(6), SamplingParams(12), f"s{i}") for i in range(4)])
        assert len({tuple(result.ids) for result in results}) == 4

    # A listener

    async def test_a_listener_hears_each_token_once_and_as_it_comes(self, sharp: RolloutEngine) -> None:
        assert takes_listener(sharp)
        heard: list[list[int]] = []
        task = asyncio.create_task(
            sharp.generate(prompt_of(17), params_of(self.long), "a", listener=lambda ids: heard.append(list(ids)))
        )
        while not heard:
            await asyncio.sleep(0)
        assert not task.done()
        found = await task
        assert all(heard) and [id for ids in heard for id in ids] == found.ids

    async def test_a_listener_hears_what_an_aborted_answer_has(self, sharp: RolloutEngine) -> None:
        heard: list[int] = []
        task = asyncio.create_task(sharp.generate(prompt_of(17), params_of(self.endless), "a", listener=heard.extend))
        while len(heard) < 3:
            await asyncio.sleep(0)
        await sharp.abort("a")
        part = await task
        assert (part.finish_reason.kind, part.ids) == ("abort", heard)
        await asyncio.sleep(0.05)
        assert part.ids == heard

    @pytest.mark.parametrize("mode", ["retract", "in_place"])
    async def test_a_listener_hears_nothing_twice_of_an_answer_that_went_on_with_new_weights(
        self, sharp: RolloutEngine, reference: PreTrainedModel, mode: Literal["retract", "in_place"]
    ) -> None:
        heard: list[int] = []
        task = asyncio.create_task(sharp.generate(prompt_of(17), params_of(self.long), "a", listener=heard.extend))
        while len(heard) < 3:
            await asyncio.sleep(0)
        await sharp.pause(mode)
        await sharp.update_weights(Weights.from_tensors(reference.named_parameters()), 2)
        await sharp.resume()
        found = await task
        assert [span.version for span in found.versions] == [1, 2]
        assert (heard, len(heard)) == (found.ids, self.long)

    async def test_a_listener_hears_nothing_of_a_cancelled_call(self, sharp: RolloutEngine) -> None:
        heard: list[int] = []
        task = asyncio.create_task(sharp.generate(prompt_of(17), params_of(self.endless), "a", listener=heard.extend))
        while not heard:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        known = len(heard)
        await sharp.generate(prompt_of(18), GREEDY, "b")
        assert len(heard) == known

    # Ends

    async def test_a_stop_token_ends_and_stays(self, sharp: RolloutEngine) -> None:
        free = await sharp.generate(prompt_of(17), GREEDY, "free")
        stop = free.ids[4]
        first = free.ids.index(stop)
        params = dataclasses.replace(GREEDY, stop_token_ids=(stop, 10**6))
        generation = await sharp.generate(prompt_of(17), params, "stopped")
        assert generation.ids == free.ids[: first + 1]
        assert len(generation.logprobs) == first + 1
        assert (generation.finish_reason.kind, generation.finish_reason.matched) == ("stop", stop)

    async def test_a_stop_string_ends_with_the_token_that_completes_it(
        self, sharp: RolloutEngine, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        free = await sharp.generate(prompt_of(17), params_of(60), "free")
        pieces = [str(tokenizer.decode([token])) for token in free.ids]
        place = next(i for i in range(5, 60) if pieces[i - 1].isascii() and pieces[i].isascii())
        stop = pieces[place - 1][-1] + pieces[place][0]
        end = next(i for i in range(60) if stop in tokenizer.decode(free.ids[: i + 1]))
        params = dataclasses.replace(params_of(60), stop=("never written", stop))
        generation = await sharp.generate(prompt_of(17), params, "stopped")
        assert generation.ids == free.ids[: end + 1]
        assert (generation.finish_reason.kind, generation.finish_reason.matched) == ("stop", stop)

    async def test_of_several_stop_strings_the_first_one_counts(
        self, sharp: RolloutEngine, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        free = await sharp.generate(prompt_of(17), params_of(30), "free")
        texts = [str(tokenizer.decode([token])) for token in free.ids]
        end = next(i for i in range(30) if len(texts[i]) > 1 and not any(c in "".join(texts[:i]) for c in texts[i]))
        later, earlier = texts[end][-1], texts[end][0]
        assert later != earlier
        params = dataclasses.replace(params_of(30), stop=(later, earlier))
        generation = await sharp.generate(prompt_of(17), params, "stopped")
        assert generation.ids == free.ids[: end + 1]
        assert generation.finish_reason.matched == (later if self.first_of_stops == "listed" else earlier)

    # Batching and caching

    async def test_requests_of_different_lengths_do_as_alone(
        self, sharp: RolloutEngine, reference: PreTrainedModel
    ) -> None:
        lengths = [1, 2, 3, 7, 16, 40, 90, 150, 5, 64, 33, 17, 100, 9, 12, 28, 51, 8]  # more than run at once
        calls = [sharp.generate(prompt_of(n), params_of(4 + n % 11), f"n{n}") for n in lengths]
        for length, generation in zip(lengths, await asyncio.gather(*calls), strict=True):
            assert generation.ids == greedy_ids(reference, prompt_of(length), 4 + length % 11)

    async def test_requests_that_join_later_do_as_alone(self, sharp: RolloutEngine, reference: PreTrainedModel) -> None:
        async def late(turns: int) -> Generation:
            for _ in range(turns):
                await asyncio.sleep(0)
            return await sharp.generate(prompt_of(10 + turns), GREEDY, f"late{turns}")

        for turns, generation in zip(range(0, 60, 6), await asyncio.gather(*map(late, range(0, 60, 6))), strict=True):
            assert generation.ids == greedy_ids(reference, prompt_of(10 + turns), 12)

    async def test_the_next_turn_finds_its_cache(self, sharp: RolloutEngine, reference: PreTrainedModel) -> None:
        ids = prompt_of(120)
        for turn in range(3):
            generation = await sharp.generate(ids, GREEDY, "dialogue")
            assert generation.ids == greedy_ids(reference, ids, 12)
            if turn:
                assert generation.cached_tokens >= 0.9 * (len(ids) - 5) - (self.block - 1)
                assert generation.cached_tokens < len(ids)
            ids = ids + generation.ids + prompt_of(5)
        expected = logprobs_of(reference, ids[:-17], generation.ids, 1.0)
        assert torch.allclose(torch.tensor(generation.logprobs), expected, atol=1e-4, rtol=0)

    async def test_a_changed_transcript_is_computed_again_from_the_change(
        self, sharp: RolloutEngine, reference: PreTrainedModel
    ) -> None:
        prompt = prompt_of(60)
        first = await sharp.generate(prompt, GREEDY, "s")
        for changed in (
            prompt + first.ids[:5] + prompt_of(9),  # other words after a common beginning
            prompt + first.ids[:5],  # cut short
            prompt,  # the first prompt again
            prompt_of(61)[1:],  # another prompt
            prompt[:30],
        ):
            generation = await sharp.generate(changed, GREEDY, "s")
            assert generation.ids == greedy_ids(reference, changed, 12)

    @pytest.mark.parametrize("together", [True, False])
    async def test_a_prompt_is_shared(self, sharp: RolloutEngine, reference: PreTrainedModel, together: bool) -> None:
        prompt = prompt_of(100)
        params = [SamplingParams(10, seed=i) for i in range(4)]
        if together:
            results = list(await asyncio.gather(*[sharp.generate(prompt, p, f"g{p.seed}") for p in params]))
        else:
            results = [await sharp.generate(prompt, p, f"g{p.seed}") for p in params]
            assert all(result.cached_tokens >= 90 for result in results[1:])
        assert len({tuple(result.ids) for result in results}) == 4
        for result in results:
            expected = logprobs_of(reference, prompt, result.ids, 1.0)
            assert torch.allclose(torch.tensor(result.logprobs), expected, atol=1e-4, rtol=0)

    async def test_flush_drops_what_no_request_uses(self, sharp: RolloutEngine) -> None:
        prompt = prompt_of(80)
        first = await sharp.generate(prompt, GREEDY, "a")
        await sharp.flush_cache()
        again = await sharp.generate(prompt, GREEDY, "b")
        assert again.cached_tokens == 0
        assert again.ids == first.ids

    async def test_flush_spares_running_requests(self, sharp: RolloutEngine, reference: PreTrainedModel) -> None:
        task = asyncio.create_task(sharp.generate(prompt_of(30), params_of(self.long), "a"))
        await self.until_running(sharp)
        await sharp.flush_cache()
        assert_greedy(reference, prompt_of(30), (await task).ids, self.long)

    async def test_release_of_unknown_and_known_sessions(
        self, sharp: RolloutEngine, reference: PreTrainedModel
    ) -> None:
        await sharp.release("never seen")
        first = await sharp.generate(prompt_of(30), GREEDY, "a")
        await sharp.release("a")
        ids = prompt_of(30) + first.ids + prompt_of(4)
        again = await sharp.generate(ids, GREEDY, "a")
        assert again.ids == greedy_ids(reference, ids, 12)

    # Abort, pause

    async def test_abort_returns_what_there_is_and_it_can_go_on(self, sharp: RolloutEngine) -> None:
        params = SamplingParams(self.long, temperature=1.0, seed=5)
        whole = await sharp.generate(prompt_of(30), params, "whole")
        task = asyncio.create_task(sharp.generate(prompt_of(30), params, "cut"))
        other = asyncio.create_task(sharp.generate(prompt_of(31), params_of(self.long), "other"))
        await self.until_running(sharp, 2)
        await sharp.abort("nobody")
        await sharp.abort("cut")
        part = await task
        assert part.finish_reason.kind == "abort"
        assert 0 < len(part.ids) < self.long and len(part.logprobs) == len(part.ids)
        assert part.ids == whole.ids[: len(part.ids)]
        assert (await other).finish_reason.kind == "length"
        rest_params = dataclasses.replace(params, max_new_tokens=self.long - len(part.ids))
        rest = await sharp.generate(prompt_of(30) + part.ids, rest_params, "cut")
        assert part.ids + rest.ids == whole.ids
        assert rest.cached_tokens >= 0.9 * 30 - (self.block - 1)

    async def test_abort_of_all(self, sharp: RolloutEngine) -> None:
        tasks = [
            asyncio.create_task(sharp.generate(prompt_of(9 + i), params_of(self.endless), f"{i}")) for i in range(20)
        ]
        await self.until_running(sharp, 10)
        await sharp.abort()
        results = await asyncio.gather(*tasks)
        assert all(result.finish_reason.kind == "abort" for result in results)
        assert (await sharp.health()).running == 0

    async def test_a_cancelled_call_frees_its_place(self, sharp: RolloutEngine, reference: PreTrainedModel) -> None:
        task = asyncio.create_task(sharp.generate(prompt_of(30), params_of(self.endless), "a"))
        await self.until_running(sharp)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        after = await sharp.generate(prompt_of(30), GREEDY, "a")
        assert after.ids == greedy_ids(reference, prompt_of(30), 12)
        assert (await sharp.health()).running == 0

    async def test_pause_abort(self, sharp: RolloutEngine) -> None:
        task = asyncio.create_task(sharp.generate(prompt_of(30), params_of(self.endless), "a"))
        await self.until_running(sharp)
        await sharp.pause("abort")
        assert (await task).finish_reason.kind == "abort"
        later = asyncio.create_task(sharp.generate(prompt_of(30), GREEDY, "b"))
        await asyncio.sleep(0.02)
        assert not later.done() and (await sharp.health()).paused
        await sharp.resume()
        assert len((await later).ids) == 12
        assert not (await sharp.health()).paused

    @pytest.mark.parametrize("turns", [1, 4, 30])
    async def test_abort_and_pause_reach_what_is_on_its_way(self, sharp: RolloutEngine, turns: int) -> None:
        """`turns` of the event loop after the request was made."""
        for end in (sharp.abort, sharp.pause):
            task = asyncio.create_task(sharp.generate(prompt_of(30), params_of(self.endless), "a"))
            for _ in range(turns):
                await asyncio.sleep(0)
            await end()
            generation = await task
            assert generation.finish_reason.kind == "abort" and len(generation.ids) < self.endless
        await sharp.resume()
        assert len((await sharp.generate(prompt_of(30), GREEDY, "a")).ids) == 12

    @pytest.mark.parametrize("mode", ["in_place", "retract"])
    async def test_pause_and_go_on(self, sharp: RolloutEngine, reference: PreTrainedModel, mode: str) -> None:
        task = asyncio.create_task(sharp.generate(prompt_of(30), params_of(self.long), "a"))
        await self.until_running(sharp)
        await sharp.pause(mode)  # type: ignore[arg-type]
        await asyncio.sleep(0.02)
        assert not task.done()
        await sharp.resume()
        generation = await task
        assert_greedy(reference, prompt_of(30), generation.ids, self.long)
        assert generation.versions == [VersionSpan(1, 0, self.long)]

    # Weights

    @pytest.mark.parametrize("mode", ["in_place", "retract", None])
    async def test_new_weights_in_mid_flight(
        self, sharp: RolloutEngine, reference: PreTrainedModel, model_dir: Path, mode: str | None
    ) -> None:
        other: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model_dir, attn_implementation="eager")
        task = asyncio.create_task(sharp.generate(prompt_of(30), params_of(self.long), "a"))
        await self.until_running(sharp)
        if mode is not None:
            await sharp.pause(mode)  # type: ignore[arg-type]
        await sharp.update_weights(Weights.from_tensors(other.named_parameters()), 2)
        await sharp.resume()
        generation = await task
        assert (await sharp.health()).version == 2
        keeps = mode == "in_place"
        assert_in_two_parts(generation, prompt_of(30), (reference, other), self.long, keeps=keeps)
        if mode == "in_place":  # but the session's next turn does not
            ids = prompt_of(30) + generation.ids
            assert (await sharp.generate(ids, GREEDY, "a")).ids == greedy_ids(other, ids, 12)

    async def test_new_weights_change_what_is_greedy_and_empty_the_cache(
        self, sharp: RolloutEngine, reference: PreTrainedModel, model_dir: Path
    ) -> None:
        other: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model_dir, attn_implementation="eager")
        old = await sharp.generate(prompt_of(40), GREEDY, "a")
        await sharp.update_weights(Weights.from_tensors(other.named_parameters()), 7)
        new = await sharp.generate(prompt_of(40), GREEDY, "b")
        assert new.cached_tokens == 0
        assert new.ids == greedy_ids(other, prompt_of(40), 12) != old.ids
        assert new.versions == [VersionSpan(7, 0, 12)]
        await sharp.update_weights(
            Weights.from_tensors(reference.state_dict().items()), 8
        )  # with the tied weight under both its names
        assert (await sharp.generate(prompt_of(40), GREEDY, "a")).ids == old.ids

    @pytest.mark.parametrize("fault", ["name", "shape"])
    async def test_an_update_is_all_or_nothing(
        self, sharp: RolloutEngine, reference: PreTrainedModel, fault: str
    ) -> None:
        old = await sharp.generate(prompt_of(40), GREEDY, "a")
        tensors = {name: torch.zeros_like(tensor) for name, tensor in reference.named_parameters()}
        last = next(reversed(tensors))
        if fault == "name":
            tensors["model.no_such.weight"] = torch.zeros(3)
        else:
            tensors[last] = torch.zeros(*tensors[last].shape, 2)
        with pytest.raises(ValueError, match=r"no_such" if fault == "name" else last.replace(".", r"\.")):
            await sharp.update_weights(Weights.from_tensors(tensors.items()), 9)
        assert (await sharp.health()).version == 1
        assert (await sharp.generate(prompt_of(40), GREEDY, "b")).ids == old.ids

    # Bad requests, sleep, close

    @pytest.mark.parametrize(
        ("ids", "params"),
        [
            ([], GREEDY),
            ([5, 10**6], GREEDY),
            ([5, -1], GREEDY),
            ([5] * (MAX_MODEL_LEN - 11), GREEDY),
            ([5], SamplingParams(0)),
            ([5], SamplingParams(4, temperature=-1.0)),
            ([5], SamplingParams(4, temperature=float("nan"))),
            ([5], SamplingParams(4, top_p=0.0)),
            ([5], SamplingParams(4, top_p=1.5)),
            ([5], SamplingParams(4, top_k=0)),
        ],
    )
    async def test_a_bad_request_is_refused_and_harms_nobody(
        self, sharp: RolloutEngine, reference: PreTrainedModel, ids: list[int], params: SamplingParams
    ) -> None:
        good = asyncio.create_task(sharp.generate(prompt_of(20), params_of(30), "good"))
        await self.until_running(sharp)
        with pytest.raises(RequestError):
            await sharp.generate(ids, params, "bad")
        assert (await good).ids == greedy_ids(reference, prompt_of(20), 30)
        assert (await sharp.generate(prompt_of(20), GREEDY, "bad")).ids == greedy_ids(reference, prompt_of(20), 12)

    async def test_the_context_can_be_used_to_its_last_token(self, sharp: RolloutEngine) -> None:
        generation = await sharp.generate(prompt_of(MAX_MODEL_LEN - 12), GREEDY, "a")
        assert len(generation.ids) == 12

    async def test_sleep_and_wake(self, sharp: RolloutEngine) -> None:
        first = await sharp.generate(prompt_of(40), GREEDY, "a")
        await sharp.sleep()
        assert (await sharp.health()).asleep
        await sharp.wake()
        assert not (await sharp.health()).asleep
        again = await sharp.generate(prompt_of(40), GREEDY, "a")
        assert (again.ids, again.cached_tokens) == (first.ids, 0)

    async def test_requests_that_were_retracted_outlast_sleep_and_new_weights(
        self, sharp: RolloutEngine, reference: PreTrainedModel, model_dir: Path
    ) -> None:
        other: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model_dir, attn_implementation="eager")
        turn = await sharp.generate(prompt_of(40), GREEDY, "dialogue")
        tasks = [
            asyncio.create_task(sharp.generate(prompt_of(30 + number), params_of(self.long), f"{number}"))
            for number in range(3)
        ]
        await self.until_running(sharp, 3)
        with naming(EngineError, "running", "abort", "retract"):
            await sharp.sleep()
        await sharp.pause("retract")
        await sharp.sleep()
        next_turn = prompt_of(40) + turn.ids + prompt_of(5)
        tasks.append(asyncio.create_task(sharp.generate(next_turn, GREEDY, "dialogue")))
        await sharp.update_weights(Weights.from_tensors(other.named_parameters()), 2)
        assert (await sharp.health()).asleep
        await sharp.wake()
        await asyncio.sleep(0.02)
        health = await sharp.health()
        assert health.paused and not health.asleep, "the pause outlasts sleep, too"
        assert not any(task.done() for task in tasks)
        await sharp.resume()
        *results, later = await asyncio.gather(*tasks)
        for number, result in enumerate(results):
            assert_in_two_parts(result, prompt_of(30 + number), (reference, other), self.long)
        assert later.ids == greedy_ids(other, next_turn, 12)
        assert (later.versions, later.cached_tokens) == ([VersionSpan(2, 0, 12)], 0)
        after = prompt_of(30) + results[0].ids
        assert (await sharp.generate(after, GREEDY, "0")).ids == greedy_ids(other, after, 12)

    async def test_requests_end_while_the_engine_sleeps(self, sharp: RolloutEngine, reference: PreTrainedModel) -> None:
        names = ["aborted", "released", "cancelled", "goes on"]
        tasks = {
            name: asyncio.create_task(sharp.generate(prompt_of(30 + number), params_of(self.long), name))
            for number, name in enumerate(names)
        }
        await self.until_running(sharp, 4)
        await sharp.pause("retract")
        await sharp.sleep()
        tasks["came later"] = asyncio.create_task(sharp.generate(prompt_of(50), GREEDY, "came later"))
        await asyncio.sleep(0)
        for name in ("aborted", "came later"):
            await sharp.abort(name)
        await sharp.release("released")
        tasks["cancelled"].cancel()
        ended = [await tasks[name] for name in ("aborted", "released", "came later")]
        with pytest.raises(asyncio.CancelledError):
            await tasks["cancelled"]
        assert {one.finish_reason.kind for one in ended} == {"abort"}
        for number, one in enumerate(ended[:2]):
            assert 0 < len(one.ids) < self.long and one.versions == [VersionSpan(1, 0, len(one.ids))]
            assert_greedy(reference, prompt_of(30 + number), one.ids, len(one.ids))
        assert not ended[2].ids
        await sharp.wake()
        await sharp.resume()
        assert_greedy(reference, prompt_of(33), (await tasks["goes on"]).ids, self.long)
        assert (await sharp.health()).running == 0

    async def test_close_ends_what_runs(self, sharp: RolloutEngine) -> None:
        task = asyncio.create_task(sharp.generate(prompt_of(30), params_of(self.endless), "a"))
        await self.until_running(sharp)
        await sharp.close()
        assert (await task).finish_reason.kind == "abort"
        await sharp.close()

    @pytest.mark.parametrize("asleep", [False, True])
    async def test_close_ends_what_is_paused(self, sharp: RolloutEngine, asleep: bool) -> None:
        task = asyncio.create_task(sharp.generate(prompt_of(30), params_of(self.endless), "a"))
        await self.until_running(sharp)
        await sharp.pause("retract" if asleep else "in_place")
        if asleep:
            await sharp.sleep()
        later = asyncio.create_task(sharp.generate(prompt_of(31), params_of(self.endless), "b"))
        await asyncio.sleep(0)
        await sharp.close()
        assert (await task).finish_reason.kind == (await later).finish_reason.kind == "abort"


def params_of(max_new_tokens: int) -> SamplingParams:
    return dataclasses.replace(GREEDY, max_new_tokens=max_new_tokens)


def prompt_of(length: int) -> list[int]:
    """Ids that no two lengths have in common after the first few."""
    return [7 + (i * i * 13 + length * (i + 1)) % 250 for i in range(length)]


async def until_running(engine: RolloutEngine, count: int = 1) -> None:
    """Wait until so many requests run, and then some, so that they have sampled something."""
    while (await engine.health()).running < count:
        await asyncio.sleep(0)
    for _ in range(12):
        await asyncio.sleep(0)


def assert_in_two_parts(
    found: Generation,
    prompt: Sequence[int],
    models: tuple[PreTrainedModel, PreTrainedModel],
    count: int,
    *,
    keeps: bool = False,
) -> None:
    """Assert that version 1 sampled the first part and version 2 the rest, from keys and values of its own.

    `models`: those of the two versions. `keeps`: the rest is sampled from keys and values of the first one.
    """
    old, new = found.versions
    cut = old.end
    assert (old.version, old.start, new.version, new.start, new.end) == (1, 0, 2, cut, count)
    assert 0 < cut < count
    before, after = (logprobs_of(model, prompt, found.ids, 1.0) for model in models)
    given = torch.tensor(found.logprobs)
    assert torch.allclose(given[:cut], before[:cut], atol=1e-4, rtol=0)
    clean = torch.allclose(given[cut:], after[cut:], atol=1e-4, rtol=0)
    assert clean != keeps, "in_place keeps the keys and values of the old weights"


@torch.no_grad()
def logprobs_of(model: PreTrainedModel, prompt: Sequence[int], ids: Sequence[int], temperature: float) -> torch.Tensor:
    """[len(ids)]: log softmax(logits / temperature) of ids after prompt."""
    logits = model(input_ids=torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]


@torch.no_grad()
def greedy_ids(model: PreTrainedModel, prompt: Sequence[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@torch.no_grad()
def assert_greedy(model: PreTrainedModel, prompt: Sequence[int], ids: Sequence[int], count: int) -> None:
    """Assert that `ids` are the `count` greedy tokens after `prompt`, by one forward (`greedy_ids`: one a token)."""
    assert len(ids) == count
    logits = model(input_ids=torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
    assert list(ids) == logits.argmax(-1).tolist()
