"""What all benchmarks share: each answers --help without running, and no package index keeps them waiting."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path

import pytest

from benchmarks.bounded_pip import pip
from tests.conftest import PROJECT
from tests.forked import forked

TRL = ("grpo_step_trl", "dpo_trl")  # need TRL, which is not installed here
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


def test_every_benchmark_answers_help(tmp_path: Path) -> None:
    folder = PROJECT / "benchmarks"
    programs = [file for file in folder.rglob("*.py") if '"__main__"' in file.read_text(encoding="utf-8")]
    names = [".".join(file.relative_to(PROJECT).with_suffix("").parts) for file in programs if file.stem not in TRL]
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
