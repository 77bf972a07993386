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
from data_prep.traces import main
from tests.data_prep.played import serving
from tests.data_prep.test_traces import written

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
