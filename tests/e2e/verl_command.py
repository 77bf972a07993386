"""A launch command of verl's on a few rows, two steps in a process of its own, as its tests start it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.forked import forked

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
SMALL = [
    "data.train_files=train.parquet",
    "data.val_files=test.parquet",
    "data.train_batch_size=4",
    f"{ACTOR}.optim.lr=1e-6",
    "actor_rollout_ref.model.path=policy",
    f"{ROLLOUT}.name=embedded",
    f"{ROLLOUT}.tensor_model_parallel_size=1",
    "trainer.n_gpus_per_node=1",
    "trainer.nnodes=1",
    "trainer.logger=console",
    "trainer.save_freq=-1",
    "trainer.test_freq=2",
    "trainer.total_training_steps=2",
    "trainer.default_local_dir=run",
]
"""What makes a command small enough for seconds: the model in `policy`, the embedded engine, two steps."""


def train(
    folder: Path, module: str, arguments: list[str], rows: list[dict[str, Any]], mini_batch: int = 2
) -> list[dict[str, Any]]:
    """Run a command in `folder` on eight rows, of which two validate; return the metrics of its two steps.

    mini_batch: `ppo_mini_batch_size` in the command's own unit.
    """
    for file, count in (("train.parquet", 8), ("test.parquet", 2)):
        pq.write_table(pa.Table.from_pylist(rows[:count]), folder / file)
    mini = f"{ACTOR}.ppo_mini_batch_size={mini_batch}"
    done = forked(["-m", module, *arguments, *SMALL, mini], folder, timeout=280)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "actor/grad_norm" in line]
    assert len(steps) == 2
    return steps
