"""A training under Ray whose processes are killed again and again, against one that is left alone.

    python -m benchmarks.training.worker_deaths [--kills 20] [--steps 40] [--assets runs/quickstart-assets]

The quickstart's data and policy, PPO on two ranks with a rollout worker, a checkpoint each step. In the second run
ranks and rollout workers get SIGKILL at random moments all over it. Prints where each kill fell, and whether the final
weights are bit for bit those of the first run; exits with 1 where they are not, or where the run ended too early.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

KINDS = ("ray::Rank", "ray::RolloutWorker")
PAUSE = (0.5, 5.0)
"""Seconds that are waited before a kill."""
AT_ONCE = 0.25
"""Part of the kills that follow the one before it without a step between them: they fall into a restart."""


def start(folder: Path, assets: Path, steps: int) -> subprocess.Popen[bytes]:
    words = [
        "algorithm=ppo",
        "data.train_batch_size=4",
        "data.val_files=null",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        f"quickstart.dir={assets.absolute()}",
        "trainer.device=cpu",
        "trainer.n_gpus_per_node=2",
        "trainer.max_worker_restarts=1000",
        "trainer.save_freq=1",
        f"trainer.total_training_steps={steps}",
        f"trainer.default_local_dir={folder}",
    ]
    folder.mkdir()
    with (folder / "log").open("wb") as log:
        return subprocess.Popen([sys.executable, "-m", "agentrl.train", *words], stdout=log, stderr=log)


def actors(process: subprocess.Popen[bytes], kinds: Sequence[str] = KINDS) -> list[psutil.Process]:
    """Find the processes below a run whose command line names one of the kinds."""
    found = []
    for child in psutil.Process(process.pid).children(recursive=True):
        try:
            if any(kind in " ".join(child.cmdline()) for kind in kinds):
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return found


def steps_done(folder: Path) -> int:
    metrics = folder / "metrics.jsonl"
    return len(metrics.read_bytes().splitlines()) if metrics.exists() else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--assets", type=Path, default=Path("runs/quickstart-assets"))
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    choose = random.Random(given.seed)
    with tempfile.TemporaryDirectory() as place:
        alone, killed = Path(place) / "alone", Path(place) / "killed"
        began = time.monotonic()
        if start(alone, given.assets, given.steps).wait() != 0:
            print((alone / "log").read_text()[-2000:])
            return 1
        print(f"left alone: {time.monotonic() - began:.0f} s", flush=True)
        began, kills, after = time.monotonic(), 0, 0
        process = start(killed, given.assets, given.steps)
        while process.poll() is None:
            time.sleep(choose.uniform(*PAUSE))
            if kills < given.kills and steps_done(killed) > after and (found := actors(process)):
                victim = choose.choice(found)
                try:
                    kind = victim.cmdline()[0]
                    victim.kill()
                except psutil.NoSuchProcess:
                    continue
                kills += 1
                after = 0 if choose.random() < AT_ONCE else given.steps * kills // given.kills
                print(f"{time.monotonic() - began:5.0f} s, after step {steps_done(killed)}: {kind}", flush=True)
        policies = [run / "policy" / "model.safetensors" for run in (alone, killed)]
        if process.returncode != 0:
            print((killed / "log").read_text()[-4000:])
            return 1
        same = policies[0].read_bytes() == policies[1].read_bytes()
        print(f"{kills} kills, {time.monotonic() - began:.0f} s; final weights {'equal' if same else 'DIFFER'}")
        return 0 if same and kills == given.kills else 1


if __name__ == "__main__":
    sys.exit(main())
