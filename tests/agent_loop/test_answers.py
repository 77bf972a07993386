"""One contract for the answers of tools: whoever makes them, a call has the same record."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import re
import sys
import threading
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml
from aiohttp import web
from PIL import Image

from agentrl.agent_loop.base import AgentLoop
from agentrl.environments.loop import EnvironmentLoop
from agentrl.environments.sidecar import EnvironmentOptions
from agentrl.errors import CodeError, DataError
from agentrl.rollouts.local import on_resume_of
from agentrl.system.call_journal import CallJournal, Entry
from agentrl.system.cassette import Cassette
from agentrl.tool import ErrorKind, Tool, ToolError, ToolResponse, ToolSchema
from agentrl.tool.answers import ANSWERS, answer_of, from_outcome, to_outcome
from agentrl.tool.session import ToolInfrastructureError
from agentrl.tool.toolset import ToolSet
from agentrl.trajectory import Status, ToolAnswer, ToolCallRecord, Trajectory
from agentrl.trajectory.picture import MAX_PIXELS, Picture, image_part, size_of
from agentrl.trajectory.sample import Sample
from agentrl.verl.tools import BaseTool
from agentrl.verl.tools import ToolResponse as VerlResponse
from tests.agent_loop.conftest import Bench, call, sample
from tests.naming import naming
from tests.remote.conftest import FaultyServer
from tests.system.test_call_journal import live

MakeBench = Callable[..., Bench]
LONG = "word " * 400
LIMIT = 60
"""Tokens of an answer."""
FILES = {"out/a.txt": base64.b64encode(b"hi").decode()}
NOTE = "\n[1 images left out: only text can be shown]"
SCHEMA: ToolSchema = {
    "type": "function",
    "function": {
        "name": "do",
        "description": "Do something.",
        "parameters": {"type": "object", "properties": {"what": {"type": "string"}}, "required": ["what"]},
    },
}
CALLS = [
    *(call("do", what=what) for what in ("fine", "long", "refused", "rich")),
    *(call("zzz", what="fine"), call("do", what=1), "<tool_call>\n{no JSON\n</tool_call>", call("do", what="fine")),
]
"""Calls of one message, of which the last one is behind `max_parallel_calls`."""


def png(width: int = 8, height: int = 4) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), (255, 0, 0)).save(file, "PNG")
    return file.getvalue()


@dataclass
class Made:
    """Tools, or a loop that has tools of its own, and a row that uses them."""

    tools: ToolSet | None = None
    row: Sample = field(default_factory=sample)
    loops: Mapping[str, AgentLoop] = field(default_factory=dict)


def tool_set(folder: Path, class_name: str, config: Mapping[str, object], timeout: float) -> ToolSet:
    entry = {"class_name": class_name, "config": dict(config)}
    entry |= {} if class_name.endswith("MCPTools") else {"tool_schema": SCHEMA}
    (folder / "tools.yaml").write_text(yaml.safe_dump({"tools": [entry]}))
    return ToolSet.from_yaml(folder / "tools.yaml", timeout=timeout, max_response_tokens=LIMIT)


SLOW = ToolAnswer("Error (timeout): do gave no answer within 0.5 s", ErrorKind.TIMEOUT)


class Answers:
    """The contract. A maker answers `fine`, `long`, `refused` and `rich`, and never `slow`."""

    gives: ClassVar[frozenset[str]] = frozenset()
    """Parts of an answer, its text aside, that the maker can give: reward, metrics, files, images."""
    refused = ToolAnswer("Error (execution): not this", ErrorKind.REFUSED)
    slow: ClassVar[tuple[ToolAnswer, ...]] = (SLOW,)
    """Answers to a call that gets none in time."""
    on_resume = "answers"

    @abstractmethod
    def make(self, folder: Path, url: str, timeout: float) -> Made:
        """Make tools that answer; `url`: of a server that does."""

    @pytest.fixture
    async def url(self) -> AsyncIterator[str]:
        """Address of a server for makers that ask one."""
        yield ""

    async def play(self, make_bench: MakeBench, made: Made, script: Sequence[str], entries: list[Entry]) -> Trajectory:
        """Run a trajectory that finds the entries of a process before it, and adds its own."""
        limits = {"max_parallel_calls": len(CALLS) - 1, "max_malformed": 9, "tool_response_tokens": LIMIT}
        bench = make_bench(list(script), made.tools, **limits)
        bench.scheduler.loops.update(made.loops)  # type: ignore[attr-defined]
        context, recorded = bench.scheduler.context, live(list(entries))
        bench.engine.said["t/0.0"] = [[]] * sum(one.who.startswith("engine") for one in recorded)
        journal = CallJournal("t/0", entries.append, recorded, on_resume_of(context.tools, context.interactions))
        (request,) = bench.requests(made.row)
        await context.tools.start("a-run")
        try:
            (one,) = await bench.scheduler.run([replace(request, journal=journal)])
        finally:
            await context.tools.close()
            for loop in made.loops.values():
                await loop.close()
        assert one.status is Status.COMPLETED, one.failure
        return one

    async def test_every_kind_of_answer(self, bench: MakeBench, tmp_path: Path, url: str) -> None:
        one = await self.play(bench, self.make(tmp_path, url, 30.0), ["".join(CALLS), "done"], [])
        fine, long, refused, rich, *others = one.tool_calls
        assert fine == ToolCallRecord("do", {"what": "fine"}, ToolAnswer("fine done"))
        assert refused == ToolCallRecord("do", {"what": "refused"}, self.refused)
        assert (long.error, long.truncated) == (None, True) and " tokens cut " in long.response
        assert long.response.startswith("word ") and len(long.response) < len(LONG) / 2
        assert rich.answer == ToolAnswer(
            "rich done" + (NOTE if "images" in self.gives else ""),
            reward=0.5 if "reward" in self.gives else None,
            metrics={"coins": 2.0} if "metrics" in self.gives else {},
            files=FILES if "files" in self.gives else {},
        )
        assert [(record.name, record.arguments, record.error) for record in others] == [
            ("zzz", {"what": "fine"}, ErrorKind.UNKNOWN_TOOL),
            ("do", {"what": 1}, ErrorKind.ARGUMENTS),
            ("", None, ErrorKind.PARSE),
            ("do", {"what": "fine"}, ErrorKind.LIMIT),
        ]
        assert [record.response for record in others] == [
            "Error (unknown_tool): no tool 'zzz'; available: do",
            'Error (arguments): what: 1 is not of type "string"',
            "Error (parse): the call is not valid JSON: "
            "Expecting property name enclosed in double quotes at character 1",
            "Error (limit): only the first 7 tool calls of a message are run; call again.",
        ]
        assert all(record.seconds > 0.0 for record in (fine, long, refused, rich))
        assert not any(record.seconds or record.truncated or record.reward or record.files for record in others)
        shown = [message["content"] for message in one.messages if message["role"] == "tool"]
        assert shown == [record.response for record in one.tool_calls]
        assert one.turns[0].calls == one.tool_calls and one.turns[0].reward == rich.reward
        assert one.metrics.get("coins") == (2.0 if "metrics" in self.gives else None)
        assert one.outline().calls[3].answer == ToolAnswer(reward=rich.reward)

    async def test_a_maker_that_is_too_slow(self, bench: MakeBench, tmp_path: Path, url: str) -> None:
        one = await self.play(bench, self.make(tmp_path, url, 0.5), [call("do", what="slow"), "done"], [])
        (record,) = one.tool_calls
        text = re.sub(r"0\.4\d+ s", "0.475 s", record.answer.text)  # less where the call waited for its turn
        assert (record.name, record.arguments) == ("do", {"what": "slow"})
        assert replace(record.answer, text=text) in self.slow
        assert record.seconds > 0.4

    async def test_after_a_kill_the_record_is_the_same(self, bench: MakeBench, tmp_path: Path, url: str) -> None:
        entries: list[Entry] = []
        script = [call("do", what="rich") + call("do", what="refused"), "done"]
        whole = await self.play(bench, self.make(tmp_path, url, 30.0), script, entries)
        written = len(entries)
        again = await self.play(bench, self.make(tmp_path, url, 30.0), script, entries)
        assert again.tool_calls == whole.tool_calls and again.turns[0].reward == whole.turns[0].reward
        assert again.transcripts == whole.transcripts and len(entries) == written
        if self.on_resume == "answers":
            seconds = [record.seconds for record in whole.tool_calls]
            assert [record.seconds for record in again.tool_calls] == seconds, "the tool is not asked again"


class Do(Tool):
    """A tool of a user's."""

    default_schema = SCHEMA
    asked = 0

    async def execute(self, instance_id: str, arguments: dict[str, Any]) -> ToolResponse:
        Do.asked += 1
        match arguments["what"]:
            case "refused":
                raise ToolError("not this")
            case "slow":
                await asyncio.sleep(60.0)
            case "long":
                return ToolResponse(LONG)
            case "rich":
                return ToolResponse("rich done", 0.5, {"coins": 2.0}, FILES, [png()])
        return ToolResponse(f"{arguments['what']} done")


