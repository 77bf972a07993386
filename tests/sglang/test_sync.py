"""Weights sent to real servers: what they sample afterwards is what transformers samples with the new weights."""

from __future__ import annotations

import copy
import dataclasses
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
import torch.multiprocessing
from safetensors.torch import load_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agentrl.engines.contract import SamplingParams
from agentrl.engines.servers.model import ModelFacts
from agentrl.engines.servers.sync import DeltaSender, DiskSender, DistributedSender, TensorSender, WeightSender
from agentrl.engines.sglang.checksums import Expectation
from agentrl.engines.sglang.client import SGLangClient
from agentrl.engines.sglang.process import SGLangProcess
from agentrl.engines.weights import Weights
from agentrl.model.checkpoint_names import CheckpointNames
from agentrl.system.http import http_client
from tests.conftest import PROJECT
from tests.forked import ForkedPython
from tests.model.families import make_model
from tests.sglang.conftest import STARTUP, StartServer
from tests.waiting import wait_for

F32 = torch.float32
BUCKET = 100_000  # bytes: the model is several of them, its embedding is larger than one
PROMPT = [5, 17, 30, 44, 101, 7]
MakeSender = Callable[[], WeightSender]


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with http_client() as http:
        yield http


@pytest.fixture
def client(server: SGLangProcess, http: aiohttp.ClientSession) -> SGLangClient:
    return SGLangClient(server.url, http)


@pytest.fixture(params=["tensor", "distributed", "disk"])
def make_sender(request: pytest.FixtureRequest, tmp_path: Path) -> MakeSender:
    senders: dict[str, MakeSender] = {
        "tensor": lambda: TensorSender(F32, BUCKET, checksums=Expectation),
        "distributed": lambda: DistributedSender(F32, BUCKET, "gloo", checksums=Expectation),
        "disk": lambda: DiskSender(F32, BUCKET, tmp_path / "weights", checksums=Expectation),
    }
    return senders[request.param]


def changed(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    """The same model with other weights, norms included."""
    model = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator) * 0.1)
    return model


def weights_of(model: PreTrainedModel) -> Weights:
    return Weights.from_tensors(model.named_parameters())


@torch.no_grad()
def greedy(model: PreTrainedModel, tokens: int = 24) -> tuple[list[int], list[float]]:
    """Ids and their log-probs by transformers."""
    ids, logprobs = list(PROMPT), []
    for _ in range(tokens):
        scores = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
        ids.append(int(scores.argmax()))
        logprobs.append(float(scores.max()))
    return ids[len(PROMPT) :], logprobs


async def expect_model(client: SGLangClient, model: PreTrainedModel, version: int) -> None:
    """The server has these weights and this version."""
    ids, logprobs = greedy(model)
    params = SamplingParams(max_new_tokens=len(ids), temperature=0.0)
    found = await client.generate(uuid.uuid4().hex, PROMPT, params, cache_key=uuid.uuid4().hex)
    assert found.ids == ids
    assert found.logprobs == pytest.approx(logprobs, abs=1e-4)
    assert [span.version for span in found.versions] == [version]
    assert (await client.info()).weight_version == str(version)


async def test_new_weights_are_what_the_server_samples_with(
    client: SGLangClient, reference: PreTrainedModel, make_sender: MakeSender
) -> None:
    sender = make_sender()
    first, second = changed(reference, 1), changed(reference, 2)
    assert greedy(first)[0] != greedy(second)[0]
    for version, model in ((11, first), (12, second)):  # the second by the same buffer, group or folder
        assert await sender.send([client], weights_of(model), version) == {}
        await expect_model(client, model, version)
        assert sender.bytes_sent == sum(4 * weight.numel() for weight in model.parameters())
        assert sender.compared == "sent"
    await sender.close()
    assert torch.multiprocessing.get_sharing_strategy() == "file_descriptor"


async def test_untied_names_of_a_tied_head_may_be_sent(
    client: SGLangClient, reference: PreTrainedModel, make_sender: MakeSender
) -> None:
    sender, model = make_sender(), changed(reference, 3)
    assert await sender.send([client], Weights.from_tensors(model.state_dict().items()), 13) == {}
    await expect_model(client, model, 13)
    assert sender.compared == "sent"
    await sender.close()


