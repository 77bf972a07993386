"""The plan of the rooms: docs/architecture.md lists them bottom up, and nothing imports upwards or in a circle.

No file is in a circle of imports; how sentences of docstrings and comments begin. Other numbers of the structure are
a report: `python -m tests.structure`.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.structure.counts import files_in_circles
from tests.structure.files import File, read

PROJECT = Path(__file__).resolve().parent.parent
BROUGHT = ("verl", "trl", "view", "replay", "environments", "serve", "suites")
"""Annexes that the core does without, and finds by their entry points."""
ENTRANCES = {"__init__", "__main__"}
"""Modules of the package itself, which may import every room."""
WORDED = ("agentrl", "sandbox", "tools", "interactions", "data_prep", "benchmarks", "labs", "examples")
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


@pytest.fixture(scope="module")
def files() -> dict[Path, File]:
    return read(PROJECT)


def room_of(file: Path) -> str:
    return file.parts[1].removesuffix(".py")


def test_every_room_is_on_the_map(files: dict[Path, File]) -> None:
    there = {room_of(file) for file in files} - ENTRANCES
    assert there == set(rooms()), "docs/architecture.md lists every room, and no other"


def test_arrows_go_one_way(files: dict[Path, File]) -> None:
    height = {**dict.fromkeys(ENTRANCES, len(rooms())), **{room: number for number, room in enumerate(rooms())}}
    upwards = [
        f"{path} imports {other}"
        for path, file in files.items()
        for other in sorted(file.imports)
        if room_of(other) != "__init__" and height[room_of(other)] > height[room_of(path)]
    ]
    assert not upwards, "\n".join(upwards)


def test_the_core_names_no_annex(files: dict[Path, File]) -> None:
    """No import, not even for types, and no text: an annex's entry points bring what the core asks for by name."""
    core = {path: file for path, file in files.items() if room_of(path) not in (*BROUGHT, "quickstart")}
    found = [
        f"{path} imports {other}"
        for path, file in core.items()
        for other in sorted(file.imports | file.types)
        if room_of(other) in BROUGHT
    ]
    target = re.compile(rf"agentrl\.({'|'.join(BROUGHT)})(\.\w+)*(:\w+)?")
    for path in core:
        for node in ast.walk(ast.parse((PROJECT / path).read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and target.fullmatch(node.value):
                found.append(f"{path}:{node.lineno} names {node.value}")
    for file in sorted((PROJECT / "configs").rglob("*.yaml")):
        found += [f"{file.relative_to(PROJECT)} names {one[0]}" for one in target.finditer(file.read_text("utf-8"))]
    assert not found, "\n".join(found)


def test_checks_are_subscribers(files: dict[Path, File]) -> None:
    """Workers, rollouts, engines and algorithms tell watches (`observe/watch.py`), and name no check."""
    found = [
        f"{path} imports {other}"
        for path, file in files.items()
        if room_of(path) in ("workers", "rollouts", "engines", "algorithms")
        for other in sorted(file.imports | file.types)
        if room_of(other) == "checks"
    ]
    assert not found, "\n".join(found)


def test_no_file_is_in_a_circle(files: dict[Path, File]) -> None:
    assert not files_in_circles(files).found


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
