"""What SGLang asks of its kernels on a CPU is there. When SGLang is upgraded, the failures list what is not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentrl.engines.servers.process import free_port
from agentrl.engines.servers.startup_log import last_error
from agentrl.engines.sglang.options import SGLangArguments
from agentrl.engines.sglang.process import SGLangProcess, environment

LAUNCH = Path(__file__).parent / "recording_launch.py"
SERVER_MODULES = [
    "sglang.launch_server",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.layers.attention.torch_native_backend",
    "sglang.srt.models.llama",
    "sglang.srt.models.qwen2",
    "sglang.srt.models.qwen3",
]
IMPORTS = f"""
import importlib, importlib.util, json, sys
spec = importlib.util.spec_from_file_location("recording_launch", sys.argv[1])
launch = importlib.util.module_from_spec(spec)
spec.loader.exec_module(launch)
failed = []
try:
    launch.install()
except Exception as error:
    failed.append(f"agentrl.engines.sglang.cpu: {{type(error).__name__}}: {{error}}")
for name in {SERVER_MODULES!r}:
    try:
        importlib.import_module(name)
    except Exception as error:
        failed.append(f"{{name}}: {{type(error).__name__}}: {{error}}")
print(json.dumps(failed))
"""


def records(path: Path, what: str) -> list[str]:
    lines = path.read_text().splitlines() if path.exists() else []
    return sorted({line.partition(" ")[2] for line in lines if line.startswith(f"{what} ")})


@pytest.mark.slice(0, "matrix")  # for upgrades: the servers of other tests import as much
def test_all_that_is_imported_is_there(tmp_path: Path) -> None:
    record = tmp_path / "record"
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS, str(LAUNCH)],
        env={**environment("cpu"), "RECORD": str(record)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    failed = json.loads(done.stdout.splitlines()[-1])
    missing = [name for name in records(record, "missing") if name.startswith("sgl_kernel.")]
    print(f"{versions()}\nasked for: {records(record, 'had')}")
    assert not missing, f"{versions()}: agentrl/engines/sglang/cpu/kernels.py lacks {missing}"
    assert not failed, f"{versions()}: does not import on a CPU: {failed}"
    assert "sgl_kernel.assign_req_to_token_pool_cpu" in records(record, "had")  # that something was recorded at all


REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0, "sampling_seed": 7},
    "truncated": {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "sampling_seed": 8},
    "stopped": {"temperature": 1.0, "stop": ["e"], "stop_token_ids": [3]},
    "constrained": {"temperature": 1.0, "regex": "[ab]+"},
    "penalised": {"temperature": 1.0, "repetition_penalty": 1.2, "presence_penalty": 0.5},
}


@pytest.fixture(scope="module")
def recording(
    server_arguments: SGLangArguments, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Path, Path]]:
    """A server that records what it asks for from the time it is ready: its url, the record and its log."""
    folder = tmp_path_factory.mktemp("recording")
    record, log, port = folder / "record", folder / "log", free_port("127.0.0.1")
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, str(LAUNCH), *server_arguments.argv(port)],
            env={**environment("cpu"), "RECORD": str(record)},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        while not answers(url):
            assert process.poll() is None, f"{versions()}: {last_error(log.read_text(), SGLangProcess.aftermath)}"
            time.sleep(0.1)
        record.unlink(missing_ok=True)
        yield url, record, log
    finally:
        os.killpg(process.pid, 9)
        process.wait()


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=10.0).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.mark.slice(0, "matrix")  # for upgrades: the servers of other tests call nearly as much
@pytest.mark.parametrize("name", REQUESTS)
def test_all_that_is_called_while_serving_is_there(recording: tuple[str, Path, Path], name: str) -> None:
    url, record, log = recording
    body = {
        "input_ids": [11, 12, 13, 14],
        "return_logprob": True,
        "sampling_params": {"max_new_tokens": 8, **REQUESTS[name]},
    }
    try:
        answer = httpx.post(f"{url}/generate", json=body, timeout=60.0)
    except httpx.HTTPError:
        answer = None
    assert answer is not None, (
        f"{versions()}: {last_error(log.read_text(), SGLangProcess.aftermath)}; missing: {records(record, 'missing')}"
    )
    assert answer.status_code == 200, f"{versions()}: {answer.text}"
    called, missing = records(record, "called"), records(record, "missing")
    print(f"{versions()}\ncalled so far: {called}")
    assert not missing, f"{versions()}: asked for while serving, and not there: {missing}"
    assert name != "seeded" or "torch.ops.sgl_kernel.murmur_hash32_cpu" in called


def versions() -> str:
    return ", ".join(f"{name} {version(name)}" for name in ("sglang", "torch", "transformers", "xgrammar"))
