"""What a server of ours is started with: its key, its environment, and who can read them; and that clients send it."""

from __future__ import annotations

import argparse
import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Awaitable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.config.sections.rollouts import RolloutsConfig
from agentrl.engines.contract import EngineError, SamplingParams
from agentrl.engines.servers.client import GroupInvitation
from agentrl.engines.servers.command_line import words
from agentrl.engines.servers.environment import is_passed
from agentrl.engines.servers.start import check_machine, server_processes
from agentrl.engines.servers.starter import KEY
from agentrl.engines.servers.sync.buckets import Bucket
from agentrl.engines.sglang import launch
from agentrl.engines.sglang.build import SGLANG
from agentrl.engines.sglang.client import SGLangClient
from agentrl.engines.sglang.options import SGLangArguments
from agentrl.engines.sglang.process import SGLangProcess, environment
from agentrl.errors import ConfigError
from agentrl.system.http import http_client
from tests.naming import naming
from tests.remote.conftest import FaultyServer, says

SECRETS = ("WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY", "JUDGE_TOKEN", "AGENTRL_SERVER_KEY", "RANK")
NEEDED = ("CUDA_VISIBLE_DEVICES", "NCCL_SOCKET_IFNAME", "HF_HOME", "SGLANG_LOG_MS", "LD_LIBRARY_PATH", "https_proxy")


class Told(SGLangProcess):
    """A process in the server's place that writes down how it was started."""

    def command(self, port: int) -> list[str]:
        program = "import json, os, sys; print(json.dumps([dict(os.environ), sys.argv]))"
        return [sys.executable, "-c", program, *super().command(port)[3:]]


@pytest.fixture
def trainers_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in (*SECRETS, *NEEDED):
        monkeypatch.setenv(name, f"value of {name}")
    yield


def started(process: SGLangProcess) -> tuple[dict[str, str], list[str]]:
    """Environment and arguments of the process."""
    process.start()
    assert process._process is not None
    process._process.wait(30)
    process.stop()
    variables, arguments = json.loads(process.log.read_text())
    return variables, arguments


def test_a_server_sees_what_it_needs_and_its_key_and_nothing_else(trainers_environment: None, tmp_path: Path) -> None:
    process = Told(SGLangArguments("/m", device="cpu"), None, tmp_path / "log", key="k" * 40, pass_env=["JUDGE_TOKEN"])
    assert process.key is not None
    variables, arguments = started(process)
    assert {name for name in SECRETS if name in variables} == {"JUDGE_TOKEN", "AGENTRL_SERVER_KEY"}
    assert {name: variables.get(name) for name in NEEDED} == {name: f"value of {name}" for name in NEEDED}
    assert {"PATH", "HOME", "OMP_WAIT_POLICY"} <= set(variables)
    assert variables[KEY] == process.key
    assert not any(process.key in argument for argument in arguments), "everyone may read command lines"
    assert process.key not in repr(sorted(environment("cpu").items()))


@given(
    start=st.sampled_from(["NVIDIA_", "SGLANG_", "CUDA_", "HF_", "VLLM_", "NCCL_", "TORCH_", "PYTHON_", "XDG_", "LC_"]),
    middle=st.sampled_from(["", "ADMIN_", "x_", "API_"]),
    secret=st.sampled_from(["KEY", "Token", "SECRET", "password", "CREDENTIALS", "KEY_FILE", "SECRET_ID", "AUTH"]),
)
def test_no_secret_is_passed_for_how_its_name_begins(start: str, middle: str, secret: str) -> None:
    name = start + middle + secret
    assert not is_passed(name)
    assert is_passed(start + middle + "RATIO")


@pytest.mark.parametrize(
    "name",
    [
        *("HF_TOKEN", "HF_TOKEN_PATH", "TOKENIZERS_PARALLELISM", "SGLANG_INIT_NEW_TOKEN_RATIO", "NCCL_IB_PKEY"),
        *("SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION", "TORCHINDUCTOR_CACHE_DIR", "XDG_CACHE_HOME", "HTTPS_PROXY"),
    ],
)
def test_what_only_sounds_like_a_secret_is_passed(name: str) -> None:
    assert is_passed(name)


def test_each_server_of_a_run_has_a_random_key_and_listens_on_loopback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEEN", "x")
    rollout = {"name": "sglang", "num_servers": 3, "server_pass_env": ["SEEN"]}
    asked = {"actor_rollout_ref": {"model": {"path": "/m"}, "rollout": rollout}}
    processes = server_processes(SGLANG, RolloutsConfig.model_validate(asked), "cpu", 100, tmp_path)
    keys = {process.key for process in processes if process.key}
    assert len(keys) == 3 and all(len(key) >= 32 for key in keys)
    assert {process.arguments.host for process in processes} == {"127.0.0.1"}
    assert all(process.environment()["SEEN"] == "x" for process in processes)
    monkeypatch.delenv("SEEN")
    with pytest.raises(ConfigError, match="server_pass_env: SEEN not set"):
        check_machine(RolloutsConfig.model_validate(asked), "cpu")


