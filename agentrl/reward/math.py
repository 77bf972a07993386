"""Mathematical answers, compared as formulas by math-verify, in processes that can be killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from agentrl.threads import DaemonThreads

DEADLINE = 20.0
"""Seconds of one verdict; the worker's own deadlines end most long ones before."""


class MathJudges:
    """Worker processes, started when first needed and kept. Their number bounds the memory (about 100 MB each).

    A worker that does not answer in time, or dies over an answer, is replaced; that answer is wrong.
    """

    def __init__(self, workers: int) -> None:
        self._places = threading.BoundedSemaphore(workers)
        self._idle: list[subprocess.Popen[str]] = []

    def judge(self, solution: str, ground_truth: str, deadline: float = DEADLINE) -> dict[str, float]:
        """Blocks. {"score": 1.0 or 0.0, "unjudged": 1.0 when no verdict could be reached}.

        Raises ValueError when the ground truth cannot be read, RuntimeError when workers cannot start.
        """
        with self._places:
            worker = self._take()
            verdict = _ask(worker, {"solution": solution, "ground_truth": ground_truth}, deadline)
            if verdict is None:
                return {"score": 0.0, "unjudged": 1.0}
            self._idle.append(worker)
        if "error" in verdict:
            raise ValueError(verdict["error"])
        return {"score": float(verdict["score"]), "unjudged": 0.0}

    def _take(self) -> subprocess.Popen[str]:
        """An idle worker that lives, else a new one."""
        while True:
            try:
                worker = self._idle.pop()
            except IndexError:  # not asked for before: other threads take workers too
                return self._start()
            if worker.poll() is None:
                return worker

    def _start(self) -> subprocess.Popen[str]:
        # -P: the folder of the script, which holds a module called `math`, stays out of the import path.
        command = [sys.executable, "-P", str(Path(__file__).with_name("math_worker.py"))]
        worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8")
        verdict = _ask(worker, None, 120.0)
        if verdict is None or "error" in verdict:
            worker.kill()
            raise RuntimeError(f"the math-verify process did not start: {verdict or 'see its messages above'}")
        return worker


def _ask(worker: subprocess.Popen[str], request: dict[str, str] | None, deadline: float) -> dict[str, Any] | None:
    """The verdict, or None when there is none in time; the worker is dead then."""
    assert worker.stdin is not None and worker.stdout is not None
    killer = threading.Timer(deadline, worker.kill)
    killer.daemon = True
    killer.start()
    try:
        if request is not None:
            worker.stdin.write(json.dumps(request) + "\n")
            worker.stdin.flush()
        line = worker.stdout.readline()
    except OSError:
        line = ""
    finally:
        killer.cancel()
    if line.endswith("\n"):
        verdict: dict[str, Any] = json.loads(line)
        return verdict
    worker.kill()
    worker.wait()
    worker.stdout.close()
    return None


_judges = MathJudges(workers=min(4, os.cpu_count() or 1))
_threads = DaemonThreads("math scorer")


async def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None
) -> dict[str, float]:
    """Score 1.0 when the last formula or number equals the ground truth, else 0.0; `unjudged` counts kills."""
    return await _threads.run(_judges.judge, solution_str, str(ground_truth))
