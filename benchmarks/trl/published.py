"""Arguments of `GRPOConfig` in TRL's documentation and examples, by the page or file that has them.

They are of TRL's repository in July 2026 (f2cd577). Where a page leaves out arguments, so do these. Values that depend
on a command line have its defaults.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

PAPERS = "docs/source/paper_index.md"


@dataclass(frozen=True, slots=True)
class Published:
    """Arguments that TRL's repository has."""

    place: str
    arguments: dict[str, Any]
    refused: dict[str, str]
    """Arguments that the door refuses, each with words of the remedy; empty: all are translated."""


_THINKING: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": False}}
_DAPO: dict[str, Any] = {
    "mask_truncated_completions": True,
    "loss_type": "dapo",
    "epsilon": 0.2,
    "epsilon_high": 0.28,
    "per_device_train_batch_size": 512,
    "num_generations": 16,
    "max_completion_length": 20480,
    "beta": 0.0,
}

CONFIGS: dict[str, Published] = {
    "GSPO": Published(
        PAPERS,
        {
            "importance_sampling_level": "sequence",
            "loss_type": "grpo",
            "beta": 0.0,
            "epsilon": 3e-4,
            "epsilon_high": 4e-4,
            "gradient_accumulation_steps": 1,
            "steps_per_generation": 4,
        },
        {},
    ),
    "DAPO": Published(PAPERS, _DAPO, {}),
    "80/20 rule": Published(
        PAPERS, {**_DAPO, "top_entropy_quantile": 0.2}, {"top_entropy_quantile": "leave it at 1.0"}
    ),
    "Dr. GRPO": Published(
        PAPERS,
        {
            "loss_type": "dr_grpo",
            "per_device_train_batch_size": 1,
            "num_generations": 8,
            "max_completion_length": 3000,
            "beta": 0.0,
        },
        {"per_device_train_batch_size": "multiple of num_generations=8, as in TRL"},
    ),
    "DeepSeek-R1": Published(
        PAPERS,
        {
            "loss_type": "grpo",
            "beta": 0.001,
            "epsilon": 10.0,
            "num_generations": 16,
            "max_completion_length": 32768,
            "steps_per_generation": 16,
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 128,
        },
        {"gradient_accumulation_steps": "steps_per_generation=128, num_iterations=1"},
    ),
    "INTELLECT-2": Published(
        PAPERS,
        {"delta": 4, "epsilon": 0.2, "beta": 0.001, "num_generations": 16, "learning_rate": 3e-7},
        {"per_device_train_batch_size": "multiple of num_generations=16, as in TRL"},
    ),
    "Skywork-OR1": Published(
        PAPERS,
        {"use_adaptive_entropy": True, "entropy_coef": 0.01, "entropy_target": 5.0, "entropy_coef_delta": 0.005},
        {"use_adaptive_entropy": "actor.target_entropy"},
    ),
    "Lite PPO": Published(
        PAPERS,
        {
            "scale_rewards": "batch",
            "loss_type": "dapo",
            "beta": 0.0,
            "top_p": 0.99,
            "top_k": 100,
            "temperature": 0.99,
            "num_generations": 8,
            "num_iterations": 1,
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 32,
            "steps_per_generation": 8,
        },
        {"gradient_accumulation_steps": "rewards divided by the deviation of all, where TRL"},
    ),
    "truncated importance sampling": Published(
        PAPERS,
        {
            "use_vllm": True,
            "vllm_importance_sampling_correction": True,
            "vllm_importance_sampling_mode": "sequence_truncate",
            "vllm_importance_sampling_clip_max": 2.0,
        },
        {},
    ),
    "masked importance sampling": Published(
        PAPERS,
        {
            "use_vllm": True,
            "vllm_importance_sampling_correction": True,
            "vllm_importance_sampling_mode": "sequence_mask",
            "vllm_importance_sampling_clip_max": 2.0,
            "vllm_importance_sampling_clip_min": 0.5,
        },
        {},
    ),
    "ScaleRL": Published(
        PAPERS,
        {
            "loss_type": "cispo",
            "epsilon_high": 5.0,
            "num_generations": 16,
            "scale_rewards": "batch",
            "cast_lm_head_to_fp32": True,
        },
        {"per_device_train_batch_size": "multiple of num_generations=16, as in TRL"},
    ),
    "2-GRPO": Published(PAPERS, {"num_generations": 2, "loss_type": "grpo"}, {}),
    "SAPO": Published(
        PAPERS,
        {"loss_type": "sapo", "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05, "scale_rewards": "group"},
        {},
    ),
    "DeepSeek-V3.2, KL": Published(PAPERS, {"beta": 0.001, "use_bias_correction_kl": True}, {}),
    "DeepSeek-V3.2, off-policy mask": Published(
        PAPERS, {"off_policy_mask_threshold": 0.5}, {"off_policy_mask_threshold": "rollout_correction.reject"}
    ),
    "GDPO": Published(PAPERS, {"multi_objective_aggregation": "normalize_then_sum"}, {}),
    "LUSPO": Published(
        PAPERS,
        {"loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon": 2e-3, "epsilon_high": 2.5e-3},
        {},
    ),
    "VESPO": Published(
        PAPERS,
        {"loss_type": "vespo", "use_vllm": True, "vllm_importance_sampling_mode": "token_truncate"},
        {"loss_type": "known here are"},
    ),
    "LoRA without regret": Published(
        "docs/source/lora_without_regret.md",
        {
            "learning_rate": 5e-5,
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": 4,
            "num_train_epochs": 1,
            "num_generations": 8,
            "generation_batch_size": 8,
            "report_to": ["trackio"],
        },
        {"gradient_accumulation_steps": "give a multiple of 8"},
    ),
    "little memory": Published(
        "docs/source/quickstart.md",
        {
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": 8,
            "num_generations": 4,
            "max_completion_length": 512,
        },
        {},
    ),
    "Wordle": Published(
        "docs/source/openenv.md",
        {
            "use_vllm": True,
            "vllm_mode": "colocate",
            **_THINKING,
            "max_completion_length": 1024,
            "num_generations": 4,
            "gradient_accumulation_steps": 64,
        },
        {},
    ),
    "vLLM as a server": Published(
        "docs/source/vllm_integration.md",
        {"use_vllm": True, "vllm_mode": "server"},
        {"vllm_mode": "actor_rollout_ref.rollout.server_urls"},
    ),
    "continuous batching": Published(
        "docs/source/grpo_trainer.md",
        {
            "use_transformers_continuous_batching": True,
            "transformers_continuous_batching_config": {"use_cuda_graph": False, "max_memory_percent": 0.4},
        },
        {},
    ),
    "2048": Published(
        "examples/scripts/grpo_2048.py",
        {
            **_THINKING,
            "logging_steps": 1,
            "log_completions": True,
            "num_completions_to_print": 2,
            "report_to": "trackio",
            "trackio_space_id": "trl-2048",
            "max_completion_length": 2048,
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2,
        },
        {},
    ),
    "catch": Published(
        "examples/scripts/openenv/catch.py",
        {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_server_base_url": None,
            "vllm_gpu_memory_utilization": 0.2,
            "logging_steps": 1,
            "log_completions": True,
            "report_to": "trackio",
            "num_train_epochs": 1,
            "per_device_train_batch_size": 2,
            "num_generations": 8,
            "max_completion_length": 4096,
            "gradient_accumulation_steps": 16,
            **_THINKING,
        },
        {},
    ),
    "agent with SQL": Published(
        "examples/notebooks/grpo_agent.ipynb",
        {
            "max_steps": 400,
            **_THINKING,
            "max_completion_length": 1024,
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_enable_sleep_mode": False,
            "report_to": "trackio",
            "save_steps": 10,
            "log_completions": True,
            "push_to_hub": True,
        },
        {"push_to_hub": "upload the folder"},
    ),
    "QLoRA": Published(
        "examples/notebooks/grpo_trl_lora_qlora.ipynb",
        {
            "model_init_kwargs": {"attn_implementation": "sdpa", "dtype": "float32"},
            "learning_rate": 2e-5,
            "max_steps": 500,
            "per_device_train_batch_size": 8,
            "max_completion_length": 256,
            "num_generations": 8,
            "optim": "paged_adamw_8bit",
            "use_liger_kernel": True,
            "logging_steps": 10,
            "report_to": "trackio",
            "log_completions": False,
            "push_to_hub": True,
        },
        {"optim": "adamw_torch_fused", "push_to_hub": "upload the folder"},
    ),
}
"""By name."""
