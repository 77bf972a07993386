"""Command line of an SGLang server, made of the job's settings and the user's own SGLang arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Self

from agentrl.config.adapters import SERVED_LAYERS, most_adapters
from agentrl.config.sglang_arguments import check_extra, plain_name
from agentrl.engines.servers.command_line import ServerArguments
from agentrl.engines.sglang.delta_loader import LOADER
from agentrl.system.json_value import JSON

RESERVED = 8
"""SGLang 0.5.23 refuses prompts longer than its context less 7, and ends answers 2 tokens early, without a word."""

CPU_TOKENS = 262_144
"""Default limit of the tokens in the KV cache of a server on a CPU."""


@dataclass(frozen=True, slots=True)
class SGLangArguments(ServerArguments):
    """Arguments of an SGLang server."""

    base_gpu_id: int = 0
    """Index of the first of its GPUs on this host."""
    plans_ahead: bool = True
    """Plan each step while the one before runs (SGLang's overlap schedule). A pause then leaves a step's tokens open,
    which are counted to the weights after it. On a CPU always off."""
    takes_deltas: bool = False
    """Take weights of which only the changed elements are sent."""
    lora_rank: int = 0
    """Rank of the adapters that it serves; 0: none."""
    frozen: Mapping[str, str] = field(default_factory=dict)
    """Adapters that it has from its start: their folders by name."""

    def __post_init__(self) -> None:
        check_extra(self.extra)

    def at(self, gpu: int) -> Self:
        return replace(self, base_gpu_id=gpu)

    def own(self, port: int) -> dict[str, JSON]:
        return {
            **self._common(port),
            **self._queue(),
            **self._adapters(),
            **(self._cpu() if self.device == "cpu" else self._gpu()),
        }

    def _common(self, port: int) -> dict[str, JSON]:
        return {
            "model_path": self.model_path,
            "host": self.host,
            "port": port,
            "device": self.device,
            "tensor_parallel_size": self.tensor_model_parallel_size,
            "context_length": self.context_length and self.context_length + RESERVED,
            "trust_remote_code": self.trust_remote_code,
            "json_model_override_args": self.override_config or None,
            "max_running_requests": self.max_num_seqs,
            "weight_version": "0",
            "incremental_streaming_output": True,
            "log_level": "info",
            "log_level_http": "warning",  # no line for each request
            "custom_weight_loader": [LOADER] if self.takes_deltas else None,
        }

    def _queue(self) -> dict[str, JSON]:
        """Let requests of the earliest prompt begin first (`SamplingParams.priority`), without preemption."""
        names = {plain_name(name): value for name, value in self.extra.items()}
        if names.get("schedule_policy", "fcfs") not in ("fcfs", "lof"):
            return {}  # SGLang would refuse both together
        return {
            "enable_priority_scheduling": True,
            "schedule_low_priority_values_first": True,
            "disable_priority_preemption": True,
        }

    def _adapters(self) -> dict[str, JSON]:
        """Serve requests with and without an adapter next to one another."""
        if not self.lora_rank:
            return {}
        return {
            "enable_lora": True,
            "max_lora_rank": self.lora_rank,
            "max_loras_per_batch": most_adapters(self.frozen),
            "lora_paths": [f"{name}={folder}" for name, folder in self.frozen.items()] or None,
            "lora_target_modules": list(SERVED_LAYERS),
            "lora_backend": "torch_native" if self.device == "cpu" else None,
        }

    def _gpu(self) -> dict[str, JSON]:
        return {
            "dtype": self.dtype,
            "base_gpu_id": self.base_gpu_id,
            "mem_fraction_static": self.gpu_memory_utilization,
            "enable_memory_saver": self.enable_memory_saver,
            "enable_fp32_lm_head": self.dtype != "float32",  # as the trainer has it (model/head_product.py)
            "disable_overlap_schedule": not self.plans_ahead,
        }

    def _cpu(self) -> dict[str, JSON]:
        context = self.context_length or CPU_TOKENS
        return {
            "dtype": "float32",
            "attention_backend": "torch_native",
            "sampling_backend": "pytorch",
            "disable_overlap_schedule": True,
            # Room for what runs and as much again, three times, for the sessions that will come back.
            "max_total_tokens": max(context, min(4 * self.max_num_seqs * context, CPU_TOKENS)),
            # max_total_tokens bounds the caches. A lower part fails where other processes take memory meanwhile.
            "mem_fraction_static": 0.5,
            "skip_server_warmup": True,
            "sleep_on_idle": True,
            "enable_deterministic_inference": True,
        }
