"""LaTeX's boxed answers."""

from __future__ import annotations


def last_boxed_only_string(string: str) -> str | None:
    """Return the last `\\boxed{...}` with all braces closed; None without one."""
    begin = string.rfind("\\boxed{")
    end = None if begin < 0 else closing_brace(string, begin)
    return None if end is None else string[begin : end + 1]


def remove_boxed(s: str) -> str:
    """Return the content of a `\\boxed{...}`. Raises ValueError for another text."""
    left = "\\boxed{"
    if not (s.startswith(left) and s.endswith("}")):
        raise ValueError(f"expected \\boxed{{...}}, found {s!r:.200}")
    return s[len(left) : -1]


def closing_brace(text: str, begin: int) -> int | None:
    """Find the place of the brace that closes the first one from `begin` on."""
    depth = 0
    for place in range(begin, len(text)):
        if text[place] == "{":
            depth += 1
        elif text[place] == "}":
            depth -= 1
            if depth == 0:
                return place
    return None
