"""What must not need torch does not import it: config, data, tools, interactions and data preparation."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parent.parent
LIBRARY = [
    "agentrl.config",
    "agentrl.data.dataset",
    "agentrl.data.loader",
    "agentrl.trajectory.sample",
    "agentrl.errors",
    "agentrl.interaction",
    "agentrl.tool",
    "agentrl.tool.toolset",
    "agentrl.train",
]


def modules_of(folder: str) -> list[str]:
    files = sorted((PROJECT / folder).glob("*.py"))
    return [f"{folder}.{file.stem}" for file in files if file.stem != "__init__"]


MODULES = [*LIBRARY, *modules_of("tools"), *modules_of("interactions"), *modules_of("data_prep")]


def test_the_folders_hold_modules() -> None:
    assert {"tools.calculator", "tools.search", "interactions.gsm8k", "data_prep.gsm8k"} <= set(MODULES)


def test_import_without_torch() -> None:
    """One process for all; the first module after which torch is there is named."""
    program = (
        "import importlib, sys\n"
        f"for name in {MODULES!r}:\n"
        "    importlib.import_module(name)\n"
        "    heavy = {'torch', 'transformers'} & set(sys.modules)\n"
        "    assert not heavy, f'{name} imports {heavy}'\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=PROJECT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("first", ["agentrl", "benchmarks", "labs"])
@pytest.mark.parametrize(
    ("torch_is_there", "given", "warns"),
    [
        (False, {}, False),
        (False, {"OMP_WAIT_POLICY": "ACTIVE"}, False),
        (True, {}, True),
        (True, {"OMP_WAIT_POLICY": "PASSIVE"}, False),
        (True, {"OMP_NUM_THREADS": "1"}, False),
    ],
)
def test_threads_do_not_spin_and_torch_before_us_is_told(
    first: str, torch_is_there: bool, given: dict[str, str], warns: bool
) -> None:
    """OpenMP reads the setting when torch loads it. Python imports a package before its modules."""
    program = (
        "import os, sys, types\n"
        f"if {torch_is_there}: sys.modules['torch'] = types.ModuleType('torch')\n"
        f"import {first}, agentrl.errors\n"
        "print(os.environ['OMP_WAIT_POLICY'], 'torch' in sys.modules)\n"
    )
    unset = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=PROJECT, env={**unset, **given}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert ("torch was imported before agentrl" in done.stderr) == warns
    assert done.stdout.split() == [given.get("OMP_WAIT_POLICY", "PASSIVE"), str(torch_is_there)]


@pytest.mark.parametrize("folder", ["tools", "interactions"])
def test_namespace_folders_have_no_init(folder: str) -> None:
    assert not (PROJECT / folder / "__init__.py").exists(), "it would hide a user's folder of the same name"
