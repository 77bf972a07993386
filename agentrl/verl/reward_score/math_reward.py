"""Scores of MATH as verl gives them: the last box, compared as text after the rewriting of arXiv:2103.03874's code."""

from __future__ import annotations

import re

from agentrl.verl.reward_score.boxes import closing_brace

READ = 100_000
"""Characters at the end of a response that are read."""


def compute_score(solution_str: str, ground_truth: str) -> float:
    """Score 1.0 where the last box equals the ground truth, both rewritten, else 0.0."""
    box = last_boxed_only_string(solution_str[-READ:])
    if box is None:
        return 0.0
    try:
        return float(is_equiv(remove_boxed(box), ground_truth))
    except ValueError:
        return 0.0


def last_boxed_only_string(string: str) -> str | None:
    """Return the last `\\boxed ...` up to a dollar sign, `\\boxed{...}` or `\\fbox{...}`; None without one."""
    if "\\boxed " in string:
        return "\\boxed " + string.rpartition("\\boxed ")[2].partition("$")[0]
    begin = max(string.rfind("\\boxed"), -1)
    if begin < 0:
        begin = string.rfind("\\fbox")
    end = None if begin < 0 else closing_brace(string, begin)
    return None if end is None else string[begin : end + 1]


def remove_boxed(s: str) -> str:
    """Return the content of a box. Raises ValueError for a text that is no box."""
    if "\\boxed " in s:
        if not s.startswith("\\boxed "):
            raise ValueError(f"expected \\boxed at the beginning, found {s!r:.200}")
        return s[len("\\boxed ") :]
    if not (s.startswith("\\boxed{") and s.endswith("}")):
        raise ValueError(f"expected \\boxed{{...}}, found {s!r:.200}")
    return s[len("\\boxed{") : -1]


def is_equiv(str1: str | None, str2: str | None, verbose: bool = False) -> bool:
    """Check whether two answers are the same text once they are rewritten."""
    if str1 is None or str2 is None:
        return str1 is str2
    try:
        return strip_string(str1) == strip_string(str2)
    except (ValueError, IndexError):
        return str1 == str2


def strip_string(string: str) -> str:
    """Write an answer in one form. Raises ValueError or IndexError for an answer without such a form."""
    for before, after in (
        ("\n", ""),
        ("\\!", ""),
        ("\\\\", "\\"),
        ("tfrac", "frac"),
        ("dfrac", "frac"),
        ("\\left", ""),
        ("\\right", ""),
        ("^{\\circ}", ""),
        ("^\\circ", ""),
        ("\\$", ""),
    ):
        string = string.replace(before, after)
    string = remove_right_units(string).replace("\\\\%", "").replace("\\%", "")
    string = string.replace(" .", " 0.").replace("{.", "{0.")
    if not string:
        return string
    string = f"0{string}" if string[0] == "." else string
    sides = string.split("=")
    string = sides[1] if len(sides) == 2 and len(sides[0]) <= 2 else string
    string = fix_fracs(fix_sqrt(string).replace(" ", ""))
    return fix_a_slash_b("\\frac{1}{2}" if string == "0.5" else string)


def remove_right_units(string: str) -> str:
    """Drop a unit, `\\text{ ...`, at the end. Raises ValueError for several."""
    before, *units = string.split("\\text{ ")
    if len(units) > 1:
        raise ValueError("more than one unit")
    return before


def fix_sqrt(string: str) -> str:
    """Put the argument of each root in braces. Raises IndexError for a root of nothing."""
    first, *roots = string.split("\\sqrt")
    return first + "".join(f"\\sqrt{root}" if root[0] == "{" else f"\\sqrt{{{root[0]}}}{root[1:]}" for root in roots)


def fix_fracs(string: str) -> str:
    """Put the arguments of each fraction in braces; a text with a fraction that lacks them is returned as it is.

    Raises IndexError for a fraction of nothing.
    """
    first, *fractions = string.split("\\frac")
    fixed = first
    for one in fractions:
        if one[0] == "{":
            fixed += f"\\frac{one}"
        elif len(one) < 2:
            return string
        else:
            below = one[1:] if one[1] == "{" else f"{{{one[1]}}}{one[2:]}"
            fixed += f"\\frac{{{one[0]}}}{below}"
    return fixed


def fix_a_slash_b(string: str) -> str:
    """Write a/b of two whole numbers as a fraction."""
    found = re.fullmatch(r"(-?(?:0|[1-9]\d*))/(-?(?:0|[1-9]\d*))", string, re.ASCII)
    return string if found is None or "-0" in found.groups() else f"\\frac{{{found[1]}}}{{{found[2]}}}"
