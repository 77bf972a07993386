"""How long training waits for a checkpoint: written at once, and written in the background.

    python -m benchmarks.training.checkpoint_pause

A policy of 62 million parameters with its AdamW state (745 MB) is updated on the CPU and saved as the trainer saves it,
to the disk of the temporary folder: files written and flushed, checksums, one rename. In turn, in the same run: the
seconds of a save that waits; those of one that goes on in the background, and what the updates beside it lose.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import torch

from agentrl.checkpoint.manager import CheckpointManager
from agentrl.checkpoint.manifest import name_of
from agentrl.config.sections.actor import ActorConfig, ActorRolloutRefConfig
from agentrl.config.sections.model import PolicyModelConfig
from agentrl.config.sections.training import Config
from agentrl.quickstart.tiny_policy import TinyShape, make_tiny_policy
from agentrl.runtime.ranks import LocalRanks
from agentrl.trajectory.batch import RaggedBatch
from agentrl.workers import PolicyWorker
from agentrl.workers.groups import PolicyGroup
from benchmarks.no_options import no_options

REPEATS = 4
SHAPE = TinyShape(hidden=768, heads=24, kv_heads=24, intermediate=2304, layers=8)
SEQUENCES, LENGTH = 4, 64


def made_up_batch() -> RaggedBatch:
    tokens = SEQUENCES * LENGTH
    generator = torch.Generator().manual_seed(0)
    return RaggedBatch.from_columns(
        offsets=torch.arange(0, tokens + 1, LENGTH),
        ids=torch.randint(3, 300, (tokens,), generator=generator),
        mask=torch.ones(tokens, dtype=torch.bool),
        rollout_logprobs=torch.zeros(tokens),
        version=torch.zeros(tokens, dtype=torch.int32),
        turn=torch.zeros(tokens, dtype=torch.int32),
        rewards=torch.zeros(tokens),
        group=torch.arange(SEQUENCES),
        trajectory=torch.arange(SEQUENCES),
        policy=torch.zeros(SEQUENCES, dtype=torch.int32),
        policies=("policy",),
        advantages=torch.randn(tokens, generator=generator),
    )


class Run:
    def __init__(self, folder: Path) -> None:
        path = make_tiny_policy(folder / "policy", seed=0, shape=SHAPE)
        model, actor = PolicyModelConfig(path=str(path)), ActorConfig(ppo_mini_batch_size=SEQUENCES)
        config = Config(actor_rollout_ref=ActorRolloutRefConfig(model=model, actor=actor))
        self.worker = PolicyWorker(config, device="cpu", total_steps=10**6)
        self.group = PolicyGroup(LocalRanks(self.worker))
        self.batch = made_up_batch()
        self.managers = {
            background: CheckpointManager(folder / str(background), keep=1, background=background)
            for background in (False, True)
        }
        self.step = 0

    def update(self) -> float:
        """Seconds."""
        began = time.perf_counter()
        self.step += 1
        self.worker.update(self.batch, step=self.step)
        return time.perf_counter() - began

    def save(self, background: bool) -> float:
        """Seconds until the next step can begin."""
        began = time.perf_counter()
        writers = {"policy": partial(self.group.save, background=background)}
        self.managers[background].save(self.step, writers, {"step": self.step})
        return time.perf_counter() - began

    def updates_until_published(self) -> list[float]:
        manager = self.managers[True]
        final = manager.dir / name_of(self.step)
        seconds = []
        while not final.exists():
            seconds.append(self.update())
            manager.settle(wait=False)
        manager.settle()
        return seconds


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        run = Run(Path(name))
        for _ in range(2):
            run.update()
        waits: dict[bool, list[float]] = {False: [], True: []}
        undisturbed, beside, updates = [], [], []
        for _ in range(REPEATS):
            undisturbed += [run.update() for _ in range(3)]
            waits[False].append(run.save(background=False))
            undisturbed += [run.update() for _ in range(3)]
            waits[True].append(run.save(background=True))
            found = run.updates_until_published()
            beside += found
            updates.append(len(found))
        size = sum(path.stat().st_size for path in (Path(name) / "False").rglob("*.safetensors"))
    at_once, background = (statistics.median(waits[kind]) for kind in (False, True))
    slower = statistics.median(beside) / statistics.median(undisturbed)
    print(f"{size / 1e6:,.0f} MB, medians of {REPEATS} saves of each kind")
    print(f"written at once:           training waits {at_once:.2f} s")
    print(f"written in the background: training waits {background:.2f} s, {background / at_once:.2f} times as long")
    print(
        f"meanwhile {statistics.median(updates):.0f} updates of {statistics.median(undisturbed):.2f} s go on, each "
        f"{slower:.2f} times as long as without"
    )


if __name__ == "__main__":
    no_options(__doc__)
    main()
