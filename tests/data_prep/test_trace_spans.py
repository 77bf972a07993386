"""Spans and logs of OpenTelemetry's own instrumentation of openai, in an environment of its own."""

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
from tests.data_prep.test_traces import write_lines, written

PACKAGES = (
    *("openai==2.8.0", "httpx==0.28.1", "wrapt<2", "opentelemetry-sdk==1.45.2"),
    *("opentelemetry-instrumentation-openai-v2==2.4b0", "opentelemetry-util-genai==0.4b0"),
    "opentelemetry-exporter-otlp-proto-common==1.45.2",
)
PROGRAM = """
import sys
from google.protobuf.json_format import MessageToJson
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.instrumentation.openai_v2 import OpenAIInstrumentor
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import ConsoleLogRecordExporter, SimpleLogRecordProcessor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

spans, logs, memory = TracerProvider(), LoggerProvider(), InMemorySpanExporter()
spans.add_span_processor(SimpleSpanProcessor(ConsoleSpanExporter(out=open("spans.json", "w"))))
spans.add_span_processor(SimpleSpanProcessor(memory))
logs.add_log_record_processor(SimpleLogRecordProcessor(ConsoleLogRecordExporter(out=open("logs.json", "w"))))
OpenAIInstrumentor().instrument(tracer_provider=spans, logger_provider=logs)
import openai
client = openai.OpenAI(base_url=sys.argv[1] + "/v1", api_key="unused")
messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 3?"}]
tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}}}
reply = client.chat.completions.create(model="m", messages=messages, tools=[tool])
messages += [reply.choices[0].message, {"role": "tool", "tool_call_id": "c1", "content": "5"}]
client.chat.completions.create(model="m", messages=messages, tools=[tool])
open("otlp.jsonl", "w").write(MessageToJson(encode_spans(memory.get_finished_spans()), indent=None) + "\\n")
"""
LATEST = {"OTEL_SEMCONV_STABILITY_OPT_IN": "gen_ai_latest_experimental"}
CAPTURE = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"


