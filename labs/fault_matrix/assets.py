"""Everything that the cells share: rows, a tiny policy for each way to call a tool, an agent, a corpus, a scorer.

A policy is made once: a few seconds in which it learns to answer anything with a call. Some letters of the call are
left to chance, so that the trajectories of a prompt differ.
"""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any, Literal, get_args

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentrl.agent_loop.react import ReactLoop
from agentrl.environments.loop import COLUMN
from agentrl.quickstart.tiny_policy import make_tiny_policy
from agentrl.tool import ToolSchema
from agentrl.tool.schema import parameters_of
from agentrl.trajectory import Message
from agentrl.trajectory.sample import Sample
from tools.code_interpreter import CodeInterpreterTool
from tools.search import SearchTool

Loop = Literal["single_turn", "tool_agent", "react", "openai_proxy", "environment", "self_play"]
LOOPS: tuple[Loop, ...] = get_args(Loop)
IN_SIDECARS = ("environment", "self_play")
PROMPTS, N, STEPS = 2, 4, 4
"""Prompts a step, trajectories of each, and steps of a run."""
LEARN = 240
RATE = 5e-3
LETTERS = "abcdefghijkmnopq"
BEHIND = {
    "environment": "\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n",
    "react": " a is 1\nThought:\n",
    "tool_agent": "\n<|im_start|>user\n<tool_response>\na is 1\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
}
"""Text between a turn of a taught policy and its next word."""

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

ENVIRONMENT = """
def tasks(split, seed, count):
    return []

def start(task, seed):
    return {"turns": 0}, None

def step(episode, action):
    episode["turns"] += 1
    return {"observation": "Sure?", "done": episode["turns"] == 2}

def score(episode):
    return float(episode["turns"] == 2)
"""
"""An environment of two turns, in a sidecar."""

GAME = """
def tasks(split, seed, count):
    return []

def start(task, seed):
    return [], {"role": "first", "observation": None}

def step(said, action):
    said.append(action["text"])
    return {"role": ["first", "second"][len(said) % 2], "observation": "Sure?", "done": len(said) == 3}

def score(said):
    asked = ["first", "second"] if said else ["first"]
    spoken = {role: "".join(said[number::2]) for number, role in enumerate(asked)}
    return {"scores": {role: 0.25 + sum(text.encode("utf-8", "replace")) % 8 / 16 for role, text in spoken.items()}}
"""
"""A game of three turns for two roles, in a sidecar. Each role's score is as the scorer's."""
TURNS = {"self_play": 3}
"""Turns of an episode, by loop; two in the others."""


def make_rows(folder: Path) -> None:
    """Write a row for each prompt of a run, so that all of them are drawn once, the tool that most cells use, and the
    loop of the environment."""
    for name, source, roles in (("rows", "faults", []), ("self_play", "environment/self_play", ["first", "second"])):
        rows = [
            {
                "prompt": [{"role": "user", "content": question(number)}],
                "data_source": source,
                "reward_model": {"ground_truth": str(number)},
                "extra_info": {COLUMN: json.dumps({"task": {"id": number, "roles": roles}, "seed": number})},
            }
            for number in range(PROMPTS * STEPS)
        ]
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet")
    documents = [{"contents": f"Title {number}\nsays a and {number}."} for number in range(8)]
    corpus = folder / "corpus.jsonl"
    corpus.write_text("".join(json.dumps(one) + "\n" for one in documents))
    tool = {"class_name": "tools.search.SearchTool", "config": {"corpus_path": str(corpus), "topk": 1}}
    (folder / "tools.yaml").write_text(json.dumps({"tools": [tool]}))
    loops = []
    for name, code in (("environment", ENVIRONMENT), ("self_play", GAME)):
        (folder / f"{name}.py").write_text(code)
        options = {"environment": str(folder / f"{name}.py")}
        loops.append({"name": name, "_target_": "agentrl.environments.loop.EnvironmentLoop", "options": options})
    (folder / "loops.yaml").write_text(json.dumps(loops))


def question(number: int) -> str:
    return f"Question {number:03d}?"


def policy_of(loop: Loop, tool: str) -> str:
    """Name the policy that a loop is run with."""
    if loop in IN_SIDECARS:
        return "environment"
    if loop not in BEHIND:
        return "plain"
    return f"{loop}-{'code' if tool == 'code_interpreter' else 'search'}"


def make_policy(folder: Path, loop: Loop, tool: str) -> Path:
    """Make the policy of a loop unless it is there."""
    path = folder / policy_of(loop, tool)
    if (path / "made").exists():
        return path
    make_tiny_policy(path, seed=3)
    if path.name != "plain":
        teach(path, "environment" if loop in IN_SIDECARS else loop, tool)
    (path / "made").touch()
    return path


def call_text(loop: Loop, tool: str, letters: str) -> str:
    """Write a call; an environment's turn is its letters."""
    if loop == "environment":
        return f"{letters}<|im_end|>"
    arguments = {"code": f"'{letters}'"} if tool == "code_interpreter" else {"query": letters}
    if loop == "react":
        return f"Action: {tool}\nAction Input: {json.dumps(arguments)}\nObservation:"
    call = json.dumps({"name": tool, "arguments": arguments})
    return f"<tool_call>\n{call}\n</tool_call><|im_end|>"


def spellings(schema: ToolSchema) -> list[ToolSchema]:
    """Write a schema in the ways of the cells' tools: its own, with titles as MCP servers do, and a short one."""
    titled, short = copy.deepcopy(schema), copy.deepcopy(schema)
    for name, of_parameter in parameters_of(titled).items():
        assert isinstance(of_parameter, dict)
        of_parameter["title"] = name.title()
    for of_parameter in parameters_of(short).values():
        assert isinstance(of_parameter, dict)
        of_parameter.pop("description", None)
    return [schema, titled, short]


def teach(path: Path, loop: Loop, tool: str) -> None:
    """Teach a policy to answer the run's prompts with a call, or a turn, that has some letters in it."""
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path)
    optimizer, rng = torch.optim.AdamW(model.parameters(), lr=RATE), random.Random(0)
    written = spellings(SearchTool.default_schema if tool == "search" else CodeInterpreterTool.default_schema)
    for step in range(LEARN):
        asked: list[Message] = [{"role": "user", "content": question(step % (PROMPTS * STEPS))}]
        tools = [] if loop == "environment" else [written[step % len(written)]]
        if loop == "react":
            row = Sample(asked, "faults", loop)
            asked, tools = ReactLoop().first_prompt(row, tools)
        prompt = tokenizer.apply_chat_template(asked, tools=tools or None, add_generation_prompt=True, tokenize=False)
        parts = [
            (prompt, False),
            (call_text(loop, tool, "".join(rng.choices(LETTERS, k=3))), True),
            (BEHIND[loop], False),
            (call_text(loop, tool, "".join(rng.choices(LETTERS, k=3))), True),
        ]
        encoded = [(tokenizer.encode(text, add_special_tokens=False), is_own) for text, is_own in parts]
        ids = torch.tensor([[token for tokens, _ in encoded for token in tokens]])
        own = torch.tensor([is_own for tokens, is_own in encoded for _ in tokens][1:])
        cross_entropy(model(input_ids=ids).logits[0, :-1][own], ids[0, 1:][own]).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(path)
