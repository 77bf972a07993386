"""The count of published templates, on templates of the tests; test-all counts the published ones."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from agentrl.chat.formats.template import TemplateFormat
from agentrl.tool import ToolSchema
from agentrl.trajectory import Message
from benchmarks.templates.__main__ import failures, table
from benchmarks.templates.drive import EXACT, LEFT_OUT, REFUSED, TOOLLESS, UNWRITTEN, WRONG, drive
from benchmarks.templates.packages import Package, read_templates
from tests.chat import templates


def test_a_template_that_is_driven_exactly() -> None:
    driven = drive(templates.HERMES)
    assert driven.format == "template:hermes" and driven.result == EXACT
    assert len(driven.kinds) == 11 and {outcome for outcome, _ in driven.kinds.values()} == {EXACT}


def test_kinds_that_a_template_does_not_write_are_named() -> None:
    driven = drive(templates.LLAMA)
    assert driven.format == "template:llama3_json" and driven.result == "exact, but"
    assert {kind: outcome for kind, (outcome, _) in driven.kinds.items() if outcome != EXACT} == {
        "parallel": UNWRITTEN,
        "text beside a call": LEFT_OUT,
        "reasoning": LEFT_OUT,
    }


def test_a_template_without_tools_is_refused() -> None:
    driven = drive(templates.IGNORES_TOOLS)
    assert driven.result == TOOLLESS and "its template writes no tool calls" in driven.refused
    assert driven.kinds["plain turns"] == (EXACT, "") and driven.kinds["calls"] == (REFUSED, "tools")


def test_tools_that_stand_in_a_system_message_alone() -> None:
    template = templates.HERMES.replace("{%- if tools %}", "{%- if tools and messages[0].role == 'system' %}", 1)
    driven = drive(template)
    assert driven.kinds["no system"][0] == REFUSED and "its template ignores tools" in driven.kinds["no system"][1]
    assert {outcome for kind, (outcome, _) in driven.kinds.items() if kind != "no system"} == {EXACT}


@pytest.mark.parametrize("damage", ["bridge", "reading", "mask"])
def test_what_differs_without_an_error_is_wrong(monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    bridge, sampled = TemplateFormat.bridge, TemplateFormat.sampled

    def short(
        self: TemplateFormat, ids: Sequence[int], messages: Sequence[Message], tools: Sequence[ToolSchema] | None
    ) -> list[int]:
        return bridge(self, ids, messages, tools)[1:]

    def without_end(self: TemplateFormat, message: Message, tools: Sequence[ToolSchema] | None) -> list[int]:
        return sampled(self, message, tools)[:-1]

    text = templates.HERMES
    if damage == "bridge":
        monkeypatch.setattr("benchmarks.templates.drive.start_up_check", lambda *_: "")
        monkeypatch.setattr(TemplateFormat, "bridge", short)
    elif damage == "mask":
        monkeypatch.setattr("benchmarks.templates.drive.start_up_check", lambda *_: "")
        monkeypatch.setattr(TemplateFormat, "sampled", without_end)
    else:  # A word that belongs to no call, and that no frame takes off.
        text = text.replace("{%- for call in message.tool_calls", "{{- 'So: ' if message.tool_calls }}\\g<0>", 1)
        text = text.replace("\\g<0>", "{%- for call in message.tool_calls", 1)
    driven = drive(text)
    assert driven.result == WRONG
    assert driven.kinds["calls"][0] == WRONG
    assert any("calls" in line for line in failures({"trl": {"t": driven}}))
    assert table({"trl": {"t": driven}}).splitlines()[-1] == "| trl | 1 | 0 | 0 | 0 | 0 | 1 |"


def test_a_package_is_pinned(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "p-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("p/templates/a.jinja", "A")
        wheel.writestr("p/other.py", "B")
    digest = hashlib.sha256((tmp_path / "p-1-py3-none-any.whl").read_bytes()).hexdigest()
    package = Package("p", "p-1-py3-none-any.whl", digest, r"p/templates/([^/]+)\.jinja")
    assert read_templates(package, tmp_path) == {"a": "A"}
    with pytest.raises(SystemExit, match=r"expected the SHA-256 0+, found .*delete the file and try again"):
        read_templates(Package("p", package.file, "0" * 64, package.templates), tmp_path)
