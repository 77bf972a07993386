"""Compiled decoder layers compute what they do otherwise, by programs that fit micro-batches of any size."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentrl.checks.recomputed import recompute
from agentrl.config.sections.actor import ActorConfig
from agentrl.config.sections.model import ModelConfig
from agentrl.config.sections.optim import OptimConfig
from agentrl.errors import ConfigError
from agentrl.model.compiled import TRIED, compile_layers, text_layers
from agentrl.model.packed import token_logprobs, use_packed_attention
from tests.model.families import FAMILIES, make_model
from tests.naming import naming
from tests.workers.conftest import BatchMaker, WorkerMaker, fsdp, same_weights


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """Programs, and whose they are."""
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.set_default_backend(None)
    torch.compiler.reset()


def programs() -> int:
    return counters["stats"]["unique_graphs"]


@pytest.mark.slice(0, "matrix")
def test_programs_of_two_sizes_serve_all_others() -> None:
    """By the real compiler: log-probs and gradients, with every layer and every size by the same programs."""
    own, compiled = (use_packed_attention(make_model("llama")) for _ in range(2))
    compile_layers(text_layers(compiled), "cpu")
    assert dict(own.named_parameters()).keys() == dict(compiled.named_parameters()).keys()
    counters.clear()
    generator, made = torch.Generator().manual_seed(0), []
    for lengths in ([20, 13], [11, 30, 7], [60, 31, 20, 33], [9]):
        ids = torch.randint(3, 61, (sum(lengths),), generator=generator)
        offsets = torch.tensor([0, *lengths]).cumsum(0)
        for model in (own, compiled):
            model.zero_grad()
            logprobs, *_ = token_logprobs(model, ids, offsets)
            logprobs.mean().backward()
            if model is own:
                expected = logprobs
        assert torch.allclose(logprobs, expected, rtol=0, atol=1e-5)
        for (name, wanted), found in zip(own.named_parameters(), compiled.parameters(), strict=True):
            assert found.grad is not None and wanted.grad is not None
            assert torch.allclose(found.grad, wanted.grad, rtol=0, atol=1e-5 * float(wanted.grad.abs().max())), name
        made.append(programs())
    assert 0 < made[0] <= 4 and made[2:] == made[1:2] * 2


def test_a_policy_that_is_compiled_learns_and_leaves_as_another(
    make_worker: WorkerMaker, make_batch: BatchMaker, tiny_policy: Path, tmp_path: Path
) -> None:
    """With layers that are computed again in the backward pass, and with adapters."""
    torch.compiler.set_default_backend("eager")
    model = ModelConfig(path=str(tiny_policy), enable_gradient_checkpointing=True, lora_rank=4)
    plain, worker = (
        make_worker(
            ActorConfig(
                ppo_mini_batch_size=4,
                ppo_max_token_len_per_gpu=64,
                optim=OptimConfig(lr=1e-2),
                use_torch_compile=compiled,
            ),
            model,
        )
        for compiled in (False, True)
    )
    for step in (1, 2):
        batch = make_batch(seed=step)
        batch = batch.with_fields(old_logprobs=plain.compute_log_probs(batch)[0])
        assert batch.old_logprobs is not None
        assert torch.allclose(worker.compute_log_probs(batch)[0], batch.old_logprobs, rtol=0, atol=1e-5)
        plain.update(batch, step=step)
        worker.update(batch, step=step)
    assert programs() > 0 and same_weights(plain, worker, 1e-5)
    one = batch.select([0])
    one = one.with_fields(old_logprobs=worker.compute_log_probs(one)[0])
    report = worker.recompute(one, 1.0, partial(recompute, gradients=True))
    assert report.evaluated["recomputed/policy"] == 1 and not report.findings, "checked by a model that is not compiled"
    worker.export(tmp_path, AutoTokenizer.from_pretrained(tiny_policy))
    exported = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(exported[name], tensor) for name, tensor in fsdp(worker).named_tensors())


def test_experts_and_windows_run_between_the_programs() -> None:
    torch.compiler.set_default_backend("eager")
    own, compiled = (use_packed_attention(make_model("gpt-oss")) for _ in range(2))
    compile_layers(text_layers(compiled), "cpu")
    ids, offsets = torch.arange(33) * 7 % 58 + 3, torch.tensor([0, 20, 33])
    with torch.no_grad():
        expected, found = (token_logprobs(model, ids, offsets)[0] for model in (own, compiled))
    assert programs() > 0 and torch.allclose(found, expected, rtol=0, atol=1e-5)


KINDS = {FAMILIES[name][0]: name for name in reversed(FAMILIES)}
"""A family of tests/model/families.py by its `model_type`."""


@pytest.mark.slice(1, "matrix")
@pytest.mark.parametrize("kind", TRIED)
def test_log_probs_and_gradients_of_each_kind_that_auto_compiles(kind: str) -> None:
    torch.compiler.set_default_backend("aot_eager")
    own, compiled = (use_packed_attention(make_model(KINDS[kind])) for _ in range(2))
    compile_layers(text_layers(compiled), "cpu")
    ids, offsets = torch.arange(33) * 7 % 58 + 3, torch.tensor([0, 20, 33])
    expected, found = (token_logprobs(model, ids, offsets)[0] for model in (own, compiled))
    assert programs() > 0 and torch.allclose(found, expected, rtol=0, atol=1e-5)
    expected.mean().backward()
    found.mean().backward()
    for (name, wanted), made in zip(own.named_parameters(), compiled.parameters(), strict=True):
        assert wanted.grad is not None and made.grad is not None
        assert torch.allclose(made.grad, wanted.grad, rtol=0, atol=1e-5 * float(wanted.grad.abs().max())), name


def test_a_compiler_that_is_missing_is_told_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", ("no-such-compiler",))
    with naming(ConfigError, "use_torch_compile=true", "no-such-compiler"):
        compile_layers([], "cpu")
