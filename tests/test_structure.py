"""The plan of the rooms: docs/architecture.md lists them bottom up, and nothing imports upwards or in a circle."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parent.parent
PACKAGE = PROJECT / "agentrl"
LOOSE = 6
"""Modules of the top level that are no room: entry points, and errors."""


def rooms() -> list[str]:
    """The rooms in the order of the table in docs/architecture.md, lowest first."""
    page = (PROJECT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = page.partition("## Rooms")[2].partition("\n## ")[0]
    return re.findall(r"^\| `(\w+)(?:/|\.py)` \|", table, re.MULTILINE)


def file_of(module: str) -> Path | None:
    path = PROJECT / module.replace(".", "/")
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.exists()), None)


def imports(file: Path) -> Iterator[Path]:
    """Files of the package that `file` imports anywhere, those for type checking aside."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("agentrl"):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (found for name in names if (found := file_of(name) or file_of(str(node.module))))
        elif isinstance(node, ast.Import):
            yield from (
                found for alias in node.names if alias.name.startswith("agentrl") and (found := file_of(alias.name))
            )


def room_of(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


FILES = {file: set(imports(file)) - {file} for file in sorted(PACKAGE.rglob("*.py"))}


def test_every_room_is_on_the_map_and_few_modules_are_loose() -> None:
    there = {room_of(file) for file in FILES if file != PACKAGE / "__init__.py"}
    assert there == set(rooms()), "docs/architecture.md lists every room, and no other"
    loose = [file for file in PACKAGE.glob("*.py") if file.name != "__init__.py"]
    assert len(loose) <= LOOSE, sorted(file.name for file in loose)


def test_arrows_go_one_way() -> None:
    height = {room: number for number, room in enumerate(rooms())}
    upwards = [
        f"{file.relative_to(PROJECT)} imports {other.relative_to(PROJECT)}"
        for file, others in FILES.items()
        for other in sorted(others)
        if PACKAGE / "__init__.py" not in (file, other) and height[room_of(other)] > height[room_of(file)]
    ]
    assert not upwards, "\n".join(upwards)


def test_no_files_import_each_other_in_a_circle() -> None:
    graph: dict[Path, set[Path]] = defaultdict(set, FILES)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(str(file.relative_to(PROJECT)) for file in error.args[1]))


def test_the_index_lists_every_page() -> None:
    index = (PROJECT / "docs" / "README.md").read_text(encoding="utf-8")
    pages = {page.name for page in (PROJECT / "docs").glob("*.md")} - {"README.md"}
    assert pages == set(re.findall(r"\]\(([\w.]+\.md)\)", index))
