"""The process that judges mathematical answers: one JSON request a line in, one JSON verdict a line out.

Run as a file, by `agentrl.reward.math`: of ours it loads `math_value.py`, which judges, and `statement.py`.
Comparing two formulas may take any time and memory, and much of that where no exception reaches it. So answers are
judged in a fork, which the kernel ends when one of them has had its share. The next fork takes milliseconds, where
a new start takes a second.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import itertools
import json
import logging
import os
import resource
import signal
import sys
from pathlib import Path
from types import FrameType, ModuleType
from typing import NoReturn, TextIO

MEMORY_BYTES = 1 << 30
"""Address space of a fork; 0.1 GiB of it are the libraries'."""
_MOST_KEPT = 256 << 20
"""Bytes that a fork may have held at the end of an answer to judge the next one, too."""
_GOLD_READ = "gold read\n"
"""Message of a fork before it looks at the answer: what happens from then on is the answer's own doing."""
_USUAL = (
    ("1", "1"),
    (r"so \boxed{\frac{x^2-1}{x+1}}", "x-1"),
    (r"$x \in (-\infty, \sqrt{2}]$", r"(-\infty,\sqrt{2}]"),
    (r"\boxed{\begin{pmatrix} 1 \\ \sin 2 \end{pmatrix}}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    ("Answer: 3.5%", "0.035"),
    (r"\boxed{x = 2 + 3i}", "x = 2"),
)
"""Judged once before all forks, which then inherit all that the libraries import and build at their first use."""


class Fork:
    """A process that judges one answer after another until one of them ends or spoils it."""

    def __init__(self) -> None:
        inwards, requests = os.pipe()
        verdicts, outwards = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(requests)
            os.close(verdicts)
            _judge_all(inwards, outwards)
        os.close(inwards)
        os.close(outwards)
        self._requests, self._verdicts = os.fdopen(requests, "w"), os.fdopen(verdicts)
        self.spent = False
        """The next answer needs another fork."""

    def judge(self, line: str) -> dict[str, object]:
        """The verdict on a request: {"score": 1.0 or 0.0, "unjudged": 0.0}.

        {"score": 0.0, "unjudged": 1.0} when the answer takes more than its time or MEMORY_BYTES, or crashes the fork;
        {"error": ...} when the ground truth does, or cannot be read.
        """
        self._requests.write(line)
        self._requests.flush()
        said = self._verdicts.readline()
        if gold_read := said == _GOLD_READ:
            said = self._verdicts.readline()
        if said.endswith("\n"):
            verdict: dict[str, object] = json.loads(said)
            self.spent = bool(verdict.pop("spent"))
            return verdict
        self.spent = True
        if gold_read:
            return {"score": 0.0, "unjudged": 1.0}
        truth = json.loads(line)["ground_truth"]
        return {"error": f"the ground truth {truth!r:.300} takes too long to read, or too much memory"}

    def end(self) -> None:
        self._requests.close()
        self._verdicts.close()
        os.waitpid(self._pid, 0)


class _Late:
    """Return True if an answer has been at one thing for half of its time."""

    said = False

    def say(self, number: int, frame: FrameType | None) -> None:
        from math_verify.errors import TimeoutException

        self.said = True
        raise TimeoutException  # math-verify continues with the next formula


def _judge_all(inwards: int, outwards: int) -> NoReturn:
    """In the fork, until there are no more requests, or an answer ends it."""
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: the fork ends with the process that asks it
        os.dup2(1, 2)  # nowhere: the last words of libraries that give up
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        late = _Late()
        signal.signal(signal.SIGVTALRM, late.say)
        signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process, wherever it is
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGVTALRM, signal.SIGPROF))
        with open(inwards) as requests, open(outwards, "w") as verdicts:
            for line in requests:
                verdict = _judge(late, verdicts, **json.loads(line))
                used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
                verdicts.write(json.dumps({**verdict, "spent": late.said or used > _MOST_KEPT}) + "\n")
                verdicts.flush()
    finally:
        os._exit(1)


def _rules() -> ModuleType:
    return importlib.import_module("math_value")


def _judge(
    late: _Late, verdicts: TextIO, solution: str, ground_truth: str, seconds: float, **how: bool
) -> dict[str, object]:
    """Raises what judging the answer raises."""
    from math_verify.errors import TimeoutException

    gold = None
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds / 2)
    try:
        gold = _rules().read_gold(ground_truth)
        verdicts.write(_GOLD_READ)
        verdicts.flush()
        right = _rules().is_right(solution, gold, **how)
        return {"score": float(right), "unjudged": float(late.said and not right)}
    except (Exception, TimeoutException) as error:
        if gold is not None:
            raise
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)


def main() -> None:
    # Output of a library must not end up between the verdicts.
    verdicts = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    logging.disable(logging.CRITICAL)
    sys.path.append(str(Path(__file__).parent))  # last, since a module there is called `math`
    # By its path, since the package imports much that is of no use here.
    sys.modules["agentrl.reward.statement"] = importlib.import_module("statement")
    for solution, ground_truth in _USUAL:
        _rules().is_right(solution, _rules().read_gold(ground_truth))
    gc.collect()
    gc.freeze()
    # The first verdict is asked for by nobody: it says that everything is imported, or why it cannot be.
    trial = json.dumps({"solution": "1", "ground_truth": "1", "seconds": 60.0})
    fork = None
    for line in itertools.chain([trial + "\n"], sys.stdin):
        fork = fork or Fork()
        verdicts.write(json.dumps(fork.judge(line)) + "\n")
        verdicts.flush()
        if fork.spent:
            fork.end()
            fork = None


if __name__ == "__main__":
    main()