def completion(number: int, message: dict[str, Any], end: str) -> dict[str, Any]:
    choice = {"index": 0, "finish_reason": end, "message": {"role": "assistant", **message}}
    head = {"id": f"chatcmpl-{number}", "object": "chat.completion", "created": 1_800_000_000, "model": "m-2"}
    return {**head, "choices": [choice], "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}}


@pytest.mark.slice(0, "documents")
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("given", "files"),
    [
        ({CAPTURE: "true"}, ("spans.json", "logs.json")),
        ({CAPTURE: "true"}, ("logs.json",)),
        ({**LATEST, CAPTURE: "SPAN_AND_EVENT"}, ("spans.json",)),
        ({**LATEST, CAPTURE: "SPAN_AND_EVENT"}, ("otlp.jsonl",)),
        ({**LATEST, CAPTURE: "SPAN_AND_EVENT"}, ("logs.json",)),
        ({**LATEST, CAPTURE: "EVENT_ONLY"}, ("spans.json", "logs.json")),
    ],
    ids=["1.36", "1.36, logs alone", "console", "otlp", "logs alone", "events"],
)
def test_the_instrumentation_of_openai(
    pytestconfig: pytest.Config, tmp_path: Path, given: dict[str, str], files: tuple[str, ...]
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    packages = install(PACKAGES, pytestconfig.cache.mkdir("clients"))
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    with serving() as server:
        server.answers.append(completion(1, {"content": None, "tool_calls": [call]}, "tool_calls"))
        server.answers.append(completion(2, {"content": "five"}, "stop"))
        words = [sys.executable, "program.py", server.url]
        subprocess.run(words, cwd=tmp_path, env={**os.environ, **given, "PYTHONPATH": str(packages)}, check=True)
    (tmp_path / "tools.json").write_text('[{"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}}]')
    sources = [str(tmp_path / name) for name in files]
    more = ["--tools", str(tmp_path / "tools.json"), "--out", str(tmp_path / "out")]
    assert main(["--source", *sources, *more]) == 0
    (row,) = written(tmp_path / "out")
    texts = [(one["role"], one["content"]) for one in row["messages"]]
    assert texts == [
        ("system", "Be brief."),
        ("user", "2 + 3?"),
        ("assistant", ""),
        ("tool", "5"),
        ("assistant", "five"),
    ]
    assert row["messages"][2]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert json.loads((tmp_path / "out" / "report.json").read_text())["dropped"] == {}


def attributes(**given: str) -> list[dict[str, Any]]:
    """Attributes as OTLP writes them."""
    return [{"key": key, "value": {"stringValue": value}} for key, value in given.items()]


def events(*records: dict[str, Any]) -> dict[str, Any]:
    return {"resourceLogs": [{"scopeLogs": [{"logRecords": list(records)}]}]}


def details(number: int, span: str = "", **more: str) -> dict[str, Any]:
    """An event with all of a call."""
    said = {
        f"gen_ai.{side}.messages": json.dumps([{"role": role, "parts": [{"type": "text", "content": text}]}])
        for side, role, text in (("input", "user", f"q{number}"), ("output", "assistant", f"a{number}"))
    }
    name = "gen_ai.client.inference.operation.details"
    given = {"gen_ai.operation.name": "chat", **said, **more}
    time = str(1_800_000_000_000_000_000 + number)
    return {"eventName": name, "spanId": span, "timeUnixNano": time, "attributes": attributes(**given)}


def said(number: int, *parts: str, **more: str) -> list[dict[str, Any]]:
    """Events up to version 1.36."""
    body = {
        "user": {"content": f"q{number}"},
        "choice": {"finish_reason": "stop", "message": f'{{"content": "a{number}"}}'},
    }
    names = {"user": "gen_ai.user.message", "choice": "gen_ai.choice"}
    return [
        {"eventName": names[part], "body": {"kvlistValue": {"values": attributes(**body[part])}}, **more}
        for part in parts
    ]


def talks(tmp_path: Path, *records: dict[str, Any]) -> list[str]:
    """The texts of each row."""
    source = write_lines(tmp_path / "log.jsonl", list(records))
    assert main(["--source", str(source), "--out", str(tmp_path / "out")]) == 0
    return [" ".join(one["content"] for one in row["messages"]) for row in written(tmp_path / "out")]


ID, TRACE = "ab" * 8, "cd" * 16
ZEROS = {"spanId": "0" * 16, "traceId": "0" * 32}
REQUEST = {
    "resourceSpans": [
        {
            "scopeSpans": [
                {
                    "spans": [
                        {"spanId": ID, "traceId": TRACE, "name": "POST", "startTimeUnixNano": "1800000000000000000"}
                    ]
                }
            ]
        }
    ]
}


@pytest.mark.parametrize("span", ["", "0" * 16, "AAAAAAAAAAA=", ID])
def test_each_event_with_an_answer_is_a_call(tmp_path: Path, span: str) -> None:
    """Also where they have no span, and where one span that is no call of a model has them all."""
    log = [events(*(details(number, span) for number in range(3))), events(details(3, span))]
    for more in ([], [REQUEST]):
        assert talks(tmp_path, *more, *log) == ["q0 a0", "q1 a1", "q2 a2", "q3 a3"]
        report = json.loads((tmp_path / "out" / "report.json").read_text())
        assert report["records_used"] == 4 and sum(report["joined_by"].values()) == 4
        assert report["sessions"] == (4 if span != ID else 1 if more else 4)


@pytest.mark.parametrize("order", [("user", "choice"), ("choice", "user")])
@pytest.mark.parametrize("more", [{}, ZEROS, {"spanId": ID}])
def test_old_events_of_several_calls_are_told_apart(
    tmp_path: Path, order: tuple[str, str], more: dict[str, str]
) -> None:
    """Messages of one user never stand in the conversation of another."""
    log = [events(*said(1, *order, **more), *said(2, *order, **more)), events(*said(3, *order, **more))]
    assert talks(tmp_path, *log) == ["q1 a1", "q2 a2", "q3 a3"]
    mixed = zip(said(1, *order, traceId=TRACE), said(2, *order, traceId="ef" * 16), strict=True)
    assert talks(tmp_path, events(*(one for pair in mixed for one in pair))) == ["q1 a1", "q2 a2"]


def test_events_without_messages_and_evaluations_are_counted_one_by_one(tmp_path: Path) -> None:
    bare = {"eventName": "gen_ai.client.inference.operation.details", "attributes": []}
    verdict = {"gen_ai.evaluation.name": "thumbs", "gen_ai.evaluation.score.label": "up", "gen_ai.response.id": "r1"}
    judged = {"eventName": "gen_ai.evaluation.result", "attributes": attributes(**verdict)}
    log = [events(judged, details(1, **{"gen_ai.response.id": "r1"}), bare, bare, details(2), {"body": "started"})]
    assert talks(tmp_path, *log) == ["q1 a1", "q2 a2"]
    assert [row["feedback"] for row in written(tmp_path / "out")] == [1, None]
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["records"] == 5 and report["dropped"]["a span without its messages"]["count"] == 2
