"""Servers that die, hang or lie: requests go on elsewhere with the right tokens, and servers come back right."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from agentrl.checks.weights import WeightWatch
from agentrl.engines.contract import EngineError, Generation, SamplingParams
from agentrl.engines.servers.client import ServerFailed
from agentrl.engines.servers.fleet import FleetState, Timings
from agentrl.engines.servers.process import living
from agentrl.engines.servers.start import reach
from agentrl.engines.servers.sync.buckets import Bucket, buckets
from agentrl.engines.servers.sync.tensor import TensorSender
from agentrl.engines.sglang.build import SGLANG
from agentrl.engines.sglang.client import SGLangClient
from agentrl.engines.sglang.engine import SGLangEngine
from agentrl.engines.sglang.options import SGLangArguments
from agentrl.engines.sglang.process import SGLangProcess
from agentrl.engines.weights import Weights
from agentrl.system.http import http_client
from tests.engines.contract import assert_greedy, assert_in_two_parts, greedy_ids, params_of, prompt_of
from tests.sglang.conftest import STARTUP, StartServer, running
from tests.sglang.engines import engine_of
from tests.waiting import until, wait_for

QUICK = Timings(check_interval=0.5, recheck_interval=0.2, check_timeout=2.0, failures=2, backoff=0.1)


Pair = tuple[SGLangProcess, SGLangProcess]


@contextmanager
def slow_server(arguments: SGLangArguments, folder: Path) -> Iterator[SGLangProcess]:
    """A slow server: what is killed in the middle of an answer is in the middle of it."""
    with running(dataclasses.replace(arguments, max_num_seqs=8), folder) as process:
        yield process


@pytest.fixture(scope="module")
def first(server_arguments: SGLangArguments, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangProcess]:
    with slow_server(server_arguments, tmp_path_factory.mktemp("first")) as process:
        yield process


@pytest.fixture(scope="module")
def second(server_arguments: SGLangArguments, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangProcess]:
    with slow_server(server_arguments, tmp_path_factory.mktemp("second")) as process:
        yield process


@pytest.fixture
def pair(first: SGLangProcess, second: SGLangProcess) -> Pair:
    """Two servers. A test that ends one leaves it ended; only the last one may."""
    return first, second


@pytest.fixture
def lasting(server: SGLangProcess, second: SGLangProcess) -> Pair:
    """Two servers for tests that end none of them, the first of them everybody's."""
    return server, second


