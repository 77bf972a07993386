"""data_prep.repairs: every repository fails its tests with the fault, and passes them with the solution."""

from __future__ import annotations

import sys
import unittest
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import pyarrow.parquet as pq
import pytest

from data_prep import repairs


def passes(source: str, tests: str, name: str, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Run the tests on a module of this source."""
    module = ModuleType(name)
    exec(source, module.__dict__)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, name, module)
        found: dict[str, Any] = {}
        exec(tests, found)
        result = unittest.TestResult()
        unittest.defaultTestLoader.loadTestsFromTestCase(found["Test"]).run(result)
    return result.wasSuccessful()


def parts_of(row: dict[str, Any]) -> tuple[str, str, str, str]:
    """(name, faulty source, tests, solution) of a row."""
    module, tests = row["extra_info"]["files"]
    return module["path"].removesuffix(".py"), module["text"], tests["text"], row["reward_model"]["ground_truth"]


@pytest.mark.parametrize("template", repairs.TEMPLATES, ids=lambda one: one.name)
def test_each_fault_fails_and_its_solution_passes(template: repairs.Template, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in template.faults:
        for seed in range(5):
            row = repairs.row(template, kind, Random(seed))
            name, faulty, tests, right = parts_of(row)
            assert not passes(faulty, tests, name, monkeypatch), (template.name, kind, faulty)
            assert passes(right, tests, name, monkeypatch), (template.name, kind, right)


def test_the_files_have_no_repository_in_common(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert repairs.main(["--out", str(tmp_path), "--train-rows", "60", "--test-rows", "30"]) == 0
    kinds, solutions = {}, list[str]()
    for name in ("train", "test", "unseen"):
        rows = pq.read_table(tmp_path / f"{name}.parquet").to_pylist()
        kinds[name] = {row["extra_info"]["kind"] for row in rows}
        solutions += [row["reward_model"]["ground_truth"] for row in rows]
    assert kinds == {"train": set(repairs.KINDS), "test": set(repairs.KINDS), "unseen": {repairs.UNSEEN}}
    assert len(set(solutions)) == len(solutions) == 120
    assert capsys.readouterr().out.count("repositories") == 3


def test_too_many_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repairs, "row", lambda template, kind, random: {"reward_model": kind})
    assert repairs.main(["--out", str(tmp_path), "--train-rows", "5"]) == 2
    assert "only 4 different repositories" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
