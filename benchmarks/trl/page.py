"""Write the table of TRL's arguments in docs/trl.md: `python -m benchmarks.trl.page` prints it."""

from __future__ import annotations

import argparse

from agentrl.trl.arguments import ARGUMENTS, Argument


def table() -> str:
    """Make the table of all arguments, in the order of their kinds."""
    rows = ["| argument | TRL's default | | |", "|---|---|---|---|"]
    for kind in ("translated", "fixed", "ignored"):
        rows += [_row(one) for one in ARGUMENTS if one.kind == kind]
    return "\n".join(rows) + "\n"


def _row(argument: Argument) -> str:
    others = "".join(f" or `{value!r}`" for value in argument.accepted)
    text = argument.text.replace("actor_rollout_ref.", "").replace("|", "\\|")
    return f"| `{argument.name}` | `{argument.default!r}`{others} | {argument.kind} | {text} |"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    print(table(), end="")