class TestOwnTool(Answers):
    gives = frozenset({"reward", "metrics", "files", "images"})

    def make(self, folder: Path, url: str, timeout: float) -> Made:
        return Made(tool_set(folder, f"{__name__}.Do", {}, timeout))


class TestCassette(TestOwnTool):
    """The answers of the first play are replayed, and no tool is asked."""

    async def play(self, make_bench: MakeBench, made: Made, script: Sequence[str], entries: list[Entry]) -> Trajectory:
        path = self.folder / "answers.jsonl"
        before = [*entries]
        for mode in ("record", "replay"):
            asked, entries[:] = Do.asked, before
            assert made.tools is not None
            made.tools.cassette = Cassette(path, mode)
            one = await super().play(make_bench, made, script, entries)
        assert Do.asked == asked, "the cassette answers"
        return one

    def make(self, folder: Path, url: str, timeout: float) -> Made:
        self.folder = folder
        return super().make(folder, url, timeout)


class VerlDo(BaseTool):
    """A tool of verl's users."""

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        match parameters["what"]:
            case "refused":
                raise ConnectionError("not this")
            case "slow":
                await asyncio.sleep(60.0)
            case "long":
                return VerlResponse(text=LONG), None, {}
            case "rich":
                return VerlResponse(text="rich done", image=[png()]), 0.5, {"coins": 2, "words": "left out"}
        return VerlResponse(text=f"{parameters['what']} done"), None, {}


