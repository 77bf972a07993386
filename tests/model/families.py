"""Families of causal language models, each as a tiny config that has what is peculiar to it.

Multipliers of embeddings, branches and heads are those of a published config.json, which a comment names.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LOCAL_AND_GLOBAL = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MIXTRAL: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
MAMBA: dict[str, Any] = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8}
GRANITE = {  # granite-3.1-2b-instruct
    "logits_scaling": 8.0,
    "attention_multiplier": 0.125,  # 1 / head_dim, as published
    "residual_multiplier": 0.22,
    "embedding_multiplier": 12.0,
}
DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3.5": ("qwen3_5_text", DELTA),
    "qwen3-next": ("qwen3_next", {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 16}),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention"]}),
    "nemotron-h": (
        "nemotron_h",
        {
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "n_groups": 1,
            "ssm_state_size": 8,
            "chunk_size": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "moe_shared_expert_intermediate_size": 16,
        },
    ),
    "granite-moe-hybrid": (
        "granitemoehybrid",
        {
            **MAMBA,
            **MIXTRAL,
            "layer_types": ["linear_attention", "full_attention"],
            "shared_intermediate_size": 16,
            **GRANITE,
            "logits_scaling": 6.0,  # granite-4.0-h-tiny
        },
    ),
    "falcon-h1": (
        "falcon_h1",
        {
            **MAMBA,
            "mamba_d_ssm": 64,
            "lm_head_multiplier": 0.0390625,  # Falcon-H1-0.5B, this and the next eight
            "embedding_multiplier": 5.656854249492381,
            "key_multiplier": 0.39062499999999994,
            "attention_in_multiplier": 1.0,
            "attention_out_multiplier": 0.9375,
            "mlp_multipliers": [0.8838834764831844, 0.5859375],
            "ssm_in_multiplier": 1.25,
            "ssm_out_multiplier": 0.23570226039551587,
            "ssm_multipliers": [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
        },
    ),
    "kimi-linear": (
        "kimi_linear",
        {
            **{key: value for key, value in LATENT.items() if key not in ("n_routed_experts", "first_k_dense_replace")},
            "q_lora_rank": None,
            "num_local_experts": 4,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_head_dim": 8,
            "linear_num_heads": 4,
        },
    ),
    "olmo-hybrid": ("olmo_hybrid", DELTA),
}
"""Families whose layers have a state, or some of them."""
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {}),
    "qwen2, window 7 in one layer": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "llama": ("llama", {"num_key_value_heads": 4}),
    "mistral, window 7": ("mistral", {"sliding_window": 7}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {**LOCAL_AND_GLOBAL, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0}),
    "gemma3": ("gemma3_text", {**LOCAL_AND_GLOBAL, "query_pre_attn_scalar": 16}),
    "phi3": ("phi3", {}),
    "glm4": ("glm4", {}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0]}),
    "granite": ("granite", GRANITE),
    "olmo3": ("olmo3", LOCAL_AND_GLOBAL),
    "cohere2": ("cohere2", {**LOCAL_AND_GLOBAL, "logit_scale": 0.0625}),  # command-r
    "gpt-oss": ("gpt_oss", {**LOCAL_AND_GLOBAL, **MIXTRAL, "rope_parameters": YARN}),
    "qwen2-moe": ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 16}),
    "qwen3-moe": ("qwen3_moe", EXPERTS),
    "mixtral": ("mixtral", MIXTRAL),
    "olmoe": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "deepseek-v2": ("deepseek_v2", LATENT),
    "deepseek-v3": ("deepseek_v3", LATENT),
}


def make_model(name: str, attention: str = "eager", **changes: Any) -> PreTrainedModel:
    """A random model of one of FAMILIES, in eval mode. `changes`: to its config."""
    family, options = (FAMILIES | HYBRIDS)[name]
    config = AutoConfig.for_model(family, **{**SIZES, **options, **changes})
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim >= 2:
                weight.normal_(0.0, 0.25)  # a fresh model hardly attends
            elif weight.ndim == 1 and not weight.any():
                weight.normal_(0.0, 0.5)  # biases and sinks
    return model.eval()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences with common beginnings at several depths, nested and equal ones, and lengths from 1."""
    generator = torch.Generator().manual_seed(1)

    def words(count: int) -> list[int]:
        return torch.randint(0, 61, (count,), generator=generator).tolist()

    system, prompt, other = words(12), words(10), words(9)
    answer = words(14)
    sequences = [
        system + prompt + answer + words(5),
        words(3),
        system + other + words(20),
        system + prompt + words(1),
        system + prompt + answer + words(8),
        system,
        words(1),
        system + other + words(2),
        words(30),
        system + prompt + words(17),
    ]
    sequences.append(list(sequences[0]))
    offsets = torch.tensor([0] + [len(s) for s in sequences]).cumsum(0)
    return torch.tensor(list(itertools.chain(*sequences))), offsets


def one_by_one(
    model: PreTrainedModel, ids: torch.Tensor, offsets: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies [T] by the model's own forward of each sequence."""
    logprobs, entropies = [], []
    for start, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        logits = model(input_ids=ids[None, start:end]).logits[0, :-1].float() / temperature
        scores = logits.log_softmax(-1)
        zero = torch.zeros(1)
        logprobs.append(torch.cat([zero, scores.gather(1, ids[start + 1 : end, None])[:, 0]]))
        entropies.append(torch.cat([zero, -(scores.exp() * scores).sum(-1)]))
    return torch.cat(logprobs), torch.cat(entropies)
