"""Text between two marks of a page: `<!-- name -->` and `<!-- end of name -->`."""

from __future__ import annotations

from pathlib import Path


def replace_text(page: Path, name: str, text: str) -> None:
    """Put `text` between the marks of the page. Raises ValueError where it lacks them; the page then stays as it is."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, found, rest = page.read_text(encoding="utf-8").partition(begin)
    _, ended, after = rest.partition(end)
    if not (found and ended):
        raise ValueError(f"{page} lacks the marks {begin} and {end}")
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")
