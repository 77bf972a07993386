"""The version of this agentrl, and the one rule for files that another version wrote.

A file of a run that this agentrl cannot read has an older format, a newer one, or was copied in part. Each has one
message: the file, the version that wrote it, and the remedy. A format's number grows only when an earlier agentrl would
misread the file: a new column or key is no reason for it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import NoReturn

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentrl.errors import DataError, UserError
from agentrl.system.json_value import JSON, as_object
from agentrl.system.plugin import describe
from agentrl.system.publish import published
from agentrl.version import __version__

RECORD = "versions.json"
"""File of a run's folder that names the versions that wrote it, and its format."""
PACKAGES = ("torch", "transformers")
UNNAMED = f"an agentrl that left no {RECORD}"
_ROOT = Path(__file__).resolve().parents[2]
_PATIENCE = 10
"""Seconds after which git's answer is not waited for."""
_MOST = 1 << 20
"""Bytes of a record."""
_LONGEST = 60
"""Characters of a version in a message: a record may come from anybody."""


@dataclass(frozen=True, slots=True)
class Format:
    """Numbers of a kind of file, from the `oldest` that this agentrl reads to the `newest`, which it writes."""

    oldest: int
    newest: int

    def check(self, found: int, where: str, writer: str | None, error: type[UserError]) -> None:
        """Raise `error` for a number that this agentrl does not read. writer: as `named_writer` returns it."""
        if self.oldest <= found <= self.newest:
            return
        by, reads = writer or "an agentrl that it does not name", str(self.newest)
        reads = reads if self.oldest == self.newest else f"{self.oldest} to {self.newest}"
        if found > self.newest:
            remedy = f"Use {writer or 'the agentrl that wrote it'}, or a later one"
        else:
            remedy = f"Use {writer or 'the agentrl that wrote it'}, or begin another run from the policy/ of this one"
        raise error(f"{where} has format {found}, by {by}; agentrl {__version__} reads {reads}. {remedy}")


FOLDER = Format(1, 1)
"""Format of a run's folder: everything in it but checkpoints, which have numbers of their own."""


class Writer(BaseModel):
    """Versions that a run was continued with, and the number of steps that were there before."""

    model_config = ConfigDict(strict=True)

    after_step: int = Field(ge=0, lt=1 << 63)
    versions: dict[str, str]


class _Record(BaseModel):
    model_config = ConfigDict(strict=True)

    format: int
    written_by: list[Writer]


@cache
def source_commit() -> str | None:
    """Return the commit of this agentrl, with `-dirty` where files differ from it; None where the commit is unknown.

    A checkout asks git. A wheel that pip made of a repository has the commit in its metadata.
    """
    if (_ROOT / ".git").exists():
        words = ["git", "-C", str(_ROOT), "describe", "--always", "--abbrev=12", "--dirty", "--exclude=*"]
        environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
        try:
            done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=_PATIENCE)
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip() or None if done.returncode == 0 else None
    try:
        origin = json.loads(distribution("agentrl").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        return None
    commit = as_object(as_object(origin).get("vcs_info")).get("commit_id")
    return commit[:12] if isinstance(commit, str) else None


@cache
def package_versions() -> dict[str, str]:
    """Return the versions of agentrl, as it says itself, and of PACKAGES as far as they are installed."""
    found = {"agentrl": __version__}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def this_agentrl() -> str:
    """Name this agentrl, as `--version` prints it."""
    return named_writer(_all_versions()) or f"agentrl {__version__}"


class ShowVersion(argparse.Action):
    """Action of the flag `--version`: print `this_agentrl`, and end the process with status 0."""

    def __call__(self, *_: object, **__: object) -> NoReturn:
        sys.stdout.write(f"{this_agentrl()}\n")
        raise SystemExit(0)


def named_writer(versions: JSON) -> str | None:
    """Name the agentrl of recorded versions, such as `agentrl 0.1.0 (commit 0123456789ab)`; None where no version is
    recorded.

    Recorded text is shortened, and shown without control characters.
    """
    found = as_object(versions)
    own, commit = (_plain(found.get(name)) for name in ("agentrl", "commit"))
    if not own:
        return None
    return f"agentrl {own}" + (f" (commit {commit})" if commit else "")


def check_folder(folder: Path) -> None:
    """Raise DataError for a run's folder of a format that this agentrl does not read, or with a damaged record."""
    try:
        with (folder / RECORD).open("rb") as file:
            text = file.read(_MOST)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise DataError(f"{folder / RECORD} cannot be read: {error}") from error
    check_record(text, str(folder / RECORD))


def check_record(text: bytes, where: str) -> None:
    """Do the work of `check_folder` on the content of a record; `where` is its place for messages."""
    _read(text, where)


def writer_of(folder: Path) -> str:
    """Name the agentrl that wrote a run's folder last, for messages about its files."""
    try:
        with (folder / RECORD).open("rb") as file:
            return writer_in(file.read(_MOST))
    except OSError:
        return UNNAMED


def writers_in(text: bytes | None) -> list[Writer]:
    """List the writers of a record, the last of them last; empty where there is no record or it is damaged."""
    try:
        return [] if text is None else _read(text, RECORD).written_by
    except DataError:
        return []


def writer_in(text: bytes | None) -> str:
    """Name the last agentrl of a record; None: there is no record."""
    writers = writers_in(text)
    return (named_writer(writers[-1].versions) if writers else None) or UNNAMED


def sign(folder: Path, after_step: int) -> None:
    """Record that this agentrl writes the steps after this one. Raises DataError and TrainingError."""
    check_folder(folder)
    file, versions = folder / RECORD, _all_versions()
    earlier = _read(file.read_bytes(), str(file)).written_by if file.exists() else []
    kept = [one for one in earlier if one.after_step < after_step]  # later steps are done again
    if kept and kept[-1].versions == versions:
        return
    record = _Record(format=FOLDER.newest, written_by=[*kept, Writer(after_step=after_step, versions=versions)])
    with published(file) as temporary:
        temporary.write_text(record.model_dump_json(indent=1) + "\n", encoding="utf-8")


def _all_versions() -> dict[str, str]:
    commit = source_commit()
    found = package_versions() | {"python": platform.python_version()}
    return found if commit is None else found | {"commit": commit}


def _read(text: bytes, where: str) -> _Record:
    try:
        found: JSON = json.loads(text)
        if isinstance(found, Mapping) and type(number := found.get("format")) is int:
            writers = found.get("written_by")
            last = as_object(writers[-1]) if isinstance(writers, list) and writers else {}
            FOLDER.check(number, where, named_writer(last.get("versions")), DataError)
        return _Record.model_validate(found)
    except (ValueError, RecursionError) as error:
        fault = describe(error) if isinstance(error, ValidationError) else str(error)
        raise DataError(
            f"{where} is damaged, or was copied in part ({fault:.200}): it names the agentrl that wrote the run. Copy "
            f"the whole folder again; or remove the file, if agentrl {__version__} wrote the run"
        ) from error


def _plain(text: JSON) -> str:
    return "".join(one for one in text if one.isprintable())[:_LONGEST] if isinstance(text, str) else ""
