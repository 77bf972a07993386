"""Weights of which only the changed elements are sent to a real vLLM server: it computes as after a full update."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from agentrl.engines.contract import RequestError, SamplingParams
from agentrl.engines.servers.sync import DeltaSender, DiskSender, DistributedSender, TensorSender, WeightSender
from agentrl.engines.vllm.checksums import Arrived
from agentrl.engines.vllm.client import VLLMClient
from agentrl.engines.vllm.process import VLLMProcess
from agentrl.engines.weights import Weights
from agentrl.system.http import http_client
from tests.engines.contract import greedy_ids, prompt_of

F32 = torch.float32
BUCKET = 100_000  # bytes: an update is several of them
TOKENS = 24


@pytest.fixture
async def client(server: VLLMProcess) -> AsyncIterator[VLLMClient]:
    async with http_client() as http:
        client = VLLMClient(server.url, http, server.key)
        await client.info()
        yield client


async def test_an_update_that_was_left_open_gives_way_to_the_next(client: VLLMClient) -> None:
    """The server answers with 500 that it is open, and closes the connection: the end needs another one."""
    await client.pause("retract")
    for _ in range(5):
        await client.begin_weight_update(60)
    await client.end_weight_update(60)


async def sent(client: VLLMClient, sender: WeightSender, model: PreTrainedModel, version: int) -> None:
    """Send weights, which have to arrive."""
    await client.pause("retract")
    assert await sender.send([client], Weights.from_tensors(model.named_parameters()), version) == {}
    assert await client.flush_cache()
    await client.resume()


async def sampled(client: VLLMClient, rid: str) -> tuple[list[int], list[float]]:
    """Greedy tokens and their log-probs, from no cache."""
    answer = await client.generate(f"{rid:>032}", prompt_of(17), SamplingParams(TOKENS, temperature=0.0), cache_key=rid)
    return answer.ids, answer.logprobs


def change(model: PreTrainedModel, seed: int, share: float) -> None:
    """Change a share of the elements of each matrix, and all others."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            noise = 0.05 * torch.randn(weight.shape, generator=generator)
            chosen = torch.rand(weight.shape, generator=generator) < (share if weight.dim() > 1 else 1.0)
            weight.add_(noise * chosen)


@pytest.mark.parametrize(
    "transport",
    [
        lambda folder: TensorSender(F32, BUCKET),
        lambda folder: DistributedSender(F32, BUCKET, "gloo"),
        lambda folder: DiskSender(F32, BUCKET, folder),
    ],
    ids=["tensor", "distributed", "disk"],
)
async def test_changes_arrive_by_each_transport(
    client: VLLMClient, reference: PreTrainedModel, tmp_path: Path, transport: Callable[[Path], WeightSender]
) -> None:
    """A server that another trainer has sent weights in between is sent all of them."""
    said: list[str] = []
    model = copy.deepcopy(reference)
    sender, other = DeltaSender(transport(tmp_path / "weights"), Arrived, said.append), TensorSender(F32, BUCKET)
    try:
        await sent(client, sender, model, 1)
        full = sender.bytes_sent
        for version in range(2, 5):
            change(model, version, 0.01)
            await sent(client, sender, model, version)
            assert sender.compared == "sent" and sender.bytes_sent < full / 5 and not said
            assert (await sampled(client, f"{tmp_path.name}{version}"))[0] == greedy_ids(model, prompt_of(17), TOKENS)
        await sent(client, other, reference, 7)
        change(model, 8, 0.01)
        await sent(client, sender, model, 8)
        assert sender.bytes_sent > full / 2 and len(said) == 1 and "is sent all" in said[0]
        assert (await sampled(client, f"{tmp_path.name}8"))[0] == greedy_ids(model, prompt_of(17), TOKENS)
        change(model, 9, 0.01)
        await sent(client, sender, model, 9)
        assert sender.bytes_sent < full / 5
    finally:
        await sender.close()
        await other.close()


@pytest.mark.slice(0, "long run")
async def test_200_updates_are_equal_to_full_ones_bit_for_bit(client: VLLMClient, reference: PreTrainedModel) -> None:
    """By checksums of what arrived after each, and by log-probs without a difference after every fiftieth."""
    model = copy.deepcopy(reference)
    delta, full = DeltaSender(TensorSender(F32, BUCKET), Arrived), TensorSender(F32, BUCKET)
    try:
        for version in range(1, 201):
            change(model, version, (0.001, 0.02, 0.3, 0.0)[version % 4])
            await sent(client, delta, model, version)
            assert delta.compared == "sent"
            if version % 50 == 0:
                found = await sampled(client, f"delta{version}")
                await sent(client, full, model, version)
                assert found == await sampled(client, f"full{version}")
    finally:
        await delta.close()
        await full.close()


async def test_without_updates_by_changes_a_server_keeps_nothing(
    client: VLLMClient, reference: PreTrainedModel
) -> None:
    delta, full = DeltaSender(TensorSender(F32, BUCKET)), TensorSender(F32, BUCKET)
    try:
        await sent(client, delta, reference, 1)
        assert set((await client.weight_checksums(60)).ranks) == {"0"} and await client.held_weights(60)
        await sent(client, full, reference, 2)
        assert await client.held_weights(60) == ""
        with pytest.raises(RequestError, match="update_weights_delta=true"):
            await client.weight_checksums(60)
    finally:
        await delta.close()
        await full.close()
