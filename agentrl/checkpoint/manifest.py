"""A checkpoint's folder: its name, and its record `state.json`, written last, with every file's size and checksum.

A record is untrusted until it is checked: it may have come from an object store or another machine. Its names are
compared with the contents of the folder, and never opened, so that no name can lead out of the folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

import xxhash
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from agentrl.errors import CheckpointError
from agentrl.system.json_value import JSON, as_object
from agentrl.system.plugin import describe
from agentrl.system.publish import flush_to_disk
from agentrl.system.versions import Format, named_writer, package_versions

FORMAT = Format(3, 3)
STATE_FILE = "state.json"
CHECKPOINTS = "checkpoints"
"""Folder of a run's checkpoints, in its own."""
_NAME = re.compile(r"step_([0-9]{6,})")
_AT_ONCE = 8
"""Files whose checksums are computed at the same time."""
_CHECKSUM = "checksum"
_LONGEST = 500
"""Characters of a file's name in a checkpoint."""
_DEEPEST = 16
"""Folders that a file lies in, at most."""
_MOST_FILES = 50_000
"""Files of a checkpoint: each rank writes one for the policy and one for the critic."""


class FileRecord(BaseModel):
    """Expected size and digest of a file of a checkpoint."""

    model_config = ConfigDict(strict=True, extra="forbid")

    bytes: int = Field(ge=0)
    xxh3: str
    """XXH3 (128 bits, hexadecimal) of the whole file."""


class Best(BaseModel):
    """The best step so far by a metric."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    step: int = Field(ge=0)
    metric: str
    greater: bool
    """The greater value is the better one."""
    value: float
    worse: int = Field(0, ge=0)
    """Values since that are not better."""

    def beats(self, other: Best | None) -> bool:
        """Say whether this value is better; one by another metric counts for nothing."""
        if other is None or (other.metric, other.greater) != (self.metric, self.greater):
            return True
        return self.value > other.value if self.greater else self.value < other.value


class Record(BaseModel):
    """Content of a checkpoint's state.json."""

    model_config = ConfigDict(strict=True, extra="forbid")

    format: int
    step: int = Field(ge=0)
    fingerprint: dict[str, JsonValue]
    versions: dict[str, str]
    """Versions that wrote it, as `package_versions` returns them."""
    files: dict[str, FileRecord]
    """By path in the checkpoint."""
    state: dict[str, JsonValue]
    """Given by the training loop."""
    best: Best | None
    """The best step up to this one; null: without a metric to choose by."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint lacks a file, or a file differs from the written one."""


def name_of(step: int) -> str:
    """The folder of the checkpoint of a step: step_000012."""
    return f"step_{step:06d}"


