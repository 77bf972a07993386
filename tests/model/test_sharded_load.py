"""What two ranks read from a checkpoint, each its own slices, is bit for bit what one process reads whole."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from agentrl.errors import ConfigError
from agentrl.model.packed import load_model
from tests.model.families import DELTA
from tests.naming import assert_names
from tests.parallel.test_shard import run_ranks

SIZES: dict[str, Any] = {
    "vocab_size": 61,  # does not divide
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3, tied, several files": ("qwen3", {"tie_word_embeddings": True}),
    "llama, bfloat16": ("llama", {"tie_word_embeddings": False}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 16}),
    "qwen3 moe": ("qwen3_moe", {"num_experts": 3, "moe_intermediate_size": 16, "num_experts_per_tok": 2}),
    "qwen3.5": ("qwen3_5_text", DELTA),
    "mixtral, one expert": ("mixtral", {"num_local_experts": 1, "num_experts_per_tok": 1}),
}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of models and of what two ranks found in them."""
    work = tmp_path_factory.mktemp("reading")
    for name, (family, options) in MODELS.items():
        torch.manual_seed(0)
        config = AutoConfig.for_model(family, **{**SIZES, **options})
        model = AutoModelForCausalLM.from_config(config)
        for weight in model.parameters():
            torch.nn.init.normal_(weight, 0.5, 0.2)
        model.generation_config.eos_token_id = 7
        if "bfloat16" in name:
            model.bfloat16()
        size = "20KB" if "several" in name else "5GB"
        model.save_pretrained(work / "models" / name, max_shard_size=size)
    lost = work / "lost"
    model.save_pretrained(lost)
    weights = load_file(lost / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, lost / "model.safetensors", metadata={"format": "pt"})
    for broken in ("no file", "cut short", "pickle"):
        (folder := work / broken).mkdir()
        shutil.copy(lost / "config.json", folder)
    whole = (lost / "model.safetensors").read_bytes()
    (work / "cut short" / "model.safetensors").write_bytes(whole[:100])
    torch.save(weights, work / "pickle" / "pytorch_model.bin")
    run_ranks(work, Path(__file__).with_name("one_of_two_reading_ranks.py"))
    return work


@pytest.fixture(scope="module", params=(0, 1))
def found(work: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
    return dict(json.loads((work / f"found-{request.param}.json").read_text())) | {"rank": request.param}


@pytest.mark.parametrize("name", MODELS)
def test_weights_and_buffers_are_those_of_the_whole_model(found: dict[str, Any], work: Path, name: str) -> None:
    if "several" in name:
        assert len(list((work / "models" / name).glob("*.safetensors"))) > 1
    seen = found[name]
    # The second rank has none of one expert's weights, which cannot be stacked there.
    whole = name == "mixtral, one expert" and found["rank"] == 1
    assert (seen.pop("read whole") > 0) == whole
    assert seen.pop("off by") < 1e-5
    assert seen == {"wrong": [], "same names": True, "training": False, "stop": True}


def test_the_critic_reads_the_backbone(found: dict[str, Any]) -> None:
    assert found["critic"] == {"wrong": [], "head": 0.0}


def test_a_weight_that_the_checkpoint_lacks_is_named(found: dict[str, Any], work: Path) -> None:
    assert_names(
        found["lost"]["error"],
        f"{work / 'lost'}",
        "config.json",
        "model.norm.weight",
        "num_hidden_layers=2",
        "actor_rollout_ref.model.override_config",
    )


@pytest.mark.parametrize("broken", ["no file", "cut short", "pickle"])
def test_weights_that_cannot_be_read_are_the_users_to_mend(found: dict[str, Any], work: Path, broken: str) -> None:
    """On ranks, and in one process (nothing is unpickled)."""
    with pytest.raises(ConfigError) as alone:
        load_model(str(work / broken))
    for message in (found[broken]["error"], str(alone.value)):
        assert str(work / broken) in message
        assert "safetensors weights (actor_rollout_ref.model.path)" in message
