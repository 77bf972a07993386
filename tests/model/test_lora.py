"""Adapters by peft: they alone learn, on one rank or two, and what leaves the worker is the model with them in it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from agentrl.config.sections.actor import ActorConfig
from agentrl.config.sections.model import ModelConfig
from agentrl.config.sections.optim import OptimConfig
from agentrl.errors import CheckpointError, ConfigError
from agentrl.model.packed import load_model
from agentrl.quickstart.tiny_policy import make_tiny_policy
from agentrl.runtime.ranks import LocalRanks, join_tokens, shares
from agentrl.workers import PolicyWorker, ReferenceWorker
from agentrl.workers.groups import ReferenceGroup
from tests.model.families import make_model
from tests.naming import Names, assert_names, naming
from tests.parallel.test_shard import RANKS, run_ranks
from tests.workers.conftest import SHAPE, BatchMaker, WorkerMaker, fsdp, same_weights

ACTOR = ActorConfig(ppo_mini_batch_size=4, ppo_max_token_len_per_gpu=64, optim=OptimConfig(lr=1e-2))


def lora(path: Path, **keys: object) -> ModelConfig:
    return ModelConfig.model_validate({"path": str(path), "lora_rank": 4, "lora_alpha": 8} | keys)


def base_weights(worker: PolicyWorker) -> dict[str, torch.Tensor]:
    """The weights beside the adapters, as they lie in the worker."""
    backend = fsdp(worker)
    assert backend.model.lora is not None
    return {name: p.detach().clone() for name, p in backend.model.lora.plain(backend.tensors).items()}


def equal(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> bool:
    return set(left) == set(right) and all(torch.equal(left[name], right[name]) for name in left)


@pytest.fixture
def trained(make_worker: WorkerMaker, make_batch: BatchMaker, tiny_policy: Path) -> PolicyWorker:
    """After two updates."""
    worker = make_worker(ACTOR, lora(tiny_policy))
    for step in (1, 2):
        worker.update(make_batch(seed=step), step=step)
    return worker


def export(worker: PolicyWorker, tiny_policy: Path, path: Path) -> Path:
    worker.export(path, AutoTokenizer.from_pretrained(tiny_policy))
    return path


def logits(model: PreTrainedModel | PeftModel) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(input_ids=torch.arange(5, 45)[None]).logits
    return result


@pytest.mark.parametrize("optim", [OptimConfig(lr=1e-2), OptimConfig(name="muon", lr=2e-2)])
def test_adapters_learn_and_nothing_else(
    make_worker: WorkerMaker, make_batch: BatchMaker, tiny_policy: Path, optim: OptimConfig
) -> None:
    batch = make_batch()
    batch = batch.with_fields(advantages=batch.mask.float())  # the more likely the better
    worker = make_worker(ActorConfig(ppo_mini_batch_size=4, optim=optim), lora(tiny_policy))
    untouched = {name: param.detach() for name, param in load_model(str(tiny_policy)).named_parameters()}
    assert equal(base_weights(worker), untouched)
    assert equal(dict(fsdp(worker).named_tensors()), untouched), "new adapters change nothing"
    before, _ = worker.compute_log_probs(batch)
    for step in range(1, 11):
        metrics = worker.update(batch, step=step)
        assert metrics["actor/grad_norm"] > 0
    after, _ = worker.compute_log_probs(batch)
    assert after[batch.mask].mean() > before[batch.mask].mean() + 0.2
    assert equal(base_weights(worker), untouched)
    assert all(".lora_" in name for name in fsdp(worker).optim.state())
    changed = [name for name, tensor in fsdp(worker).named_tensors() if not torch.equal(tensor, untouched[name])]
    assert len(changed) == 7 * SHAPE.layers, "every linear layer of the decoder, and not the head"


def test_gradient_checkpointing_changes_nothing(
    make_worker: WorkerMaker, make_batch: BatchMaker, tiny_policy: Path, trained: PolicyWorker
) -> None:
    other = make_worker(ACTOR, lora(tiny_policy, enable_gradient_checkpointing=True))
    for step in (1, 2):
        other.update(make_batch(seed=step), step=step)
    assert same_weights(other, trained, 1e-6)


def test_only_the_named_layers(make_worker: WorkerMaker, tiny_policy: Path) -> None:
    worker = make_worker(ACTOR, lora(tiny_policy, target_modules=["q_proj", "v_proj"]))
    assert len(fsdp(worker).params) == 2 * 2 * SHAPE.layers
    assert all("q_proj" in name or "v_proj" in name for name in fsdp(worker).params)


@pytest.mark.parametrize(
    ("excluded", "left"),
    [
        (["v_proj"], ["0.q", "1.q"]),
        (r".*\.0\..*", ["1.q", "1.v"]),
        (["layers.0.self_attn.v_proj"], ["0.q", "1.q", "1.v"]),
    ],
)
def test_excluded_layers_get_no_adapters(
    make_worker: WorkerMaker, tiny_policy: Path, excluded: str | list[str], left: list[str]
) -> None:
    keys = {"target_modules": ["q_proj", "v_proj"], "exclude_modules": excluded}
    worker = make_worker(ACTOR, lora(tiny_policy, **keys))
    found = {re.sub(r".*layers\.(\d)\.self_attn\.(\w)_proj.*", r"\1.\2", name) for name in fsdp(worker).params}
    assert sorted(found) == left


def test_all_linear_layers_of_a_mixture_are_those_of_its_attention(
    tmp_path: Path,
    tiny_policy: Path,
    make_worker: WorkerMaker,
    make_batch: BatchMaker,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its experts are one parameter a layer: they, the router and the head stay, and the run says so."""
    make_model("qwen3-moe", vocab_size=SHAPE.vocab).save_pretrained(tmp_path / "mixture")
    worker = make_worker(ACTOR, lora(tmp_path / "mixture"))
    assert_names(caplog.text, "experts")
    backend = fsdp(worker)
    adapted = {name.split(".lora_")[0].rpartition(".")[2] for name in backend.params}
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj"}
    before = {name: tensor.clone() for name, tensor in backend.named_tensors()}
    worker.update(make_batch(), step=1)
    moved = {
        name.rpartition("proj")[0][-2:] for name, tensor in backend.named_tensors() if not tensor.equal(before[name])
    }
    assert moved == {"q_", "k_", "v_", "o_"}
    exported = AutoModelForCausalLM.from_pretrained(export(worker, tiny_policy, tmp_path / "policy"))
    assert sum(param.numel() for param in exported.parameters()) == sum(tensor.numel() for tensor in before.values())


