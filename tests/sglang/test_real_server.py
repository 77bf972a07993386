"""The comparison of the embedded engine with servers, small: all sample the same number of tokens."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest

from agentrl.engines.sglang.process import SGLangProcess
from agentrl.model.packed import load_model
from benchmarks.real.engine import made_prompts
from benchmarks.real.server import Served, compare, over_sglang


async def test_engine_and_server_are_compared(
    server: SGLangProcess, model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = load_model(str(model_dir))
    servers = {"SGLang": Served(server, partial(over_sglang, server.url, model_dir))}
    await compare(model, servers, made_prompts(model, 4, 2, 8), 3, rounds=1)
    pattern = r"^4 x 3, tokens a CPU-second: embedded [\d.]+, SGLang [\d.]+; embedded over SGLang: [\d.]+$"
    assert re.search(pattern, capsys.readouterr().out, re.M)
