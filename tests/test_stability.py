"""What docs/stability.md promises is there: imports, commands, keys, files, and one version everywhere."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Callable
from email.parser import Parser
from pathlib import Path
from typing import cast
from zipfile import ZipFile

import pytest
import yaml

from agentrl.__main__ import COMMANDS
from agentrl.config import Config, PreferencesConfig, SFTConfig
from agentrl.config.keys import leaf_keys
from agentrl.config.sections.offline import EvaluateConfig, GenerateConfig
from agentrl.system import versions
from agentrl.system.parts import parts
from agentrl.system.targets import load_target
from agentrl.system.versions import this_agentrl
from agentrl.version import __version__
from tests.test_packaging import bare, command, run

__all__ = ["bare"]  # a fixture
PROJECT = Path(__file__).resolve().parent.parent
PAGE = (PROJECT / "docs" / "stability.md").read_text(encoding="utf-8")
COMMON = {name: f"agentrl.{name}:main" for name in COMMANDS if name != "plan"} | {"plan": "agentrl.plan.__main__:main"}
MAINS = COMMON | parts("commands")
"""By command, its function: those of the core, and those of annexes."""


def rows(title: str) -> list[list[str]]:
    """Cells of the table of a section of the page."""
    section = PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def promised_imports() -> dict[str, list[str]]:
    found = {}
    for module, names in rows("Imports"):
        module = module.strip("`")
        page = re.search(r"\]\((reference/\w+\.md)\)", names)
        if page is None:
            found[module] = re.findall(r"`(\w+)`", names)
        else:
            text = (PROJECT / "docs" / page[1]).read_text(encoding="utf-8")
            found[module] = re.findall(rf"^::: {re.escape(module)}\.(\w+)$", text, re.MULTILINE)
    return found


@pytest.mark.parametrize("module", promised_imports())
def test_each_promised_name_is_there(module: str) -> None:
    names = promised_imports()[module]
    assert names and [name for name in names if not hasattr(importlib.import_module(module), name)] == []


def promised_commands() -> list[list[str]]:
    return [words.split() for cell, _ in rows("Commands") for words in re.findall(r"`python -m ([^`]+)`", cell)]


def test_each_promised_command_answers() -> None:
    """They answer at once: the longest waits for the imports of torch."""
    assert {words[0].removeprefix("agentrl.") for words in promised_commands()} >= MAINS.keys()
    started = {
        " ".join(words): subprocess.Popen(
            [sys.executable, "-m", *words, "--help"], cwd=PROJECT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for words in promised_commands()
        if not words[0].startswith("agentrl.")  # the others: `test_every_command_says_its_version`
    }
    answers = {name: process.communicate()[0].decode() for name, process in started.items()}
    assert {name: answers[name] for name, process in started.items() if process.returncode != 0} == {}
    assert all("--help" in text or "usage" in text.lower() for text in answers.values()), answers


@pytest.mark.parametrize("name", MAINS)
def test_every_command_says_its_version(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    main = cast(Callable[[list[str]], int], load_target(MAINS[name], name))
    for flag in ("--version", "--help"):
        try:
            status = main([flag])
        except SystemExit as end:
            status = int(end.code or 0)
        assert status == 0, flag
        said = capsys.readouterr().out
        assert said == f"{this_agentrl()}\n" if flag == "--version" else "--version" in said or name == "verl"


def test_every_key_of_the_page_of_keys_is_a_key() -> None:
    """`benchmarks.config_page` writes that page; here the page is the promise."""
    text = (PROJECT / "docs" / "config.md").read_text(encoding="utf-8")
    promised = set(re.findall(r"^\| `([\w.]+)` \|", text, re.MULTILINE))
    schemas = (Config, SFTConfig, PreferencesConfig, GenerateConfig, EvaluateConfig)
    known = {key for schema in schemas for key in leaf_keys(schema)}
    assert len(promised) > 300 and sorted(promised - known) == []


def test_one_version_is_in_every_place(agentrl_wheel: Path) -> None:
    with ZipFile(agentrl_wheel) as file:
        (name,) = [name for name in file.namelist() if name.endswith(".dist-info/METADATA")]
        assert Parser().parsestr(file.read(name).decode())["Version"] == __version__
        assert not any("recorded_runs" in name for name in file.namelist())
    assert yaml.safe_load((PROJECT / "CITATION.cff").read_text())["version"] == __version__


def test_a_wheel_and_its_runs_say_the_version_and_no_commit(
    bare: Path, installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = command(bare, tmp_path, "--version")
    assert (said.returncode, said.stdout) == (0, f"agentrl {__version__}\n")
    program = "from pathlib import Path\nfrom agentrl.system.versions import sign\nsign(Path('.'), 0)\n"
    run(program, installed, tmp_path)
    assert versions.writer_of(tmp_path) == f"agentrl {__version__}"
    monkeypatch.setenv("PATH", os.devnull)
    versions.source_commit.cache_clear()
    try:
        assert versions.source_commit() is None, "a machine without git"
    finally:
        versions.source_commit.cache_clear()


def test_a_checkout_says_its_commit() -> None:
    words = ["git", "-C", str(PROJECT), "rev-parse", "--short=12", "HEAD"]
    head = subprocess.run(words, capture_output=True, text=True)
    if head.returncode != 0:
        pytest.skip("not a checkout, or no git")
    assert (versions.source_commit() or "").removesuffix("-dirty") == head.stdout.strip()


def test_words_of_a_record_do_nothing_to_a_terminal() -> None:
    hostile = {"agentrl": "1\x1b[2J\r0" + "9" * 1000, "commit": "a\nb"}
    named = versions.named_writer(hostile)
    assert named is not None and named.isprintable() and len(named) < 150
    assert versions.named_writer({"commit": "a"}) is None and versions.named_writer([1]) is None
