"""Layers with a state that runs on from token to token: packed sequences stay apart, and training is whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from agentrl.config.sections.actor import ActorConfig
from agentrl.config.sections.model import ModelConfig
from agentrl.config.sections.optim import OptimConfig
from agentrl.errors import ConfigError
from agentrl.model.compiled import compile_layers, text_layers
from agentrl.model.export import export_model
from agentrl.model.heads import PolicyModel
from agentrl.model.packed import hidden_states, load_model, token_logprobs, use_packed_attention
from agentrl.model.stateful import keeps_state, stateful_mixers
from agentrl.workers import PolicyWorker
from agentrl.workers.learner import checkpoint_layers
from tests.model.families import HYBRIDS, SIZES, batch, make_model, one_by_one
from tests.model.test_families import NoTokenizer, assert_packed_is_one_by_one, grouped_batch
from tests.naming import assert_names, naming
from tests.workers.conftest import fsdp
from tests.workers.made import policy_worker

OPTIM = OptimConfig(name="muon", lr=1e-2, adamw_lr=1e-2)


@pytest.mark.slice(1, "matrix")
@pytest.mark.parametrize("name", HYBRIDS)
def test_packed_equals_one_by_one_with_gradients(name: str) -> None:
    assert_packed_is_one_by_one(name)


@pytest.mark.slice(2, "matrix")
@pytest.mark.parametrize("name", HYBRIDS)
def test_a_sequence_changes_no_bit_of_another_and_recomputing_changes_none(name: str) -> None:
    model = use_packed_attention(make_model(name))
    backbone = list(model.base_model.parameters())
    ids, offsets = batch()
    changed = ids.clone()
    changed[offsets[3] : offsets[4]] = 5
    before, after = hidden_states(model, ids, offsets), hidden_states(model, changed, offsets)
    own = torch.zeros(len(ids), dtype=torch.bool)
    own[offsets[3] : offsets[4]] = True
    assert torch.equal(before[~own], after[~own])
    assert not torch.allclose(before[own], after[own], atol=1e-2)
    before.square().sum().backward()
    gradients = [weight.grad for weight in backbone]
    model.zero_grad()
    checkpoint_layers(model)
    again = hidden_states(model, ids, offsets)
    again.square().sum().backward()
    assert torch.equal(again, before)
    assert all(map(torch.equal, gradients, (weight.grad for weight in backbone)))  # type: ignore[arg-type]


def test_an_export_computes_what_was_trained(tmp_path: Path) -> None:
    """Nemotron-H with time steps below `time_step_min`, as trained models have them."""
    own = make_model("nemotron-h")
    for name, weight in own.named_parameters():
        if name.endswith("dt_bias"):
            nn.init.constant_(weight, -9.0)  # a time step of 1.2e-4
    own.save_pretrained(tmp_path / "model")
    model, (ids, offsets) = load_model(str(tmp_path / "model")), batch()
    weights = dict(model.named_parameters())
    export_model(PolicyModel(model), weights, torch.float32, tmp_path / "export", NoTokenizer())  # type: ignore[arg-type]
    with torch.no_grad():
        trained = token_logprobs(model, ids, offsets).logprobs
        exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export", attn_implementation="eager")
        assert torch.allclose(one_by_one(exported, ids, offsets, 1.0)[0], trained, atol=1e-5)
        read_back = token_logprobs(load_model(str(tmp_path / "export")), ids, offsets).logprobs
        assert torch.equal(read_back, trained)


def test_only_parts_with_a_state_are_found() -> None:
    found = {name: use_packed_attention(make_model(name)) for name in ("qwen3.5", "lfm2", "falcon-h1", "qwen3-moe")}
    mixers = {name: [(m.layer_idx, type(m).__name__) for m in stateful_mixers(one)] for name, one in found.items()}
    assert mixers == {
        "qwen3.5": [(0, "Qwen3_5GatedDeltaNet")],
        "lfm2": [(0, "Lfm2ShortConv")],
        "falcon-h1": [(0, "FalconH1Mixer"), (1, "FalconH1Mixer")],
        "qwen3-moe": [],
    }
    assert [keeps_state(one.config) for one in found.values()] == [True, True, True, False]


def test_a_first_token_without_numbers_hides_no_state() -> None:
    """As a padding token's, whose embedding a new model has as zeros."""
    model = make_model("lfm2")
    with torch.no_grad():
        model.get_parameter("model.embed_tokens.weight")[0] = 0.0
    assert [type(mixer).__name__ for mixer in stateful_mixers(use_packed_attention(model))] == ["Lfm2ShortConv"]


def test_the_models_own_forward_is_as_before() -> None:
    own, model = make_model("qwen3.5"), use_packed_attention(make_model("qwen3.5"))
    ids, offsets = batch()
    hidden_states(model, ids, offsets)
    model.set_attn_implementation("eager")
    assert torch.equal(model(input_ids=ids[None]).logits, own(input_ids=ids[None]).logits)


@pytest.mark.parametrize(
    ("family", "options", "why"),
    [
        ("minimax", {"layer_types": ["linear_attention", "full_attention"], "num_local_experts": 2}, "only 1 of its 2"),
        ("recurrent_gemma", {"lru_width": 32}, "only 0 of its 2"),
    ],
)
def test_states_that_cannot_be_kept_apart_are_refused(family: str, options: dict[str, Any], why: str) -> None:
    config = AutoConfig.for_model(family, **{**SIZES, **options})
    with naming(ConfigError, why):
        use_packed_attention(AutoModelForCausalLM.from_config(config))