class TestVerlTool(Answers):
    gives = frozenset({"reward", "metrics", "images"})
    refused = ToolAnswer("Error (execution): ConnectionError: not this", ErrorKind.EXECUTION)

    def make(self, folder: Path, url: str, timeout: float) -> Made:
        return Made(tool_set(folder, f"{__name__}.VerlDo", {"on_resume": "answers"}, timeout))


async def answer(request: web.Request) -> web.StreamResponse:
    """Answer as a server of the tool."""
    what = (await request.json())["what"]
    if what == "slow":
        await asyncio.sleep(60.0)
    return web.Response(status=400 if what == "refused" else 200, text=ANSWERED[what])


ANSWERED = {"fine": "fine done", "long": LONG, "refused": "not this", "rich": "rich done", "slow": ""}


LATE = ToolAnswer("Error (execution): RemoteUnavailable: tool do: no answer within 0.475 s", ErrorKind.EXECUTION)
"""A remote client gives up by itself, right before the call's own deadline, which may pass first on a busy machine."""


class TestHttpTool(Answers):
    slow = (LATE, SLOW)
    refused = ToolAnswer("Error (execution): status 400: not this", ErrorKind.REFUSED)

    @pytest.fixture
    async def url(self) -> AsyncIterator[str]:
        server = FaultyServer([answer])
        await server.start()
        yield server.url
        await server.stop()

    def make(self, folder: Path, url: str, timeout: float) -> Made:
        config = {"url": url, "method": "POST", "on_error": "tell"}
        return Made(tool_set(folder, "tools.http_endpoint.HttpTool", config, timeout))


MCP = f"""
import base64, json, sys

ANSWERED, TOOL, IMAGE = {ANSWERED!r}, {SCHEMA["function"]!r}, {base64.b64encode(png()).decode()!r}
TOOL = {{"name": TOOL["name"], "description": TOOL["description"], "inputSchema": TOOL["parameters"]}}
for line in sys.stdin:
    message = json.loads(line)
    method, number = message["method"], message.get("id")
    if number is None or (method == "tools/call" and message["params"]["arguments"]["what"] == "slow"):
        continue
    if method == "initialize":
        known = {{"tools": {{}}}}
        version = message["params"]["protocolVersion"]
        result = {{"protocolVersion": version, "capabilities": known, "serverInfo": {{"name": "s", "version": "1"}}}}
    elif method == "tools/list":
        result = {{"tools": [TOOL]}}
    elif method == "tools/call":
        what = message["params"]["arguments"]["what"]
        result = {{"content": [{{"type": "text", "text": ANSWERED[what]}}], "isError": what == "refused"}}
        if what == "rich":
            result["content"].append({{"type": "image", "data": IMAGE, "mimeType": "image/png"}})
    else:
        error = {{"code": -32601, "message": method}}
        print(json.dumps({{"jsonrpc": "2.0", "id": number, "error": error}}), flush=True)
        continue
    print(json.dumps({{"jsonrpc": "2.0", "id": number, "result": result}}), flush=True)
"""


