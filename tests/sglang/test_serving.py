"""The page on serving: its server's command on a CPU, with a policy of a base model, and its client."""

from __future__ import annotations

import asyncio
import shlex
import subprocess
import sys
from pathlib import Path

import httpx

from agentrl.engines.sglang.options import SGLangArguments
from agentrl.engines.sglang.process import SGLangProcess
from tests.checkpoint.pairs import ASKED, PAIRS, SAID
from tests.checkpoint.test_serving import export
from tests.e2e.test_docs import commands, write_files
from tests.sglang.conftest import STARTUP

PAGE = "docs/serve.md"
FOLDER = "runs/quickstart/policy"


class PagesServer(SGLangProcess):
    """A server with the arguments of the page's command, after those that a CPU needs."""

    words: tuple[str, ...] = ()

    def command(self, port: int) -> list[str]:
        return [*super().command(port), *self.words, "--port", str(port)]


def test_the_pages_server_ends_where_turns_end(tmp_path: Path) -> None:
    policy = tmp_path / FOLDER
    export(tmp_path / "base", PAIRS["ChatML on Qwen's base, by key"].save_base(tmp_path / "base", "<|im_end|>"), policy)
    write_files(PAGE, tmp_path)
    _, serve, ask = map(shlex.split, commands(PAGE))
    assert serve[:3] == ["python", "-m", "sglang.launch_server"] and ask[:2] == ["python", "client.py"]
    arguments = SGLangArguments(str(policy), device="cpu", context_length=512, max_num_seqs=2)
    server = PagesServer(arguments, None, tmp_path / "server.log")
    server.words = tuple(str(policy) if word == FOLDER else word for word in serve[3:])
    try:
        server.start()
        asyncio.run(server.ready(STARTUP))
        page = [word.replace("http://127.0.0.1:30000", server.url) for word in ask[1:]]
        asked = subprocess.run([sys.executable, *page], cwd=tmp_path, capture_output=True, text=True, timeout=STARTUP)
        assert asked.returncode == 0, asked.stderr
        assert asked.stdout.startswith("stop ChatCompletionMessage("), asked.stdout
        body = {"model": "policy", "messages": ASKED, "temperature": 0, "max_tokens": 60}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=STARTUP).raise_for_status().json()
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] == SAID + 1
    finally:
        server.stop()
