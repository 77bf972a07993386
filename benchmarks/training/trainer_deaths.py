"""Trainings that are killed again and again, at any moment, with each bound of staleness: is every prompt trained once?

    python -m benchmarks.training.trainer_deaths --out runs/deaths [--kills 36] [--bounds 0 1 2 3 4]

For each bound a training on the quickstart's tasks is begun, and gets SIGKILL at a random moment; the same command goes
on with it, and is killed again. After the last kill it is left alone for three steps more. Counted are prompts that
are missing, or there twice, in the ledger of what was trained on, and sampled tokens in the files of trajectories that
are older than the bound. With a bound of 0, where rollouts and updates take turns, the final weights are compared with
those of a training of as many steps that nobody killed. Begun again, the script goes on with the kills that are left.
Exits with 1 where anything was lost, repeated or too old.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import agentrl
from agentrl.observe.tracking import read_metrics
from agentrl.system.json_value import JSON
from agentrl.trajectory.parquet import read_trajectories, trajectory_files
from benchmarks.forked import forked, started

PROMPTS = 4
"""Prompts of a step."""
ALIVE = (0.2, 8.0)
"""Seconds for which a training lives, drawn evenly."""
ENDLESS = 100_000


@dataclass(frozen=True, slots=True)
class Found:
    """Result for a bound."""

    steps: int
    lost: int
    repeated: int
    too_old: int
    """Sampled tokens."""
    same_weights: bool | None
    """Only with a bound of 0."""

    @property
    def is_right(self) -> bool:
        """True where nothing is wrong."""
        return not (self.lost or self.repeated or self.too_old or self.same_weights is False)


def keys(folder: Path, assets: Path, bound: int, steps: int) -> dict[str, JSON]:
    """Return the keys of a training."""
    ahead: dict[str, JSON] = {"async_training.max_staleness": bound, "async_training.depth": bound} if bound else {}
    return ahead | {
        "data.train_batch_size": PROMPTS,
        "data.val_files": None,
        "algorithm.filter_groups.enable": False,  # every step makes a version
        "actor_rollout_ref.rollout.n": 4,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 2,
        "actor_rollout_ref.actor.optim.lr": 1e-4,
        "actor_rollout_ref.actor.optim.lr_scheduler_type": "constant",
        "quickstart.dir": str(assets.absolute()),
        "trainer.device": "cpu",
        "trainer.logger": ["jsonl"],
        "trainer.save_freq": 3,
        "trainer.total_training_steps": steps,
        "trainer.default_local_dir": str(folder),
    }


def train(folder: Path, assets: Path, bound: int, steps: int) -> None:
    """Train until that many steps are done, from where a process before ended."""
    agentrl.train(keys(folder, assets, bound, steps))


def kill_until(folder: Path, assets: Path, bound: int, kills: int, seed: int) -> None:
    """Begin and kill the training until it was killed `kills` times; those of an earlier call count."""
    counted = folder.with_suffix(".kills")
    done = int(counted.read_text()) if counted.exists() else 0
    while done < kills:
        process = started(partial(train, folder, assets, bound, ENDLESS), folder.with_suffix(".log"))
        seconds = random.Random(f"{seed}/{bound}/{done}").uniform(*ALIVE)
        process.join(seconds)
        if process.exitcode is not None:
            raise SystemExit(f"the training with bound {bound} ended by itself, see {folder.with_suffix('.log')}")
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        done += 1
        counted.write_text(str(done))
        print(f"bound {bound}: kill {done} after {seconds:.1f} s, in step {steps_of(folder) + 1}", flush=True)


def steps_of(folder: Path) -> int:
    """Count the steps whose metrics are written."""
    file = folder / "metrics.jsonl"
    return max((int(str(line["step"])) for line in read_metrics(file)), default=0) if file.exists() else 0


def judge(folder: Path, assets: Path, bound: int) -> Found:
    """Leave the training alone until three steps more are done, and look at what it recorded."""
    steps = steps_of(folder) + 3
    if forked(partial(train, folder, assets, bound, steps), folder.with_suffix(".log")) != 0:
        raise SystemExit(f"the training with bound {bound} failed, see {folder.with_suffix('.log')}")
    done = steps_of(folder)
    if bound == 0:
        other = folder.with_name(folder.name + "-alone")
        if forked(partial(train, other, assets, bound, done), other.with_suffix(".log")) != 0:
            raise SystemExit(f"the training that nobody killed failed, see {other.with_suffix('.log')}")
        files = [run / "policy" / "model.safetensors" for run in (folder, other)]
        same = files[0].read_bytes() == files[1].read_bytes()
        return Found(done, lost=0, repeated=0, too_old=too_old(folder, bound), same_weights=same)
    batches = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    trained = Counter(one for batch in batches for first, end in batch["trained"] for one in range(first, end))
    lost = sum(one not in trained for one in range(PROMPTS * done))
    return Found(done, lost, sum(trained.values()) - len(trained), too_old(folder, bound), same_weights=None)


def too_old(folder: Path, bound: int) -> int:
    """Count the sampled tokens that were trained on later than the bound allows; the policy of step s is s - 1 old."""
    count = 0
    for file in trajectory_files(folder / "trajectories"):
        step = int(file.stem.split("_")[1])
        for trajectory in read_trajectories(file):
            for transcript in trajectory.transcripts:
                count += sum(span.end - span.start for span in transcript.versions if step - 1 - span.version > bound)
    return count


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/deaths"))
    parser.add_argument("--assets", type=Path, default=Path("runs/quickstart-assets"))
    parser.add_argument("--kills", type=int, default=36, help="of each bound")
    parser.add_argument("--bounds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    rows, right = (
        ["| bound | kills | steps | lost | repeated | too old | weights |", "|---|---|---|---|---|---|---|"],
        True,
    )
    for bound in given.bounds:
        began, folder = time.monotonic(), (given.out / f"bound-{bound}").absolute()
        kill_until(folder, given.assets, bound, given.kills, given.seed)
        found = judge(folder, given.assets, bound)
        right &= found.is_right
        weights = {True: "the same", False: "**others**", None: ""}[found.same_weights]
        cells = [bound, given.kills, found.steps, found.lost, found.repeated, found.too_old, weights]
        rows.append("| " + " | ".join(map(str, cells)) + " |")
        print(f"bound {bound}: {time.monotonic() - began:.0f} s", flush=True)
    print("\n".join(rows))
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
