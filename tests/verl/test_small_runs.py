"""Small runs of verl's commands, against the formulas of the release that each is made for."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from benchmarks.verl import release_steps
from benchmarks.verl.small_runs import FAMILIES, FAULTS, compared, different

pytestmark = pytest.mark.timeout(300)


@pytest.mark.slice(1, "long run")
@pytest.mark.parametrize("name", FAMILIES)
def test_a_run_is_that_of_the_release_that_its_command_is_made_for(name: str, tmp_path: Path) -> None:
    recorded, found = compared(name, tmp_path)
    assert different(found) == FAMILIES[name].differs, found
    observed = [not one for step in recorded.found for row in step.sampled for one in row]
    assert any(observed) == bool(FAMILIES[name].between), "the policy read what it did not write"


@pytest.mark.slice(0, "long run")
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name: str, tmp_path: Path) -> None:
    fault = FAULTS[name]
    _, found = compared(fault.family, tmp_path, fault)
    assert fault.shows_in in different(found), found


def test_the_formulas_are_no_code_of_ours() -> None:
    tree = ast.parse(Path(release_steps.__file__).read_text(encoding="utf-8"))
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {one.name for node in nodes for one in node.names} | {getattr(node, "module", None) or "" for node in nodes}
    assert not [name for name in names if name.startswith("agentrl")]
