"""Names and shapes from a configuration alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from agentrl.engines.servers.model import ModelFacts
from agentrl.engines.weights import Weights
from tests.naming import naming

SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 101,
}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", [Qwen2Config, LlamaConfig])
def test_shapes_are_those_of_the_model_and_tied_weights_have_both_names(
    kind: type[LlamaConfig | Qwen2Config], tied: bool, tmp_path: Path
) -> None:
    config = kind(**SIZES, tie_word_embeddings=tied)
    config.save_pretrained(tmp_path)
    facts = ModelFacts.from_path(str(tmp_path))
    model = AutoModelForCausalLM.from_config(config)
    assert facts.vocab_size == 101
    assert facts.shapes == {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
    assert facts.shapes["lm_head.weight"] == (101, 16)
    facts.check(Weights.from_tensors(model.named_parameters()))


def test_an_unknown_name_and_a_wrong_shape_are_refused(model_dir: Path) -> None:
    facts = ModelFacts.from_path(str(model_dir))
    with pytest.raises(ValueError, match=r"no parameter 'model\.norm\.wight'"):
        facts.check(Weights.from_tensors([("model.norm.wight", torch.ones(64))]))
    with naming(ValueError, "model.norm.weight", "(64,)", "(63,)"):
        facts.check(Weights.from_tensors([("model.norm.weight", torch.ones(63))]))


def test_no_memory_is_taken_for_weights(tmp_path: Path) -> None:
    LlamaConfig(**{**SIZES, "hidden_size": 1 << 16, "num_hidden_layers": 200, "vocab_size": 1 << 18}).save_pretrained(
        tmp_path
    )
    assert ModelFacts.from_path(str(tmp_path)).shapes["model.embed_tokens.weight"] == (1 << 18, 1 << 16)  # 64 GiB
