"""Every way to train and to continue, on the weights of a real model: a vocabulary of 49,152, tied embeddings, 30
layers, and distributions that are nearly certain. Two prompts, two trajectories each, 32 tokens."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.test_distillation import same_weights
from tests.e2e.test_lora import merged_equals_adapter
from tests.e2e.test_resume import kill_after, numbers
from tests.e2e.test_train import lines
from tests.forked import forked
from tests.real_model import TEMPLATE, cut_model, find_model

MODEL = "actor_rollout_ref.model"
ACTOR = "actor_rollout_ref.actor"
Overrides = Callable[..., list[str]]


@pytest.fixture(scope="module")
def whole_model(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return find_model(pytestconfig, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def four_layers(whole_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cut_model(whole_model, tmp_path_factory.mktemp("cut"), layers=4)


@pytest.fixture
def real_run(data_dir: Path, reward_file: Path, tmp_path: Path) -> Overrides:
    def overrides(model: Path, *more: str, run: str = "run", steps: int = 2) -> list[str]:
        return [
            f"data.train_files={data_dir}/train.parquet",
            "data.val_files=null",
            f"actor_rollout_ref.rollout.multi_turn.tool_config_path={data_dir}/tools.yaml",
            f"{MODEL}.path={model}",
            f"{MODEL}.chat_template={TEMPLATE}",
            f"custom_reward_function.path={reward_file}",
            "data.train_batch_size=2",
            "data.max_prompt_length=600",
            "data.max_response_length=32",
            f"{ACTOR}.ppo_mini_batch_size=2",
            f"{ACTOR}.optim.lr=1e-5",
            "actor_rollout_ref.rollout.n=2",
            "algorithm.filter_groups.enable=false",
            f"trainer.total_training_steps={steps}",
            "trainer.save_freq=1",
            "trainer.max_ckpt_to_keep=null",
            "trainer.device=cpu",
            f"trainer.default_local_dir={tmp_path / run}",
            *more,
        ]

    return overrides


def trained(arguments: list[str], run: Path, steps: int = 2) -> list[dict[str, float]]:
    """Train, and check what holds for each of these runs; its metrics."""
    done = forked(["-m", "agentrl.train", *arguments], run.parent, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = [line for line in lines(run) if "actor/grad_norm" in line]
    assert len(found) == steps
    for line in found:
        assert line["rollout/logprob_gap_max_abs"] < 1e-3, "engine and trainer disagree"
        assert line["actor/grad_norm"] > 0
        assert line.get("checks/alarms", 0) == 0, done.stdout[-3000:]
    assert json.loads((run / "policy" / "config.json").read_text())["tie_word_embeddings"]
    names = load_file(run / "policy" / "model.safetensors")
    assert "lm_head.weight" not in names and names["model.embed_tokens.weight"].shape == (49152, 576)
    return found


def test_one_step_of_a_few_real_layers(whole_model: Path, real_run: Overrides, tmp_path: Path) -> None:
    cut = cut_model(whole_model, tmp_path / "cut", layers=2)
    trained(real_run(cut, steps=1), tmp_path / "run", steps=1)


@pytest.mark.slice(0, "long run")
@pytest.mark.timeout(1200)
def test_adapters_start_from_supervised_ones_and_their_policy_starts_a_run(
    whole_model: Path, real_run: Overrides, data_dir: Path, tmp_path: Path
) -> None:
    """Supervised training with adapters, then rewards with and without them: one command each."""
    data = [f"data.train_files={data_dir}/sft.parquet", "data.on_bad_row=learn", "data.train_batch_size=2"]
    keys = [*data, f"model.path={whole_model}"]
    keys += [f"model.chat_template={TEMPLATE}", "model.lora_rank=4", "trainer.total_training_steps=2"]
    keys += ["trainer.device=cpu", f"trainer.default_local_dir={tmp_path}/sft", "optim.lr=1e-3"]
    done = forked(["-m", "agentrl.sft", *keys], tmp_path, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    adapters = [f"{MODEL}.lora_rank=4", f"{ACTOR}.optim.lr=1e-3"]
    found = trained(
        real_run(
            whole_model,
            *adapters,
            f"{MODEL}.lora_adapter_path={tmp_path}/sft/policy/adapter",
            f"{ACTOR}.use_kl_loss=true",
            run="lora",
        ),
        tmp_path / "lora",
    )
    assert found[0]["actor/kl_loss"] > 1e-4, "the reference has no adapters, and the policy begins with them"
    # Logits up to 36, after 30 layers: merging by peft itself changes them by 2e-3 in float32.
    assert merged_equals_adapter(tmp_path / "lora" / "policy", whole_model, tolerance=1e-2)
    trained(real_run(tmp_path / "lora" / "policy", run="next", steps=1), tmp_path / "next", steps=1)


@pytest.mark.slice(0, "long run")
@pytest.mark.timeout(1200)
def test_a_critic(whole_model: Path, real_run: Overrides, tmp_path: Path) -> None:
    keys = [key for key in real_run(whole_model) if "filter_groups" not in key]
    found = trained([*keys, "algorithm=ppo", "critic.optim.lr=1e-4"], tmp_path / "run")
    assert all(line["critic/vf_loss"] > 0 and line["critic/grad_norm"] > 0 for line in found)


@pytest.mark.slice(0, "long run")
@pytest.mark.timeout(1200)
def test_a_reward_model_of_real_layers(
    whole_model: Path, four_layers: Path, real_run: Overrides, tmp_path: Path
) -> None:
    asked = {"role": "user", "content": "How much is 12 times 3?"}
    pairs = {
        name: json.dumps([asked, {"role": "assistant", "content": said}])
        for name, said in (("chosen", "36"), ("rejected", "I do not know."))
    }
    pq.write_table(pa.Table.from_pylist([pairs] * 4), tmp_path / "pairs.parquet")
    keys = ["trains=reward_model", f"model.path={four_layers}", f"model.chat_template={TEMPLATE}", "optim.lr=1e-4"]
    keys += [f"data.train_files={tmp_path}/pairs.parquet", "data.train_batch_size=2", "trainer.device=cpu"]
    keys += ["trainer.total_training_steps=2", f"trainer.default_local_dir={tmp_path}/scores"]
    done = forked(["-m", "agentrl.preferences", *keys], tmp_path, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    scored = ["reward_model.enable=true", f"reward_model.model.path={tmp_path}/scores/policy"]
    found = trained(real_run(whole_model, *scored), tmp_path / "run")
    assert all(line["reward/std"] > 0 for line in found)


@pytest.mark.slice(0, "long run")
@pytest.mark.timeout(1200)
def test_the_whole_model_teaches_its_first_layers(
    whole_model: Path, four_layers: Path, real_run: Overrides, tmp_path: Path
) -> None:
    taught = [f"distillation.teacher.path={whole_model}", "distillation.scope=full", "distillation.divergence=js"]
    found = trained(real_run(four_layers, *taught), tmp_path / "run")
    assert all(line["distill/taught_fraction"] == 1 and line["distill/kl"] > 0.1 for line in found)


@pytest.mark.slice(0, "kill")
@pytest.mark.timeout(1200)
def test_killed_and_resumed_equals_undisturbed(whole_model: Path, real_run: Overrides, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    trained(real_run(whole_model, run="whole"), whole)
    assert kill_after(real_run(whole_model, run="parts"), parts, 900, last=1)
    assert not (parts / "policy").exists()
    trained(real_run(whole_model, run="parts"), parts)
    assert numbers(parts) == numbers(whole)
    assert same_weights(parts, whole)
    shutil.rmtree(parts)


@pytest.mark.slice(0, "long run")
@pytest.mark.timeout(1200)
def test_an_exported_policy_answers_by_generate(whole_model: Path, real_run: Overrides, tmp_path: Path) -> None:
    trained(real_run(whole_model, steps=1), tmp_path / "run", steps=1)
    policy: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "policy")
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "run" / "policy")
    assert tokenizer.chat_template == TEMPLATE.read_text()
    asked = [{"role": "user", "content": "What is the capital of France? Answer with one sentence."}]
    ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        answer = policy.generate(**ids, do_sample=False, max_new_tokens=40)[0, ids["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer) and tokenizer.decode(answer[-1]) == "<|im_end|>"
