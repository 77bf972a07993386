"""A program that repairs the module in its folder: a model says what to replace, the program replaces it and tests.

It has the standard library alone, so that any image with Python can run it. It knows the endpoint of the model from
OPENAI_BASE_URL, reads its task from stdin, and ends when the tests pass or after three calls.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

CALLS = 3
TEST_SECONDS = 10
TEXT = {"type": "string"}
REPLACE = {
    "name": "replace",
    "description": "Replace a text of the module, which has it once, and run the tests.",
    "parameters": {"type": "object", "properties": {"old": TEXT, "new": TEXT}, "required": ["old", "new"]},
}
TOOLS = [{"type": "function", "function": REPLACE}]
Ask = Callable[[list[dict[str, Any]]], dict[str, Any]]
"""(messages) -> the model's message."""


def module_of(folder: Path) -> Path:
    return next(file for file in sorted(folder.glob("*.py")) if not file.name.startswith("test_"))


def opening(task: str, folder: Path) -> list[dict[str, Any]]:
    """Show the task, the module and what its tests say."""
    module = module_of(folder)
    return [{"role": "user", "content": f"{task}\n\n{module.name}:\n{module.read_text()}\nTests: {tested(folder)[1]}"}]


def tested(folder: Path) -> tuple[bool, str]:
    """Run the tests; return whether they pass, and the line that failed with its error."""
    words = [sys.executable, "-B", "-m", "unittest", "-q"]
    try:
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=TEST_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return False, "they do not end."
    if done.returncode == 0:
        return True, "they pass."
    lines = [line.strip() for line in done.stderr.splitlines()]
    failed = [line for line in lines if line.startswith("self.assert")]
    errors = [line for line in lines if "Error: " in line]
    return False, "\n".join([*failed[-1:], *errors[-1:]])[:300]


def act(call: dict[str, Any], folder: Path) -> tuple[bool, str]:
    """Carry out a call; return whether the tests pass now, and the answer."""
    try:
        arguments = json.loads(call["function"]["arguments"])
        old, new = arguments["old"], arguments["new"]
        found = module_of(folder).read_text().count(old)
    except (ValueError, KeyError, TypeError):
        return False, "Expected the call replace with the texts old and new."
    if found != 1 or not old:
        return False, f"The module has that text {found if old else 0} times, not once."
    module_of(folder).write_text(module_of(folder).read_text().replace(old, new))
    passed, said = tested(folder)
    return passed, f"Tests: {said}"


def session(task: str, folder: Path, ask: Ask) -> list[dict[str, Any]]:
    """Have the model repair the module; return the conversation."""
    messages = opening(task, folder)
    for _ in range(CALLS):
        message = ask(messages)
        messages.append(message)
        calls = message.get("tool_calls") or []
        passed = False
        for call in calls[:1]:
            passed, answer = act(call, folder)
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": answer})
        if passed or not calls:
            break
        messages += [
            {"role": "tool", "tool_call_id": call["id"], "content": "One call at a time."} for call in calls[1:]
        ]
    return messages


def endpoint(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Ask the model behind OPENAI_BASE_URL."""
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages, "tools": TOOLS}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    request = urllib.request.Request(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", body, headers)
    with urllib.request.urlopen(request) as answer:
        message: dict[str, Any] = json.load(answer)["choices"][0]["message"]
    return message


if __name__ == "__main__":
    session(sys.stdin.read(), Path.cwd(), endpoint)