@pytest.mark.parametrize("servers", [1, 2])
async def test_a_tensor_that_was_not_sent_is_named_within_one_update(
    servers: int, lasting: Pair, reference: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what the servers say of a sample of their parameters, and never while all is well."""
    lost = "model.layers.1.self_attn.k_proj.weight"
    engine, watch = engine_of(lasting[:servers], reference), WeightWatch(16.0)

    async def found(version: int) -> list[str]:
        torch.manual_seed(version)
        new = {name: tensor + torch.randn_like(tensor) for name, tensor in reference.state_dict().items()}
        weights, passed = watch.watched(Weights.from_tensors(new.items()), engine)
        await engine.update_weights(weights, version)
        return [f"{one.what} {one.where}" for one in await watch.check(engine, passed, version)]

    assert [await found(version) for version in (1, 2)] == [[], []]

    def without(tensors: Iterable[tuple[str, torch.Tensor]], *more: Any) -> Iterator[Bucket]:
        return buckets(((name, tensor) for name, tensor in tensors if name != lost), *more)

    with monkeypatch.context() as patch:
        patch.setattr("agentrl.engines.servers.sync.filling.buckets", without)
        told = await found(3)
    assert sorted(told) == sorted(
        f"version 3 of {lost.replace('k_proj', 'qkv_proj')} is not in the engine "
        f"{lost.replace('k_proj', 'qkv_proj')} at {process.url}"
        for process in lasting[:servers]
    )
    assert await found(4) == []
    await engine.close()


@asynccontextmanager
async def engine_over(
    processes: tuple[SGLangProcess, ...], reference: PreTrainedModel, *, ours: bool, told: list[str] | None = None
) -> AsyncIterator[SGLangEngine]:
    """An engine with the reference's weights, version 1. `ours`: it restarts and stops the servers."""
    engine = engine_of(processes, reference, ours=ours, timings=QUICK, notify=(told if told is not None else []).append)
    try:
        await engine.update_weights(Weights.from_tensors(reference.named_parameters()), 1)
        yield engine
    finally:
        await engine.close()


async def in_the_middle(engine: SGLangEngine, server: int, at_least: int) -> None:
    """Until so many requests of that server have tokens."""
    asked = list(engine._supervisor.servers.values())[server]
    while sum(call.server is asked and bool(call.partial.ids) for call in engine._calls.values()) < at_least:
        await asyncio.sleep(0.002)


def requests(engine: SGLangEngine, count: int, tokens: int, name: str = "s") -> list[Awaitable[Generation]]:
    return [engine.generate(prompt_of(20 + i), params_of(tokens), f"{name}{i}") for i in range(count)]


def assert_right(
    results: list[Generation], reference: PreTrainedModel, tokens: int, version: int = 1, first: int = 0
) -> None:
    for i, result in enumerate(results, first):
        assert_greedy(reference, prompt_of(20 + i), result.ids, tokens)
        assert [span.version for span in result.versions] == [version] * len(result.versions)
        assert result.versions[0].start == 0 and result.versions[-1].end == tokens
        assert len(result.logprobs) == tokens and result.finish_reason.kind == "length"


@pytest.mark.slice(0, "kill")
async def test_a_server_that_hangs_is_given_up_and_taken_back(pair: Pair, reference: PreTrainedModel) -> None:
    told: list[str] = []
    async with engine_over(pair, reference, ours=False, told=told) as engine:
        first, second = list(engine._supervisor.servers)
        tasks = [asyncio.ensure_future(request) for request in requests(engine, 12, 100)]
        pid = pair[0].pid
        assert pid is not None
        stopped = list(living(pid))
        await in_the_middle(engine, 0, 3)
        for process in stopped:
            os.kill(process, signal.SIGSTOP)
        try:
            assert_right(list(await asyncio.gather(*tasks)), reference, 100)
            await until(lambda: engine._supervisor.fleet.state(first) is FleetState.DEAD, 20)
            assert engine._supervisor.fleet.serving == [second]
        finally:
            for process in stopped:
                os.kill(process, signal.SIGCONT)
        # It answers again; but nobody knows what it has, so it is sent the weights before it serves.
        await until(lambda: engine._supervisor.fleet.state(first) is FleetState.HEALTHY, 20)
        assert (await engine.health()).metrics["failovers"] >= 3
        assert "is dead" in told[0] and "go on elsewhere" in told[0] and "serves again" in told[-1]
        assert_right(list(await asyncio.gather(*requests(engine, 12, 10))), reference, 10)


async def test_a_server_with_old_weights_cannot_pass_as_current(
    lasting: Pair, reference: PreTrainedModel, model_dir: Path
) -> None:
    async with engine_over(lasting, reference, ours=False) as engine:
        first = next(iter(engine._supervisor.servers.values()))
        other: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model_dir)
        # Planted: somebody else gives one server other, older weights.
        failures = await TensorSender(torch.float32, 1 << 20).send(
            [first.client], Weights.from_tensors(other.named_parameters()), 0
        )
        assert not failures
        assert_right(list(await asyncio.gather(*requests(engine, 12, 30))), reference, 30)
        await until(lambda: len(engine._supervisor.fleet.serving) == 2, 10)
        # The same prompts on both servers: what one of them has in its cache must be of the weights it has now.
        for name in ("a", "b", "c"):
            assert_right(list(await asyncio.gather(*requests(engine, 12, 10, name))), reference, 10)


