"""Coding programs as they are published act in whole sessions: `make setup-programs`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from agentrl.openai_api.agents import AgentOptions
from agentrl.trajectory import Status
from tests.harnesses.conftest import IS_RIGHT, TASK, Harnessed
from tests.programs import program

SHELLS = {
    "claude_code": ("claude", "Bash", "command"),
    "codex": ("codex", "exec_command", "cmd"),
    "mini_swe_agent": ("mini", "bash", "command"),
    "opencode": ("opencode", "bash", "command"),
    "pi": ("pi", "bash", "command"),
}
"""The executable, and its shell's name and parameter."""


def run(name: str, command: str) -> str:
    """Call a program's shell."""
    _, tool, parameter = SHELLS[name]
    arguments = {parameter: command, **({"description": "runs it"} if name == "opencode" else {})}
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"


def policy(name: str, steps: int) -> Callable[[str], str]:
    """A policy that does `steps` commands, one after another, and ends."""
    end = run(name, "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT") if name == "mini_swe_agent" else "The sum is there."

    def say(prompt: str) -> str:
        if TASK not in prompt or "title generator" in prompt:
            return "A title"
        done = sum(f"DONE-{step}-" in prompt for step in range(steps))
        write = "printf 5 > answer.txt; " if done == 1 else ""
        return end if done == steps else run(name, f"{write}printf 'DO%s-%d-' NE {done}")

    return say


@pytest.mark.slice(0, "matrix")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", SHELLS)
async def test_a_program_acts_and_every_sampled_token_is_recorded(
    harnessed: Callable[..., Harnessed], name: str
) -> None:
    options = AgentOptions(harness=name, command=[str(program(SHELLS[name][0]))], check=IS_RIGHT)
    used = harnessed(options, policy(name, steps=4))
    files = [{"path": "notes/read.me", "text": "Numbers: 2, 3."}]
    (found,) = await used.run({"files": files})
    assert (found.status, found.score) == (Status.COMPLETED, 1.0), found.failure
    sampled = [id for turns in used.bench.engine.said.values() for turn in turns for id in turn]
    recorded = [
        id for transcript in found.transcripts for id, mask in zip(transcript.ids, transcript.mask, strict=True) if mask
    ]
    assert Counter(recorded) == Counter(sampled)
    metrics: dict[str, Any] = found.metrics
    assert metrics["openai_calls"] >= 5
    assert not {"openai_bad_requests", "openai_refused"} & metrics.keys()


@pytest.mark.slice(0, "matrix")
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", SHELLS)
async def test_a_program_ends_soon_when_its_turns_are_used_up(harnessed: Callable[..., Harnessed], name: str) -> None:
    options = AgentOptions(harness=name, command=[str(program(SHELLS[name][0]))], check=IS_RIGHT)
    (found,) = await harnessed(options, policy(name, steps=9), max_assistant_turns=3).run()
    assert (found.status, found.score) == (Status.TURN_LIMIT, 1.0), found.failure