class TestMcpTool(Answers):
    gives = frozenset({"images"})
    slow = (LATE, SLOW)
    refused = ToolAnswer("Error (execution): not this", ErrorKind.EXECUTION)

    def make(self, folder: Path, url: str, timeout: float) -> Made:
        pytest.importorskip("mcp", reason="the extra `mcp` is not installed")
        (folder / "server.py").write_text(MCP)
        config = {"command": [sys.executable, "-I", "-S", str(folder / "server.py")], "on_error": "tell"}
        return Made(tool_set(folder, "tools.mcp.MCPTools", config, timeout))


ENVIRONMENT = f"""
ANSWERED = {ANSWERED!r}

def tasks(split, seed, count):
    yield {{}}

def start(task, seed):
    return dict(task), None

def step(episode, action):
    answers = [ANSWERED[one["arguments"]["what"]] for one in action["calls"]]
    return {{"answers": answers, "observation": None, "reward": None, "done": not answers}}

def score(episode):
    return 1.0
"""


class TestEnvironment(Answers):
    """An environment's answers are texts; its rewards are the turn's, and its errors are the trajectory's."""

    refused = ToolAnswer("not this")
    on_resume = "calls"
    test_a_maker_that_is_too_slow = None  # type: ignore[assignment]  # it fails the trajectory, which is tried again

    def make(self, folder: Path, url: str, timeout: float) -> Made:
        (folder / "doing.py").write_text(ENVIRONMENT)
        task = json.dumps({"task": {"tools": [SCHEMA]}, "seed": 7})
        row = sample("env", data_source="environment/env", extra_info={"environment": task})
        return Made(None, row, {"env": EnvironmentLoop(EnvironmentOptions(environment=str(folder / "doing.py")))})


def test_an_answer_is_written_and_read_whole() -> None:
    whole = ToolAnswer("a", ErrorKind.TIMEOUT, 0.5, 2.0, metrics={"n": 1.0}, files=FILES, images=(Picture(png()),))
    back = ANSWERS.read(ANSWERS.write(whole))
    assert back == whole and back.seconds == 2.0 and back.error is ErrorKind.TIMEOUT


@pytest.mark.parametrize(
    ("kept", "answer"),
    [
        ({"text": "a"}, ToolAnswer("a")),
        ({"text": "a", "reward": 0.5, "metrics": {}, "error": None, "is_fault": False}, ToolAnswer("a", reward=0.5)),
        (
            {"text": "a", "error": "limit", "seconds": 1.0, "files": FILES},
            ToolAnswer("a", ErrorKind.LIMIT, files=FILES),
        ),
    ],
)
def test_answers_of_earlier_releases_are_read(kept: dict[str, object], answer: ToolAnswer) -> None:
    assert from_outcome(kept) == answer
    assert list(to_outcome(answer)) == [
        *("text", "reward", "metrics", "error", "is_fault", "is_code_error", "seconds", "files", "images")
    ]


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ({"text": "gone", "is_fault": True}, ToolInfrastructureError),
        ({"text": "tool do: TypeError", "is_fault": True, "is_code_error": True}, CodeError),
    ],
)
async def test_a_fault_on_a_cassette_of_an_earlier_release_comes_again(
    tmp_path: Path, line: dict[str, object], error: type[Exception]
) -> None:
    tools = ToolSet.from_tools([Do()])
    tools.cassette = Cassette(tmp_path / "a.jsonl", "record")
    session = await tools.open("a.0", {})
    tools.cassette.record(session._asked(tools.slots["do"], "execute", {"what": "fine"}), line)
    tools.cassette = Cassette(tmp_path / "a.jsonl", "replay")
    with pytest.raises(error, match=str(line["text"])):
        await session.call("do", {"what": "fine"})


async def test_large_images_are_decoded_outside_the_event_loop_and_their_pixels_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoded, decode, here = list[bool](), Picture.decode, threading.current_thread()

    def watched(one: Picture) -> Image.Image:
        decoded.append(threading.current_thread() is here)
        return decode(one)

    monkeypatch.setattr(Picture, "decode", watched)
    large = Image.new("RGB", (512, 512))
    for images, on_loop in (
        ([png(), png()], True),
        ([png(512, 511)], True),
        ([png(512, 512)], False),
        ([large], False),
    ):
        decoded.clear()
        answer = await answer_of(ToolResponse("", images=images), 0.0, images=True)
        assert [one.size for one in answer.images] == [
            Picture(one).size if isinstance(one, bytes) else one.size for one in images
        ]
        assert decoded == [on_loop] * len(images)
    assert size_of([{"role": "user", "content": [image_part(answer.images[0])]}]) >= 512 * 512 // 16
    with naming(DataError, ("90000000", str(MAX_PIXELS))):
        await answer_of(ToolResponse("", images=[png(9000, 5000)] * 2), 0.0, images=True)
    assert len(decoded) == 1