@pytest.mark.slice(0, "kill")
@pytest.mark.timeout(400)
async def test_weights_in_flight_on_a_fleet_of_which_one_server_fails(
    pair: Pair,
    reference: PreTrainedModel,
    model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each token is of the version that is recorded of it, whatever its server was sent and when."""
    other: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model_dir, attn_implementation="eager")
    models = {1: reference, 2: other, 3: reference, 4: other}
    resumed: list[str] = []
    told: list[str] = []
    async with engine_over(pair, reference, ours=False, told=told) as engine:
        servers = list(engine._supervisor.servers.values())
        refusing = {servers[1].url}

        async def end(client: SGLangClient, timeout: float) -> None:
            if client.url in refusing:
                raise ServerFailed(client.url, "planted")
            await SGLangClient.post(client, "/end_weight_update", {}, timeout=timeout)

        async def resume(client: SGLangClient) -> None:
            resumed.append(client.url)
            await SGLangClient.post(client, "/continue_generation", {})

        tasks = [asyncio.ensure_future(request) for request in requests(engine, 12, 100)]
        await in_the_middle(engine, 0, 3)
        await in_the_middle(engine, 1, 3)
        await engine.update_in_flight(Weights.from_tensors(other.named_parameters()), 2)
        await engine.lock_weights()
        # From here on the second server takes no weights to their end.
        monkeypatch.setattr(SGLangClient, "end_weight_update", end)
        monkeypatch.setattr(SGLangClient, "resume", resume)
        tasks += [asyncio.ensure_future(request) for request in requests(engine, 12, 100, "t")]
        await engine.update_in_flight(Weights.from_tensors(reference.named_parameters()), 3)
        assert resumed.count(servers[0].url) == 1 and servers[1].url not in resumed
        assert engine._supervisor.fleet.serving == [servers[0].url]
        assert any("did not take the weights" in line for line in told)
        await engine.lock_weights()
        await asyncio.sleep(1.5)  # of the supervisor's looks, in which it may not send what is about to change
        assert engine._supervisor.fleet.state(servers[1].url) is FleetState.STALE and servers[1].url not in resumed
        refusing.clear()
        await engine.update_in_flight(Weights.from_tensors(other.named_parameters()), 4)
        assert set(engine._supervisor.fleet.serving) == {server.url for server in servers}
        tasks += [asyncio.ensure_future(request) for request in requests(engine, 12, 20, "u")]
        results = list(await asyncio.gather(*tasks))
    for number, result in enumerate(results):
        prompt = prompt_of(20 + number % 12)
        for span in result.versions:
            before = prompt + result.ids[: span.start]
            count = span.end - span.start
            assert_greedy(models[span.version], before, result.ids[span.start : span.end], count)
    spans = [[span.version for span in result.versions] for result in results]
    assert any(len(set(one)) > 1 for one in spans), "some answers went on under further weights"
    assert all(one == sorted(one) for one in spans) and all(set(one) == {4} for one in spans[24:])


async def test_a_server_that_was_left_paused_is_reached(server: SGLangProcess) -> None:
    http = http_client()
    client = SGLangClient(server.url, http)
    await client.pause("abort")
    with pytest.raises(ServerFailed):
        await client.check(2.0)
    assert (await reach(client, SGLANG.needs, 60.0)).weight_version
    await http.close()


async def test_an_answer_that_makes_no_sense_is_the_servers_fault(server: SGLangProcess) -> None:
    http = http_client()
    client = SGLangClient(server.url + "/model_info?", http)  # answers 200 to everything, with something else
    with pytest.raises(ServerFailed):
        await client.generate("0" * 32, [5], SamplingParams(1), cache_key="v0")
    gone = SGLangClient("http://127.0.0.1:9", http)
    with pytest.raises(ServerFailed, match=r"127\.0\.0\.1:9"):
        await gone.generate("0" * 32, [5], SamplingParams(1), cache_key="v0")
    await http.close()


async def test_memory_is_lent_until_new_weights_have_come(lasting: Pair, reference: PreTrainedModel) -> None:
    async with engine_over(lasting, reference, ours=False) as engine:
        engine._free_weights = True
        before = await engine.generate(prompt_of(40), params_of(12), "a")
        await engine.sleep()
        waiting = asyncio.create_task(engine.generate(prompt_of(41), params_of(12), "b"))
        with pytest.raises(EngineError, match="update_weights must come first"):
            await engine.wake()
        await engine.update_weights(Weights.from_tensors(reference.named_parameters()), 2)
        assert not waiting.done() and (await engine.health()).asleep
        await engine.wake()
        assert (await waiting).ids == greedy_ids(reference, prompt_of(41), 12)
        after = await engine.generate(prompt_of(40), params_of(12), "a")
        assert (after.ids, after.versions[0].version, after.cached_tokens) == (before.ids, 2, 0)


@pytest.mark.slice(1, "matrix")
@pytest.mark.parametrize("fault", ["flush", "release"])
async def test_memory_that_a_server_does_not_give_back_holds_up_nothing(
    lasting: Pair,
    reference: PreTrainedModel,
    model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
) -> None:
    """Where requests hold its cache they are asked again, from what they had; a call that fails is a server's fault."""
    other: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model_dir, attn_implementation="eager")
    async with engine_over(lasting, reference, ours=False) as engine:
        engine._free_weights = True
        tasks = [asyncio.ensure_future(request) for request in requests(engine, 12, 600)]
        await in_the_middle(engine, 0, 3)
        await in_the_middle(engine, 1, 3)
        await engine.pause("retract")
        flush, release, asked = SGLangClient.flush_cache, SGLangClient.release_memory, list[str]()

        async def refuse_flush(client: SGLangClient, wait: float = 0.0) -> bool:
            asked.append(client.url)
            return client.url != lasting[1].url if not wait else await flush(client, wait)

        async def fail_to_release(client: SGLangClient, tags: Any) -> None:
            asked.append(client.url)
            if client.url == lasting[1].url:
                raise ServerFailed(client.url, "would not")
            await release(client, tags)

        with monkeypatch.context() as patch:
            patch.setattr(SGLangClient, "flush_cache", refuse_flush)
            if fault == "release":
                patch.setattr(SGLangClient, "flush_cache", flush)
                patch.setattr(SGLangClient, "release_memory", fail_to_release)
            await engine.sleep()
        assert set(asked) == {process.url for process in lasting}
        arrived = [len(engine._calls[f"s{number}"].partial.ids) for number in range(12)]
        await engine.update_weights(Weights.from_tensors(other.named_parameters()), 2)
        await engine.wake()
        await engine.resume()
        for number, result in enumerate(await asyncio.gather(*tasks)):
            if arrived[number]:
                assert_in_two_parts(result, prompt_of(20 + number), (reference, other), 600)
            else:  # it had waited for a place
                assert_right([result], other, 600, version=2, first=number)


