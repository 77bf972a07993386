"""A policy that calls a tool, and an empty working directory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl.tool import FunctionTool
from tests.e2e.taught import teach


def multiply(a: int, b: int) -> int:
    """Multiplies two integers.

    Args:
        a: The first integer.
        b: The second integer.
    """
    return a * b


@pytest.fixture(scope="session")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that multiplies 12 by 7 with the tool, most of the time."""
    folder = tmp_path_factory.mktemp("taught") / "policy"
    call = '<tool_call>\n{"name": "multiply", "arguments": {"a": 12, "b": 7}}\n</tool_call><|im_end|>'
    seen = "\n<|im_start|>tool\n84<|im_end|>\n<|im_start|>assistant\n"
    asked = [{"role": "user", "content": "What is 12 * 7?"}]
    teach(folder, [call, "It is 84.<|im_end|>"], [seen], asked, [FunctionTool(multiply).schema], steps=120)
    return folder


@pytest.fixture
def at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    yield tmp_path
