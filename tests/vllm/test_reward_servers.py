"""A reward model, a judge and a teacher on a real vLLM server that a run starts: by the keys as on SGLang."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import aiohttp
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from agentrl.config import Config
from agentrl.config.sections.distillation import TeacherConfig
from agentrl.config.sections.reward import JudgeConfig
from agentrl.remote.logprobs import LogprobServer
from agentrl.remote.router import ModelRouter
from agentrl.reward.judge import ModelJudge, verdict_format
from agentrl.rollouts.ray_worker import StatusBuffer
from agentrl.rollouts.reward_servers.open import open_reward_servers
from agentrl.trajectory import Message, Trajectory
from tests.engines.contract import logprobs_of, prompt_of

VERDICT = '{"reason": "so", "score": 7}'


async def test_one_server_is_reward_model_judge_and_teacher(model_dir: Path, tmp_path: Path) -> None:
    section = {"enable": True, "model": {"path": str(model_dir), "generative": True}}
    rollout = {"name": "vllm", "engine_kwargs": {"vllm": {"max_logprobs": 30}}}
    config = Config.model_validate({"reward_model": {**section, "rollout": rollout}})
    status = StatusBuffer()
    opened = open_reward_servers(config, "cpu", tmp_path, status)
    servers = await asyncio.to_thread(opened.__enter__)
    try:
        assert servers is not None
        router = ModelRouter(servers, status.warn)
        await asyncio.to_thread(router.start, 60.0)
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model_dir, attn_implementation="eager")
        await asks_as_a_scorer(f"http://{router.address}", servers.urls[0])
        await judges(f"http://{router.address}/v1", str(model_dir))
        await teaches(f"http://{router.address}/v1", model)
        await asyncio.to_thread(router.close)
    finally:
        await asyncio.to_thread(opened.__exit__, None, None, None)
    assert not status.take().warnings


async def asks_as_a_scorer(url: str, server: str) -> None:
    """Under any name of a model; the server itself asks for its key, and has no routes that change it."""
    asked = {"model": "critic", "messages": [{"role": "user", "content": "Is it right?"}], "max_tokens": 4}
    async with aiohttp.ClientSession() as client:
        async with client.post(f"{url}/v1/chat/completions", json=asked) as answer:
            assert (await answer.json())["usage"]["completion_tokens"] <= 4
        as_object = asked | {"response_format": verdict_format(), "max_tokens": 12}
        async with client.post(f"{url}/v1/chat/completions", json=as_object) as answer:
            assert (await answer.json())["choices"][0]["message"]["content"].lstrip().startswith("{")
        async with client.post(f"{server}/v1/chat/completions", json=asked) as answer:
            assert answer.status == 401
        for path in ("pause", "update_weights", "generate"):
            async with client.post(f"{url}/{path}", json={}) as answer:
                assert answer.status == 404, path


async def judges(url: str, model: str) -> None:
    only = {"response_format": None, "structured_outputs": {"choice": [VERDICT]}}
    judge = ModelJudge(JudgeConfig(base_url=url, model=model, extra_body=only))
    await judge.start("run")
    messages: list[Message] = [{"role": "user", "content": "How high?"}, {"role": "assistant", "content": "4806 m"}]
    found = await judge.compute_score("judge/x", "4806 m", {}, Trajectory("t", 0, messages=messages))
    assert found == {"score": json.loads(VERDICT)["score"] / 10, "unreadable": 0.0}
    await judge.close()


@torch.no_grad()
async def teaches(url: str, model: PreTrainedModel) -> None:
    """The sampled tokens' log-probs, and the likeliest tokens."""
    ids, first = prompt_of(40), 25
    expected = logprobs_of(model, ids[:first], ids[first:], 1.0)
    places = model(input_ids=torch.tensor([ids])).logits[0, first - 1 : -1].log_softmax(-1)
    for top_k in (0, 5):
        teacher = TeacherConfig(base_url=url, api="prompt_logprobs", model="critic", tokenizer="t")
        server = LogprobServer(teacher, "distillation.teacher", top_k=top_k)
        found = await server.score(ids, first)
        assert found.logprobs == pytest.approx(expected.tolist(), abs=1e-4)
        if top_k:
            best = places.topk(top_k).values
            told = torch.tensor([[logprob for _, logprob in pairs] for pairs in found.top])
            assert torch.allclose(told, best, atol=1e-4)
        await server.close()