def test_a_key_stays_when_a_server_is_started_again(tmp_path: Path) -> None:
    process = Told(SGLangArguments("/m", device="cpu"), None, tmp_path / "log", key="the same")
    for _ in range(2):
        assert started(process)[0][KEY] == "the same"
        process.log.unlink()


def test_the_key_is_parsed_and_not_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launch.with_key(["--port", "1"], "k") == ["--port", "1", "--api-key=k"]
    assert launch.with_key(["--tokenizer-worker-num", "1"], "k")[-1] == "--api-key=k"
    assert launch.with_key(["--tokenizer-worker-num", "2"], "k") == ["--tokenizer-worker-num", "2"]  # knows none
    parser = argparse.ArgumentParser()
    parser.add_argument("--api-key")
    assert parser.parse_args(launch.with_key([], "-k")).api_key == "-k"
    assert parser.parse_args(words("api_key", "--k")).api_key == "--k"
    factory, written = logging.getLogRecordFactory(), io.StringIO()
    handler = logging.StreamHandler(written)
    logger = logging.getLogger("a server")
    logger.addHandler(handler)
    try:
        launch.hide_in_logs("secret-key")
        logger.warning("server_args={'api_key': 'secret-key'}")
        logger.warning("with %s", "arguments 'secret-key'")
    finally:
        logging.setLogRecordFactory(factory)
        logger.removeHandler(handler)
    assert "secret-key" not in written.getvalue() and written.getvalue().count("[key]") == 2


def test_a_process_that_runs_the_server_hands_the_key_to_no_child() -> None:
    """`main` takes it out of the environment before anything else is started."""
    program = (
        "import os, subprocess, sys, types\n"
        "for name in ('sglang', 'sglang.launch_server', 'sglang.srt', 'sglang.srt.plugins', 'sglang.srt.server_args', "
        "'sglang.srt.utils'): sys.modules[name] = types.ModuleType(name)\n"
        "sys.modules['sglang.srt.plugins'].load_plugins = lambda: None\n"
        "sys.modules['sglang.srt.server_args'].prepare_server_args = lambda arguments: arguments\n"
        "sys.modules['sglang.srt.utils'].kill_process_tree = lambda *_, **__: None\n"
        "def run(arguments): print(arguments, subprocess.check_output(['env']).count(b'AGENTRL_SERVER_KEY'))\n"
        "sys.modules['sglang.launch_server'].run_server = run\n"
        "from agentrl.engines.sglang import launch\n"
        "launch.main()\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program, "--port", "1"], env={**os.environ, KEY: "k"}, capture_output=True, text=True
    )
    assert ran.stdout == "['--port', '1', '--api-key=k'] 0\n", ran.stderr


@pytest.mark.parametrize("name", ["api_key", "--admin-api-key", "grpc-port", "host"])
def test_what_would_open_a_server_is_refused(name: str) -> None:
    with naming(ConfigError, f"engine_kwargs.sglang.{name}"):
        SGLangArguments("/m", extra={name: "1"})


async def test_every_call_of_the_client_carries_the_key() -> None:
    """Of all methods, those of health and weights too."""
    server, http = FaultyServer([says(503)]), http_client()
    await server.start()
    try:
        for call in every_call(SGLangClient(server.url.rstrip("/"), http, "the key")):
            with pytest.raises(EngineError):
                await call
    finally:
        await http.close()
        await server.stop()
    assert len({request.path for request in server.asked}) >= 15
    assert {request.headers.get("Authorization") for request in server.asked} == {"Bearer the key"}


def every_call(client: SGLangClient) -> Iterator[Awaitable[object]]:
    bucket = Bucket([], torch.empty(0, dtype=torch.uint8), last=True)
    yield client.generate("0" * 32, [5], SamplingParams(3), cache_key="v3")
    yield client.abort()
    yield client.pause("abort")
    yield client.resume()
    yield client.flush_cache()
    yield client.release_memory(["weights"])
    yield client.resume_memory(["weights"])
    yield client.check(5.0)
    yield client.info()
    yield client.post("server_info", {})
    yield client.begin_weight_update(5.0)
    yield client.end_weight_update(5.0)
    yield client.update_from_memory(bucket, 1, ranks=1, timeout=5.0)
    yield client.join_weight_group(GroupInvitation("n", "gloo", "127.0.0.1", 1, 1, 2), 5.0)
    yield client.update_from_broadcast(bucket, 1, group="g", timeout=5.0)
    yield client.leave_weight_group("g", 5.0)
    yield client.update_from_disk(Path("/none"), 1, 5.0)
    yield client.weight_checksums(5.0)