def test_exported_is_the_merged_model_and_the_adapter(tiny_policy: Path, trained: PolicyWorker, tmp_path: Path) -> None:
    """transformers loads the one, peft the other, and both compute what peft's own merge does."""
    out = export(trained, tiny_policy, tmp_path / "policy")
    merged = AutoModelForCausalLM.from_pretrained(out)
    assert merged.lm_head.weight is merged.model.embed_tokens.weight
    base = AutoModelForCausalLM.from_pretrained(tiny_policy)
    unchanged = logits(base)
    by_peft = PeftModel.from_pretrained(base, out / "adapter")
    unmerged = logits(by_peft)
    assert (unmerged - unchanged).abs().max() > 1e-2
    assert (logits(merged) - unmerged).abs().max() < 1e-5
    theirs = dict(by_peft.merge_and_unload().named_parameters())
    for name, tensor in fsdp(trained).named_tensors():
        assert torch.allclose(tensor, theirs[name], rtol=0, atol=1e-6), name
    assert {name: tuple(t.shape) for name, t in fsdp(trained).named_tensors()} == dict(trained.weights().shapes)


def test_starts_from_an_adapter(
    make_worker: WorkerMaker, tiny_policy: Path, trained: PolicyWorker, tmp_path: Path
) -> None:
    out = export(trained, tiny_policy, tmp_path / "policy") / "adapter"
    assert same_weights(make_worker(ACTOR, lora(tiny_policy, lora_adapter_path=str(out))), trained)


