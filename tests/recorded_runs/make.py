"""Make the runs of a commit, small enough to be kept: README.md says how.

    PYTHONPATH=CHECKOUT python make.py FOLDER

FOLDER gets `model/`, `data/`, `reward.py` and `runs/`, whose configs name them relative to it. Nothing is imported from
the tests, so that the code of any commit can run this file.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from agentrl.quickstart.tiny_policy import TinyShape, make_tiny_policy
from data_prep.quickstart import Recipe, make

SHAPE = TinyShape(vocab=280, hidden=16, layers=1, heads=1, kv_heads=1, intermediate=16)
REWARD = """\
import os
import signal
from pathlib import Path

KILL = Path(__file__).with_name("kill")


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if KILL.exists():
        with KILL.open("ab") as scores:
            scores.write(b".")
            if scores.tell() >= 64:
                os.kill(os.getpid(), signal.SIGKILL)
    return len(solution_str) % 7 / 7
"""
"""A scorer that tells random answers apart; a run is killed when a file `kill` next to it has 64 bytes."""
TRAIN = (
    "data.train_files=data/train.parquet",
    "data.val_files=data/val.parquet",
    "actor_rollout_ref.rollout.multi_turn.tool_config_path=data/tools.yaml",
    "actor_rollout_ref.model.path=model",
    "custom_reward_function.path=reward.py",
    "data.train_batch_size=2",
    "data.max_prompt_length=600",
    "data.max_response_length=16",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.rollout.n=2",
    "algorithm.filter_groups.enable=false",
)
QUESTIONS = (("How much is 12 times 3?", "#### 36", "#### 7"), ("Add 40 and 2.", "#### 42", "Forty."))


def run(folder: Path, module: str, *words: str, killed: bool = False) -> None:
    """Run a command in the folder, with the code that this process imports from."""
    done = subprocess.run([sys.executable, "-m", f"agentrl.{module}", *words], cwd=folder)
    expected = -signal.SIGKILL if killed else 0
    if done.returncode != expected:
        raise SystemExit(f"{module}: expected status {expected}, found {done.returncode}")


def write_rows(folder: Path) -> None:
    """Write conversations and pairs of them."""
    asked = [[{"role": "user", "content": question}] for question, _, _ in QUESTIONS]
    good = [[*one, {"role": "assistant", "content": text[1]}] for one, text in zip(asked, QUESTIONS, strict=True)]
    bad = [[*one, {"role": "assistant", "content": text[2]}] for one, text in zip(asked, QUESTIONS, strict=True)]
    pq.write_table(pa.table({"messages": [json.dumps(one) for one in good]}), folder / "conversations.parquet")
    pairs = {"chosen": [json.dumps(one) for one in good], "rejected": [json.dumps(one) for one in bad]}
    pq.write_table(pa.table(pairs), folder / "pairs.parquet")


def main(folder: Path) -> None:
    """Make everything; takes about a minute."""
    make_tiny_policy(folder / "model", seed=3, shape=SHAPE)
    make(folder / "data", Recipe(seed=1, train_rows=8, val_rows=2, good_rows=8, flawed_rows=2), lambda text: None)
    write_rows(folder / "data")
    (folder / "reward.py").write_text(REWARD)
    saved = ["trainer.total_training_steps=2", "trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=2"]
    run(folder, "train", *TRAIN, *saved, "trainer.test_freq=2", "trainer.default_local_dir=runs/turns")
    (folder / "runs" / "turns" / "reward.png").unlink()  # a tenth of all bytes, and nothing reads it
    ahead = ["async_training.max_staleness=1", "trainer.total_training_steps=6", "trainer.save_freq=2"]
    ahead.append("trainer.max_actor_ckpt_to_keep=1")
    (folder / "kill").write_bytes(b"." * (64 - 20))
    more = [*ahead, "trainer.val_before_train=false", "trainer.test_freq=-1", "trainer.default_local_dir=runs/ahead"]
    run(folder, "train", *TRAIN, *more, killed=True)
    (folder / "kill").unlink()
    tuned = ["model.path=model", "data.train_batch_size=2", "trainer.total_epochs=1", "trainer.save_freq=1"]
    conversations = "data.train_files=data/conversations.parquet"
    run(folder, "sft", *tuned, conversations, "trainer.default_local_dir=runs/sft")
    run(folder, "preferences", *tuned, "data.train_files=data/pairs.parquet", "trainer.default_local_dir=runs/pairs")
    rows = ["data.path=data/val.parquet", "data.output_path=runs/generated.parquet", "data.n_samples=2"]
    tools = "rollout.multi_turn.tool_config_path=data/tools.yaml"
    run(folder, "generate", *rows, "model.path=model", "data.max_response_length=16", tools)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
