"""The arena's table and picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.marked import replace_text
from labs.arena.contenders import Contender
from labs.arena.runs import TASKS, Match, Result, Task

PICTURE = "images/arena.png"
ENOUGH = 0.8
"""Validation success whose cost in trajectories is told."""


def table(matches: Sequence[Match], out: Path) -> list[str]:
    """Return the lines of Markdown tables, one for each ray: a row for each contender, means over finished seeds.

    With several seeds the lowest and the highest are told beside the mean. A task of which a ray has no result has no
    columns in its table.
    """
    lines: list[str] = []
    for ray in dict.fromkeys(match.contender.ray for match in matches):
        own = [match for match in matches if match.contender.ray == ray]
        results = {match: found for match in own if (found := Result.from_folder(match, out))}
        tasks = [task for task in TASKS if any(match.task == task for match in results)]
        columns = f"before | after | in training | trajectories to {ENOUGH:.0%} | CPU-s"
        critics = any(found.explained is not None for found in results.values())
        columns += " | explained variance" if critics else ""
        width = columns.count("|") + 1
        lines += ["", f"| {ray} | " + " | ".join(f"{task}: {columns}" for task in tasks) + " |"]
        lines.append("|---" * (1 + width * len(tasks)) + "|")
        for name in dict.fromkeys(match.contender.name for match in own):
            seen = [(match, found) for match, found in results.items() if match.contender.name == name]
            if seen:
                by_task = [[one for match, one in seen if match.task == task] for task in tasks]
                cells = [cell for own in by_task for cell in _cells(own)[:width]]
                lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return lines[1:]


def _cells(results: Sequence[Result]) -> list[str]:
    if not results:
        return ["" for _ in range(6)]
    enough = [next((seen for seen, rate in one.success if rate >= ENOUGH), None) for one in results]
    reached = [seen for seen in enough if seen is not None]
    explained = [one.explained for one in results if one.explained is not None]
    some = f"{len(reached)} of {len(results)}" if reached else "never"
    return [
        _share([one.success[0][1] for one in results]),
        _share([one.success[-1][1] for one in results]),
        _share([one.training for one in results]),
        f"{mean(reached):,.0f}" if len(reached) == len(results) else some,
        f"{mean(one.cpu_seconds for one in results):.0f}",
        f"{mean(explained):.2f}" if explained else "",
    ]


def _share(by_seed: Sequence[float]) -> str:
    if len(by_seed) == 1:
        return f"{by_seed[0]:.1%}"
    return f"{mean(by_seed):.1%} ({min(by_seed):.1%} to {max(by_seed):.1%})"


def document(matches: Sequence[Match], out: Path, docs: Path) -> None:
    """Write the table between its marks in algorithms.md, and the picture beside it."""
    text = "\n".join(table(matches, out))
    replace_text(docs / "algorithms.md", "arena", f"\n{text}\n")
    draw(matches, out, docs / PICTURE)


def draw(matches: Sequence[Match], out: Path, file: Path) -> None:
    """Draw validation success against trajectories: a row for each kind, a column for each task."""
    tasks: list[Task] = list(dict.fromkeys(match.task for match in matches))
    kinds = list(dict.fromkeys(match.contender.ray for match in matches))
    figure = Figure(figsize=(5.2 * len(tasks), 4.2 * len(kinds)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(kinds), len(tasks), sharey=True, squeeze=False)
    for across, task in enumerate(tasks):
        for down, kind in enumerate(kinds):
            axes = panels[down][across]
            axes.set_title(f"{task}: {kind}", fontsize=10)
            axes.set_ylim(-0.03, 1.03)
            axes.grid(alpha=0.3)
            axes.set_xlabel("trajectories", fontsize=8)
            own = [match for match in matches if match.task == task and match.contender.ray == kind]
            named: dict[Contender, list[Result]] = {}
            for match in own:
                if (found := Result.from_folder(match, out)) is not None:
                    named.setdefault(match.contender, []).append(found)
            for place, (contender, results) in enumerate(named.items()):
                seen = [x for x, _ in results[0].success]
                rate = [mean(ys) for ys in zip(*([y for _, y in one.success] for one in results), strict=True)]
                style, color = ("-", "--", ":")[place // 8], f"C{place % 8}"
                axes.plot(seen, rate, style, color=color, marker=".", linewidth=1.3, label=contender.name)
            axes.set_visible(bool(named))
            if named and (across == len(tasks) - 1 or kind == "correction"):
                axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    figure.savefig(file, dpi=110)
