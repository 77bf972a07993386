"""The clients that people have, in an environment of their own: each works, and leaves one transcript of exact ids."""

from __future__ import annotations

import asyncio
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.chat import Chat
from tests.openai_api.conftest import scripted
from tests.openai_api.test_dialects import TURNS
from tests.openai_api.test_record import recorded, said

PACKAGES = ("anthropic==2.14.0", "openai==3.57.0", "openai-agents==0.24.0")
ANTHROPIC = """
import sys, anthropic
client = anthropic.Anthropic(base_url=sys.argv[1].removesuffix("/v1"), api_key="unused", max_retries=0)
tool = {"name": "add", "description": "Add.", "input_schema": {"type": "object", "properties": {
    "a": {"type": "integer"}, "b": {"type": "integer"}}}}
given = {"model": "policy", "max_tokens": 200, "tools": [tool], "system": "Use tools."}
messages = [{"role": "user", "content": "What is 2 + 3?"}]
for turn in range(9):
    if turn % 2:
        with client.messages.stream(messages=messages, **given) as stream:
            reply = stream.get_final_message()
    else:
        reply = client.messages.create(messages=messages, **given)
    calls = [block for block in reply.content if block.type == "tool_use"]
    if not calls:
        break
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "5"} for call in calls]
    messages += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": results}]
print(reply.content[-1].text)
"""
RESPONSES = """
import sys, openai
client = openai.OpenAI(base_url=sys.argv[1], api_key="unused", max_retries=0)
tool = {"type": "function", "name": "add", "description": "Add.", "strict": False, "parameters": {"type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}}
given = {"model": "policy", "tools": [tool], "instructions": "Use tools."}
items, before = [{"role": "user", "content": "What is 2 + 3?"}], openai.omit
for turn in range(9):
    if turn % 2:
        with client.responses.stream(input=items, previous_response_id=before, **given) as stream:
            reply = stream.get_final_response()
    else:
        reply = client.responses.create(input=items, previous_response_id=before, **given)
    calls = [item for item in reply.output if item.type == "function_call"]
    if not calls:
        break
    items, before = [{"type": "function_call_output", "call_id": one.call_id, "output": "5"} for one in calls], reply.id
print(reply.output_text)
"""
AGENTS = """
import sys, agents
agents.set_tracing_disabled(True)
agents.set_default_openai_client(agents.AsyncOpenAI(base_url=sys.argv[1], api_key="unused", max_retries=0))

@agents.function_tool
def add(a: float, b: float) -> float:
    "Add."
    return a + b

agent = agents.Agent(name="adder", instructions="Use tools.", tools=[add], model="policy")
print(agents.Runner.run_sync(agent, "What is 2 + 3?").final_output)
"""


@pytest.fixture(scope="module")
def packages(pytestconfig: pytest.Config) -> Path:
    """The folder with the clients, made once."""
    named = hashlib.sha256(" ".join(PACKAGES).encode()).hexdigest()[:12]
    folder = pytestconfig.cache.mkdir(f"clients-{named}")
    done = folder / "done"
    if not done.exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder), "--upgrade"]
        subprocess.run([*pip, *PACKAGES], check=True)
        done.touch()
    return folder


@pytest.mark.slice(0, "documents")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("program", [ANTHROPIC, RESPONSES, AGENTS], ids=["anthropic", "responses", "agents"])
async def test_a_client_as_it_is(chat: Chat, packages: Path, tmp_path: Path, program: str) -> None:
    (tmp_path / "program.py").write_text(program)
    texts = [TURNS[0], TURNS[1].replace("1.0", "1"), TURNS[3], "#### 5"]
    environment = {**os.environ, "PYTHONPATH": str(packages)}
    async with scripted(chat, texts) as (service, engine), service.session() as open:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "program.py", open.base_url, cwd=tmp_path, env=environment, stdout=asyncio.subprocess.PIPE
        )
        out, _ = await process.communicate()
        assert (process.returncode, out.decode().strip()) == (0, "#### 5")
        assert len(open.trajectory.transcripts) == 1
        assert recorded(open.trajectory) == said(engine)
        assert len([record for turn in open.trajectory.turns for record in turn.calls]) == 4
