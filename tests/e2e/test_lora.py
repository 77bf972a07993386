"""Whole runs with adapters: the main job with a reference, killed and started again, and supervised training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from agentrl.sft import main as sft
from agentrl.train import main
from agentrl.workers import ReferenceWorker
from tests.e2e.test_train import lines
from tests.runs import Overrides

SHARD = "shard-00001-of-00001.safetensors"
MODEL = "actor_rollout_ref.model"


def logits(model: PreTrainedModel | PeftModel) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(input_ids=torch.arange(5, 45)[None]).logits
    return result


def merged_equals_adapter(policy: Path, base: Path, tolerance: float = 1e-4) -> bool:
    """What transformers makes of the exported policy, and peft of the adapter beside it; and both learnt something."""
    start = AutoModelForCausalLM.from_pretrained(base)
    unchanged = logits(start)
    merged = logits(AutoModelForCausalLM.from_pretrained(policy))
    assert (merged - unchanged).abs().max() > 10 * tolerance
    by_peft = logits(PeftModel.from_pretrained(start, policy / "adapter"))
    return bool((merged - by_peft).abs().max() < tolerance)


def test_a_run_with_adapters(
    small_run: Overrides, tmp_path: Path, policy_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object, **keywords: object) -> None:
        raise AssertionError("a second model is loaded, though the policy without its adapters is the reference")

    monkeypatch.setattr(ReferenceWorker, "__init__", refuse)
    keys = [
        f"{MODEL}.lora_rank=8",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    ]
    keys += ["actor_rollout_ref.actor.optim.lr=5e-3", "actor_rollout_ref.actor.kl_loss_coef=0.01"]
    assert main(small_run(*keys, run_dir=tmp_path / "whole")) == 0
    metrics = lines(tmp_path / "whole")
    for line in metrics[1:]:
        assert line["rollout/logprob_gap_max_abs"] < 1e-4, "engine and trainer disagree"
        assert line["actor/grad_norm"] > 0
    assert metrics[1]["actor/kl_loss"] < 1e-6 < metrics[3]["actor/kl_loss"]
    assert merged_equals_adapter(tmp_path / "whole" / "policy", policy_dir)
    saved = load_file(tmp_path / "whole" / "checkpoints" / "step_000003" / "policy" / SHARD)
    assert all(".lora_" in name for name in saved)

    short = small_run(*keys, run_dir=tmp_path / "resumed")
    assert main([*short, "trainer.total_training_steps=2"]) == 0
    assert main(short) == 0
    again = load_file(tmp_path / "resumed" / "checkpoints" / "step_000003" / "policy" / SHARD)
    assert all(torch.equal(again[name], saved[name]) for name in saved)

    start = [f"{MODEL}.lora_rank=8", f"{MODEL}.lora_adapter_path={tmp_path / 'whole' / 'policy' / 'adapter'}"]
    assert main([*small_run(*start, run_dir=tmp_path / "further"), "trainer.total_training_steps=1"]) == 0
    assert lines(tmp_path / "further")[-1]["rollout/logprob_gap_max_abs"] < 1e-4, "the engine begins with the adapter"


def test_supervised_training_with_adapters(policy_dir: Path, data_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    keys = ["model.lora_rank=8", "optim.lr=1e-2", "trainer.total_training_steps=5", "trainer.device=cpu"]
    files = [f"data.train_files={data_dir}/sft.parquet", "data.on_bad_row=learn", f"model.path={policy_dir}"]
    assert sft([*files, *keys, f"trainer.default_local_dir={out}"]) == 0
    losses = [json.loads(line)["sft/loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0] - 0.3
    assert merged_equals_adapter(out / "policy", policy_dir)
