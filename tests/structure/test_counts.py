"""Numbers of a made-up project, whose circle, bags and words are known."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.structure.__main__ import main
from tests.structure.counts import Measure, measure
from tests.structure.files import read
from tests.structure.words import count

FILES = {
    "agentrl/__init__.py": "",
    "agentrl/core/a.py": """
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from agentrl.core.b import Late
    import agentrl.core.alone
""",
    "agentrl/core/b.py": "def late():\n    from agentrl import core\n    from agentrl.core import c\nclass Late: ...\n",
    "agentrl/core/c.py": "import agentrl.core.a\n",
    "agentrl/core/d.py": "from . import e\n",
    "agentrl/core/e.py": "from ..core.d import x\n",
    "agentrl/core/__init__.py": "from agentrl.core import alone\n",
    "agentrl/core/alone.py": '"""Alone."""\n',
    "agentrl/core/classes.py": "class _Large:\n"
    + "".join(f"    def m{n}(self): self.x{n % 16} = {n}\n" for n in range(21))
    + "class Long:\n    x0: int\n    self: int\n"
    + "    pass\n" * 298
    + "class Kept:\n"
    + "".join(f"    x{n}: int\n" for n in range(15)),
    "agentrl/core/functions.py": """
from dataclasses import dataclass
@dataclass
class Bag:
    a: int
    b: int
    c: "int"
    def __post_init__(self): ...
@dataclass
class Record:
    a: int
    b: int
    c: int
    d: int
@dataclass
class Made(Record): ...
class One:
    def run(self, bag: Bag | None, d, /, e, *, f, g, h): ...
class Other:
    def run(self, bag: "Bag", d, e, f, g, *rest): ...
def seven(a, b, c, d, e, f, g): ...
def eight(a, b, c, d, *, e, f, **more):
    return more["g"], more.pop("h", 0), more.get(a), {}.get("i")
def made(a, b, c, d, record: Record) -> list[Record]:
    return seven(_once(_twice(), _twice()), made)
def _once(*values):
    \"\"\"See `made`.\"\"\"
def _twice():
    \"\"\"What it is told is none of its business. See it.\"\"\"
def _never(): ...
""",
    "agentrl/config/sections/many.py": "class Many:\n" + "".join(f"    key{n}: int\n" for n in range(16)),
    "agentrl/verl/annex.py": "def annex(): ...\n" * 40,
    "docs/page.md": "# None behind\n\nOne goes on. `behind` ends here:\n\n| behind |\n\n```\nanew\n```\n",
    "tests/core/test_a.py": "one = 1\n\n# two\n",
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("project")
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.fixture(scope="module")
def measures(root: Path) -> dict[str, Measure]:
    return measure(root, read(root))


def test_circles_go_by_imports_for_types_and_in_functions(measures: dict[str, Measure]) -> None:
    assert measures["files in circles"] == Measure(
        5,
        ["agentrl/core/a.py <-> agentrl/core/b.py <-> agentrl/core/c.py", "agentrl/core/d.py <-> agentrl/core/e.py"],
    )


def test_classes(measures: dict[str, Measure]) -> None:
    large = "agentrl/core/classes.py _Large"
    assert measures["classes over 20 methods"].found == [f"{large} (21)"]
    assert measures["classes over 15 attributes"].found == [f"{large} (16)"]
    assert measures["classes over 300 lines"].found == ["agentrl/core/classes.py Long (301)"]
    assert measures["methods of the largest class"] == Measure(21, [large])
    assert measures["public classes"].number == 9


def test_a_bag_of_options_and_keys_of_kwargs_are_parameters(measures: dict[str, Measure]) -> None:
    """Seven are not too many; a record that functions return is one."""
    wide = [line.partition(" ")[2] for line in measures["functions over 7 parameters"].found]
    assert wide == ["One.run (8)", "eight (8)"]


def test_functions_used_once(measures: dict[str, Measure]) -> None:
    private = measures["private functions used once"].found
    assert [line.partition(" ")[2] for line in private] == ["_never", "_once"]
    every = measures["functions used once"].found
    assert [line.partition(" ")[2] for line in every] == ["_never", "_once", "made", "seven"]


def test_lines(measures: dict[str, Measure]) -> None:
    assert measures["lines of tests"] == Measure(3, ["core (3)"])
    core = sum(text.count("\n") for name, text in FILES.items() if name.startswith("agentrl/") and "verl" not in name)
    assert measures["lines of the core"].number == core
    assert measures["files under 30 lines"].number == 9
    assert len(measures["docstrings that only point"].found) == 1


def test_words(measures: dict[str, Measure]) -> None:
    # "One goes on." and "X ends here:"
    assert measures["hard words in 1,000 of docs"] == Measure(166.7, ["page.md (goes on 1)"])
    assert measures["hard words in 1,000 of docstrings"].found == ["agentrl/core/functions.py (is told 1, none 1)"]


def test_sentences() -> None:
    long = "A " + "word " * 29 + "ends."
    found = count([f"{long} And [one](of.md) `that` is\n- {long}\n\n- None, say, is no word. That of it\nis."])
    assert (found.sentences, found.long, found.hard) == (5, 2, {", say": 1, "that of": 1})
    assert (found.words, found.long_in_100) == (31 + 5 + 31 + 6 + 4, 40.0)


def test_the_command_prints_numbers_or_what_was_counted(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--root", str(root)])
    assert "| files in circles | 5 |" in capsys.readouterr().out.splitlines()
    main(["classes over 20", "--root", str(root)])
    assert capsys.readouterr().out == "agentrl/core/classes.py _Large (21)\n"


def test_a_commit_is_compared_and_what_came_and_went_is_named(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(root, tmp_path, dirs_exist_ok=True)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=t", "-c", "user.email=t@example.org"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "before"]):
        subprocess.run([*git, *command], check=True)
    (tmp_path / "agentrl/core/d.py").write_text("def _new(): ...\n")
    main(["--root", str(tmp_path), "--against", "HEAD"])
    lines = capsys.readouterr().out.splitlines()
    assert "| files in circles | 5 | 3 |" in lines and "| public classes | 9 | 9 |" in lines
    assert "- agentrl/core/d.py <-> agentrl/core/e.py" in lines
    assert any(line.startswith("+ agentrl/core/d.py") and "_new" in line for line in lines)
    with pytest.raises(SystemExit, match=r"--against nowhere: .*nowhere"):
        main(["--root", str(tmp_path), "--against", "nowhere"])
