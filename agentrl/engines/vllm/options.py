"""Command line of a vLLM server, made of the job's settings and the user's own vLLM arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.engines.servers.command_line import ServerArguments
from agentrl.engines.vllm.plugin import BACKEND, EXTENSION
from agentrl.system.json_value import JSON

STREAM_TOKENS = 64
"""Tokens that a server sends at a time: as many are lost at most when it dies."""
CPU_CACHE_BYTES = 512 << 20
"""Keys and values of a server on a CPU."""
CPU_BLOCK = 32
"""Tokens of a block of keys and values on a CPU: the smallest one whose kernels exist. Caches share whole blocks."""


@dataclass(frozen=True, slots=True)
class VLLMArguments(ServerArguments):
    """Arguments of a vLLM server."""

    gpus: Sequence[int] = ()
    """Devices of this machine that it runs on."""

    def own(self, port: int) -> dict[str, JSON]:
        return {**self._common(port), **(self._cpu() if self.device == "cpu" else self._gpu())}

    def _common(self, port: int) -> dict[str, JSON]:
        return {
            "model": self.model_path,
            "host": self.host,
            "port": port,
            "tensor_parallel_size": self.tensor_model_parallel_size,
            "max_model_len": self.context_length,
            "trust_remote_code": self.trust_remote_code,
            "hf_overrides": self.override_config or None,
            "max_num_seqs": self.max_num_seqs,
            "stream_interval": STREAM_TOKENS,
            "scheduling_policy": "priority",  # `SamplingParams.priority`: the earliest prompt goes first
            "logprobs_mode": "processed_logprobs",  # of softmax(logits / temperature)
            "enable_prompt_tokens_details": True,
            "enable_scale_out": True,  # the route of token ids
            "weight_transfer_config": {"backend": BACKEND},
            "worker_extension_cls": EXTENSION,
            "middleware": "agentrl.engines.vllm.guard.Guard",
            "disable_uvicorn_access_log": True,  # no line for each request
            "no_enable_log_requests": True,
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