def test_resumes_bit_for_bit(
    make_worker: WorkerMaker, make_batch: BatchMaker, tiny_policy: Path, trained: PolicyWorker, tmp_path: Path
) -> None:
    trained.save(tmp_path / "saved")
    names = {name.partition("/")[0] for name in load_file(tmp_path / "saved" / "shard-00001-of-00001.safetensors")}
    assert names == set(fsdp(trained).params), "adapters and their optimizer only"
    resumed = make_worker(ACTOR, lora(tiny_policy))
    resumed.load(tmp_path / "saved")
    for worker in (trained, resumed):
        worker.update(make_batch(seed=3), step=3)
    assert same_weights(resumed, trained)
    assert equal(fsdp(resumed).optim.state(), fsdp(trained).optim.state())


def test_a_checkpoint_beside_other_weights_is_refused(
    make_worker: WorkerMaker, tiny_policy: Path, trained: PolicyWorker, tmp_path: Path
) -> None:
    """Adapters fit any model of the shape, and mean nothing there."""
    trained.save(tmp_path / "saved")
    other = make_tiny_policy(tmp_path / "other", seed=1, shape=SHAPE)
    for model, message in (
        (lora(other), "weights with checksum .* Set actor_rollout_ref.model.path"),
        (lora(tiny_policy, lora_alpha=16), "lora_alpha: 8 in the checkpoint, 16 in this run"),
        (lora(tiny_policy, lora_rank=8), "the keys of LoRA"),
        (ModelConfig(path=str(tiny_policy)), "the keys of LoRA"),
    ):
        worker = make_worker(ACTOR, model)
        before = {name: tensor.clone() for name, tensor in fsdp(worker).named_tensors()}
        with pytest.raises(CheckpointError, match=message):
            worker.load(tmp_path / "saved")
        assert equal(dict(fsdp(worker).named_tensors()), before)


def test_reference_is_the_policy_without_adapters(
    make_batch: BatchMaker, tiny_policy: Path, trained: PolicyWorker
) -> None:
    batch = make_batch()
    reference = ReferenceWorker(
        str(tiny_policy), dtype="float32", device="cpu", temperature=1.0, log_prob_max_tokens=4096
    )
    expected, metrics = reference.compute_reference_log_probs(batch)
    now, _ = trained.compute_log_probs(batch)
    found = ReferenceGroup(LocalRanks(trained)).log_probs(batch).ref_logprobs
    assert found is not None and torch.equal(found, expected)
    assert metrics == {}
    assert (now - expected).abs().max() > 0.01
    assert torch.equal(trained.compute_log_probs(batch)[0], now), "the adapters are on again"


def test_bfloat16_keeps_adapters_in_float32(
    make_worker: WorkerMaker, make_batch: BatchMaker, tiny_policy: Path
) -> None:
    worker = make_worker(ACTOR, lora(tiny_policy, dtype="bfloat16"))
    worker.update(make_batch(), step=1)
    assert {param.dtype for param in fsdp(worker).params.values()} == {torch.float32}
    assert {tensor.dtype for tensor in base_weights(worker).values()} == {torch.bfloat16}
    assert {tensor.dtype for _, tensor in fsdp(worker).named_tensors()} == {torch.bfloat16}


