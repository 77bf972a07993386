"""Peak memory of twelve runs on a CPU, over the peak that `python -m agentrl.plan` foretells.

    python -m benchmarks.training.planned_memory [--cases plain critic] [--steps 2]

The model is made up (91 million parameters, or 26); its random weights end hardly any answer, so trajectories reach
their longest, as the plan assumes. Peaks are the kernel's (ru_maxrss) of a process of its own.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from agentrl.config import Config, load_config
from agentrl.plan.memory import MemoryPlan
from agentrl.quickstart.tiny_policy import TinyShape, make_tiny_policy
from agentrl.runtime.room import room

LARGE = TinyShape(hidden=768, layers=12, heads=24, kv_heads=8, intermediate=2048)
SMALL = TinyShape(hidden=512, layers=6, heads=16, kv_heads=4, intermediate=1536)
ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
PROMPT = 64
"""Tokens that a prompt has at most."""
REWARD = """\
def compute_score(solution_str):
    return len(solution_str) % 7
"""
CASES: dict[str, tuple[TinyShape, list[str]]] = {
    "plain": (LARGE, []),
    "small model": (SMALL, []),
    "long": (LARGE, ["data.max_response_length=512"]),
    "many": (SMALL, ["data.train_batch_size=32", f"{ACTOR}.ppo_mini_batch_size=32", "data.max_response_length=256"]),
    "small micro-batches": (LARGE, [f"{ACTOR}.ppo_max_token_len_per_gpu=512"]),
    "large micro-batches": (SMALL, [f"{ACTOR}.ppo_max_token_len_per_gpu=8192"]),
    "checkpointing": (LARGE, [f"{MODEL}.enable_gradient_checkpointing=true"]),
    "LoRA": (LARGE, [f"{MODEL}.lora_rank=16"]),
    "critic": (LARGE, ["algorithm.adv_estimator=gae", "critic.ppo_max_token_len_per_gpu=2048"]),
    "reference": (LARGE, [f"{ACTOR}.use_kl_loss=true"]),
    "bfloat16": (LARGE, [f"{MODEL}.dtype=bfloat16"]),
    "freed cache": (SMALL, [f"{ROLLOUT}.free_cache_engine=true", "data.max_response_length=512"]),
}


def words_of(folder: Path, model: Path, further: Sequence[str], steps: int) -> list[str]:
    """Overrides of a run."""
    return [
        f"data.train_files={folder}/rows.parquet",
        f"{MODEL}.path={model}",
        "data.train_batch_size=8",
        f"{ACTOR}.ppo_mini_batch_size=8",
        f"{ROLLOUT}.n=4",
        f"data.max_prompt_length={PROMPT}",
        "data.max_response_length=128",
        f"{ACTOR}.ppo_max_token_len_per_gpu=2048",
        f"{ROLLOUT}.log_prob_max_token_len_per_gpu=2048",
        f"custom_reward_function.path={folder}/reward.py",
        "trainer.device=cpu",
        "trainer.save_freq=-1",
        f"trainer.total_training_steps={steps}",
        f"trainer.default_local_dir={folder}/run",
        *further,
    ]


def peak_of(words: Sequence[str], log: Path) -> int:
    """Train in a process of its own; return the bytes that it held at most. Raises SystemExit when it fails."""
    with log.open("wb") as file:
        command = [sys.executable, "-m", "agentrl.train", *words]
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"error: {' '.join(words)} ended with status {status}:\n{log.read_text()[-2000:]}")
    return used.ru_maxrss << 10


def write_rows(file: Path) -> None:
    """Rows of one question of 40 words each."""
    rows = [
        {
            "prompt": [{"role": "user", "content": f"How many apples are {number} apples and {number + 3} oranges?"}],
            "data_source": "made up",
            "reward_model": {"ground_truth": "1"},
        }
        for number in range(64)
    ]
    pq.write_table(pa.Table.from_pylist(rows), file)


def compare(case: str, steps: int, place: Path) -> float:
    """Print a case's peak, seen and foretold, and return seen over foretold."""
    shape, further = CASES[case]
    folder = place / case.replace(" ", "_")
    folder.mkdir()
    write_rows(folder / "rows.parquet")
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")
    model = make_tiny_policy(folder / "model", 0, shape=shape)
    words = words_of(folder, model, further, steps)
    plan = MemoryPlan(load_config(words, "train", Config), "cpu", room("cpu"))
    seen = peak_of(words, folder / "log")
    fullest = plan.fullest
    ratio = seen / fullest.total
    print(
        f"{case}: {seen / 1e9:.2f} GB, {fullest.total / 1e9:.2f} foretold ({fullest.name}): {ratio:.2f}",
        flush=True,
    )
    return ratio


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES), metavar="CASE")
    parser.add_argument("--steps", type=int, default=2)
    asked = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as place:
        ratios = [compare(case, asked.steps, Path(place)) for case in asked.cases]
    within = sum(abs(ratio - 1) <= 0.15 for ratio in ratios)
    print(f"within 15 %: {within} of {len(ratios)}; median {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
