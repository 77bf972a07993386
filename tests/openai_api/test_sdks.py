"""The clients that people have, in an environment of their own: each works, and leaves one transcript of exact ids."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentrl.chat import Chat
from agentrl.config.registries import HARNESSES
from agentrl.system.delivery import Delivery
from benchmarks.packages import install
from tests.e2e.conftest import PROJECT
from tests.e2e.test_docs import blocks
from tests.openai_api.conftest import Open, scripted
from tests.openai_api.programs import QUESTION, TURNS
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
def folder(pytestconfig: pytest.Config) -> Path:
    """The folder of all clients."""
    return pytestconfig.cache.mkdir("clients")


@pytest.mark.slice(0, "documents")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("program", [ANTHROPIC, RESPONSES, AGENTS], ids=["anthropic", "responses", "agents"])
async def test_a_client_as_it_is(chat: Chat, folder: Path, tmp_path: Path, program: str) -> None:
    (tmp_path / "program.py").write_text(program)
    texts = [TURNS[0], TURNS[1].replace("1.0", "1"), TURNS[3], "#### 5"]
    environment = {**os.environ, "PYTHONPATH": str(install(PACKAGES, folder))}
    async with scripted(chat, texts) as (service, engine), service.session() as open:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "program.py", open.base_url, cwd=tmp_path, env=environment, stdout=asyncio.subprocess.PIPE
        )
        out, _ = await process.communicate()
        assert (process.returncode, out.decode().strip()) == (0, "#### 5")
        assert len(open.trajectory.transcripts) == 1
        assert recorded(open.trajectory) == said(engine)
        assert len([record for turn in open.trajectory.turns for record in turn.calls]) == 4


PAGES = ["langgraph", "openai_agents", "anthropic", "shell"]
"""Pages of docs/agents; the last has no packages."""
SAYS = [TURNS[0], TURNS[1].replace("1.0", "1").replace(str(10**17 + 1), "7"), "The sum is 5."]
RECORDED = Path(__file__).parent / "recorded"
"""Requests of the pages' programs with their real clients. Delete a file and run its test to record it again."""


def packages_of(page: str) -> list[str]:
    """What a page has its reader install."""
    (command,) = blocks(f"docs/agents/{page}.md", "bash")
    words = re.search(r"^agent-env/bin/pip install (.+)$", command, re.MULTILINE)
    return words[1].split() if words else []


def check(open: Open, engine: Any) -> None:
    """Three turns and three calls are one transcript of exact ids."""
    assert len(open.trajectory.transcripts) == 1
    assert recorded(open.trajectory) == said(engine)
    assert next(record.response for turn in open.trajectory.turns for record in turn.calls) in ("5", "5.0")
    assert len([record for turn in open.trajectory.turns for record in turn.calls]) == 3
    assert "openai_bad_requests" not in open.trajectory.metrics


async def run_page(chat: Chat, page: str, tmp_path: Path, packages: Path | None) -> list[dict[str, Any]]:
    """Run a page's program as the trainer does, in a session of a policy that calls its tool; return its requests."""
    language, file, python = ("sh", "my_agent.sh", "bash") if page == "shell" else ("python", "my_agent.py", "python")
    (text,) = [block for block in blocks(f"docs/agents/{page}.md", language) if file in block[:60]]
    (tmp_path / file).write_text(text)
    asked: list[dict[str, Any]] = []
    async with scripted(chat, SAYS) as (service, engine), service.session() as open:
        begin = open.session.begin

        async def spied(body: bytes, dialect: Any, delivery: Delivery, read: Any = None) -> Any:
            asked.append({"path": dialect.path, "body": json.loads(body)})
            return await begin(body, dialect, delivery, read)

        open.session.begin = spied  # type: ignore[method-assign]
        environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": str(packages or "")}
        for vendor, address in (("OPENAI", open.base_url), ("ANTHROPIC", open.base_url.removesuffix("/v1"))):
            named = {"BASE_URL": address, "API_KEY": "unused", "MODEL": "policy"}
            environment |= {f"{vendor}_{name}": value for name, value in named.items()}
        pipe = asyncio.subprocess.PIPE
        command = [sys.executable if python == "python" else python, file]
        process = await asyncio.create_subprocess_exec(
            *command, cwd=tmp_path, env=environment, stdin=pipe, stdout=pipe, stderr=pipe
        )
        sample = {"prompt": [QUESTION], "extra_info": {"sum": 5}}
        out, errors = await process.communicate(json.dumps(sample).encode())
        assert process.returncode == 0, errors.decode()
        assert json.loads(out.decode().splitlines()[-1]) == {"score": 1}
        check(open, engine)
    named_alike: list[dict[str, Any]] = json.loads(re.sub(r"[0-9a-f]{32}", "ID", json.dumps(asked)))
    return named_alike


@pytest.mark.slice(0, "documents")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", PAGES[:-1])
async def test_the_program_of_a_page_with_its_real_client(chat: Chat, folder: Path, tmp_path: Path, page: str) -> None:
    asked = await run_page(chat, page, tmp_path, install(packages_of(page), folder))
    file = RECORDED / f"{page}.json"
    if not file.exists():
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(asked, indent=1) + "\n")
    assert asked == json.loads(file.read_text()), f"other requests than {file.name} holds"


@pytest.mark.skipif(shutil.which("jq") is None or shutil.which("curl") is None, reason="needs curl and jq")
async def test_the_shell_script_of_its_page(chat: Chat, tmp_path: Path) -> None:
    asked = await run_page(chat, "shell", tmp_path, None)
    assert [one["path"] for one in asked] == ["v1/chat/completions"] * 3


@pytest.mark.parametrize("page", PAGES[:-1])
async def test_the_requests_of_a_pages_client_leave_one_transcript(chat: Chat, page: str) -> None:
    """As it was recorded with the real client, which `make test` does not have."""
    async with scripted(chat, SAYS) as (service, engine), service.session() as open, httpx.AsyncClient() as client:
        for asked in json.loads((RECORDED / f"{page}.json").read_text()):
            url = f"{open.base_url.removesuffix('/v1')}/{asked['path']}"
            assert (await client.post(url, json=asked["body"], timeout=60)).status_code == 200
        check(open, engine)


def test_every_page_of_an_agent_is_run() -> None:
    """Pages of harnesses are run in tests/e2e/test_harness_pages.py."""
    pages = [*PAGES, *HARNESSES.names()]
    assert sorted(pages) == sorted(path.stem for path in (PROJECT / "docs" / "agents").glob("*.md"))
