"""The main road under load, on a CPU: SGLang, Ray and two FSDP ranks, by what each of them waits for.

    python -m benchmarks.real.main_road overlap [--steps 12] [--assets runs/quickstart-assets]
    python -m benchmarks.real.main_road faults [--steps 16]
    python -m benchmarks.real.main_road flat [--steps 2000]
    python -m benchmarks.real.main_road start

It runs in an environment that has SGLang. Each part trains the quickstart's policy on its tasks with
`python -m agentrl.train`, and prints a Markdown table:

- `overlap`: at K = 0, 1 and 2 the median time of a step, the shares of it in which engine and trainer are idle, and the
  ratio of a step to the longer of rollout and update.
- `faults`: a run of which, in the middle of a step, a server is killed, hung for 30 s, a rank killed, and a rollout
  worker killed, against a run that is left alone. Exits with 1 where a run does not end with all of its steps.
- `flat`: a long run's memory, descriptors, threads, seconds of a step, and bytes of its folder, by quarter, and the
  processes whose memory grew most; exits with 1 where the last half's steps are longer than the first half's by more
  than their noise.
- `start`: CPU-seconds from the command to the first step, of the imports of each kind of process, and of a wrong key.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from agentrl.observe.tracking import read_metrics
from agentrl.system.json_value import JSON
from benchmarks.training.quickstart_seeds import number
from benchmarks.training.worker_deaths import actors

STEP = "time/step"
SERVER, RANK, WORKER = "agentrl.engines.sglang.launch", "ray::Rank", "ray::RolloutWorker"
HUNG = 30.0  # seconds
LEFT_OUT = 2
"""First steps that are not counted: caches fill, servers compile."""
IMPORTED = {
    "the command": "agentrl.train",
    "a rank": "agentrl.workers",
    "a rollout worker": "agentrl.rollouts.ray_worker",
}


@dataclass(frozen=True, slots=True)
class Road:
    """A training that runs, and its folder."""

    process: subprocess.Popen[bytes]
    folder: Path

    def tree(self) -> list[psutil.Process]:
        """List the command's processes: itself, Ray's and the servers'."""
        with suppress(psutil.NoSuchProcess):
            own = psutil.Process(self.process.pid)
            return [own, *own.children(recursive=True)]
        return []

    def lines(self) -> list[Mapping[str, JSON]]:
        """Read the lines of the steps that have ended."""
        file = self.folder / "metrics.jsonl"
        return [line for line in read_metrics(file) if STEP in line] if file.exists() else []

    def end(self) -> None:
        """Wait for the end. Raises SystemExit with the end of what the command said where it failed."""
        if self.process.wait() != 0:
            raise SystemExit(f"error: status {self.process.returncode}:\n{said(self.folder)}")


def said(folder: Path) -> str:
    return (folder.parent / f"{folder.name}.log").read_text(errors="replace")[-3000:]


