"""Mathematical answers, compared as formulas by math-verify, in processes that bound the cost of an answer.

An answer pays for itself: waiting for a process is nobody's time, and an answer that takes too much is wrong. So
deadlines around `compute_score` do not count here; an answer's own is SECONDS of processor time, which no other work
changes.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

from agentrl.system.deadline import paused_deadlines

SECONDS = 2.0
"""Processor time of one verdict; half of it for reading the answer, or for comparing it in one way. Honest answers that
need simplification take up to 0.3 s.
"""
BOXED = ("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500", "hiyouga/geometry3k")
"""Data sources whose published scores are of boxed answers alone."""
STALLED = 120.0
"""Seconds after which a worker that says nothing is lost: starting takes one or two, a verdict SECONDS and a bit."""


class MathJudges:
    """Worker processes, started when first needed and kept. Their number bounds processors and memory: less than
    0.1 GB each, and up to 1 GiB more while an answer is judged.
    """

    def __init__(self, workers: int, seconds: float = SECONDS) -> None:
        self._most, self._seconds = workers, seconds
        self._idle: list[_Worker] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._places = asyncio.Semaphore(workers)

    async def judge(
        self, solution: str, ground_truth: str, *, expressions: bool = False, boxed: bool = False
    ) -> dict[str, float]:
        """{"score": 1.0 or 0.0, "unjudged": 1.0 when no verdict could be reached within time and memory, else 0.0}.

        Raises ValueError when the ground truth cannot be read, RuntimeError when workers do not start or do not stay.
        """
        if self._loop is not (loop := asyncio.get_running_loop()):
            self._loop, self._places = loop, asyncio.Semaphore(self._most)
        how = {"expressions": expressions, "boxed": boxed, "seconds": self._seconds}
        request = {"solution": solution, "ground_truth": ground_truth, **how}
        with paused_deadlines():
            async with self._places:
                verdict = await self._ask(json.dumps(request).encode() + b"\n")
        if "error" in verdict:
            raise ValueError(verdict["error"])
        return {name: float(value) for name, value in verdict.items()}

    async def _ask(self, line: bytes) -> dict[str, float | str]:
        for _ in range(2):  # an idle one may have been killed, and its answer must not be lost by that
            worker = self._idle.pop() if self._idle else _Worker()
            try:
                verdict = await worker.verdict(line)
            except BaseException:
                worker.kill()
                raise
            if verdict is not None:
                self._idle.append(worker)
                return verdict
            worker.kill()
        raise RuntimeError("the math-verify process ended, twice, without a verdict: see its messages above")


class _Worker:
    """A process that runs `math_worker.py`."""

    def __init__(self) -> None:
        # -P: the folder of the script, which holds a module called `math`, stays out of the import path.
        command = [sys.executable, "-P", str(Path(__file__).with_name("math_worker.py"))]
        self._socket, theirs = socket.socketpair()  # of no event loop, unlike asyncio's own pipes
        with theirs:
            self.process = subprocess.Popen(command, stdin=theirs.fileno(), stdout=theirs.fileno())
        self._socket.setblocking(False)
        self._started = False

    async def verdict(self, line: bytes) -> dict[str, float | str] | None:
        """None when the process has ended. Raises RuntimeError when it cannot judge."""
        try:
            async with asyncio.timeout(STALLED):
                if not self._started and (trial := await self._line()) is not None:
                    if "error" in trial:
                        raise RuntimeError(f"the math-verify process did not start: {trial['error']}")
                    self._started = True
                await asyncio.get_running_loop().sock_sendall(self._socket, line)
                return await self._line()
        except ConnectionError:
            return None
        except TimeoutError as error:
            raise RuntimeError(f"the math-verify process said nothing for {STALLED:g} s") from error

    async def _line(self) -> dict[str, float | str] | None:
        said = b""
        while not said.endswith(b"\n"):
            part = await asyncio.get_running_loop().sock_recv(self._socket, 1 << 16)
            if not part:
                return None
            said += part
        verdict: dict[str, float | str] = json.loads(said)
        return verdict

    def kill(self) -> None:
        self._socket.close()
        self.process.kill()
        self.process.wait()


_judges = MathJudges(workers=min(8, os.cpu_count() or 1))


async def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: object,
    extra_info: object = None,
    expressions: bool = False,
    format_share: float = 0.0,
) -> dict[str, float]:
    """Score 1.0 when the answer equals the ground truth and is a value, else 0.0; `unjudged` counts answers that took
    too much time or memory.

    The answer is the content of the last `\\boxed{...}`. Without a box it is the one value that the last sentence
    states, but for the data sources in BOXED. A value leaves no work that the ground truth does not leave:
    `\\sum_{k=1}^{100} k^2` is no value (see `agentrl.reward.math_value.left_to_do`). With `expressions` any equal
    formula is right. `format_share` of the score, 0.0 to 1.0, is paid for the form of the answer (`is_formed`) and the
    rest for the value. Raises ValueError for another share.
    """
    if not 0.0 <= format_share <= 1.0:
        raise ValueError(f"format_share: expected a number from 0 to 1, found {format_share!r}")
    boxed = data_source in BOXED
    verdict = await _judges.judge(solution_str, str(ground_truth), expressions=expressions, boxed=boxed)
    if format_share:
        verdict["score"] = (1.0 - format_share) * verdict["score"] + format_share * is_formed(solution_str)
    return verdict


def is_formed(text: str) -> bool:
    """True for thoughts in `<think>...</think>` at the beginning, and a `\\boxed{...}` after them.

    The form that published scores of geometry3k pay 0.1 for.
    """
    if not text.startswith("<think>"):
        return False
    place = 0
    for part in ("</think>", "\\boxed{", "}"):
        place = text.find(part, place)
        if place < 0:
            return False
    return True
