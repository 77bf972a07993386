"""`agentrl.engines.sglang.launch` that writes down what SGLang asks of its kernels. Run as

    RECORD=FILE python recording_launch.py ARGUMENTS

Each line of FILE is `had NAME` or `missing NAME`: an attribute of the module `sgl_kernel` that was asked for, or an
operator of `torch.ops.sgl_kernel`; `called NAME` for each call of one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from agentrl.engines.sglang import cpu as sglang_cpu

RECORD = Path(os.environ["RECORD"])


def record(what: str, name: str) -> None:
    with RECORD.open("a") as file:  # short appends of several processes do not mix
        file.write(f"{what} {name}\n")


class Recorded:
    """A kernel, or one overload of it, that writes down its calls."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self._name = name
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        record("called", self._name)
        return self._function(*args, **kwargs)

    def __getattr__(self, overload: str) -> Any:
        return Recorded(self._name, getattr(self._function, overload))


class RecordingModule(ModuleType):
    """`sgl_kernel`. A name that the stand-ins lack raises only when it is called, so that all are found at once."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        from agentrl.engines.sglang.cpu import kernels

        have = hasattr(kernels, name)
        record("had" if have else "missing", f"sgl_kernel.{name}")
        return Recorded(f"sgl_kernel.{name}", getattr(kernels, name) if have else kernels._absent(name))


class RecordingOperators:
    """`torch.ops.sgl_kernel`."""

    def __init__(self, operators: Any) -> None:
        self._operators = operators

    def __getattr__(self, name: str) -> Any:
        operator = getattr(self._operators, name, None)
        record("had" if operator is not None else "missing", f"torch.ops.sgl_kernel.{name}")
        if operator is None:
            raise AttributeError(name)
        return Recorded(f"torch.ops.sgl_kernel.{name}", operator)


def install() -> None:
    import torch

    sglang_cpu.install()
    sys.modules["sgl_kernel"] = RecordingModule("sgl_kernel")
    operators: Any = torch.ops
    operators.sgl_kernel = RecordingOperators(operators.sgl_kernel)
    sglang_cpu.allow_seeds()


if __name__ == "__main__":
    install()
    from agentrl.engines.sglang.launch import main

    main()
