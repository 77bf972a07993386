"""A real model, served: its log-probs are those of transformers, and an exported policy's turns end as there."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from agentrl.chat import Chat
from agentrl.engines.sglang.options import SGLangArguments
from agentrl.engines.sglang.process import SGLangProcess
from agentrl.trajectory import Message
from benchmarks.rollouts.sglang_work import engine_over
from tests.checkpoint.test_serving import export
from tests.real_model import TEMPLATE, assert_log_probs_are_transformers, find_model, problems_of_gsm8k
from tests.sglang.conftest import STARTUP

ASKED: list[Message] = [{"role": "user", "content": "What is the capital of France? Answer with one sentence."}]


@pytest.mark.slice(0, "long run")
@pytest.mark.timeout(900)
def test_an_exported_policy_answers_as_by_generate(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    base = find_model(pytestconfig, tmp_path / "model")
    chat = Chat.from_pretrained(str(base), chat_template=TEMPLATE.read_text())
    policy = export(base, chat, tmp_path / "policy")
    server = SGLangProcess(
        SGLangArguments(str(policy), device="cpu", context_length=512, max_num_seqs=2), None, tmp_path / "server.log"
    )
    try:
        server.start()
        asyncio.run(server.ready(STARTUP))
        body = {"model": "policy", "messages": ASKED, "temperature": 0, "max_tokens": 40}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=STARTUP).raise_for_status().json()
    finally:
        server.stop()
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "stop"
    model: Any = AutoModelForCausalLM.from_pretrained(policy)
    prompt = chat.render(ASKED)
    with torch.no_grad():
        ids = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=40)[0, len(prompt) :].tolist()
    assert chat.tokenizer.decode(ids, skip_special_tokens=True).strip() == choice["message"]["content"].strip()
    assert len(ids) == answer["usage"]["completion_tokens"]


@pytest.mark.slice(0, "long run")
@pytest.mark.timeout(900)
async def test_log_probs_of_real_prompts_are_transformers(
    pytestconfig: pytest.Config, shared_data: Path, tmp_path: Path
) -> None:
    folder = find_model(pytestconfig, tmp_path / "model")
    prompts = problems_of_gsm8k(folder, shared_data, 12)
    arguments = SGLangArguments(str(folder), device="cpu", context_length=1024, max_num_seqs=len(prompts))
    server = SGLangProcess(arguments, None, tmp_path / "server.log")
    try:
        server.start()
        await server.ready(STARTUP)
        engine = engine_over([server.url], folder)
        try:
            await assert_log_probs_are_transformers(engine, folder, prompts)
        finally:
            await engine.close()
    finally:
        server.stop()
