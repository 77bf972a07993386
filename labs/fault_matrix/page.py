"""The matrix as a table, and in the documents."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from benchmarks.marked import replace_text
from labs.fault_matrix.assets import LOOPS
from labs.fault_matrix.cells import BOUNDS, Cell, Result, outcome
from labs.fault_matrix.faults import FAULTS

SHORT = {"does not apply": "-", "not run": "not run", "failed": "FAILED"}


def table(out: Path) -> list[str]:
    """Return the table's lines: a row a fault, a column a loop; seconds to recover, synchronous / asynchronous."""
    lines = [f"| fault | {' | '.join(LOOPS)} | left out |", f"|---|{'---|' * (len(LOOPS) + 1)}"]
    counts: Counter[str] = Counter()
    commits: Counter[str] = Counter()
    for fault in FAULTS:
        left_out, entries = 0, []
        for loop in LOOPS:
            found = [outcome(Cell(fault, loop, mode), out) for mode in BOUNDS]
            counts.update(one.state for one in found)
            commits.update(one.commit for one in found if one.commit)
            left_out += sum(one.left_out for one in found)
            words = [entry(one) for one in found]
            entries.append(words[0] if len(set(words)) == 1 and words[0] in SHORT.values() else " / ".join(words))
        lines.append(f"| {fault.name} | {' | '.join(entries)} | {left_out or ''} |")
    total = ", ".join(f"{counts[state]} {state}" for state in ("passed", "failed", "does not apply", "not run"))
    of = ", ".join(f"`{commit}` ({count})" for commit, count in commits.most_common())
    return [*lines, "", f"{counts.total()} cells: {total}. Commit (cells played): {of or 'none'}."]


def entry(found: Result) -> str:
    return SHORT.get(found.state, f"{found.recovery:.1f}")


def document(out: Path, page: Path) -> None:
    """Write the table between its marks."""
    text = "\n".join(table(out))
    replace_text(page, "fault matrix", f"\n{text}\n")
