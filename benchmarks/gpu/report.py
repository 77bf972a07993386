"""A report as Markdown: an overview, then a table of each part's rows."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.gpu.orchestrate import Report, Result, Value


def markdown(report: Report, last: Report | None = None) -> str:
    """Write the whole page. A number that the `last` report has, too, is followed by its ratio to that number."""
    how = " with tiny shapes: a trial of the parts, no measurement" if report.tiny else ""
    pages = [f"# agentrl on {report.device}{how}", "docs/gpu.md says how to read it.", overview(report.parts)]
    if last is not None:
        pages.insert(2, "In brackets: the number over that of the report that it is compared with.")
    before = {} if last is None else last.parts
    pages += [
        section(name, result, before.get(name, Result()))
        for name, result in report.parts.items()
        if result.rows or result.tail
    ]
    return "\n\n".join(pages) + "\n"


def overview(parts: dict[str, Result]) -> str:
    rows = [[name, part.status, f"{part.seconds:.0f}", str(len(part.rows))] for name, part in parts.items()]
    return table(["part", "status", "seconds", "rows"], rows)


def section(name: str, result: Result, last: Result) -> str:
    """Write a part's rows, with the columns that any of them has; the end of its output where it failed."""
    columns = list(dict.fromkeys(column for values in result.rows.values() for column in values))
    rows = [
        [label, *(compared(values.get(column), last.rows.get(label, {}).get(column)) for column in columns)]
        for label, values in result.rows.items()
    ]
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


def compared(value: Value, last: Value) -> str:
    """Show a value and, where both are numbers, how many times the last one it is."""
    numbers = [one for one in (value, last) if isinstance(one, int | float) and not isinstance(one, bool) and one]
    return shown(value) + (f" ({numbers[0] / numbers[1]:.2f})" if len(numbers) == 2 else "")


def shown(value: Value) -> str:
    """Numbers with four digits."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"
    return str(value)
