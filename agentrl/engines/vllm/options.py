"""Command line of a vLLM server, made of the job's settings and the user's own vLLM arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from agentrl.config.adapters import SERVED_LAYERS, VLLM_RANK, most_adapters
from agentrl.config.sections.training import Config
from agentrl.engines.servers.command_line import ServerArguments
from agentrl.engines.vllm.plugin import BACKEND, EXTENSION
from agentrl.system.json_value import JSON

STREAM_TOKENS = 64
"""Tokens that a server sends at a time: as many are lost at most when it dies."""
CPU_CACHE_BYTES = 512 << 20
"""Keys and values of a server on a CPU."""
CPU_BLOCK = 32
"""Tokens of a block of keys and values on a CPU: the smallest one whose kernels exist. Caches share whole blocks."""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, VLLM_RANK)
"""Largest ranks that vLLM can be started with."""


@dataclass(frozen=True, slots=True)
class VLLMArguments(ServerArguments):
    """Arguments of a vLLM server."""

    gpus: Sequence[int] = ()
    """Devices of this machine that it runs on."""
    trained: bool = True
    """agentrl sends it weights, and trains on its log-probs. Another server is vLLM's as it stands, with a key."""
    lora_rank: int = 0
    """Rank of the adapters that it serves; 0: it serves no adapters."""
    frozen: Mapping[str, str] = field(default_factory=dict)
    """Adapters that it has from its start: their folders by name."""

    @classmethod
    def of_reward_model(cls, config: Config, device: str, host: str) -> Self:
        return replace(super(VLLMArguments, cls).of_reward_model(config, device, host), trained=False)

    def at(self, gpu: int) -> Self:
        gpus = range(gpu, gpu + self.tensor_model_parallel_size) if self.device == "cuda" else ()
        return replace(self, gpus=gpus)

    def own(self, port: int) -> dict[str, JSON]:
        trained = self._trained() if self.trained else {}
        device = self._cpu() if self.device == "cpu" else self._gpu()
        return {**self._common(port), **trained, **self._adapters(), **device}

    def _common(self, port: int) -> dict[str, JSON]:
        return {
            "model": self.model_path,
            "host": self.host,
            "port": port,
            "tensor_parallel_size": self.tensor_model_parallel_size,
            "max_model_len": self.context_length or "auto",  # the model's own, as far as the cache has room
            "trust_remote_code": self.trust_remote_code,
            "hf_overrides": self.override_config or None,
            "max_num_seqs": self.max_num_seqs,
            "enable_scale_out": True,  # the route of token ids, by which a server is checked, too
            "middleware": "agentrl.engines.vllm.guard.Guard",
            "disable_uvicorn_access_log": True,  # no line for each request
            "no_enable_log_requests": True,
        }

    @staticmethod
    def _trained() -> dict[str, JSON]:
        return {
            "stream_interval": STREAM_TOKENS,
            "scheduling_policy": "priority",  # `SamplingParams.priority`: the earliest prompt goes first
            "logprobs_mode": "processed_logprobs",  # of softmax(logits / temperature)
            "enable_prompt_tokens_details": True,
            "weight_transfer_config": {"backend": BACKEND},
            "worker_extension_cls": EXTENSION,
        }

    def _adapters(self) -> dict[str, JSON]:
        """Serve requests with and without an adapter next to one another."""
        if not self.lora_rank:
            return {}
        return {
            "enable_lora": True,
            "max_lora_rank": lora_rank(self.lora_rank),
            "max_loras": most_adapters(self.frozen),
            "lora_modules": [f"{name}={folder}" for name, folder in self.frozen.items()] or None,
            "lora_target_modules": list(SERVED_LAYERS),
        }

    def _gpu(self) -> dict[str, JSON]:
        return {
            "dtype": self.dtype,
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "enable_sleep_mode": self.enable_memory_saver,
        }

    def _cpu(self) -> dict[str, JSON]:
        return {
            "dtype": "float32",
            "enforce_eager": True,  # else each start compiles
            "block_size": CPU_BLOCK,
            "kv_cache_memory_bytes": CPU_CACHE_BYTES,
        }


def lora_rank(rank: int) -> int:
    """Find the least rank of vLLM's that serves adapters of `rank`; the largest one where all are smaller."""
    return next((known for known in LORA_RANKS if known >= rank), LORA_RANKS[-1])
