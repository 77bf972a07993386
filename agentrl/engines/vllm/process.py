"""A vLLM server process of ours."""

from __future__ import annotations

import re
from collections.abc import Container, Sequence

import httpx

from agentrl.engines.servers.environment import passed
from agentrl.engines.servers.http import key_header
from agentrl.engines.servers.process import ServerProcess
from agentrl.engines.vllm.options import VLLMArguments
from agentrl.system.proxies import spare_own_addresses

LORA_ROUTES = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
"""Variable that gives a server the routes that load adapters."""


class VLLMProcess(ServerProcess):
    """A vLLM server at 127.0.0.1."""

    arguments: VLLMArguments
    software = "vLLM"
    stages = (
        (re.compile(r"Initializing a V1 LLM engine"), "configured"),
        (re.compile(r"Starting to load model"), "loading weights"),
        (re.compile(r"[Ll]oading.*shards: +(\d+)% Completed"), "loading weights: {}%"),
        (re.compile(r"Loading weights took ([\d.]+) seconds"), "weights loaded in {} s"),
        (re.compile(r"KV cache size: ([\d,]+) tokens"), "KV cache of {} tokens"),
        (re.compile(r"Capturing CUDA graphs"), "capturing CUDA graphs"),
        (re.compile(r"Application startup complete"), "ready"),
    )
    aftermath = "Engine core initialization failed"
    module = "agentrl.engines.vllm.launch"

    def environment(self) -> dict[str, str]:
        made = environment(self.arguments.device, self.arguments.gpus, self._pass_env)
        if self.arguments.trained:
            made["VLLM_SERVER_DEV_MODE"] = "1"  # the routes that pause it and exchange its weights
            if self.arguments.lora_rank:
                made[LORA_ROUTES] = "1"
        else:
            made["VLLM_SKIP_MODEL_NAME_VALIDATION"] = "1"  # whoever asks a reward model need not know its path
        return made

    async def served_model(self, http: httpx.AsyncClient) -> str | None:
        if (await http.get(f"{self.url}/health")).status_code != 200:
            return None
        told = await http.get(f"{self.url}/v1/models", headers=key_header(self.key))
        return str(told.raise_for_status().json()["data"][0]["root"])


def environment(device: str, gpus: Sequence[int], pass_env: Container[str] = ()) -> dict[str, str]:
    """Build the environment of a server process. The user's variables stay if a server may see them (`passed`)."""
    ours = {
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONUNBUFFERED": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # the plugin knows the sampler of the first one
    }
    if device == "cpu":
        # Threads of one server; a small model is slower with more, and two servers would be bound to the same core.
        ours |= {"OMP_NUM_THREADS": "1", "VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    made = {**ours, **passed(pass_env)}
    if gpus:
        visible = made.get("CUDA_VISIBLE_DEVICES", "")
        names = visible.split(",") if visible else [str(number) for number in range(max(gpus) + 1)]
        made["CUDA_VISIBLE_DEVICES"] = ",".join(names[number] for number in gpus)
    spare_own_addresses(made)
    return made