@pytest.mark.slice(0, "kill")
@pytest.mark.timeout(400)  # starts of two servers, and of one again
async def test_a_server_that_dies_asleep_takes_no_request_with_it(
    start_server: StartServer, reference: PreTrainedModel, model_dir: Path
) -> None:
    """What had arrived is gone on from elsewhere; the new process has the new weights before it serves."""
    servers = await asyncio.gather(*[start_server(max_num_seqs=8) for _ in range(2)])
    other: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model_dir, attn_implementation="eager")
    told: list[str] = []
    async with engine_over(tuple(servers), reference, ours=True, told=told) as engine:
        engine._free_weights = True
        tasks = [asyncio.ensure_future(request) for request in requests(engine, 12, 600)]
        await in_the_middle(engine, 0, 3)
        await in_the_middle(engine, 1, 3)
        first = engine._supervisor.servers[servers[0].url]
        there = [number for number in range(12) if engine._calls[f"s{number}"].server is first]
        await engine.pause("retract")
        await engine.sleep()
        arrived = {number: len(engine._calls[f"s{number}"].partial.ids) for number in there}
        pid = servers[0].pid
        assert pid is not None and set(first.freed) == {"kv_cache", "weights"}
        os.killpg(pid, signal.SIGKILL)
        wait_for(lambda: servers[0].exited is not None)  # before a request meets it
        await until(lambda: engine._supervisor.fleet.state(first.url) is FleetState.DEAD)
        await asyncio.sleep(1.5)  # of the supervisor's looks, in which nothing is started beside an update
        assert engine._supervisor.fleet.state(first.url) is FleetState.DEAD and not any(task.done() for task in tasks)
        await engine.update_weights(Weights.from_tensors(other.named_parameters()), 2)
        await engine.wake()
        await engine.resume()
        results = await asyncio.gather(*tasks)
        kept = {number: count for number, count in arrived.items() if count}
        assert kept and {number: results[number].versions[0].end for number in kept} == kept
        for number, result in enumerate(results):
            if len(result.versions) == 2:
                assert_in_two_parts(result, prompt_of(20 + number), (reference, other), 600)
            else:  # it had begun nowhere, or nothing of it had arrived
                assert number not in kept
                assert_greedy(other, prompt_of(20 + number), result.ids, 600)
        await until(lambda: engine._supervisor.fleet.state(first.url) is FleetState.HEALTHY, STARTUP)
        assert first.freed == () and (await first.client.info()).weight_version == "2"
        assert_right(list(await asyncio.gather(*requests(engine, 12, 10))), other, 10, version=2)


