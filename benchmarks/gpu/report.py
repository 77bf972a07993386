"""A report as Markdown: an overview, then a table of each part's rows."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.gpu.orchestrate import Report, Result, Value


def markdown(report: Report) -> str:
    """The whole page."""
    how = " with tiny shapes: a trial of the parts, no measurement" if report.tiny else ""
    pages = [f"# agentrl on {report.device}{how}", "docs/gpu.md says how to read it.", overview(report.parts)]
    pages += [section(name, result) for name, result in report.parts.items() if result.rows or result.tail]
    return "\n\n".join(pages) + "\n"


def overview(parts: dict[str, Result]) -> str:
    rows = [[name, part.status, f"{part.seconds:.0f}", str(len(part.rows))] for name, part in parts.items()]
    return table(["part", "status", "seconds", "rows"], rows)


def section(name: str, result: Result) -> str:
    """Its rows, with the columns that any of them has; the end of its output where it failed."""
    columns = list(dict.fromkeys(column for values in result.rows.values() for column in values))
    rows = [[label, *(shown(values.get(column)) for column in columns)] for label, values in result.rows.items()]
    pages = [f"## {name}"]
    if rows:
        pages.append(table([name, *columns], rows))
    if result.tail:
        pages.append(f"{result.status}; the end of its output:\n\n```\n" + "\n".join(result.tail) + "\n```")
    return "\n\n".join(pages)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [[cell.replace("|", "\\|").replace("\n", " ") for cell in line] for line in [head, *rows]]
    lines.insert(1, ["---"] * len(head))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def shown(value: Value) -> str:
    """Numbers with four digits."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"
    return str(value)
