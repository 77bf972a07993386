"""Compares verl's published scorers with those that files made for verl import here, over made-up responses.

Each response is put together of the pieces that scorers look for, whole and broken; what a scorer returns must be the
same value. Prints the number of responses, of those that score, and the first that differ.

    pip install --no-deps --target /tmp/verl verl==0.9.1
    python -m benchmarks.verl.scorers --verl /tmp/verl
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import ModuleType

from agentrl.verl.reward_score import gsm8k, math_dapo, math_reward, search_r1_like_qa_em

PIECES = (
    *(
        "Answer: ",
        "answer:",
        "ANSWER :\n",
        "#### ",
        "####",
        "\\boxed{",
        "\\boxed ",
        "\\fbox{",
        "}",
        "{",
        "$",
        " ",
        "\n",
    ),
    *("\\frac", "\\dfrac", "\\frac{1}{2}", "\\sqrt", "\\sqrt{", "1/2", "-3/4", "0.5", ".5", "\\text{", "\\text{ ", "%"),
    *("\\%", "\\\\", "\\!", "x=", "= ", "12", "1,234", "-7", "7.", "42", "a ", "an ", "the ", "units", "\\left(", ")"),
    *("^\\circ", "\\$", "\\mathrm{th}", "\\overline{", "\\textbf{", "mbox", "\\ldots", "{,}", '"', "é", "½", "٣"),
    *("<answer>", "</answer>", "<answer> Paris </answer>", "Paris", "paris.", "The Paris", "word " * 30),
)
TRUTHS = ("42", "1234", "\\frac{1}{2}", "0.5", "-7", "1,234", "x=5", "$12$", "\\sqrt{3}", "Paris", "12\\text{ cm}", "")


def response(rng: Random, truth: str) -> str:
    """Make a response of a few pieces, in half of them with the ground truth in the form that is asked for."""
    pieces = [rng.choice(PIECES) for _ in range(rng.randint(0, 12))]
    if rng.random() < 0.5:
        form = rng.choice(("Answer: {}", "#### {}", "\\boxed{{{}}}", "<answer>{}</answer>", "\\boxed {}$"))
        pieces.insert(rng.randint(0, len(pieces)), form.format(truth))
    return "".join(pieces)


def cases() -> dict[str, tuple[ModuleType, Callable[[ModuleType, str, str], object]]]:
    """Name each comparison: our module, and the call of either module."""
    return {
        "gsm8k": (gsm8k, lambda module, text, truth: module.compute_score(text, truth, format_score=0.25)),
        "gsm8k flexible": (gsm8k, lambda module, text, truth: module.compute_score(text, truth, "flexible", 0.25)),
        "math_dapo": (math_dapo, lambda module, text, truth: module.compute_score(text, truth)),
        "math_dapo box": (math_dapo, lambda module, text, truth: module.compute_score(text, truth, True)),
        "math_reward": (math_reward, lambda module, text, truth: module.compute_score(text, truth)),
        "search": (
            search_r1_like_qa_em,
            lambda module, text, truth: module.compute_score(text, {"target": [truth, "x"]}, format_score=0.25),
        ),
        "search within": (
            search_r1_like_qa_em,
            lambda module, text, truth: module.compute_score_subem(text, {"target": truth}, format_score=0.25),
        ),
    }


def reference(folder: Path, name: str) -> ModuleType:
    """Load a scorer's file of verl's package, without the package."""
    file = folder / "verl" / "utils" / "reward_score" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"reference_{name}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--verl", type=Path, required=True, help="folder with verl's package")
    parser.add_argument("--responses", type=int, default=20_000)
    given = parser.parse_args()
    for name, (ours, call) in cases().items():
        theirs = reference(given.verl, ours.__name__.rpartition(".")[2])
        if hasattr(theirs, "random"):
            theirs.random.randint = lambda low, high: 0  # it prints one response of 64
        rng, differing, scoring = Random(name), [], 0
        for _ in range(given.responses):
            truth = rng.choice(TRUTHS)
            text = response(rng, truth)
            found, expected = call(ours, text, truth), call(theirs, text, truth)
            scoring += (found["score"] if isinstance(found, dict) else found) == 1.0
            if found != expected:
                differing.append((text, truth, found, expected))
        print(f"{name}: {given.responses} responses, {scoring} score, {len(differing)} differ")
        for one in differing[:5]:
            print("   ", *map(repr, one))


if __name__ == "__main__":
    main()