@pytest.mark.slice(0, "kill")
@pytest.mark.timeout(400)  # two starts of servers, beside whatever else the machine does
async def test_a_killed_server_is_started_again_and_has_the_weights_before_it_serves(
    pair: Pair, reference: PreTrainedModel, model_dir: Path
) -> None:
    told: list[str] = []
    other: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model_dir, attn_implementation="eager")
    async with engine_over(pair, reference, ours=True, told=told) as engine:
        await engine.update_weights(Weights.from_tensors(other.named_parameters()), 2)
        first = next(iter(engine._supervisor.servers))
        tasks = [asyncio.ensure_future(request) for request in requests(engine, 12, 100)]
        await in_the_middle(engine, 0, 3)
        pid = pair[0].pid
        assert pid is not None
        os.killpg(pid, signal.SIGKILL)
        assert_right(list(await asyncio.gather(*tasks)), other, 100, version=2)
        # The new process has the weights of the model's folder, and their version is 0.
        states: list[FleetState] = []

        def healthy() -> bool:
            states.append(engine._supervisor.fleet.state(first))
            return states[-1] is FleetState.HEALTHY

        await until(healthy, STARTUP)
        assert [state for i, state in enumerate(states) if i == 0 or states[i - 1] is not state][-3:] == [
            FleetState.STARTING,
            FleetState.STALE,
            FleetState.HEALTHY,
        ]
        assert (await engine._supervisor.servers[first].client.info()).weight_version == "2"
        assert_right(list(await asyncio.gather(*requests(engine, 12, 10))), other, 10, version=2)
        assert engine._supervisor.servers[first].url == pair[0].url
        assert (await engine.health()).metrics["restarts"] == 1
        # All of them end while the event loop stands still, as it does between two steps: they will be started again.
        for process in pair:
            assert process.pid is not None
            os.killpg(process.pid, signal.SIGKILL)
        while any(process.exited is None for process in pair):
            time.sleep(0.01)
        await engine.update_weights(Weights.from_tensors(reference.named_parameters()), 3)
        assert not engine._supervisor.fleet.serving and not engine._supervisor.fleet.hopeless
        waiting = asyncio.create_task(engine.generate(prompt_of(20), params_of(10), "w"))
        await until(lambda: engine._supervisor.restarts > 1, 10)
        assert not waiting.done()
    assert (await waiting).finish_reason.kind == "abort"
    assert all(process.exited is not None for process in pair)
