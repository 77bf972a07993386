"""`python -m benchmarks.verl.page` writes the last table of docs/verl.md: what each of verl's keys is here."""

from __future__ import annotations

import argparse
from pathlib import Path

from agentrl.verl.keys.entries import VerlKey
from agentrl.verl.keys.table import VERL_KEYS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "verl.md"
BEGIN = "| verl's key | here | what stands for it |\n|---|---|---|\n"


def page(text: str) -> str:
    """Return the page's text with the rows of the table of today."""
    rows = (f"| `{entry.pattern}` | {_here(entry)} | {_text(entry)} |\n" for entry in VERL_KEYS)
    return text.partition(BEGIN)[0] + BEGIN + "".join(rows)


def _here(entry: VerlKey) -> str:
    if entry.kind == "ignored" and entry.accepted is not None:
        return f"ignored: {', '.join(f'`{_shown(value)}`' for value in entry.accepted)}; others unsupported"
    return entry.kind


def _shown(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _text(entry: VerlKey) -> str:
    ours = ", ".join(f"`{name}`" for name in entry.ours if name != entry.pattern and name not in entry.text)
    return f"{entry.text}{f' ({ours})' if ours else ''}".replace("|", "\\|")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
