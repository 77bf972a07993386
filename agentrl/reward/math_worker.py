"""The process that judges mathematical answers: one JSON request a line in, one JSON verdict a line out.

Run as a file, by `agentrl.reward.math`: it imports math-verify and nothing of ours. A process of its own, because
comparing two formulas may take any time and memory: math-verify's own deadline works only in a main thread, and what
hangs outside the interpreter can only be killed.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import resource
import sys

MEMORY_BYTES = 4 << 30
SECONDS = 4
"""Of each of the three steps: reading the ground truth, reading the answer, comparing."""


def judge(solution: str, ground_truth: str) -> float:
    """1.0 when the last formula or number of `solution` equals `ground_truth`, else 0.0.

    Raises ValueError when the ground truth cannot be read.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    boxed = ground_truth if "\\boxed" in ground_truth else f"\\boxed{{{ground_truth.strip().strip('$')}}}"
    gold = parse(boxed, [LatexExtractionConfig()], parsing_timeout=SECONDS)
    if not gold:
        raise ValueError(f"the ground truth {ground_truth!r} is not mathematics that can be read")
    answer = parse(solution, [LatexExtractionConfig(), ExprExtractionConfig()], parsing_timeout=SECONDS)
    return float(bool(answer) and verify(gold, answer, timeout_seconds=SECONDS))


def main() -> None:
    # Whatever a library prints must not end up between the verdicts.
    verdicts = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    # The first verdict is asked for by nobody: it says that everything is imported, or why it cannot be.
    trial = json.dumps({"solution": "1", "ground_truth": "1"})
    for line in itertools.chain([trial], sys.stdin):
        request = json.loads(line)
        try:
            verdict: dict[str, object] = {"score": judge(request["solution"], request["ground_truth"])}
        except Exception as error:
            verdict = {"error": f"{type(error).__name__}: {error}"}
        verdicts.write(json.dumps(verdict) + "\n")
        verdicts.flush()


if __name__ == "__main__":
    main()
