"""The plan of the rooms: docs/architecture.md lists them bottom up, and nothing imports upwards or in a circle.

Docstrings and comments, too: how their sentences begin.
"""

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
LOOSE = 7
"""Modules of the top level that are no room: entry points, and errors."""
WORDED = ("agentrl", "sandbox", "tools", "interactions", "data_prep", "benchmarks", "examples")
FIRST = re.compile(r"\s*(?:Of|That|Those|Whether|As|It|Whoever|What|Where)\b")
"""Words that no docstring begins with: the sentence would need its neighbours, which a tooltip does not show."""
LATER = re.compile(r"[.!?]\s+(?:Of|That|Those)\b")
"""Words that no later sentence of a docstring begins with."""
COMMENT = re.compile(r"#\s(?:.*[.!?]\s+)?(?:Of|That|Those)\b")


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


def ill_begun(text: str) -> list[int]:
    """Lines of a module's docstrings, and comments, with a sentence that begins with one of the words."""
    found = [text.count("\n", 0, match.start()) + 1 for match in COMMENT.finditer(text)]
    if re.search(f'"""{FIRST.pattern}', text) or LATER.search(text):  # parsing all files would take seconds
        found += [
            node.lineno
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
            if FIRST.match(node.value.value) or LATER.search(node.value.value)
        ]
    return sorted(found)


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ('"""What it does."""', [1]),
        ('x = 1\n"""\nOf each process.\n"""', [2]),
        ('def f():\n    r"""Sum. Those of others go."""', [2]),
        ("# It waits. Of all, one", [1]),
        ('"""Whatever of it: that, where, as it was."""\nraise ValueError("no. That is none")', []),
    ],
)
def test_ill_begun_sentences_are_found(text: str, lines: list[int]) -> None:
    assert ill_begun(text) == lines


def test_sentences_of_docstrings_and_comments_begin_well() -> None:
    files = [file for folder in WORDED for file in sorted((PROJECT / folder).rglob("*.py"))]
    found = [
        f"{file.relative_to(PROJECT)}:{line}" for file in files for line in ill_begun(file.read_text(encoding="utf-8"))
    ]
    assert not found, f"begin with a noun phrase or an imperative verb, not with {FIRST.pattern}:\n" + "\n".join(found)
