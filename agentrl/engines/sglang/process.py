"""An SGLang server process of ours."""

from __future__ import annotations

import re
from collections.abc import Container

import httpx

from agentrl.engines.servers.environment import passed
from agentrl.engines.servers.http import key_header
from agentrl.engines.servers.process import ServerProcess
from agentrl.engines.sglang.options import SGLangArguments
from agentrl.system.proxies import spare_own_addresses


class SGLangProcess(ServerProcess):
    """An SGLang server at 127.0.0.1, or the host that its arguments name."""

    arguments: SGLangArguments
    software = "SGLang"
    stages = (
        (re.compile(r"server_args="), "configured"),
        (re.compile(r"Load weight begin"), "loading weights"),
        (re.compile(r"[Ll]oading.*shards: +(\d+)% Completed"), "loading weights: {}%"),
        (re.compile(r"Load weight end\. elapsed=([\d.]+) s"), "weights loaded in {} s"),
        (re.compile(r"KV Cache is allocated\..*#tokens: (\d+)"), "KV cache of {} tokens"),
        (re.compile(r"Capture (?:\w+ )*(?:CUDA|cuda) graph.* begin"), "capturing CUDA graphs"),
        (re.compile(r"fired up and ready"), "ready"),
    )
    aftermath = "scheduler died during initialization"
    module = "agentrl.engines.sglang.launch"

    def environment(self) -> dict[str, str]:
        return environment(self.arguments.device, self._pass_env)

    async def served_model(self, http: httpx.AsyncClient) -> str | None:
        if (await http.get(f"{self.url}/health")).status_code != 200:
            return None
        told = await http.get(f"{self.url}/model_info", headers=key_header(self.key))
        # SGLang (0.5.23) asks itself for this before it listens, where there is no warm-up. Without it, to empty a
        # cache on a CPU is to go over all objects of the process: half a second of each update of the weights. One
        # that does not know it serves as well.
        await http.post(f"{self.url}/freeze_gc", headers=key_header(self.key))
        return str(told.raise_for_status().json()["model_path"])


def environment(device: str, pass_env: Container[str] = ()) -> dict[str, str]:
    """Build the environment of a server process. The user's variables stay if a server may see them (`passed`)."""
    ours = {
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONUNBUFFERED": "1",
        # A scheduler that crashed would keep its server from ending for more than a minute.
        "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
        "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",
        # Places reserved at a context's end may lie beyond the model's last position; no token ever does.
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    }
    if device == "cpu":
        ours["OMP_NUM_THREADS"] = "1"  # threads of one server; a small model is slower with more
    made = {**ours, **passed(pass_env)}
    spare_own_addresses(made)  # a server asks itself
    return made
