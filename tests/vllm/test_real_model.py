"""A real model, served by vLLM: its log-probs are those of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from agentrl.engines.servers.model import ModelFacts
from agentrl.engines.servers.supervisor import Server
from agentrl.engines.servers.sync import TensorSender
from agentrl.engines.vllm.client import VLLMClient
from agentrl.engines.vllm.engine import VLLMEngine
from agentrl.engines.vllm.options import VLLMArguments
from agentrl.engines.vllm.process import VLLMProcess
from agentrl.system.http import http_client
from tests.real_model import assert_log_probs_are_transformers, find_model, problems_of_gsm8k
from tests.vllm.conftest import STARTUP


@pytest.mark.slice(0, "long run")
async def test_log_probs_of_real_prompts_are_transformers(
    pytestconfig: pytest.Config, shared_data: Path, tmp_path: Path
) -> None:
    folder = find_model(pytestconfig, tmp_path / "model")
    prompts = problems_of_gsm8k(folder, shared_data, 12)
    arguments = VLLMArguments(str(folder), "cpu", "float32", context_length=1024, max_num_seqs=len(prompts))
    server = VLLMProcess(arguments, None, tmp_path / "server.log", key="secret")
    http = http_client()
    try:
        server.start()
        await server.ready(STARTUP)
        client, sender = VLLMClient(server.url, http, server.key), TensorSender(torch.float32, 1 << 20)
        facts = ModelFacts.from_path(str(folder))
        engine = VLLMEngine([Server(client)], http, facts, sender, max_model_len=1024, deterministic=True)
        await client.info()
        try:
            await assert_log_probs_are_transformers(engine, folder, prompts)
        finally:
            await engine.close()
    finally:
        server.stop()
