"""Our side of `grpo_step`: one step of the real training loop for each line on stdin, its cost as a line of JSON."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import yaml
from transformers.utils import logging

from agentrl.config import load_config
from agentrl.observe.open import open_display
from agentrl.trainer.build import build
from agentrl.trainer.inputs import open_inputs
from benchmarks.training.delayed_calculator import DelayedCalculator
from data_prep.transcripts import TOOLS

ROLLOUT = "actor_rollout_ref.rollout"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--policy", required=True)
    parser.add_argument("--rows", type=Path, required=True, help="JSON: a list of {prompt, ground_truth}")
    parser.add_argument("--delay", type=float, required=True, help="seconds a tool call takes")
    parser.add_argument("--prompts", type=int, required=True)
    parser.add_argument("--generations", type=int, required=True)
    parser.add_argument("--turn-tokens", type=int, required=True)
    parser.add_argument("--response-tokens", type=int, required=True)
    given = parser.parse_args()
    answers, sys.stdout = sys.stdout, sys.stderr
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        config = load_config(overrides(given, Path(folder)))
        with open_display("grpo_step") as display, build(config, open_inputs(config), display) as run:
            trainer = run.training
            while sys.stdin.readline():
                cpu, wall = time.process_time(), time.perf_counter()
                trainer.step += 1
                metrics = trainer.take_step(validates=False).metrics
                cost = {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall}
                print(json.dumps(cost | {"response": metrics["response/mean"]}), file=answers, flush=True)


def overrides(given: argparse.Namespace, folder: Path) -> list[str]:
    """The command line of the same step: as many prompts, turns and tokens, one optimizer step, nothing written."""
    write_rows(given.rows, folder / "train.parquet")
    write_tools(given.delay, folder / "tools.yaml")
    return [
        f"data.train_files={folder}/train.parquet",
        f"data.train_batch_size={given.prompts}",
        "data.shuffle=false",
        f"data.max_response_length={given.response_tokens}",
        f"actor_rollout_ref.model.path={given.policy}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={given.prompts}",
        "actor_rollout_ref.actor.optim.lr=1e-6",
        f"{ROLLOUT}.n={given.generations}",
        f"{ROLLOUT}.multi_turn.tool_config_path={folder}/tools.yaml",
        f"{ROLLOUT}.multi_turn.max_assistant_turns=2",
        f"{ROLLOUT}.multi_turn.max_tokens_per_turn={given.turn_tokens}",
        f"{ROLLOUT}.multi_turn.force_final_answer=false",
        "algorithm.filter_groups.enable=false",
        f"trainer.default_local_dir={folder}/run",
        "trainer.logger=[]",
        "trainer.save_trajectories=none",
        "trainer.show_trajectory_freq=-1",
    ]


def write_rows(source: Path, parquet: Path) -> None:
    rows = [
        {
            "data_source": "quickstart/arithmetic",
            "prompt": row["prompt"],
            "reward_model": {"style": "rule", "ground_truth": row["ground_truth"]},
            "agent_name": "tool_agent",
        }
        for row in json.loads(source.read_text(encoding="utf-8"))
    ]
    pq.write_table(pa.Table.from_pylist(rows), parquet)


def write_tools(delay: float, path: Path) -> None:
    tool = {
        "class_name": f"{DelayedCalculator.__module__}.{DelayedCalculator.__name__}",
        "config": {"seconds": delay},
        "tool_schema": TOOLS[0],
    }
    path.write_text(yaml.safe_dump({"tools": [tool]}), encoding="utf-8")


if __name__ == "__main__":
    main()
