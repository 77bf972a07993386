"""What benchmarks and labs share: each answers --help without running, and is named where somebody runs it.

No package index keeps them waiting.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import time
from pathlib import Path

import pytest

from benchmarks.bounded_pip import pip
from tests.conftest import PROJECT
from tests.forked import forked

FOLDERS = ("benchmarks", "labs")
TRL = ("grpo_step_trl",)  # needs TRL, which is not installed here
OPTIONAL = {"benchmarks/gpu/last.json"}
"""Files that a page names for readers to make."""
ASK = """
import contextlib, io, json, runpy, sys
answers = {}
for name in sys.argv[1].split(","):
    sys.argv, said = [name, "--help"], io.StringIO()
    with contextlib.redirect_stdout(said):
        try:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
            status = "it ran"
        except SystemExit as end:
            status = end.code
    answers[name] = [status, said.getvalue()]
print(json.dumps(answers))
"""


def tracked() -> dict[Path, str]:
    """Read the files that git has, or would take; binary ones are left out."""
    words = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    done = subprocess.run(words, cwd=PROJECT, capture_output=True, text=True, check=True)
    found = {}
    for name in filter(None, done.stdout.split("\0")):
        if (file := PROJECT / name).is_file():
            found[Path(name)] = file.read_text(encoding="utf-8", errors="replace")
    return found


def programs() -> list[Path]:
    """Files of both folders that are run by name, relative to the project."""
    files = [file for folder in FOLDERS for file in (PROJECT / folder).rglob("*.py")]
    return [file.relative_to(PROJECT) for file in files if '"__main__"' in file.read_text(encoding="utf-8")]


def name_of(program: Path) -> str:
    """Return the name of the module, with `__main__`."""
    return ".".join(program.with_suffix("").parts)


def test_what_a_text_names_is_there() -> None:
    """Files, folders and modules, in pages, programs and CI; records of tests name commits of their own."""
    named = re.compile(rf"(?<![\w./-])({'|'.join(FOLDERS)})([./])([\w./]+)")
    missing = [
        f"{path}: {folder}{between}{rest}"
        for path, text in tracked().items()
        if path.parts[:2] != ("tests", "recorded_runs") and path.suffix not in (".csv", ".json", ".txt")
        for folder, between, rest in named.findall(text)
        if f"{folder}{between}{rest}" not in OPTIONAL and not is_there(folder, between, rest.rstrip("./"))
    ]
    assert not missing, "\n".join(missing)


def is_there(folder: str, between: str, rest: str) -> bool:
    """Say whether a folder has this file, or this module, perhaps with the name of a thing in it behind."""
    if between == "/":
        return any((PROJECT / place / rest).exists() for place in (folder, f"tests/{folder}"))
    words = rest.split(".")
    return any((PROJECT / folder).joinpath(*words[:length]).with_suffix(".py").exists() for length in range(1, 4)) or (
        (PROJECT / folder).joinpath(*words).is_dir()
    )


def test_every_program_is_named_where_somebody_runs_it() -> None:
    """On a page, in CI, in a test or in another program. A script that nobody runs goes; a page keeps its figure."""
    texts, unnamed = tracked(), []
    for program in programs():
        if (PROJECT / program).with_name("__main__.py").exists():
            continue  # part of a program of several files, which asks for it
        name = name_of(program)
        folder, _, own = name.rpartition(".")
        said = [re.escape(name), re.escape(name.replace(".", "/")), rf'"{own}\.py"', rf"from {folder} import .*{own}"]
        asked = re.compile(rf"(?:{'|'.join(said)})(?!\w)")
        if not any(asked.search(text) for path, text in texts.items() if path != program):
            unnamed.append(str(program))
    assert not unnamed, unnamed


def test_benchmarks_import_no_lab_and_nothing_else_imports_either() -> None:
    imports = re.compile(r"^\s*(?:from|import) (benchmarks|labs)\b", re.MULTILINE)
    allowed = {"tests": {"benchmarks", "labs"}, "labs": {"benchmarks", "labs"}, "benchmarks": {"benchmarks"}}
    wrong = [
        f"{path} imports {folder}"
        for path, text in tracked().items()
        if path.suffix == ".py"
        for folder in sorted(set(imports.findall(text)) - allowed.get(path.parts[0], set()))
    ]
    assert not wrong, "\n".join(wrong)


def test_every_benchmark_answers_help(tmp_path: Path) -> None:
    names = [name for name in map(name_of, programs()) if name.rpartition(".")[2] not in TRL]
    assert len(names) > 25
    (tmp_path / "ask.py").write_text(ASK)
    done = forked([tmp_path / "ask.py", ",".join(sorted(names))])
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout.splitlines()[-1])
    assert sorted(answers) == sorted(names)
    assert {name: status for name, (status, _) in answers.items() if status not in (0, None)} == {}
    assert [name for name, (_, said) in answers.items() if len(said) < 80] == []


def test_an_index_that_never_answers_costs_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault injection: a server that accepts connections and is silent."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        index = f"http://127.0.0.1:{silent.getsockname()[1]}/simple"
        for name, value in (("PIP_INDEX_URL", index), ("PIP_EXTRA_INDEX_URL", ""), ("PIP_FIND_LINKS", "")):
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        began = time.monotonic()
        with pytest.raises(SystemExit, match=r"pip download .* failed.*PIP_INDEX_URL"):
            pip("download", "-q", "--no-deps", "no-such-package", retries=1, timeout=0.2)
        assert time.monotonic() - began < 20  # pip's own five retries of 15 s would take minutes