def test_compiled_layers_are_refused() -> None:
    model = use_packed_attention(make_model("qwen3.5"))
    with naming(ConfigError, "use_torch_compile=true", "Qwen3_5DecoderLayer"):
        compile_layers(text_layers(model), "cpu")


def make_worker(path: Path, **model: Any) -> PolicyWorker:
    return policy_worker(
        ModelConfig(path=str(path), **model),
        ActorConfig(optim=OPTIM, ppo_max_token_len_per_gpu=100),
        device="cpu",
        temperature=1.0,
        log_prob_max_tokens=4096,
        total_steps=10,
        seed=0,
    )


@pytest.mark.slice(1, "matrix")
@pytest.mark.parametrize("name", HYBRIDS)
def test_trained_resumed_and_exported(name: str, tmp_path: Path) -> None:
    """Names and shapes are the checkpoint's; a resumed worker learns the same, bit for bit."""
    make_model(name).save_pretrained(tmp_path / "model")
    saved = load_file(tmp_path / "model" / "model.safetensors")
    worker = make_worker(tmp_path / "model", enable_gradient_checkpointing=True)
    before = {key: tensor.clone() for key, tensor in fsdp(worker).named_tensors()}
    assert {key: (tensor.shape, tensor.dtype) for key, tensor in before.items()} == {
        key: (tensor.shape, tensor.dtype) for key, tensor in saved.items() if key in before
    }
    assert set(before) >= {key for key in saved if "correction_bias" not in key}
    assert worker.update(grouped_batch(), step=1)["actor/grad_norm"] > 0
    assert not any(torch.equal(tensor, before[key]) for key, tensor in fsdp(worker).named_tensors())
    worker.save(tmp_path / "state")
    worker.update(grouped_batch(), step=2)
    resumed = make_worker(tmp_path / "model", enable_gradient_checkpointing=True)
    resumed.load(tmp_path / "state")
    resumed.update(grouped_batch(), step=2)
    for (key, tensor), (_, other) in zip(fsdp(worker).named_tensors(), fsdp(resumed).named_tensors(), strict=True):
        assert torch.equal(tensor, other), key
    assert_exported(worker, tmp_path / "export")
    assert load_file(tmp_path / "export" / "model.safetensors").keys() == saved.keys()


def test_adapters_lie_beside_the_linear_layers_of_mixers(tmp_path: Path) -> None:
    make_model("qwen3.5").save_pretrained(tmp_path / "model")
    worker = make_worker(tmp_path / "model", lora_rank=2)
    mixer = fsdp(worker).model.base.get_submodule("model.layers.0.linear_attn")
    adapted = {name.partition(".")[0] for name, _ in mixer.named_parameters() if "lora_" in name}
    assert (
        adapted
        == {name for name, part in linear_layers(mixer)}
        == {
            "in_proj_qkv",
            "in_proj_z",
            "in_proj_b",
            "in_proj_a",
            "out_proj",
        }
    )
    before = {name: weight.detach().clone() for name, weight in mixer.named_parameters()}
    for step in (1, 2):  # the first moves B alone
        worker.update(grouped_batch(), step=step)
    assert all(torch.equal(before[name], weight) != ("lora_" in name) for name, weight in mixer.named_parameters())
    assert_exported(worker, tmp_path / "export")


def test_adapters_leave_out_layers_that_peft_refuses(tmp_path: Path) -> None:
    make_model("falcon-h1").save_pretrained(tmp_path / "model")
    base = fsdp(make_worker(tmp_path / "model", lora_rank=2)).model.base
    adapted = {name.partition(".lora_")[0].rpartition(".")[2] for name, _ in base.named_parameters() if "lora_" in name}
    assert "in_proj" in adapted and "out_proj" not in adapted


@pytest.mark.parametrize("name", ["qwen3-next", "deepseek-v3"])
def test_adapters_leave_out_layers_whose_names_peft_takes_for_experts(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_model(name).save_pretrained(tmp_path / "model")
    base = fsdp(make_worker(tmp_path / "model", lora_rank=2)).model.base
    adapted = {name.partition(".lora_")[0].rpartition(".")[2] for name, _ in base.named_parameters() if "lora_" in name}
    assert "o_proj" in adapted and not adapted & {"gate_proj", "up_proj", "down_proj"}
    assert ("in_proj_qkvz" in adapted) == (name == "qwen3-next")
    assert_names(caplog.text, "all-linear", "down_proj", "gate_proj", "up_proj")


def linear_layers(mixer: nn.Module) -> list[tuple[str, nn.Module]]:
    """The linear layers directly below `mixer`, with or without adapters."""
    return [(name, part) for name, part in mixer.named_children() if isinstance(part, nn.Linear) or "lora" in str(part)]


def assert_exported(worker: PolicyWorker, folder: Path) -> None:
    """transformers reads the export, and has the worker's log-probs."""
    worker.export(folder, NoTokenizer())  # type: ignore[arg-type]
    exported = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    batch = grouped_batch()
    logprobs, _ = worker.compute_log_probs(batch)
    start, end = batch.offsets[2:4].tolist()
    with torch.no_grad():
        expected = exported(input_ids=batch.ids[None, start:end]).logits[0, :-1].log_softmax(-1)
    expected = expected.gather(1, batch.ids[start + 1 : end, None])[:, 0]
    assert torch.allclose(logprobs[start + 1 : end], expected, atol=1e-5)
