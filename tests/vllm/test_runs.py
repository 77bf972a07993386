"""Weights by each transport, runs of the command, and servers that cannot be attached to."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from agentrl.engines.contract import SamplingParams
from agentrl.engines.servers.client import ServerFailed
from agentrl.engines.servers.sync import DiskSender, DistributedSender, TensorSender, WeightSender
from agentrl.engines.vllm.client import VLLMClient
from agentrl.engines.vllm.process import VLLMProcess
from agentrl.engines.weights import Weights
from agentrl.system.http import http_client
from agentrl.trl import GRPOConfig, GRPOTrainer
from tests.e2e.test_train import lines
from tests.engines.contract import greedy_ids, prompt_of
from tests.sglang.training import Run, overrides, write_assets

Transport = Callable[[Path], WeightSender]


@pytest.fixture
async def client(server: VLLMProcess) -> AsyncIterator[VLLMClient]:
    async with http_client() as http:
        client = VLLMClient(server.url, http, server.key)
        await client.info()
        yield client


@pytest.mark.parametrize(
    "transport",
    [
        lambda folder: TensorSender(torch.float32, 100_000),
        lambda folder: DistributedSender(torch.float32, 100_000, "gloo"),
        lambda folder: DiskSender(torch.float32, 100_000, folder),
    ],
    ids=["tensor", "distributed", "disk"],
)
async def test_weights_arrive_by_each_transport(
    client: VLLMClient, reference: PreTrainedModel, model_dir: Path, tmp_path: Path, transport: Transport
) -> None:
    """Twice, in several buckets each, as the second update finds a group that is made already."""
    other: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model_dir, attn_implementation="eager")
    sender = transport(tmp_path / "weights")
    try:
        for version, model in ((1, reference), (2, other), (3, reference)):
            await client.pause("retract")
            assert await sender.send([client], Weights.from_tensors(model.named_parameters()), version) == {}
            assert await client.flush_cache()
            await client.resume()
            params = SamplingParams(12, temperature=0.0)
            answer = await client.generate(f"{version:032}", prompt_of(17), params, cache_key=f"{transport}{version}")
            assert answer.ids == greedy_ids(model, prompt_of(17), 12)
            assert [span.version for span in answer.versions] == [version]
            assert (await client.info()).weight_version == str(version)
    finally:
        await sender.close()


async def test_a_server_that_answers_otherwise_or_wants_a_key_is_refused(server: VLLMProcess) -> None:
    async with http_client() as http:
        with pytest.raises(ServerFailed, match="401"):
            await VLLMClient(server.url, http).info()


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_run_from_start_to_end(model_dir: Path, tmp_path: Path, staleness: int) -> None:
    assets = tmp_path / "assets"
    assets.mkdir()
    words = overrides(write_assets(assets), model_dir, tmp_path, "actor_rollout_ref.rollout.name=vllm")
    run = Run([*words, f"async_training.max_staleness={staleness}"], assets, tmp_path)
    try:
        assert run.end(900) == 0, run.stderr
    finally:
        run.stop()
    steps = [line for line in lines(tmp_path / "run") if "actor/grad_norm" in line]
    assert len(steps) == 3
    assert all(line["actor/grad_norm"] > 0 and line["left_out/failed"] == 0 for line in steps)
    assert all(line["rollout/logprob_gap_max_abs"] < 1e-4 for line in steps[: 3 if staleness == 0 else 1])


def test_the_quickstart_reaches_the_success_of_the_embedded_engine(tmp_path: Path) -> None:
    """A third of its steps: the seeds of docs/quickstart.md have 94 to 99 % then. It reads long prompts in parts."""
    keys = ["actor_rollout_ref.rollout.name=vllm", "trainer.total_training_steps=10"]
    run = Run([*keys, f"trainer.default_local_dir={tmp_path}/run"], tmp_path, tmp_path)
    try:
        assert run.end(900) == 0, run.stderr
    finally:
        run.stop()
    found = lines(tmp_path / "run")
    before, *_, after = [line["val/success_sampled"] for line in found if "val/success_sampled" in line]
    assert before < 0.3 and after > 0.75
    steps = [line for line in found if "actor/grad_norm" in line]
    assert len(steps) == 10
    assert max(line["rollout/logprob_gap_max_abs"] for line in steps) < 1e-4


def test_trls_door_generates_with_vllm(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`use_vllm=True` of a script for TRL, with the importance correction that is TRL's default."""
    monkeypatch.chdir(tmp_path)
    arguments: dict[str, Any] = {"per_device_train_batch_size": 4, "num_generations": 2, "max_steps": 2}
    arguments |= {"max_completion_length": 12, "max_prompt_length": 100, "logging_steps": 1}
    rows = [{"prompt": [{"role": "user", "content": f"Say {number}."}]} for number in range(4)]

    def length(completions: list[list[dict[str, str]]], **kwargs: object) -> list[float]:
        return [len(completion[-1]["content"]) % 7 / 7 for completion in completions]

    trainer = GRPOTrainer(model_dir, length, GRPOConfig("run", use_vllm=True, **arguments), rows)
    assert trainer.train().global_step == 2
    *steps, summary = trainer.state.log_history
    assert len(steps) == 2 and all(entry["checks/gap_worst"] < 1e-4 for entry in steps) and "train_runtime" in summary
