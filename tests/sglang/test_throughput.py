"""The benchmark of throughput, small: what it compares is the same work."""

from __future__ import annotations

from pathlib import Path

from agentrl.chat import Chat
from agentrl.engines.sglang.process import SGLangProcess
from benchmarks.rollouts.sglang_throughput import compare
from benchmarks.rollouts.sglang_work import Shape


async def test_all_ways_ask_for_the_same_and_have_the_same_tokens(server: SGLangProcess, model_dir: Path) -> None:
    chat = Chat.from_pretrained(str(model_dir))
    chat.stop_token_ids = ()
    rows = await compare(server, chat, Shape(dialogues=6, turns=2, fewest=4, most=8), rounds=2)
    assert {name: row["different_answers"] for name, row in rows.items()} == {
        "agentrl": 0,
        "straight": 0,
        "straight without a stream": 0,
    }
    assert all(row["tokens_per_second"] > 0 and row["client_cpu_ms_a_request"] > 0 for row in rows.values())
