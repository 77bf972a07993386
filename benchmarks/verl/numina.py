"""Compares verl's scorer of numina_* (prime_math) with ours on answers of which it is known whether they are right.

Each ground truth comes with answers that have its value and answers that do not, in a box and in a sentence. Prints
how many each scorer judges wrongly, and every answer on which the two differ.

    pip install --no-deps --target /tmp/verl verl==0.9.1 pylatexenc==2.10
    python -m benchmarks.verl.numina --verl /tmp/verl

verl's scorer evaluates texts of the policy as Python: it is given the answers below and no others. Its parser of LaTeX
needs another ANTLR than hydra-core, and so is out of use here as it is beside verl.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ContextDecorator
from pathlib import Path
from types import FrameType, ModuleType

from agentrl.reward.math import MathJudges
from agentrl.verl.calling import waited

CASES: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("42", ("42", "42.0", "42.", "+42", "x = 42", "42 \\text{ cm}", "42^\\circ"), ("43", "4.2", "0.42", "4200", "-42")),
    ("1234", ("1234", "1,234", "1{,}234", "1\\,234"), ("1,235", "123.4", "12.34", "123400", "1,2,3,4")),
    ("2010", ("2010", "2{,}010"), ("2010.1", "2009.9", "20.10", "201")),
    ("-7", ("-7", "-7.0", "- 7"), ("7", "-0.07", "-700", "-8")),
    ("0", ("0", "0.0", "-0"), ("1", "0.1")),
    ("0.5", ("0.5", ".5", "\\frac{1}{2}", "1/2", "\\dfrac12"), ("0.6", "50", "\\frac{1}{3}", "5")),
    (
        "\\frac{3}{4}",
        ("\\frac{3}{4}", "\\frac34", "\\tfrac{3}{4}", "3/4", "0.75"),
        ("\\frac{4}{3}", "75", "0.74", "34"),
    ),
    ("-\\frac{1}{3}", ("-\\frac{1}{3}", "\\frac{-1}{3}", "-1/3"), ("\\frac{1}{3}", "-0.3", "-3")),
    ("3\\frac{1}{2}", ("3\\frac{1}{2}", "\\frac{7}{2}", "3.5"), ("\\frac{3}{2}", "31/2", "4.5")),
    ("50\\%", ("50\\%", "50 \\%"), ("5\\%", "51\\%")),
    ("\\sqrt{3}", ("\\sqrt{3}", "\\sqrt3", "3^{1/2}"), ("3", "\\sqrt{2}", "-\\sqrt{3}", "1.7")),
    (
        "2\\sqrt{3}",
        ("2\\sqrt{3}", "\\sqrt{12}", "2 \\sqrt 3"),
        ("\\sqrt{6}", "3\\sqrt{2}", "2 + \\sqrt{3}", "2\\sqrt{30}"),
    ),
    (
        "\\frac{\\sqrt{3}}{2}",
        ("\\frac{\\sqrt{3}}{2}", "\\frac{1}{2}\\sqrt{3}"),
        ("\\frac{3}{2}", "\\frac{\\sqrt{2}}{3}"),
    ),
    ("4\\pi", ("4\\pi", "4 \\pi"), ("4", "\\pi", "4\\pi^2", "400\\pi")),
    ("\\frac{\\pi}{3}", ("\\frac{\\pi}{3}", "\\pi/3"), ("60", "\\frac{\\pi}{6}", "\\pi")),
    ("(3,-1)", ("(3,-1)", "(3, -1)", "\\left(3,-1\\right)"), ("(-1,3)", "(3,1)", "3", "[3,-1]")),
    ("(-\\infty,2]", ("(-\\infty,2]", "(-\\infty, 2]"), ("(-\\infty,2)", "[2,\\infty)", "(2,\\infty)")),
    ("[1,5)", ("[1,5)", "[1, 5)"), ("(1,5)", "[1,5]", "(1,5]", "[1,6)")),
    ("(1,3) \\cup (5,\\infty)", ("(1,3) \\cup (5,\\infty)",), ("(1,3)", "(5,\\infty)", "(1,5)")),
    ("1, 2, 3", ("1, 2, 3", "1,2,3", "3, 2, 1"), ("1, 2", "1, 2, 4", "123", "6")),
    ("\\{1, 3\\}", ("\\{1, 3\\}", "\\{3, 1\\}"), ("\\{1, 2\\}", "\\{1\\}", "3")),
    ("x^2 + 2x + 1", ("x^2 + 2x + 1", "x^2+2x+1", "(x+1)^2", "1 + 2x + x^2"), ("x^2 + 2x", "(x-1)^2", "x + 1", "4")),
    ("y = 2x + 3", ("y = 2x + 3", "y=2x+3", "y = 3 + 2x"), ("y = 3x + 2", "y = 2x - 3", "y = 2x")),
    ("2^{10}", ("2^{10}", "1024", "1{,}024"), ("2^{11}", "20", "210", "10.24")),
    ("\\frac{n(n+1)}{2}", ("\\frac{n(n+1)}{2}", "\\frac{n^2+n}{2}"), ("\\frac{n(n-1)}{2}", "n(n+1)", "\\frac{n}{2}")),
    (
        "\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}",
        ("\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}",),
        ("\\begin{pmatrix} 1 & 2 \\\\ 3 & 5 \\end{pmatrix}", "\\begin{pmatrix} 1 & 3 \\\\ 2 & 4 \\end{pmatrix}", "10"),
    ),
    ("\\ln 2", ("\\ln 2", "\\ln(2)", "\\log 2"), ("2", "\\ln 3", "\\log_{10} 2")),
    ("1 + i", ("1 + i", "1+i", "i + 1"), ("1 - i", "1", "i")),
    ("\\text{C}", ("\\text{C}", "C", "(C)"), ("A", "\\text{B}", "D")),
    ("\\text{even}", ("\\text{even}", "even"), ("odd", "\\text{odd}")),
    ("1.5 \\times 10^6", ("1.5 \\times 10^6", "1500000", "1{,}500{,}000"), ("15000", "1.5", "1.5 \\times 10^5")),
)
FORMS = {
    "box": "Step 1: We compute.\nStep 2: The answer is $\\boxed{{{}}}$.",
    "sentence": "Step 1: We compute.\nStep 2: Therefore, the answer is ${}$.",
}


class TimeLimit(ContextDecorator):
    """Stands for verl's timeout_limit, around a call or as a context, in the main thread."""

    def __init__(self, seconds: float) -> None:
        self._seconds = float(seconds)

    def __enter__(self) -> None:
        signal.signal(signal.SIGALRM, _late)
        signal.setitimer(signal.ITIMER_REAL, self._seconds)

    def __exit__(self, *error: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _late(number: int, frame: FrameType | None) -> None:
    raise TimeoutError


def reference(folder: Path) -> Callable[[str, str], bool]:
    """Load prime_math's `compute_score` of verl's package, without the package's own imports."""
    sys.path.append(str(folder))  # pylatexenc
    scorers = folder / "verl" / "utils" / "reward_score"
    for name, path in (("verl", folder), ("verl.utils", folder), ("verl.utils.reward_score", scorers)):
        package = sys.modules[name] = ModuleType(name)
        package.__path__ = [str(path)]
    sys.modules["verl.utils.py_functional"] = functional = ModuleType("verl.utils.py_functional")
    functional.__dict__["timeout_limit"] = TimeLimit
    module = importlib.import_module("verl.utils.reward_score.prime_math")

    def is_right(response: str, truth: str) -> bool:
        with contextlib.redirect_stdout(io.StringIO()):
            return bool(module.compute_score(response, truth)[0])

    return is_right


def answers() -> Iterator[tuple[str, str, str, bool]]:
    """Yield (form, ground truth, answer, whether it is right)."""
    for form in FORMS:
        for truth, right, wrong in CASES:
            yield from ((form, truth, answer, True) for answer in right)
            yield from ((form, truth, answer, False) for answer in wrong)


def main() -> None:
    """Compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--verl", type=Path, required=True, help="folder with verl's package and pylatexenc")
    theirs, judges = reference(parser.parse_args().verl), MathJudges(workers=1)
    counts: Counter[tuple[str, str]] = Counter()
    for form, truth, answer, is_right in answers():
        response = FORMS[form].format(answer)
        ours = waited(judges.judge(response, truth))["score"] == 1.0
        verls = theirs(response, truth)
        counts[form, "right answers" if is_right else "wrong answers"] += 1
        for name, found in (("ours", ours), ("verl's", verls)):
            if found != is_right:
                counts[form, f"{name} {'takes' if found else 'refuses'}"] += 1
        if ours != verls:
            said = "right" if is_right else "wrong"
            print(f"{form}: {answer!r} for {truth!r} is {said}: ours {ours}, verl's {verls}")
    for (form, what), count in sorted(counts.items()):
        print(f"{form}: {what} {count}")


if __name__ == "__main__":
    main()
