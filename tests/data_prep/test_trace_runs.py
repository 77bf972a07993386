"""Runs of LangSmith: of a real LangGraph agent and of wrapped clients, in an environment of their own; and bad ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.packages import install
from data_prep.traces.__main__ import main
from tests.data_prep.played import serving
from tests.data_prep.test_trace_sessions import ONE, TWO, rows
from tests.data_prep.test_trace_spans import completion
from tests.data_prep.test_traces import write_lines, written

PACKAGES = (
    *("langchain-core==1.8.3", "langchain-openai==1.7.4", "langchain-anthropic==1.7.10", "langgraph==1.2.24"),
    *("langsmith==0.15.1", "openai==3.57.0", "anthropic==2.14.0"),
)
PROGRAM = """
import json, os, sys, threading, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
runs, votes = {}, []

class Service(BaseHTTPRequestHandler):
    def answer(self, body):
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *given):
        pass
    def do_GET(self):
        limits = {"use_multipart_endpoint": False, "size_limit": 100, "size_limit_bytes": 20000000}
        limits |= {"scale_up_qsize_trigger": 1000, "scale_up_nthreads_limit": 2, "scale_down_nempty_trigger": 4}
        self.answer(json.dumps({"version": "0.13.0", "batch_ingest_config": limits}).encode())
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        for one in (*body.get("post", ()), *body.get("patch", ())):
            runs.setdefault(one["id"], {"session_id": "project"}).update(
                {name: value for name, value in one.items() if value is not None}
            )
        if "key" in body:
            votes.append({"session_id": "project", **body})
        self.answer(b"{}")

service = ThreadingHTTPServer(("127.0.0.1", 0), Service)
threading.Thread(target=service.serve_forever, daemon=True).start()
os.environ.update(
    LANGSMITH_TRACING="true", LANGSMITH_ENDPOINT=f"http://127.0.0.1:{service.server_port}", LANGSMITH_API_KEY="unused",
    OPENAI_API_KEY="unused", ANTHROPIC_API_KEY="unused", OPENAI_BASE_URL=sys.argv[1] + "/v1",
)
import anthropic, openai
from langchain_anthropic import ChatAnthropic
from langchain_core.tools import tool
from langchain_core.tracers.langchain import wait_for_all_tracers
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent
from langsmith import Client
from langsmith.wrappers import wrap_anthropic, wrap_openai

@tool
def multiply(a: int, b: int) -> int:
    "Multiply two numbers."
    return a * b

for thread, model in (("t-1", ChatOpenAI(model="m")), ("t-2", ChatAnthropic(model="c", base_url=sys.argv[1]))):
    agent = create_react_agent(model, [multiply], prompt="Be brief.")
    agent.invoke({"messages": [("user", "6 * 7?")]}, {"configurable": {"thread_id": thread}})
schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
function = {"type": "function", "function": {"name": "multiply", "parameters": schema}}
wrap_openai(openai.OpenAI()).chat.completions.create(
    model="m",
    tools=[function],
    messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 * 3?"}],
)
asked = [{"role": "user", "content": "4 * 5?"}]
client = wrap_anthropic(anthropic.Anthropic(base_url=sys.argv[1]))
own = [{"name": "multiply", "input_schema": schema}]
said = client.messages.create(model="c", max_tokens=9, system="Be brief.", messages=asked, tools=own)
asked.append({"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in said.content]})
asked.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_3", "content": "20"}]})
client.messages.create(model="c", max_tokens=9, system="Be brief.", messages=asked, tools=own)
wait_for_all_tracers()
service_client = Client()
service_client.flush()
while sum("outputs" in run and "end_time" in run for run in runs.values()) < len(runs) or len(runs) < 10:
    time.sleep(0.05)
(root,) = [run for run in runs.values() if run["name"] == "LangGraph" and "t-1" in json.dumps(run["extra"])]
(last,) = [run for run in runs.values() if "4 * 5?" in json.dumps(run["inputs"]) and "20" in json.dumps(run["inputs"])]
for run, key, score in ((root, "user_score", 1), (last, "user_score", 0), (root, "toxicity", 0.9)):
    service_client.create_feedback(run_id=run["id"], trace_id=run["trace_id"], key=key, score=score, comment="so")
service_client.flush()
while len(votes) < 3:
    time.sleep(0.05)
for name, records in (("runs", runs.values()), ("feedback", votes)):
    with open(f"{name}.jsonl", "w") as file:
        file.writelines(json.dumps(one) + "\\n" for one in records)
"""
CALL = {"a": 6, "b": 7}


def block_answer(number: int, text: str, call: dict[str, Any] | None = None) -> dict[str, Any]:
    blocks: list[dict[str, Any]] = [{"type": "text", "text": text}]
    if call is not None:
        blocks.append({"type": "tool_use", "id": f"toolu_{number}", "name": "multiply", "input": call})
    head = {"id": f"msg_{number}", "type": "message", "role": "assistant", "model": "c-2", "content": blocks}
    end = "end_turn" if call is None else "tool_use"
    return {**head, "stop_reason": end, "stop_sequence": None, "usage": {"input_tokens": 1, "output_tokens": 1}}


@pytest.mark.slice(0, "documents")
@pytest.mark.timeout(600)
def test_a_langgraph_agent_and_wrapped_clients(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    packages = install(PACKAGES, pytestconfig.cache.mkdir("clients"))
    call = {"id": "c1", "type": "function", "function": {"name": "multiply", "arguments": json.dumps(CALL)}}
    with serving() as server:
        server.answers += [
            completion(1, {"content": None, "tool_calls": [call]}, "tool_calls"),
            completion(2, {"content": "42"}, "stop"),
            block_answer(1, "I multiply.", CALL),
            block_answer(2, "It is 42."),
            completion(3, {"content": "6"}, "stop"),
            block_answer(3, "", {"a": 4, "b": 5}),
            block_answer(4, "20"),
        ]
        words = [sys.executable, "program.py", server.url]
        subprocess.run(words, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(packages)}, check=True, timeout=300)
    sources = [str(tmp_path / name) for name in ("runs.jsonl", "feedback.jsonl")]
    assert main(["--source", *sources, "--out", str(tmp_path / "out")]) == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["calls"] == {"langsmith": 7} and not report["dropped"] and not report["left_out"]
    assert report["skipped"].keys() == {"no call of a model: chain", "no call of a model: tool"}
    assert list(report["feedback"]["problems"]) == ["a score of another name"]
    found = {row["messages"][1]["content"]: row for row in written(tmp_path / "out")}
    talks = [" | ".join(one["content"] for one in row["messages"]) for row in written(tmp_path / "out")]
    assert sorted(talks) == [
        "Be brief. | 2 * 3? | 6",
        "Be brief. | 4 * 5? |  | 20 | 20",
        "Be brief. | 6 * 7? |  | 42 | 42",
        "Be brief. | 6 * 7? | I multiply. | 42 | It is 42.",
    ]
    assert {row["session"] for row in found.values()} >= {"t-2"} and len(found) == 3
    assert {row["feedback"] for row in written(tmp_path / "out") if row["session"] == "t-1"} == {1}
    assert found["4 * 5?"]["feedback"] == 0 and found["2 * 3?"]["feedback"] is None
    for row in written(tmp_path / "out"):
        (tool,) = json.loads(row["tools"])
        assert tool["function"]["name"] == "multiply" and tool["function"]["parameters"]["type"] == "object"
        for message in row["messages"]:
            for one in message["tool_calls"] or ():
                assert one["function"]["name"] == "multiply" and set(json.loads(one["function"]["arguments"])) == {
                    *"ab"
                }


def message(kind: str, content: Any, **more: Any) -> dict[str, Any]:
    """A message as LangChain serializes it."""
    id = ["langchain", "schema", "messages", f"{kind}Message"]
    return {"lc": 1, "type": "constructor", "id": id, "kwargs": {"content": content, **more}}


def run(prompt: list[Any], *answers: Any, trace: str = "t", **more: Any) -> dict[str, Any]:
    """A run of a chat model of LangChain's; `session_id` is the project, as the service has it."""
    generations = [{"text": "", "type": "ChatGeneration", "message": one} for one in answers]
    outputs = {"generations": [generations], "type": "LLMResult"}
    head = {"id": f"run-{len(prompt)}", "trace_id": trace, "run_type": "llm", "session_id": "project"}
    return {**head, "inputs": {"messages": [prompt]}, "outputs": outputs, **more}


ASKED = [message("System", "Be brief."), message("Human", "a", type="human")]
SAID = message("AI", "1", type="ai")


def test_forms_of_messages_and_records(tmp_path: Path) -> None:
    """Chunks, flat messages, `messages_to_dict`, OpenAI's; JSON text; a page of the API, and children of a chain."""
    flat = [{"type": "system", "content": "Be brief."}, {"type": "human", "content": [{"type": "text", "text": "a"}]}]
    held = [{"type": "system", "data": {"content": "Be brief."}}, {"role": "user", "content": "a"}]
    text = {name: json.dumps(value) for name, value in run(ASKED, SAID).items() if name in ("inputs", "outputs")}
    chain = {"id": "t", "trace_id": "t", "run_type": "chain", "session_id": "project", "inputs": {"x": 1}}
    log: list[dict[str, Any]] = [
        {"runs": [run(ASKED, message("AI", "1", type="AIMessageChunk")), {**chain, "outputs": {}}]},
        run(flat, SAID),
        run(held, SAID),
        {**run(ASKED, SAID), **text},
        {**chain, "child_runs": [run(ASKED, SAID)]},
    ]
    assert rows(tmp_path, *log) == [(ONE, 0, "a 1")]
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["calls"] == {"langsmith": 5} and report["repeated_calls"] == 4 and not report["dropped"]


def test_reasoning_is_kept_and_parts_that_are_calls_are_not_said_twice(tmp_path: Path) -> None:
    tools = [{"name": "f", "input_schema": {"type": "object", "properties": {"x": {}}}}]
    parts = [
        {"type": "thinking", "thinking": "Hm."},
        {"type": "text", "text": "1"},
        {"type": "tool_use", "id": "c", "name": "f", "input": {"x": 1}},
    ]
    said = message("AI", parts, tool_calls=[{"name": "f", "args": {"x": 1}, "id": "c", "type": "tool_call"}])
    rows(tmp_path, run(ASKED, said, extra={"invocation_params": {"tools": tools}}))
    (row,) = written(tmp_path / "out")
    (call,) = row["messages"][-1]["tool_calls"]
    assert (row["messages"][-1]["content"], row["messages"][-1]["reasoning_content"]) == ("1", "Hm.")
    assert call["function"] == {"name": "f", "arguments": '{"x": 1}'}


def test_a_project_is_no_session(tmp_path: Path) -> None:
    """Two users' runs share their project; a thread joins the runs of its metadata."""
    other = [ASKED[0], message("Human", "x")]
    thread: dict[str, Any] = {"extra": {"metadata": {"thread_id": "th"}}}
    later = [*ASKED, SAID, message("Human", "b")]
    log = [run(ASKED, SAID), run(other, message("AI", "y"), trace="u")]
    assert rows(tmp_path, *log) == [(ONE, 0, "a 1"), (TWO, 0, "x y")]
    log = [run(ASKED, SAID, **thread), run(later, message("AI", "2"), trace="u", **thread)]
    assert rows(tmp_path, *log) == [("th", 0, "a 1 b 2")]


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ({"inputs": {"prompts": ["a"]}}, "a prompt that is plain text"),
        ({"inputs": {"messages": [ASKED, ASKED]}}, "a run of several prompts"),
        ({"inputs": {"messages": [[message("Remove", "")]]}}, "a message of an unknown kind"),
        ({"inputs": {"messages": [[message("Human", [{"type": "image_url", "image_url": {}}])]]}}, "an image"),
        ({"outputs": None, "error": "RateLimitError()"}, "the answer is an error"),
        ({"outputs": None}, "a call without an answer"),
        ({"outputs": {"generations": [[]]}}, "a call without an answer"),
        (
            run(ASKED, message("AI", "1", response_metadata={"stop_reason": "max_tokens"})),
            "an answer that was cut by a limit",
        ),
    ],
)
def test_runs_that_cannot_be_used(tmp_path: Path, bad: dict[str, Any], reason: str) -> None:
    source = write_lines(tmp_path / "log.jsonl", [run(ASKED, SAID), {**run(ASKED, SAID), **bad}])
    assert main(["--source", str(source), "--out", str(tmp_path / "out")]) == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    (found,) = report["dropped"].items()
    assert found[0] == reason and "log.jsonl:2" in found[1]["first"] and report["rows"] == 1