@contextmanager
def road(folder: Path, assets: Path, steps: int, *more: str) -> Iterator[Road]:
    """Start a training on two ranks with an SGLang server and a rollout worker; what is left of it ends with it."""
    words = [
        "actor_rollout_ref.rollout.name=sglang",
        "actor_rollout_ref.rollout.nnodes=1",
        "trainer.device=cpu",
        "trainer.n_gpus_per_node=2",
        "trainer.max_worker_restarts=100",
        "data.val_files=null",
        "trainer.show_trajectory_freq=-1",
        "trainer.save_freq=1",
        f"quickstart.dir={assets.absolute()}",
        f"trainer.total_training_steps={steps}",
        f"trainer.default_local_dir={folder}",
        *more,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    with (folder.parent / f"{folder.name}.log").open("wb") as log:
        command = [sys.executable, "-m", "agentrl.train", *words]
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    one = Road(process, folder)
    try:
        yield one
    finally:
        for each in one.tree():
            with suppress(psutil.NoSuchProcess):
                each.kill()
        process.wait()


def of_steps(lines: Sequence[Mapping[str, JSON]], key: str) -> list[float]:
    return [number(line, key) for line in lines[LEFT_OUT:]]


def overlap(place: Path, assets: Path, steps: int) -> int:
    print("| K | step, s | rollout, s | update, s | engine idle | trainer idle | step over the longer |")
    print("|---|---|---|---|---|---|---|")
    for bound in (0, 1, 2):
        with road(place / f"k{bound}", assets, steps, f"async_training.max_staleness={bound}") as run:
            run.end()
            lines = run.lines()
        step = statistics.median(of_steps(lines, STEP))
        if bound:
            engine = statistics.mean(of_steps(lines, "async/engine_idle"))
            trainer = statistics.mean(of_steps(lines, "async/trainer_idle"))
            rollout, update = step * (1 - engine), step * (1 - trainer)
        else:
            rollout = statistics.median(of_steps(lines, "time/rollout"))
            update = step - rollout
            engine, trainer = update / step, rollout / step
        ratio = step / max(rollout, update)
        print(f"| {bound} | {step:.2f} | {rollout:.2f} | {update:.2f} | {engine:.2f} | {trainer:.2f} | {ratio:.2f} |")
    return 0


def send(run: Road, kind: str, what: signal.Signals) -> None:
    """Signal a process of a kind, an SGLang server with its whole group. Raises SystemExit where there is none."""
    there = actors(run.process, (kind,))
    if not there:
        raise SystemExit(f"error: no process of {kind} to send {what.name} to:\n{said(run.folder)}")
    print(f"after step {len(run.lines())}: {what.name} to {kind} ({there[0].pid})", flush=True)
    if kind == SERVER:
        os.killpg(os.getpgid(there[0].pid), what)
    else:
        there[0].send_signal(what)


def hang(run: Road) -> None:
    """Stop a server for `HUNG` seconds."""
    send(run, SERVER, signal.SIGSTOP)
    time.sleep(HUNG)
    send(run, SERVER, signal.SIGCONT)


FAULTS: Mapping[str, Callable[[Road], None]] = {
    "server killed": lambda run: send(run, SERVER, signal.SIGKILL),
    "server hung for 30 s": hang,
    "rank killed": lambda run: send(run, RANK, signal.SIGKILL),
    "rollout worker killed": lambda run: send(run, WORKER, signal.SIGKILL),
}


def faults(place: Path, assets: Path, steps: int) -> int:
    bound = "async_training.max_staleness=1"
    with road(place / "alone", assets, steps, bound) as run:
        began = time.monotonic()
        run.end()
        alone = time.monotonic() - began
    rows, failed = [("none", alone, 0)], 0
    for name, fault in FAULTS.items():
        with road(place / name.replace(" ", "-"), assets, steps, bound) as run:
            began = time.monotonic()
            while len(run.lines()) < steps // 2 and run.process.poll() is None:
                time.sleep(0.1)
            time.sleep(statistics.median(of_steps(run.lines(), STEP)) / 2)
            fault(run)
            status = run.process.wait()
            rows.append((name, time.monotonic() - began, status))
            if status != 0 or len(run.lines()) != steps:
                failed, _ = 1, print(said(run.folder))
    print("| fault | whole run, s | over the run left alone | exit status |\n|---|---|---|---|")
    for name, seconds, status in rows:
        print(f"| {name} | {seconds:.0f} | {seconds / alone:.2f} | {status} |")
    return failed


@dataclass(frozen=True, slots=True)
class Sample:
    """Resources of a run after some of its steps."""

    step: int
    memory: float
    """MB of all processes (proportional shares)."""
    descriptors: int
    threads: int
    folder: float
    """MB."""
    by_process: dict[str, float]
    """MB by the process, under its name and number."""


def name_of(process: psutil.Process) -> str:
    """Name a process by its title, or by the module that it runs."""
    words = process.cmdline() or [process.name()]
    title = words[2] if words[1:2] == ["-m"] and len(words) > 2 else words[0].rpartition("/")[2]
    return f"{title.partition('.')[0] if title.startswith('ray::') else title} {process.pid}"


def sample(run: Road) -> Sample:
    descriptors = threads = 0
    by_process: dict[str, float] = {}
    for one in run.tree():
        with suppress(psutil.Error):
            by_process[name_of(one)] = one.memory_full_info().pss / 1e6
            descriptors += one.num_fds()
            threads += one.num_threads()
    sizes = 0
    for file in run.folder.rglob("*"):
        with suppress(OSError):
            sizes += file.stat().st_size
    memory = sum(by_process.values())
    return Sample(len(run.lines()), memory, descriptors, threads, sizes / 1e6, by_process)


def flat(place: Path, assets: Path, steps: int) -> int:
    """Small steps, so that there are many."""
    small = ["data.train_batch_size=4", "actor_rollout_ref.rollout.n=4", "async_training.max_staleness=1"]
    samples: list[Sample] = []
    with road(place / "flat", assets, steps, *small, "trainer.save_freq=100") as run:
        while run.process.poll() is None:
            time.sleep(5)
            if len(run.lines()) >= steps * (len(samples) + 1) / 20:
                samples.append(sample(run))
                print(replace(samples[-1], by_process={}), flush=True)
        run.end()
        seconds = of_steps(run.lines(), STEP)
    print("| steps | seconds of a step | memory, MB | descriptors | threads | folder, MB |\n|---|---|---|---|---|---|")
    quarter = len(seconds) // 4
    for first in range(4):
        there = [one for one in samples if first * quarter < one.step <= (first + 1) * quarter]
        step = statistics.median(seconds[first * quarter : (first + 1) * quarter])
        if there:
            last = there[-1]
            print(
                f"| to {last.step} | {step:.3f} | {last.memory:.0f} | {last.descriptors} | {last.threads} | "
                f"{last.folder:.1f} |"
            )
    early, late = samples[len(samples) // 10], [one for one in samples if one.step < steps][-1]
    print(f"| process | MB at step {early.step} | MB at step {late.step} |\n|---|---|---|")
    for name, now in sorted(late.by_process.items(), key=lambda one: early.by_process.get(one[0], 0.0) - one[1])[:6]:
        print(f"| {name} | {early.by_process.get(name, 0.0):.0f} | {now:.0f} |")
    halves = [statistics.median(one) for one in (seconds[: 2 * quarter], seconds[2 * quarter :])]
    noise = statistics.median(abs(one - statistics.median(seconds)) for one in seconds)
    print(f"the last half's steps take {halves[1] / halves[0]:.2f} of the first half's; noise {noise / halves[0]:.2f}")
    return 1 if halves[1] > halves[0] + noise else 0


def cpu_of(words: Sequence[str], status: int) -> float:
    """CPU-seconds of a Python program and its children. Raises SystemExit where it ends with another status."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    if done.returncode != status:
        raise SystemExit(f"error: {' '.join(words)}: expected status {status}, found {done.returncode}: {done.stderr}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def start(place: Path, assets: Path, steps: int) -> int:
    with road(place / "first", assets, steps) as run:
        began, used = time.monotonic(), 0.0
        while not run.lines() and run.process.poll() is None:
            used = sum(one.cpu_times().user + one.cpu_times().system for one in run.tree() if one.is_running())
            time.sleep(0.1)
        seconds = time.monotonic() - began
    print(f"| to the end of the first step | {seconds:.1f} s, {used:.1f} CPU-seconds |\n|---|---|")
    for name, module in IMPORTED.items():
        taken = statistics.median(cpu_of(["-c", f"import {module}"], 0) for _ in range(3))
        print(f"| imports of {name} | {taken:.1f} CPU-seconds |")
    wrong = statistics.median(cpu_of(["-m", "agentrl.train", "trainer.seeed=3"], 2) for _ in range(3))
    print(f"| a wrong key | {wrong:.1f} CPU-seconds |")
    return 0


PARTS: Mapping[str, tuple[Callable[[Path, Path, int], int], int]] = {
    "overlap": (overlap, 12),
    "faults": (faults, 16),
    "flat": (flat, 2000),
    "start": (start, 3),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--steps", type=int, help="of each training")
    parser.add_argument("--assets", type=Path, default=Path("runs/quickstart-assets"), help="the quickstart's folder")
    given = parser.parse_args()
    part, steps = PARTS[given.part]
    with tempfile.TemporaryDirectory() as place:
        return part(Path(place), given.assets, given.steps or steps)


if __name__ == "__main__":
    sys.exit(main())
