"""Everything that the cells share: rows, a tiny policy for each way to call a tool, an agent, a corpus, a scorer.

A policy is made once: a few seconds in which it learns to begin each answer with a call, whatever it is asked. Behind
the call's answer it says what an untrained model says, so that the trajectories of a prompt differ.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentrl.quickstart.tiny_policy import make_tiny_policy

Loop = Literal["single_turn", "tool_agent", "react", "openai_proxy"]
LOOPS: tuple[Loop, ...] = get_args(Loop)
PROMPTS, N, STEPS = 2, 4, 4
"""Prompts a step, trajectories of each, and steps of a run."""
LEARN = 60
RATE = 5e-3
SEARCH = {"query": "a"}
CODE = {"code": "1+1"}

SCORER = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return 0.25 + sum(solution_str.encode("utf-8", "replace")) % 8 / 16
"""
"""A scorer that never gives 0: a score of 0 is made of a fault."""
LOWEST, GRAIN, HIGHEST = 0.25, 1 / 16, 0.6875

AGENT = """
import httpx, openai

async def solve(sample, base_url, api_key, model):
    messages = list(sample["prompt"])
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        for turn in range(2):
            reply = await client.chat.completions.create(model=model, messages=messages, max_tokens=24)
            messages.append(reply.choices[0].message)
            if turn == 0 and TOOL is not None:
                async with httpx.AsyncClient(timeout=1.0, trust_env=False) as tool:
                    answer = await tool.get(TOOL, params={"query": "a"})
                if answer.status_code >= 500:
                    raise ConnectionError(f"the tool's server answers {answer.status_code}")
                messages.append({"role": "user", "content": answer.json()["text"]})
            else:
                messages.append({"role": "user", "content": "Sure?"})
    return {}
"""
"""An agent of openai_proxy, with a tool of its own at the address TOOL."""


def make_rows(folder: Path) -> None:
    """Write a row for each prompt of a run; nothing is drawn twice, and all that is drawn is known."""
    rows = [
        {
            "prompt": [{"role": "user", "content": question(number)}],
            "data_source": "faults",
            "reward_model": {"ground_truth": str(number)},
        }
        for number in range(PROMPTS * STEPS)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")
    documents = [{"contents": f"Title {number}\nsays a and {number}."} for number in range(8)]
    (folder / "corpus.jsonl").write_text("".join(json.dumps(one) + "\n" for one in documents))


def question(number: int) -> str:
    return f"Question {number:03d}?"


def policy_of(loop: Loop, tool: str) -> str:
    """Name the policy that a loop is run with."""
    if loop not in ("tool_agent", "react"):
        return "plain"
    return f"{loop}-{'code' if tool == 'code_interpreter' else 'search'}"


def make_policy(folder: Path, loop: Loop, tool: str) -> Path:
    """Make the policy of a loop unless it is there."""
    path = folder / policy_of(loop, tool)
    if (path / "made").exists():
        return path
    make_tiny_policy(path, seed=3)
    if loop in ("tool_agent", "react"):
        teach(path, call_text(loop, tool))
    (path / "made").touch()
    return path


def call_text(loop: Loop, tool: str) -> str:
    """Write the call that begins each answer."""
    arguments: Mapping[str, Any] = CODE if tool == "code_interpreter" else SEARCH
    if loop == "react":
        return f"Action: {tool}\nAction Input: {json.dumps(arguments)}\nObservation:"
    call = json.dumps({"name": tool, "arguments": arguments})
    return f"<tool_call>\n{call}\n</tool_call><|im_end|>"


def teach(path: Path, call: str) -> None:
    """Teach a policy to say `call` behind any question."""
    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    said = tokenizer.encode(call, add_special_tokens=False)
    for step in range(LEARN):
        asked = f"{question(step)}<|im_end|>\n<|im_start|>assistant\n"
        prompt = tokenizer.encode(asked, add_special_tokens=False)
        ids = torch.tensor([[*prompt, *said]])
        logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
        cross_entropy(logits, ids[0, len(prompt) :]).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(path)
