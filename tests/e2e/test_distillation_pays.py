"""The demonstration of docs/algorithms.md: a fifth of the trajectories that GRPO needs, multi-turn, with tools."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.e2e.conftest import PROJECT, command
from tests.e2e.test_train import lines

A_STEP = 32 * 8
"""Trajectories of GRPO's."""


@pytest.mark.slice(0, "long run")
@pytest.mark.timeout(3600)
def test_a_fifth_of_the_trajectories_gives_the_teachers_success(tmp_path: Path) -> None:
    """The student begins as the teacher began, and sees as many questions a validation."""
    page = (PROJECT / "docs" / "algorithms.md").read_text(encoding="utf-8").partition("### What it saves")[2]
    written = re.search(r"^    python -m agentrl\.train (.*?[^\\])$", page, re.MULTILINE | re.DOTALL)
    assert written
    for words in ([], shlex.split(written[1].replace("\\\n", " "))):
        done = command(words, cwd=tmp_path, timeout=1700)
        assert done.returncode == 0, done.stderr
    teacher, student = lines(tmp_path / "runs" / "quickstart"), lines(tmp_path / "runs" / "student")
    wanted = 0.95 * teacher[-1]["val/success_sampled"]
    assert student[0]["val/success_sampled"] == teacher[0]["val/success_sampled"] < 0.5 * wanted
    by_grpo = next(line["step"] for line in teacher[1:] if line.get("val/success_sampled", 0.0) >= wanted) * A_STEP
    trajectories = (len(student) - 1) * 16 * 2
    assert trajectories <= by_grpo / 5
    assert student[-1]["val/success_sampled"] >= wanted
    assert student[-1]["val/turns_mean"] > 2, "with tools between its turns"
