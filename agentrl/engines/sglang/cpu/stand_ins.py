"""Stand-ins for packages that SGLang imports and, on a CPU, does not use."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Collection, Sequence
from types import ModuleType
from typing import Any


class StandIn:
    """Anything: an attribute, a call or an index of it is another one. As a decorator it changes nothing."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __getattr__(self, name: str) -> Any:
        if name == "active":  # triton.runtime.driver.active: as Triton does without a GPU
            raise RuntimeError("there is no active driver")
        return stand_in(name)

    def __call__(self, *args: object, **kwargs: object) -> object:
        decorated = len(args) == 1 and not kwargs and callable(args[0]) and not isinstance(args[0], StandIn)
        return args[0] if decorated else self

    def __getitem__(self, _: object) -> StandIn:
        return self

    def __or__(self, _: object) -> StandIn:
        return self

    __ror__ = __or__


def stand_in(name: str) -> Any:
    """A class for a name that is written like one, so that `isinstance` and annotations work; else an object."""
    if name.startswith("__") and name.endswith("__"):
        raise AttributeError(name)
    return type(name, (StandIn,), {}) if name[:1].isupper() else StandIn()


class StandInModule(ModuleType):
    """A module that has every name."""

    def __getattr__(self, name: str) -> Any:
        return stand_in(name)


class StandInFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `packages` and everything under them, for importers in SGLang only.

    Torch and transformers ask whether these packages are there, and must keep finding that they are not.
    """

    def __init__(self, packages: Collection[str]) -> None:
        self.packages = frozenset(packages)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in self.packages or not asked_by_sglang():
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return StandInModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__version__ = "3.0.0"  # type: ignore[attr-defined]


def asked_by_sglang() -> bool:
    """True when the nearest frame outside the import machinery belongs to SGLang or to a package that it brings."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not name.startswith(("importlib", "_frozen_importlib")) and name != __name__:
            return name.partition(".")[0] in ("sglang", "xgrammar", "compressed_tensors")
        frame = frame.f_back  # type: ignore[assignment]
    return False
