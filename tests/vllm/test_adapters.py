"""Adapters that vLLM's servers are sent and serve unmerged, and a whole run with them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from agentrl.engines.servers.engine import ServerEngine
from agentrl.engines.servers.model import ModelFacts
from agentrl.engines.servers.process import ServerProcess
from agentrl.engines.servers.supervisor import Server
from agentrl.engines.servers.sync import AdapterSender, TensorSender
from agentrl.engines.vllm.client import VLLMClient
from agentrl.engines.vllm.engine import VLLMEngine
from agentrl.engines.vllm.options import VLLMArguments
from agentrl.engines.vllm.process import VLLMProcess
from agentrl.system.http import http_client
from tests.e2e.test_train import lines
from tests.engines.adapters import RANK, AdapterContract
from tests.engines.contract import MAX_MODEL_LEN
from tests.sglang.training import Run, overrides, write_assets
from tests.vllm.conftest import STARTUP

MODEL = "actor_rollout_ref.model"


def started(arguments: VLLMArguments, folder: Path) -> Iterator[VLLMProcess]:
    process = VLLMProcess(replace(arguments, lora_rank=RANK), None, folder / "0.log", key="secret")
    try:
        process.start()
        asyncio.run(process.ready(STARTUP))
        yield process
    finally:
        process.stop()


@pytest.fixture(scope="module")
def serving(server_arguments: VLLMArguments, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMProcess]:
    """A server that serves adapters."""
    yield from started(server_arguments, tmp_path_factory.mktemp("adapters"))


class TestAdapters(AdapterContract):
    too_wide = "greater than max_lora_rank 8"
    long = 600  # 3 s and more, by the pace of `tests.vllm.paced`

    @pytest.fixture
    def own_server(self, server_arguments: VLLMArguments, tmp_path: Path) -> Iterator[VLLMProcess]:
        yield from started(server_arguments, tmp_path)

    def engine_of(
        self, process: ServerProcess, reference: PreTrainedModel, folder: Path, *, ours: bool = False
    ) -> ServerEngine:
        http = http_client()
        shapes = {name: tuple(tensor.shape) for name, tensor in reference.state_dict().items()}
        return VLLMEngine(
            [Server(VLLMClient(process.url, http, process.key), process if ours else None)],
            http,
            ModelFacts(reference.config.vocab_size, shapes),
            AdapterSender(TensorSender(torch.float32, 1 << 20), folder),
            max_model_len=MAX_MODEL_LEN,
            deterministic=True,
        )


@pytest.mark.timeout(900)
def test_a_run_sends_the_base_once_and_adapters_after_each_step(model_dir: Path, tmp_path: Path) -> None:
    assets = write_assets(tmp_path)
    words = overrides(assets, model_dir, tmp_path, "actor_rollout_ref.rollout.name=vllm", f"{MODEL}.lora_rank={RANK}")
    run = Run([*words, f"{MODEL}.lora_merge=false"], assets, tmp_path)
    try:
        assert run.end(900) == 0, run.stderr
    finally:
        run.stop()
    metrics = lines(tmp_path / "run")
    sent = [line["sync/bytes"] for line in metrics]
    assert len(sent) > 1 and sent[0] > 2 * sent[1] and len({*sent[1:]}) == 1
    for line in metrics:
        assert line["rollout/logprob_gap_max_abs"] < 1e-4, "servers and trainer have different adapters"
        assert line["actor/grad_norm"] > 0 and line["engine/failovers"] == 0
    assert metrics[-1]["engine/adapter_bases"] == 1
