"""What must not need torch does not import it: config, data, tools, interactions and data preparation."""

from __future__ import annotations

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


@pytest.mark.parametrize("folder", ["tools", "interactions"])
def test_namespace_folders_have_no_init(folder: str) -> None:
    assert not (PROJECT / folder / "__init__.py").exists(), "it would hide a user's folder of the same name"
