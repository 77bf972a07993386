"""The stand-ins: there for SGLang, absent for everybody else, and harmless where they are used as decorators."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.engines.sglang.cpu.stand_ins import StandIn, StandInModule, stand_in
from tests.naming import assert_names, naming

MODULE = """
import triton_absent
import triton_absent.language as tl
from triton_absent.runtime.driver import Driver, driver

@triton_absent.jit
def kernel(x):
    return x + 1

@triton_absent.autotune(configs=[triton_absent.Config({}, num_warps=4)], key=["n"])
def tuned(x: tl.constexpr | None):
    return x + 2

VERSION = triton_absent.__version__
"""
PROGRAM = """
import importlib.util, sys
sys.path.insert(0, {folder!r})
from agentrl.engines.sglang.cpu.stand_ins import StandInFinder
sys.meta_path.append(StandInFinder(["triton_absent"]))
assert importlib.util.find_spec("triton_absent") is None, "found by others"
try:
    import triton_absent
except ModuleNotFoundError:
    pass
else:
    raise AssertionError("imported by others")
import {package}.kernels as kernels
print(kernels.kernel(1), kernels.tuned(1), kernels.VERSION, isinstance(1, kernels.Driver))
"""


def run(folder: Path, package: str) -> subprocess.CompletedProcess[str]:
    (folder / package).mkdir()
    (folder / package / "__init__.py").touch()
    (folder / package / "kernels.py").write_text(MODULE)
    program = PROGRAM.format(folder=str(folder), package=package)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)


def test_sglang_finds_them_and_decorated_functions_stay_what_they_are(tmp_path: Path) -> None:
    done = run(tmp_path, "sglang")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["2", "3", "3.0.0", "False"]


def test_nobody_else_does(tmp_path: Path) -> None:
    done = run(tmp_path, "transformers_like")
    assert done.returncode != 0
    assert_names(done.stderr, "'triton_absent'")


def test_a_module_has_every_name_but_pythons_own() -> None:
    module = StandInModule("anything")
    assert isinstance(module.some.thing[3](4), StandIn)
    assert isinstance(module.Thing, type)
    with pytest.raises(AttributeError):
        _ = module.__wrapped__


def test_there_is_no_active_driver() -> None:
    """As Triton has it without a GPU: what asks for its device falls back to the CPU."""
    with naming(RuntimeError, "active driver"):
        _ = stand_in("driver").active


def test_the_trainers_process_is_left_alone() -> None:
    """Importing what starts servers installs nothing, whatever the command line says, and imports no SGLang."""
    program = (
        "import sys; sys.argv += ['--device', 'cpu']\n"
        "import agentrl.engines.servers.process\n"
        "assert not {'sglang', 'sgl_kernel', 'agentrl.engines.sglang.cpu'} & set(sys.modules), 'imported'\n"
        "assert all(type(finder).__name__ != 'StandInFinder' for finder in sys.meta_path)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
