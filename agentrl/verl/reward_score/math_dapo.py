"""Scores of DAPO's data sets as verl gives them: 1 or -1, by the line `Answer: ...` or by the last box."""

from __future__ import annotations

import re

from agentrl.verl.reward_score.boxes import last_boxed_only_string, remove_boxed

READ = 300
"""Characters at the end of a response that are read."""
BOX_READ = 100
"""The same where only a box counts."""
NO_ANSWER = "[INVALID]"
"""Prediction of a response without an answer."""
ANSWER = r"(?i)Answer\s*:\s*([^\n]+)"

SUBSTITUTIONS = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    ("\\$", ""),
    (r"\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (",\\text{and}", ","),
    ("\\text{and}", ","),
    ("\\text{m}", "\\text{}"),
)
WORDS = (
    "square ways integers dollars mph inches hours km units \\ldots sue points feet minutes digits cents degrees cm gm "
    "pounds meters meals edges students childrentickets multiples \\text{s} \\text{.}"
)
REMOVED = (
    *WORDS.split(),
    "\\text{\ns}",
    "\\text{}^2",
    "\\text{}^3",
    "\\text{\n}",
    "\\text{}",
    r"\mathrm{th}",
    r"^\circ",
    r"^{\circ}",
    r"\;",
    r",\!",
    "{,}",
    '"',
    "\\dots",
)
"""Texts of the normalisation of arXiv:2206.14858, appendix D.1, in its order, which matters."""


def compute_score(
    solution_str: str,
    ground_truth: str,
    strict_box_verify: bool = False,
    pause_tokens_index: list[int] | None = None,
) -> dict[str, object]:
    """Score the end of a response: {"score": 1.0 or -1.0, "acc": whether it is right, "pred": the answer found}."""
    is_right, found = verify(solution_str[-READ:], ground_truth, strict_box_verify, pause_tokens_index)
    return {"score": 1.0 if is_right else -1.0, "acc": is_right, "pred": found}


def verify(
    solution_str: str,
    answer: str,
    strict_box_verify: bool = False,
    pause_tokens_index: list[int] | None = None,
) -> tuple[bool, str | None]:
    """Return whether a response is right, and the answer found: `Answer: ...`, and without one the last box's."""
    is_right, found = (False, NO_ANSWER) if strict_box_verify else is_correct_minerva(solution_str, answer)
    if found != NO_ANSWER:
        return is_right, found
    verdict, boxed = is_correct_strict_box(solution_str, answer, pause_tokens_index)
    return (verdict == 1, boxed) if strict_box_verify or boxed is not None else (is_right, found)


def is_correct_strict_box(pred: str, gt: str, pause_tokens_index: list[int] | None = None) -> tuple[int, str | None]:
    """Return 1 where the last box holds the ground truth letter by letter, else -1; and the content of the box."""
    if pause_tokens_index is not None and len(pause_tokens_index) != 4:
        raise ValueError(f"pause_tokens_index must hold 4 places, found {len(pause_tokens_index)}")
    read = pred[-BOX_READ:] if pause_tokens_index is None else pred[pause_tokens_index[-1] - BOX_READ :]
    box = last_boxed_only_string(read)
    found = None if box is None else remove_boxed(box)
    return (1 if found == gt else -1), found


def is_correct_minerva(
    solution_str: str, gt: str, gt_need_extract: bool = False, answer_pattern: str = ANSWER
) -> tuple[bool, str]:
    """Return whether the last answer equals the ground truth, both normalised; and the answer, normalised."""
    answers = re.findall(answer_pattern, solution_str)
    found = normalize_final_answer(answers[-1] if answers else NO_ANSWER)
    if gt_need_extract:
        box = last_boxed_only_string(gt)
        if box is None:
            raise ValueError(f"the ground truth has no \\boxed{{...}}: {gt!r:.200}")
        gt = remove_boxed(box)
    return found == normalize_final_answer(gt), found


def normalize_final_answer(final_answer: str) -> str:
    """Write an answer in one form (arXiv:2206.14858, appendix D.1)."""
    text = final_answer.split("=")[-1]
    for before, after in SUBSTITUTIONS:
        text = text.replace(before, after)
    for word in REMOVED:
        text = text.replace(word, "")
    text = "\n".join(map(_in_dollars, text.split("\n")))
    for name in ("text", "textbf", "overline"):
        text = re.sub(rf"\\{name}\{{([^}}\n]*)\}}", r"\1", text)
    text = "\n".join(map(_in_box, text.split("\n")))
    text = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", text)
    text = re.sub(r"sqrt([^{])", r"sqrt{\1}", text).replace("$", "")
    digits = text.replace(",", "")
    return digits.strip() if digits.isdigit() else text.strip()


def _in_dollars(line: str) -> str:
    """Return the text between the first two dollar signs, with them; a line without two as it is."""
    parts = line.split("$", 2)
    return f"${parts[1]}$" if len(parts) == 3 else line


def _in_box(line: str) -> str:
    """Take the first \\boxed{ and the last } after it out of a line."""
    before, box, inside = line.partition("\\boxed{")
    content, brace, behind = inside.rpartition("}")
    return f"{before}{content}{behind}" if box and brace else line
