"""Server processes: start-up, what is said when it fails, and that nothing of them is left."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from agentrl.engines.contract import EngineError
from agentrl.engines.servers.client import ServerFailed
from agentrl.engines.servers.process import living
from agentrl.engines.sglang.client import SGLangClient
from agentrl.engines.sglang.options import RESERVED, SGLangArguments
from agentrl.engines.sglang.process import SGLangProcess
from agentrl.system.http import http_client
from tests.engines.contract import MAX_MODEL_LEN, MAX_NUM_SEQS
from tests.forked import forked
from tests.sglang.conftest import STARTUP, StartServer
from tests.waiting import until

pytestmark = pytest.mark.timeout(600)  # two starts, on a busy machine

STARTER = """
import asyncio, os, sys, time
from pathlib import Path
from agentrl.engines.sglang.options import SGLangArguments
from agentrl.engines.sglang.process import SGLangProcess

model, log, when = sys.argv[1:]
arguments = SGLangArguments(model, device="cpu", context_length=64, max_num_seqs=2)
process = SGLangProcess(arguments, None, Path(log))
process.start()
if when == "serving":
    asyncio.run(process.ready(150.0))
child = os.fork()
if child > 0:
    print(process.pid, child, flush=True)
time.sleep(300)
"""
"""Starts a server, and a child that holds all that its parent held open."""


def test_the_shared_server_serves_what_it_was_asked_for(server: SGLangProcess, model_dir: Path) -> None:
    info = httpx.get(f"{server.url}/server_info", timeout=30.0).json()
    assert info["model_path"] == str(model_dir)
    assert info["context_length"] == MAX_MODEL_LEN + RESERVED
    assert (info["max_running_requests"], info["host"]) == (MAX_NUM_SEQS, "127.0.0.1")
    assert info["weight_version"] == "0"  # at its start; by now other tests have sent weights
    assert server.exited is None
    environment = Path(f"/proc/{server.pid}/environ").read_bytes().split(b"\0")
    assert b"OMP_WAIT_POLICY=PASSIVE" in environment
    limits = Path(f"/proc/{server.pid}/limits").read_text().split("Max open files")[1].split()[:2]
    assert limits[0] == limits[1]


def test_a_server_that_runs_is_not_started_again(server: SGLangProcess) -> None:
    with pytest.raises(EngineError, match="runs already"):
        server.start()


def test_a_given_port_that_is_taken_is_refused_before_the_start(
    server: SGLangProcess, server_arguments: SGLangArguments, tmp_path: Path
) -> None:
    port = int(server.url.rpartition(":")[2])
    with pytest.raises(EngineError, match=f"port {port} of 127.0.0.1 is in use"):
        SGLangProcess(server_arguments, port, tmp_path / "log").start()


async def test_start_up_is_told_a_key_is_asked_for_and_stop_leaves_nothing(
    server_arguments: SGLangArguments, tmp_path: Path
) -> None:
    """A server that is ready has been told to leave its objects of the start out of garbage collection."""
    key = "a-key-of-this-test-0123456789"
    arguments = replace(server_arguments, extra={**server_arguments.extra, "log_level": "debug"})
    process = SGLangProcess(arguments, None, tmp_path / "servers" / "0.log", key=key)
    process.start()
    told: list[str] = []
    await process.ready(STARTUP, told.append)
    assert "loading weights" in told and any(line.startswith("KV cache of ") for line in told)
    # The scheduler takes the message by itself, after the server's answer.
    await until(lambda: "Freezing GC in Scheduler process" in process.log.read_text())
    async with http_client() as http:
        info = await SGLangClient(process.url, http, key).info()
        assert info.context_length == MAX_MODEL_LEN + RESERVED
        await SGLangClient(process.url, http, key).check(60.0)
        for wrong in (None, "another"):
            with pytest.raises(ServerFailed, match="status 401"):
                await SGLangClient(process.url, http, wrong).info()
            with pytest.raises(ServerFailed, match="status 401"):
                await SGLangClient(process.url, http, wrong).begin_weight_update(10.0)
    main = process.pid
    assert main is not None
    assert len(list(living(main))) >= 3  # its scheduler and detokenizer too
    process.stop()  # it asks nobody to end
    assert (list(living(main)), process.exited) == ([], -signal.SIGKILL)
    process.stop()
    assert key not in process.log.read_text()


@pytest.mark.slice(0, "matrix")
async def test_a_port_that_is_taken_meanwhile_is_exchanged(server_arguments: SGLangArguments, tmp_path: Path) -> None:
    process = SGLangProcess(server_arguments, None, tmp_path / "0.log")
    process.start()
    first, told = process.url, list[str]()
    with socket.create_server(("127.0.0.1", int(first.rpartition(":")[2]))):  # listens, and never answers
        await process.ready(STARTUP, told.append)
    process.stop()
    assert process.url != first
    assert f"port {first.rpartition(':')[2]} was taken meanwhile, trying another" in told
    assert "loading weights" in told[told.index(next(line for line in told if "trying another" in line)) :]


@pytest.mark.slice(0, "matrix")  # a training's failed start is in the slice: test_training.py
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"extra": {"no_such_argument": 3}}, "error: unrecognized arguments: --no-such-argument 3"),
        ({"extra": {"schedule_policy": "best"}}, "argument --schedule-policy: invalid choice: 'best'"),
        ({"model_path": "/no/such/policy"}, "OSError: .*'/no/such/policy'"),
        ({"extra": {"max_total_tokens": 0}}, "RuntimeError: Not enough memory"),  # of the scheduler's process
    ],
    ids=["unknown", "choice", "model", "scheduler"],
)
async def test_a_failed_start_says_the_servers_own_error(
    server_arguments: SGLangArguments, tmp_path: Path, changes: dict[str, object], says: str
) -> None:
    log = tmp_path / "0.log"
    process = SGLangProcess(replace(server_arguments, **changes), None, log)  # type: ignore[arg-type]
    process.start()
    main = process.pid
    with pytest.raises(EngineError, match=says) as raised:
        await process.ready(STARTUP)
    lines = str(raised.value).splitlines()
    assert "ended while it was starting" in lines[0]
    assert lines[-1] == f"Its log: {log}"
    assert len(lines) < 12
    assert main is not None and list(living(main)) == []
    process.stop()


async def test_a_start_that_takes_too_long_is_given_up(server_arguments: SGLangArguments, tmp_path: Path) -> None:
    process = SGLangProcess(server_arguments, None, tmp_path / "0.log")
    process.start()
    with pytest.raises(EngineError, match="is not ready after 1 s"):
        await process.ready(1.0)
    assert process.exited is None
    process.stop()
    assert process.exited is not None


@pytest.mark.slice(0, "kill")
async def test_a_server_whose_scheduler_dies_ends_and_is_started_again(start_server: StartServer) -> None:
    """At its place, with its log continued."""
    process = await start_server(context_length=64, max_num_seqs=2)
    url, main = process.url, process.pid
    assert main is not None
    scheduler = next(pid for pid in living(main) if b"scheduler" in Path(f"/proc/{pid}/cmdline").read_bytes())
    os.kill(scheduler, signal.SIGKILL)
    while process.exited is None:  # for ever, where it outlives its scheduler
        await asyncio.sleep(0.05)
    process.stop()
    assert list(living(main)) == []
    process.start()
    await process.ready(STARTUP)
    assert process.url == url
    assert process.log.read_text().count("fired up and ready") == 2
    again = process.pid
    assert again is not None and again != main
    os.kill(again, signal.SIGKILL)
    while process.exited is None:
        await asyncio.sleep(0.05)
    assert process.exited == -signal.SIGKILL


@pytest.mark.slice(0, "matrix")  # servers of the slice are started by the same code, with the words of a CPU
def test_sglang_understands_the_command_line_of_a_server_on_gpus(tmp_path: Path) -> None:
    arguments = SGLangArguments(
        "/m",
        tensor_model_parallel_size=2,
        base_gpu_id=2,
        gpu_memory_utilization=0.7,
        context_length=512,
        enable_memory_saver=True,
        extra={"attention_backend": "triton", "lora_paths": ["a", "b"]},
    ).argv(7001)
    program = tmp_path / "arguments.py"
    program.write_text(
        "import sys; from agentrl.engines.sglang import cpu as sglang_cpu; sglang_cpu.install()\n"
        "from sglang.srt.server_args import prepare_server_args\n"
        "args = prepare_server_args(sys.argv[1:])\n"
        "print(args.device, args.tp_size, args.base_gpu_id, args.mem_fraction_static, args.dtype,\n"
        "      args.weight_version, args.attention_backend,\n"
        "      args.enable_memory_saver, args.incremental_streaming_output)\n"
    )
    done = forked([program, *arguments])
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "cuda 2 2 0.7 bfloat16 0 triton True True"


@pytest.mark.slice(1, "kill")
@pytest.mark.parametrize("when", ["starting", "serving"])
def test_a_server_ends_with_a_starter_that_is_killed(model_dir: Path, tmp_path: Path, when: str) -> None:
    """Also where a forked child of the starter lives on and keeps the pipe open."""
    command = [sys.executable, "-c", STARTER, str(model_dir), str(tmp_path / "0.log"), when]
    starter = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    main, child = map(int, starter.stdout.readline().split())
    try:
        if when == "serving":
            assert len(list(living(main))) >= 3
        starter.kill()
        starter.wait()
        os.kill(child, 0)
        while list(living(main)):  # for ever, where the server outlives its starter
            time.sleep(0.05)
    finally:
        os.kill(child, signal.SIGKILL)
        starter.stdout.close()
