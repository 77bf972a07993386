"""A pretrained model trained on the device: a supervised warm-up of 160 conversations, then GRPO with the quickstart's
tools.

`--model` is a folder in Hugging Face format of a small chat model, for example SmolLM2-135M-Instruct; the quickstart's
chat template replaces the model's. Its rows are those of the quickstart.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pyarrow.parquet as pq

from agentrl.quickstart.tiny_policy import CHAT_TEMPLATE
from benchmarks.gpu.part import Setting, row, setting
from benchmarks.gpu.quickstart import watch

STEPS, CONVERSATIONS, PROMPTS, TRAJECTORIES = 30, 160, 32, 8


def module(name: str, *words: str) -> None:
    """Run a command of the project. Raises subprocess.CalledProcessError when it fails."""
    subprocess.run([sys.executable, "-m", name, *words], check=True)


def warm_up(asked: Setting, folder: Path, template: str) -> Path:
    """Train the model on good conversations; returns the folder of the weights."""
    few = 32 if asked.tiny else CONVERSATIONS
    pq.write_table(pq.read_table(folder / "data/sft.parquet").slice(0, few), folder / "conversations.parquet")
    began = time.monotonic()
    module(
        "agentrl.sft",
        f"data.train_files={folder}/conversations.parquet",
        f"model.path={asked.model}",
        f"model.chat_template={template}",
        f"model.dtype={asked.dtype}",
        "data.train_batch_size=16",
        "optim.lr=1e-4",
        f"trainer.device={asked.device}",
        f"trainer.default_local_dir={folder}/sft",
    )
    row("seconds of the supervised warm-up", seen=time.monotonic() - began)
    return folder / "sft/policy"


def main() -> None:
    asked = setting(__doc__)
    with tempfile.TemporaryDirectory() as name:
        folder, prompts = Path(name), 2 if asked.tiny else PROMPTS
        module("data_prep.quickstart", f"--out={folder}/data")
        template = folder / "template.jinja"
        template.write_text(CHAT_TEMPLATE, encoding="utf-8")
        policy = warm_up(asked, folder, str(template))
        words = [
            f"trainer.device={asked.device}",
            f"data.train_files={folder}/data/train.parquet",
            f"data.val_files={folder}/data/val.parquet",
            f"actor_rollout_ref.rollout.multi_turn.tool_config_path={folder}/data/tools.yaml",
            f"actor_rollout_ref.model.path={policy}",
            f"actor_rollout_ref.model.dtype={asked.dtype}",
            f"data.train_batch_size={prompts}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts}",
            f"actor_rollout_ref.rollout.n={2 if asked.tiny else TRAJECTORIES}",
            "actor_rollout_ref.actor.optim.lr=1e-5",
            "data.max_prompt_length=300",
            "data.max_response_length=160",
            "trainer.save_freq=-1",
            f"trainer.total_training_steps={2 if asked.tiny else STEPS}",
            *(["data.val_max_samples=4"] if asked.tiny else []),
        ]
        watch(words, folder / "run", {})


if __name__ == "__main__":
    main()