def test_two_ranks_equal_one(
    make_worker: WorkerMaker, make_batch: BatchMaker, tiny_policy: Path, tmp_path: Path
) -> None:
    """Rank 3 is no multiple of two ranks, and the shares differ in size and in the number of micro-batches."""
    batch = make_batch(prompts=7, n=1)
    optim = OptimConfig(name="muon", lr=1e-2, lr_scheduler_type="linear")
    actor = ActorConfig(ppo_mini_batch_size=4, ppo_max_token_len_per_gpu=64, optim=optim)
    model = lora(tiny_policy, lora_rank=3, enable_gradient_checkpointing=True)
    worker = make_worker(actor, model, log_prob_max_tokens=128)
    batch = batch.with_fields(old_logprobs=worker.compute_log_probs(batch)[0])
    assert batch.old_logprobs is not None
    torch.save({item.name: getattr(batch, item.name) for item in fields(batch)}, tmp_path / "batch.pt")
    settings = {"model": model.model_dump(), "actor": actor.model_dump()}
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    run_ranks(tmp_path, Path(__file__).with_name("one_of_two_lora_ranks.py"))

    metrics = [worker.update(batch, step=step) for step in (1, 2)]
    for rank in range(RANKS):
        for one, two in zip(metrics, json.loads((tmp_path / f"metrics-{rank}.json").read_text()), strict=True):
            assert two == pytest.approx(one, rel=1e-4, abs=1e-5)
    parts = shares(batch.lengths.tolist(), RANKS)
    ranks = [load_file(tmp_path / f"logprobs-{rank}.safetensors") for rank in range(RANKS)]
    found = {name: join_tokens([rank[name] for rank in ranks], parts, batch) for name in ranks[0]}
    after, _ = worker.compute_log_probs(batch)
    assert (after - batch.old_logprobs).abs().max() > 1e-3
    for name, expected in (("reference", batch.old_logprobs), ("again", batch.old_logprobs), ("after", after)):
        assert torch.allclose(found[name], expected, rtol=0, atol=1e-5), name
    merged = load_file(tmp_path / "merged.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in merged.items()} == dict(worker.weights().shapes)
    for name, tensor in fsdp(worker).named_tensors():
        assert torch.allclose(merged[name], tensor, rtol=0, atol=1e-5), name

    resumed = make_worker(actor, model)
    resumed.load(tmp_path / "policy")  # a checkpoint of two ranks, in one process
    assert equal(dict(fsdp(resumed).named_tensors()), merged)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    by_peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_policy), tmp_path / "export/adapter")
    assert (logits(exported) - logits(by_peft)).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["q_proj", "query"], ("'query'", "down_proj", "q_proj")),
        (["lm_head"], "head"),
        (["embed_tokens"], "'embed_tokens'"),
    ],
)
def test_wrong_targets_are_named(
    make_worker: WorkerMaker, tiny_policy: Path, targets: list[str], message: Names
) -> None:
    with naming(ConfigError, message):
        make_worker(ACTOR, lora(tiny_policy, target_modules=targets))


def test_adapters_that_do_not_fit_are_named(
    make_worker: WorkerMaker, tiny_policy: Path, trained: PolicyWorker, tmp_path: Path
) -> None:
    good = export(trained, tiny_policy, tmp_path / "policy") / "adapter"

    def refused(message: str, folder: Path = good, **keys: object) -> None:
        with pytest.raises(ConfigError, match=message):
            make_worker(ACTOR, lora(tiny_policy, lora_adapter_path=str(folder), **keys))

    refused("adapter_config.json cannot be read", tmp_path / "nowhere")
    refused("has r=4, and the run has lora_rank=8", lora_rank=8)
    refused("has lora_alpha=8, and the run has lora_alpha=16", lora_alpha=16)
    refused(r"lora_A.weight: the run has nothing, the adapter \[4, ", target_modules=["q_proj"])
    other = Path(shutil.copytree(good, tmp_path / "rslora"))
    settings = json.loads((other / "adapter_config.json").read_text())
    (other / "adapter_config.json").write_text(json.dumps(settings | {"use_rslora": True}))
    refused("has use_rslora=True; only plain LoRA", other)
    short = Path(shutil.copytree(good, tmp_path / "short"))
    tensors = load_file(short / "adapter_model.safetensors")
    tensors.pop(next(iter(tensors)))
    save_file(tensors, short / "adapter_model.safetensors")
    refused(r"the run has \[.*\], the adapter nothing", short)
    (short / "adapter_model.safetensors").write_bytes(b"half")
    refused("adapter_model.safetensors cannot be read", short)
