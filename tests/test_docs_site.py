"""The documentation as a site, and the names in the page that people open when something is wrong."""

from __future__ import annotations

import inspect
import pydoc
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from agentrl.config import Config, config_to_dict
from agentrl.system.json_value import JSON

PROJECT = Path(__file__).parents[1]
SITE = tomllib.loads((PROJECT / "zensical.toml").read_text(encoding="utf-8"))["project"]
REFERENCE = [path for path in sorted((PROJECT / "docs").rglob("*.md")) if "\n::: " in path.read_text(encoding="utf-8")]
ELSEWHERE = re.compile(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=[\"']?(https?:)?//")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, as `make docs` builds it: a link that leads nowhere is an error."""
    there = tmp_path_factory.mktemp("site")
    for name in ("docs", "agentrl"):
        shutil.copytree(PROJECT / name, there / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(PROJECT / "zensical.toml", there)
    zensical = Path(sys.executable).with_name("zensical")
    built = subprocess.run([zensical, "build", "--strict", "--clean"], cwd=there, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    return there / "build" / "site"


def pages(entry: JSON) -> list[str]:
    match entry:
        case str(path):
            return [path]
        case dict(entries):
            return [path for value in entries.values() for path in pages(value)]
        case list(entries):
            return [path for value in entries for path in pages(value)]
    raise AssertionError(f"unexpected in nav: {entry!r}")


def test_every_page_is_in_the_navigation_once() -> None:
    there = [str(path.relative_to(PROJECT / "docs")) for path in (PROJECT / "docs").rglob("*.md")]
    assert sorted(pages(SITE["nav"])) == sorted(there)


def test_each_decision_has_a_number_of_its_own() -> None:
    """Two that were written at the same time took the same."""
    files = sorted((PROJECT / "docs" / "decisions").glob("[0-9]*.md"))
    titles = [file.read_text(encoding="utf-8").partition(".")[0].removeprefix("# ") for file in files]
    assert titles == [str(int(file.name[:3])) for file in files] and len({*titles}) == len(titles)


def test_the_site_is_whole_and_loads_nothing_from_elsewhere(site: Path) -> None:
    for page in pages(SITE["nav"]):
        html = (site / page.replace("README", "index")).with_suffix(".html").read_text(encoding="utf-8")
        assert "<h1" in html
        assert not ELSEWHERE.search(html), page


def test_the_reference_shows_docstrings(site: Path) -> None:
    html = (site / "reference" / "agent_loop.html").read_text(encoding="utf-8")
    assert 'id="agentrl.agent_loop.Episode' in html
    assert ":::" not in html


@pytest.mark.parametrize("page", REFERENCE, ids=lambda page: page.stem)
def test_a_reader_of_a_reference_page_outside_the_site_finds_its_docstrings(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    names = re.findall(r"^::: (\S+)$", text, re.MULTILINE)
    said = text.partition(":::")[0]
    command, source = re.search(r"`python -m pydoc (\S+)`", said), re.search(r"`(agentrl/\S+)`", said)
    assert command and command[1] in names and source and (PROJECT / source[1]).exists()
    assert "`make docs`" in said
    assert [name for name in names if not inspect.getdoc(pydoc.locate(name))] == [], "nothing for pydoc to print"


def keys(tree: dict[str, JSON], above: str = "") -> list[str]:
    found = []
    for name, value in tree.items():
        found.append(above + name)
        if isinstance(value, dict):
            found += keys(value, f"{above}{name}.")
    return found


def test_keys_and_figures_of_the_troubleshooting_page_are_there() -> None:
    page = (PROJECT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    known = keys(config_to_dict(Config()))
    source = "\n".join(path.read_text(encoding="utf-8") for path in (PROJECT / "agentrl").rglob("*.py"))
    named = set(re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)(?:=[^`]*)?`", page)) - {"metrics.jsonl"}
    keys_named = {name for name in named if not name.endswith((".md", ".jsonl", ".yaml", ".py"))}
    assert len(keys_named) > 20
    assert [name for name in keys_named if not any(key == name or key.endswith("." + name) for key in known)] == []
    figures = set(
        re.findall(r"`((?:rollout|async|actor|group|tool|val|time|response|left_out|success)/[a-z_]+)`", page)
    )
    assert len(figures) > 10
    assert [name for name in figures if f"{name.partition('/')[2]}" not in source] == []


def test_the_page_of_the_installation_lists_every_extra_once() -> None:
    page = (PROJECT / "docs" / "installation.md").read_text(encoding="utf-8").partition("## Extras")[2]
    firsts = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert sorted(re.findall(r"`([\w-]+)`", " ".join(firsts))) == sorted(project["optional-dependencies"])