def touched(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    """The same model with another value in one element of a hundred, and the final norm negated."""
    model = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            chosen = torch.rand(weight.shape, generator=generator) < 0.01
            weight.add_(torch.randn(weight.shape, generator=generator) * chosen)
        model.get_parameter("model.norm.weight").neg_()
    return model


def deltas_by(inner: WeightSender, notify: Callable[[str], None] = print) -> DeltaSender:
    inner._checksums = None  # type: ignore[attr-defined]
    return DeltaSender(inner, Expectation, notify)


async def test_a_server_that_is_sent_only_changes_has_all_weights(
    client: SGLangClient, reference: PreTrainedModel, make_sender: MakeSender
) -> None:
    sender, model = deltas_by(make_sender()), changed(reference, 1)
    for version in (61, 62, 63):
        assert await sender.send([client], weights_of(model), version) == {}
        await expect_model(client, model, version)
        assert sender.compared == "sent"
        whole = sum(4 * weight.numel() for weight in model.parameters())
        assert sender.bytes_sent >= whole if version == 61 else sender.bytes_sent < 0.05 * whole
        model = touched(model, version)
    assert await TensorSender(F32, BUCKET).send([client], weights_of(reference), 64) == {}  # by another trainer
    assert await sender.send([client], weights_of(model), 65) == {}
    await expect_model(client, model, 65)
    assert dict(sender._full) == {"first": 1, "lost": 1}
    await sender.close()


@pytest.mark.slice(0, "kill")  # in the slice, a server that lost its weights: the test above
async def test_a_killed_server_that_comes_back_is_sent_all_weights_and_one_without_a_loader_always(
    start_server: StartServer, http: aiohttp.ClientSession, reference: PreTrainedModel
) -> None:
    said: list[str] = []
    sender, model = deltas_by(TensorSender(F32, BUCKET), said.append), changed(reference, 1)
    process = await start_server(takes_deltas=False)
    client = SGLangClient(process.url, http)
    for version in (1, 2):
        assert await sender.send([client], weights_of(model), version) == {}
    assert len(said) == 1 and "takes no delta weights" in said[0] and "--custom-weight-loader agentrl." in said[0]
    process.arguments = dataclasses.replace(process.arguments, takes_deltas=True)
    _signal_group(process, signal.SIGKILL)
    process.stop()
    process.start()
    await process.ready(STARTUP)
    for version in (3, 4):
        assert await sender.send([client], weights_of(model), version) == {}
        await expect_model(client, model, version)
        model = touched(model, version)
    assert dict(sender._full) == {"unable": 2, "lost": 1}
    await sender.close()


class FlipsAByte(SGLangClient):
    """A fault: what the sender put into its buffer, or its files, changes on the way to the server."""

    def __init__(self, url: str, http: aiohttp.ClientSession, sender: WeightSender) -> None:
        super().__init__(url, http)
        self._sender = sender
        self.armed = True

    async def post(self, path: str, body: Mapping[str, Any], *, timeout: float | None = 60.0) -> Any:
        if self.armed and path.startswith("update_weights"):
            self.armed = False
            if isinstance(self._sender, TensorSender):
                self._sender._buffer[1001] ^= 1
            else:
                file = sorted(Path(body["model_path"]).iterdir())[0]
                content = bytearray(file.read_bytes())
                content[-7] ^= 1
                file.write_bytes(content)
        return await super().post(path, body, timeout=timeout)


@pytest.mark.parametrize("make_sender", ["tensor", "disk"], indirect=True)
async def test_one_corrupted_bit_is_found(
    client: SGLangClient, http: aiohttp.ClientSession, reference: PreTrainedModel, make_sender: MakeSender
) -> None:
    sender, model = make_sender(), changed(reference, 4)
    corrupting = FlipsAByte(client.url, http, sender)
    [fault] = (await sender.send([corrupting], weights_of(model), 14)).values()
    assert "1 parameters differ from what was sent" in str(fault)
    assert f"version 14, checksum: {client.url}" in str(fault)
    assert await sender.send([corrupting], weights_of(model), 14) == {}
    await expect_model(client, model, 14)
    await sender.close()


@pytest.mark.parametrize("make_sender", ["tensor", "distributed"], indirect=True)
async def test_an_update_that_was_left_open_is_no_obstacle(
    client: SGLangClient, reference: PreTrainedModel, make_sender: MakeSender
) -> None:
    await client.post("/begin_weight_update", {})
    sender, model = make_sender(), changed(reference, 5)
    assert await sender.send([client], weights_of(model), 15) == {}
    await expect_model(client, model, 15)
    await sender.close()


async def test_a_reader_that_fails_leaves_a_sender_that_works(
    client: SGLangClient, reference: PreTrainedModel, make_sender: MakeSender
) -> None:
    model = changed(reference, 6)
    whole = weights_of(model)

    def read() -> Iterator[tuple[str, torch.Tensor]]:
        for number, pair in enumerate(whole.read()):
            if number == 5:
                raise RuntimeError("a gather failed")
            yield pair

    sender = make_sender()
    with pytest.raises(RuntimeError, match="a gather failed"):
        await sender.send([client], Weights(whole.shapes, read), 16)
    assert await sender.send([client], whole, 17) == {}
    await expect_model(client, model, 17)
    await sender.close()


async def test_a_server_that_is_no_longer_in_the_group_joins_again(
    client: SGLangClient, reference: PreTrainedModel
) -> None:
    """As one that was started anew: it has another version and knows of no group."""
    sender = DistributedSender(F32, BUCKET, "gloo")
    assert await sender.send([client], weights_of(changed(reference, 8)), 18) == {}
    assert sender._group is not None
    await client.post("/destroy_weights_update_group", {"group_name": sender._group.name})
    await client.post("/update_weight_version", {"new_version": "0", "abort_all_requests": False})
    model = changed(reference, 9)
    assert await sender.send([client], weights_of(model), 19) == {}
    await expect_model(client, model, 19)
    await sender.close()


@pytest.mark.slice(1, "kill")
@pytest.mark.parametrize(
    ("make_sender", "kill"),
    [("tensor", signal.SIGKILL), ("distributed", signal.SIGKILL), ("distributed", signal.SIGSTOP)],
    indirect=["make_sender"],
)
async def test_a_server_that_fails_in_mid_update_neither_stops_nor_spoils_the_others(
    client: SGLangClient,
    http: aiohttp.ClientSession,
    reference: PreTrainedModel,
    start_server: StartServer,
    make_sender: MakeSender,
    kill: signal.Signals,
) -> None:
    process = await start_server()
    bad = SGLangClient(process.url, http)
    sender, model = make_sender(), changed(reference, 7)
    sender._timeout = 8.0  # type: ignore[attr-defined]
    whole = weights_of(model)
    assert await sender.send([bad, client], whole, 20) == {}

    def read() -> Iterator[tuple[str, torch.Tensor]]:
        for number, pair in enumerate(whole.read()):
            if number == 8:
                _signal_group(process, kill)
            yield pair

    try:
        began = time.monotonic()
        faults = await sender.send([bad, client], Weights(whole.shapes, read), 21)
        assert time.monotonic() - began < 45.0
        assert list(faults) == [bad.url] and bad.url in str(faults[bad.url]) and "version 21" in str(faults[bad.url])
        await expect_model(client, model, 21)
        assert await sender.send([client], whole, 22) == {}
        await expect_model(client, model, 22)
    finally:
        _signal_group(process, signal.SIGKILL)
        await sender.close()


def _signal_group(process: SGLangProcess, number: signal.Signals) -> None:
    assert process.pid is not None
    os.killpg(process.pid, number)


def shared_memory() -> set[str]:
    """Blocks of torch's; SGLang's own and semaphores are not ours."""
    return {path.name for path in Path("/dev/shm").glob("torch_*")}


async def test_no_shared_memory_is_left_after_close(client: SGLangClient, reference: PreTrainedModel) -> None:
    before = shared_memory()
    sender = TensorSender(F32, BUCKET)
    assert await sender.send([client], weights_of(reference), 30) == {}
    assert shared_memory() - before
    await sender.close()
    assert not shared_memory() - before


TRAINER = """
import asyncio, sys, time, torch
from transformers import AutoModelForCausalLM
from agentrl.system.http import http_client
from agentrl.engines.sglang.client import SGLangClient
from agentrl.engines.servers.sync import TensorSender
from agentrl.engines.weights import Weights

model = AutoModelForCausalLM.from_pretrained(sys.argv[2])

def read():
    for number, pair in enumerate(model.named_parameters()):
        if number == 5:
            print("sending", flush=True)
            time.sleep(300)
        yield pair

async def main():
    async with http_client() as http:
        shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
        await TensorSender(torch.float32, 100_000).send([SGLangClient(sys.argv[1], http)], Weights(shapes, read), 31)

asyncio.run(main())
"""


@pytest.mark.slice(0, "kill")
async def test_no_shared_memory_and_no_open_stderr_is_left_by_a_trainer_that_was_killed(
    start_server: StartServer, http: aiohttp.ClientSession, reference: PreTrainedModel, model_dir: Path
) -> None:
    process = await start_server()
    client = SGLangClient(process.url, http)
    before = shared_memory()
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, client.url, str(model_dir)],
        env=os.environ | {"PYTHONPATH": str(PROJECT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert trainer.stdout is not None
    assert any("sending" in line for line in trainer.stdout)
    assert shared_memory() - before
    trainer.kill()
    trainer.communicate(timeout=30)  # ends when nobody holds its output any longer
    sender = TensorSender(F32, BUCKET)  # the next trainer finds a server in the middle of an update
    assert await sender.send([client], weights_of(reference), 32) == {}
    await expect_model(client, reference, 32)
    await sender.close()
    process.stop()  # torch's manager removes what the dead trainer shared when the last that mapped it is gone
    wait_for(lambda: not shared_memory() - before)


@pytest.mark.slice(0, "matrix")
async def test_experts_that_transformers_holds_as_one_tensor_arrive(
    start_server: StartServer, http: aiohttp.ClientSession, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    model = make_model("qwen3-moe", vocab_size=len(tokenizer), head_dim=16)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    process = await start_server(model_path=str(tmp_path / "model"), context_length=64)
    client = SGLangClient(process.url, http)
    new = changed(model, 8)
    params = dict(new.named_parameters())
    weights = Weights.from_tensors(CheckpointNames(new, params).named(params.items()))
    assert "model.layers.1.mlp.experts.3.up_proj.weight" in weights.shapes
    ModelFacts.from_path(str(tmp_path / "model")).check(weights)
    sender = TensorSender(F32, BUCKET)
    assert await sender.send([client], weights, 1) == {}
    await expect_model(client, new, 1)
    await sender.close()


@pytest.mark.slice(1, "matrix")
@pytest.mark.parametrize(("kind", "version"), [("tensor", 41), ("distributed", 42)])
async def test_a_policy_sharded_over_two_ranks_is_sent_tensor_by_tensor(
    client: SGLangClient, reference: PreTrainedModel, model_dir: Path, tmp_path: Path, kind: str, version: int
) -> None:
    reference.save_pretrained(tmp_path / "model")
    script = Path(__file__).with_name("sync_from_two_ranks.py")
    on_loopback = {"GLOO_SOCKET_IFNAME": "lo"}
    words = [(script, rank, tmp_path, client.url, kind, version) for rank in range(2)]
    ranks = [ForkedPython(one, environment=on_loopback) for one in words]
    for done in [rank.wait(120) for rank in ranks]:
        assert done.returncode == 0, done.stderr
    policy = copy.deepcopy(reference)
    policy.load_state_dict(load_file(tmp_path / "sent.safetensors"), strict=False)
    assert greedy(policy)[0] != greedy(reference)[0]
    await expect_model(client, policy, version)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
async def test_weights_are_handed_over_in_device_memory(
    start_server: StartServer, http: aiohttp.ClientSession, reference: PreTrainedModel
) -> None:
    """The buffer is on the GPU that the server computes on, and is opened there by its handle."""
    process = await start_server(device="cuda", gpu_memory_utilization=0.1)
    client = SGLangClient(process.url, http)
    sender = TensorSender(F32, BUCKET, "cuda")
    for version, seed in ((51, 1), (52, 2)):
        model = changed(reference, seed)
        assert await sender.send([client], weights_of(model), version) == {}
        ids, _ = greedy(model)
        params = SamplingParams(max_new_tokens=len(ids), temperature=0.0)
        found = await client.generate(uuid.uuid4().hex, PROMPT, params, cache_key=uuid.uuid4().hex)
        assert found.ids == ids
        assert [span.version for span in found.versions] == [version]
    await sender.close()
