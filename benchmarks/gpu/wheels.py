"""A folder of the wheels that a GPU machine without a network lacks for `python -m benchmarks.gpu`.

    python -m benchmarks.gpu.wheels --out wheels [--have pip-freeze.txt] [--python 3.12]

Wanted are the project's own dependencies, what its tests are run with, and what those need in turn, at the versions of
this environment; left out is what the target has. `--have` is its `pip list --format=freeze`; without it a machine
with PyTorch, transformers, JAX and their company is assumed (have.txt beside this file). Run it in the project's
environment. On the target, where pip works without an index:

    python3 -m pip install --no-index --no-deps --no-compile --target /tmp/site wheels/*.whl
    PYTHONPATH=/tmp/site python3 -m benchmarks.gpu --budget 570
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.bounded_pip import pip

PROJECT = Path(__file__).resolve().parents[2]
HAVE = Path(__file__).with_name("have.txt")
TESTS = ("pytest", "pytest-asyncio", "pytest-timeout", "hypothesis")
"""Part of the project's extra `dev`: what the tests that need a GPU import, and their plugins."""
BUILT = ("antlr4-python3-runtime",)
"""Packages without a wheel of the version that is needed (Hydra's), in plain Python."""
MOST = 60.0
"""MB of the folder."""
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")


@dataclass(frozen=True, slots=True)
class Lack:
    """Packages that a target needs and has not."""

    missing: dict[str, str | None]
    """Packages to bring, and the versions that this environment has of them."""
    too_old: list[str]
    """Packages that the target has in a version that somebody cannot use: `name version, wanted by ...`."""


def read_have(text: str) -> dict[str, str | None]:
    """Names to versions (None: not told) from `pip list --format=freeze`, or plain names, with comments."""
    found: dict[str, str | None] = {}
    for line in text.splitlines():
        word = line.partition("#")[0].partition("@")[0].strip()
        name, _, number = word.partition("==")
        if name:
            found[canonicalize_name(name.strip())] = number.strip() or None
    return found


def wanted() -> list[str]:
    """Requirements of the project, and of the tests of its extra `dev`."""
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    dev = [Requirement(text) for text in project["optional-dependencies"]["dev"]]
    return [*project["dependencies"], *(str(one) for one in dev if one.name in TESTS)]


def lacking(roots: Sequence[str], have: Mapping[str, str | None], python: str) -> Lack:
    """Follow `roots` through the metadata of this environment's packages, as they apply on the target.

    What the target has is followed, too: lists of packages are not always whole.
    """
    target = target_environment(python)
    missing: dict[str, str | None] = {}
    too_old: list[str] = []
    waiting = [(Requirement(text), "agentrl", set[str]()) for text in roots]
    seen: set[tuple[str, str]] = set()
    while waiting:
        need, by, extras = waiting.pop()
        if need.marker is not None and not any(need.marker.evaluate({**target, "extra": e}) for e in (extras or {""})):
            continue
        name = canonicalize_name(need.name)
        if name in have:
            number = have[name]
            if number is not None and not need.specifier.contains(number, prereleases=True):
                too_old.append(f"{name} {number}, and {by} needs {need.specifier}")
        else:
            missing[name] = installed(name)
        for extra in ("", *need.extras):
            if (name, extra) not in seen:
                seen.add((name, extra))
                waiting += [(Requirement(text), name, {extra}) for text in needs_of(name)]
    return Lack(dict(sorted(missing.items())), sorted(set(too_old)))


def target_environment(python: str) -> dict[str, str]:
    """The markers of CPython `python` on Linux and x86-64."""
    return {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "implementation_version": f"{python}.0",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "os_name": "posix",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": "x86_64",
        "platform_release": "",
        "platform_version": "",
    }


def installed(name: str) -> str | None:
    try:
        return version(name).partition("+")[0]
    except PackageNotFoundError:
        return None


def needs_of(name: str) -> list[str]:
    try:
        return requires(name) or []
    except PackageNotFoundError:
        return []


def exact(name: str, number: str | None) -> str:
    return name if number is None else f"{name}=={number}"


def bring(package: str, number: str | None, out: Path, python: str) -> None:
    """One wheel for the target; built here where the package has none and is plain Python."""
    what, folder = exact(package, number), ["-d", str(out)]
    if package in BUILT:
        pip("wheel", "-q", "--no-deps", "-w", str(out), what)
        return
    kind = ["--only-binary=:all:", "--python-version", python, "--implementation", "cp"]
    platforms = [word for one in PLATFORMS for word in ("--platform", one)]
    pip("download", "-q", "--no-deps", *kind, *platforms, *folder, what)


def total(out: Path) -> float:
    """MB of the wheels in a folder."""
    return sum(file.stat().st_size for file in out.glob("*.whl")) / 1e6


def check_size(out: Path, most: float = MOST) -> str:
    """Return the number and size of the wheels in words. Raises SystemExit when they are too large to carry."""
    largest = sorted(out.glob("*.whl"), key=lambda file: -file.stat().st_size)
    said = f"{len(largest)} wheels, {total(out):.1f} of at most {most:.0f} MB"
    if total(out) > most:
        names = ", ".join(f"{file.name} {file.stat().st_size / 1e6:.1f}" for file in largest[:5])
        raise SystemExit(f"error: {said}; the largest: {names}. Tell what the target has with --have")
    return said


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.wheels",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the wheels; must be empty or not there")
    parser.add_argument("--have", type=Path, default=HAVE, help="`pip list --format=freeze` of the target")
    parser.add_argument("--python", default="3.12", help="the target's, as 3.12")
    parser.add_argument("--dry-run", action="store_true", help="say what is lacking, bring nothing")
    given = parser.parse_args()
    lack = lacking(wanted(), read_have(given.have.read_text(encoding="utf-8")), given.python)
    for line in lack.too_old:
        print(f"warning: the target has {line}")
    print(
        "lacking:", " ".join(name if number is None else f"{name}=={number}" for name, number in lack.missing.items())
    )
    if given.dry_run:
        return 0
    given.out.mkdir(parents=True, exist_ok=True)
    if any(given.out.iterdir()):
        parser.error(f"{given.out} is not empty")
    for name, number in lack.missing.items():
        bring(name, number, given.out, given.python)
    print(f"{check_size(given.out)}. On the target:")
    print(f"python3 -m pip install --no-index --no-deps --no-compile --target /tmp/site {given.out}/*.whl")
    return 0


if __name__ == "__main__":
    sys.exit(main())