def step_of(name: str) -> int | None:
    """The step of a checkpoint's folder; None where it is named otherwise."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match is not None and name_of(int(match[1])) == name else None


def steps_in(folder: Path) -> dict[int, Path]:
    """Find the published checkpoints in a folder, by step."""
    found = ((step_of(path.name), path) for path in folder.glob("step_*") if path.is_dir())
    return {step: path for step, path in found if step is not None}


def seal(
    dir: Path, step: int, fingerprint: Mapping[str, JSON], state: Mapping[str, JSON], best: Best | None = None
) -> None:
    """Flush everything in `dir` to the disk and write its state.json."""
    names = sorted(listing(dir))
    record: dict[str, JSON] = {
        "format": FORMAT.newest,
        "step": step,
        "fingerprint": fingerprint,
        "versions": package_versions(),
        "files": {
            name: {"bytes": (dir / name).stat().st_size, "xxh3": checksum}
            for name, checksum in zip(names, _checksums(dir, names), strict=True)
        },
        "state": state,
        "best": None if best is None else best.model_dump(),
    }
    write_record(dir, record)
    folders = (path for path in dir.rglob("*") if path.is_dir())
    for path in [*(dir / name for name in names), dir / STATE_FILE, *folders, dir]:
        flush_to_disk(path)


def write_record(dir: Path, record: Mapping[str, JSON]) -> None:
    """Write state.json with the checksum of its own content."""
    sealed = {**record, _CHECKSUM: _own_checksum(record)}
    (dir / STATE_FILE).write_text(json.dumps(sealed, indent=1) + "\n", encoding="utf-8")


def read_record(text: bytes, where: str) -> Record:
    """Parse and check the content of a state.json; `where` is its place for messages.

    Raises DamagedCheckpointError when it differs from the written content or names files that no checkpoint has, and
    CheckpointError for another format: it may be whole, and no older one is to take its place.
    """
    try:
        found: JSON = json.loads(text.decode())
        if not isinstance(found, dict):
            raise ValueError(f"expected a mapping, found {found!r:.200}")
        own = found.pop(_CHECKSUM, None)
        is_whole = own == _own_checksum(found)
        # Every format has this checksum, but for those before 3.
        if (is_whole or own is None) and type(number := found.get("format")) is int:
            FORMAT.check(number, where, named_writer(found.get("versions")), CheckpointError)
        if (count := len(as_object(found.get("files")))) > _MOST_FILES:
            raise ValueError(f"expected at most {_MOST_FILES:,} files, found {count:,}")
        record = Record.model_validate(found)
        if not is_whole:
            raise ValueError("it does not hold what was written")
        for name in record.files:
            if not _is_plain(name) or any(str(parent) in record.files for parent in PurePosixPath(name).parents):
                raise ValueError(f"it names the file {name!r:.200}")
    except (ValueError, RecursionError) as error:
        fault = describe(error) if isinstance(error, ValidationError) else str(error)
        shown = fault.encode("utf-8", "backslashreplace").decode()
        raise DamagedCheckpointError(f"{where} is damaged: {shown:.500}") from error
    return record


def verified(path: Path, step: int | None = None, name: str | None = None) -> Record:
    """Return the record in state.json, after every file has been checked against it.

    `step`: the one it must be of. `name`: its place in messages, by default `path`. Raises DamagedCheckpointError, and
    CheckpointError when it cannot be read or is of another format: it may be whole, and is not to be passed over for an
    older one.
    """
    name = name or str(path)
    there = listing(path)
    sizes = {file: entry.st_size for file, entry in there.items() if stat.S_ISREG(entry.st_mode)}
    if STATE_FILE not in sizes:
        raise DamagedCheckpointError(
            f"{name} has no {STATE_FILE}, or a link in its place: it is half-written, or not a checkpoint (those are "
            "named step_000012)"
        )
    with _readable(path):
        record = read_record((path / STATE_FILE).read_bytes(), f"{name}/{STATE_FILE}")
    if step is not None and record.step != step:
        raise DamagedCheckpointError(f"{name} is of step {record.step}, as its {STATE_FILE} says: it was renamed")
    by = f" ({named_writer(record.versions) or 'an agentrl that it does not name'} wrote it)"
    in_part = f"{name} is half-written, or was copied in part"
    for file, expected in record.files.items():
        if file not in sizes:
            raise DamagedCheckpointError(f"{in_part}: {file} is missing, or behind a link{by}")
        if sizes[file] != expected.bytes:
            raise DamagedCheckpointError(f"{in_part}: {file} has {sizes[file]:,} bytes, want {expected.bytes:,}{by}")
    # Readers take every shard of a folder. Notes and the like of a user's own are left alone.
    for file in sorted(there.keys() - record.files.keys()):
        if file.endswith(".safetensors"):
            raise DamagedCheckpointError(f"{name} is damaged: {file!r} was not written with it; move it away")
    with _readable(path):
        for file, checksum in zip(record.files, _checksums(path, record.files), strict=True):
            if checksum != record.files[file].xxh3:
                raise DamagedCheckpointError(f"{name} is damaged: {file} does not hold what was written{by}")
    return record


def listing(dir: Path) -> dict[str, os.stat_result]:
    """Return everything below `dir` but folders, by its path there, as lstat describes it. Links are not followed.

    Raises CheckpointError when a folder cannot be read.
    """
    found: dict[str, os.stat_result] = {}
    with _readable(dir):
        for folder, folders, files in os.walk(dir, onerror=_refuse):
            for name in [*folders, *files]:
                path = Path(folder, name)
                if not stat.S_ISDIR((entry := path.lstat()).st_mode):
                    found[path.relative_to(dir).as_posix()] = entry
    return found


def _refuse(error: OSError) -> None:
    raise error


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Raise CheckpointError where the disk does not answer."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error}. It may be whole, so no older one is taken instead"
        ) from error


def _is_plain(name: str) -> bool:
    """Check that `name` is a relative path that leads to a file below, and is not state.json's own."""
    if len(name) > _LONGEST or name.count("/") > _DEEPEST:
        return False
    path = PurePosixPath(name)
    odd = ".." in path.parts or "\\" in name or not name.isprintable()
    return not (odd or path.is_absolute() or str(path) != name or name in (".", STATE_FILE))


def _checksums(dir: Path, names: Iterable[str]) -> list[str]:
    with ThreadPoolExecutor(_AT_ONCE, "checksum") as threads:
        return list(threads.map(lambda name: _checksum(dir / name), names))


def _checksum(path: Path) -> str:
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def _own_checksum(record: Mapping[str, JSON]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(record, sort_keys=True).encode())
