"""What cannot be trained or served is refused by name before the first weight is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from agentrl.config import Config
from agentrl.config.sections.sft import SFTConfig
from agentrl.engines.embedded.shapes import cache_shapes
from agentrl.errors import ConfigError
from agentrl.model.packed import empty_model, load_model
from agentrl.model.trial import try_family
from agentrl.parallel.tensor_parallel import split_layers
from agentrl.workers.before_loading import check_models, check_tuned
from tests.model.families import FAMILIES, HYBRIDS, SIZES
from tests.naming import Names, naming
from tests.parallel.test_arrangements import TwoRanks

UNTRAINABLE: dict[str, tuple[str, dict[str, Any]]] = {
    "minimax": ("minimax", {"layer_types": ["linear_attention", "full_attention"], "num_local_experts": 2}),
    "recurrent-gemma": ("recurrent_gemma", {"lru_width": 32}),
}
COMPILED = {"actor": {"use_torch_compile": True}}
SGLANG = {"rollout": {"name": "sglang"}}


@pytest.fixture
def folder(tmp_path: Path) -> Any:
    """Writes a model's folder whose weights cannot be read."""

    def write(family: str, name: str = "model") -> str:
        kind, options = (FAMILIES | HYBRIDS | UNTRAINABLE)[family]
        AutoConfig.for_model(kind, **{**SIZES, **options}).save_pretrained(tmp_path / name)
        (tmp_path / name / "model.safetensors").write_bytes(b"no weights")
        return str(tmp_path / name)

    return write


def config_of(path: str, roles: dict[str, Any], **further: Any) -> Config:
    model = {"path": path, **roles.get("model", {})}
    return Config.model_validate({"actor_rollout_ref": {**roles, "model": model}, **further})


@pytest.mark.parametrize(
    ("family", "roles", "why"),
    [
        ("minimax", {}, ("MiniMaxForCausalLM", "2 layers")),
        ("recurrent-gemma", {}, ("RecurrentGemmaForCausalLM", "2 layers", "docs/models.md")),
        ("qwen3.5", COMPILED, "use_torch_compile=true"),
        ("lfm2", SGLANG, ("rollout.name=sglang", "lfm2", "rollout.name=embedded")),
        ("olmo-hybrid", SGLANG, ("SGLang", "olmo_hybrid", "rollout.name=embedded")),
        (
            "qwen3.5",
            {"actor": {"router_replay": {"mode": "R2"}}},
            ("router_replay.mode", "Qwen3_5ForCausalLM", "mode=disabled"),
        ),
        (
            "falcon-h1",
            {"actor": {"strategy_options": {"moe_aux_loss_coeff": 0.1}}},
            "strategy_options.moe_aux_loss_coeff",
        ),
        (
            "lfm2",
            {"model": {"lora_rank": 2, "target_modules": ["c_attn"]}},
            ("Lfm2ForCausalLM", "'c_attn'", "in_proj"),
        ),
        (
            "nemotron-h",
            {"model": {"lora_rank": 2, "target_modules": ["out_proj"]}},
            ("target_modules=['out_proj']", "out_proj"),
        ),
        (
            "lfm2",
            {"actor": {"freeze_vision_tower": True}},
            ("freeze_vision_tower=true", "Lfm2ForCausalLM", "no effect"),
        ),
    ],
)
def test_a_policy(family: str, roles: dict[str, Any], why: Names, folder: Any) -> None:
    with naming(ConfigError, why):
        check_models(config_of(folder(family), roles), "cpu")


@pytest.mark.parametrize("role", ["reference", "teacher", "reward model"])
def test_another_model_of_the_run(role: str, folder: Any) -> None:
    policy, other = folder("qwen3", "policy"), folder("recurrent-gemma", "other")
    roles, further = {}, {}  # type: dict[str, Any], dict[str, Any]
    if role == "reference":
        roles = {"ref": {"path": other}, "actor": {"use_kl_loss": True}}
    elif role == "teacher":
        further = {"distillation": {"teacher": {"path": other}, "coef": 1.0}}
    else:
        further = {"reward_model": {"enable": True, "model": {"path": other}}}
    with naming(ConfigError, "other:", "RecurrentGemmaForCausalLM"):
        check_models(config_of(policy, roles, **further), "cpu")


@pytest.mark.parametrize(
    ("model", "why"),
    [({}, "only 1 of its 2 layers"), ({"lora_rank": 2, "target_modules": ["c_attn"]}, "only 1 of its 2 layers")],
)
def test_a_model_that_is_trained_on_files(model: dict[str, Any], why: str, folder: Any) -> None:
    tree = {"data": {"train_files": "none"}, "model": {"path": folder("minimax"), **model}}
    with pytest.raises(ConfigError, match=why):
        check_tuned(SFTConfig.model_validate(tree))


def test_layers_that_no_ranks_can_split(folder: Any) -> None:
    """Ranks split a model before they read its weights."""
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=2: transformers' plan for Lfm2ForCausalLM"):
        split_layers(empty_model(folder("lfm2")), TwoRanks())  # type: ignore[arg-type]


@pytest.mark.parametrize("family", HYBRIDS)
def test_families_that_can_be_trained_are_not_refused(family: str, folder: Any) -> None:
    """Only then their weights are opened, and refused here."""
    path, ran = folder(family), []
    check_models(config_of(path, {}), "cpu")
    try_family(path, further=lambda model: ran.append(cache_shapes(model, 1)))
    assert ran, "a copy was tried"
    with naming(ConfigError, "causal language model"):
        load_model(path)


def test_models_without_states_are_not_tried(folder: Any) -> None:
    ran: list[object] = []
    try_family(folder("qwen3"), further=ran.append)
    assert not ran
