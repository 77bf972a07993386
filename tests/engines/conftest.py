"""The model that engines are tested with, and the same weights in plain transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from agentrl.model.packed import load_model
from agentrl.quickstart.tiny_policy import TinyShape, make_tiny_policy


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_policy(tmp_path_factory.mktemp("policy"), 3, shape=TinyShape(hidden=64, kv_heads=1))


@pytest.fixture(scope="session")
def tokenizer(model_dir: Path) -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(model_dir)
    return tokenizer


@pytest.fixture(scope="session")
def reference(model_dir: Path) -> PreTrainedModel:
    """Weights large enough that attention and context decide what comes next; run by transformers' own attention."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model_dir, attn_implementation="eager")
    generator = torch.Generator().manual_seed(0)
    embedding = model.get_input_embeddings().weight
    with torch.no_grad():
        for weight in (weight for weight in model.parameters() if weight.ndim == 2):
            weight.normal_(0.0, 0.3 if weight is embedding else 0.2, generator=generator)
    return model.eval()


@pytest.fixture
def model(model_dir: Path, reference: PreTrainedModel) -> PreTrainedModel:
    """The reference's weights, with packed attention."""
    model = load_model(str(model_dir))
    model.load_state_dict(reference.state_dict())
    return model
