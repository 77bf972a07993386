"""A checkpoint's folder: its name, and its record `state.json`, written last, with every file's size and checksum."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from agentrl.errors import CheckpointError
from agentrl.system.publish import flush_to_disk

FORMAT = 2
STATE_FILE = "state.json"
_NAME = re.compile(r"step_(\d{6,})")
PACKAGES = ("agentrl", "torch", "transformers")
BLOCK = 1 << 20
SAMPLED_BLOCKS = 64
"""A larger file's checksum is taken over so many blocks of 1 MiB, evenly spread, its first and last among them."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint lacks a file or a file of it is not what was written."""


def name_of(step: int) -> str:
    """The folder of the checkpoint of a step: step_000012."""
    return f"step_{step:06d}"


def step_of(name: str) -> int | None:
    """The step of a checkpoint's folder; None where it is named otherwise."""
    match = _NAME.fullmatch(name)
    return None if match is None else int(match[1])


def seal(dir: Path, step: int, fingerprint: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Flush everything in `dir` to the disk and write its state.json."""
    paths = sorted(path for path in dir.rglob("*") if path.is_file())
    record = {
        "format": FORMAT,
        "step": step,
        "fingerprint": fingerprint,
        "versions": versions(),
        "files": {
            str(path.relative_to(dir)): {"bytes": path.stat().st_size, "crc32": _checksum(path)} for path in paths
        },
        "state": state,
    }
    (dir / STATE_FILE).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    for path in [*paths, dir / STATE_FILE, *(path for path in dir.rglob("*") if path.is_dir()), dir]:
        flush_to_disk(path)


def verified(path: Path) -> dict[str, Any]:
    """The record in state.json, after every file has been checked against it."""
    try:
        record: dict[str, Any] = json.loads((path / STATE_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DamagedCheckpointError(
            f"{path} has no {STATE_FILE}: it is half-written, or not a checkpoint (those are named step_000012)"
        ) from None
    except ValueError as error:
        raise DamagedCheckpointError(f"{path / STATE_FILE} is damaged: {error}") from error
    if record.get("format", FORMAT) != FORMAT:
        raise CheckpointError(
            f"{path} has format {record['format']}, this agentrl reads {FORMAT}: use the agentrl that wrote it "
            f"({record.get('versions', {}).get('agentrl', 'another')})"
        )
    missing = {"format", "fingerprint", "versions", "files", "state"} - record.keys()
    if missing:
        raise DamagedCheckpointError(f"{path / STATE_FILE} is damaged: it lacks {', '.join(sorted(missing))}")
    for name, expected in record["files"].items():
        file = path / name
        if not file.is_file():
            raise DamagedCheckpointError(f"{path} is half-written: {name} is missing")
        if file.stat().st_size != expected["bytes"]:
            raise DamagedCheckpointError(
                f"{path} is half-written: {name} has {file.stat().st_size:,} bytes, want {expected['bytes']:,}"
            )
        if _checksum(file) != expected["crc32"]:
            raise DamagedCheckpointError(f"{path} is damaged: {name} does not hold what was written")
    return record


def _checksum(path: Path) -> str:
    """CRC-32 of a file; of SAMPLED_BLOCKS blocks of it when it is larger than those."""
    size = path.stat().st_size
    last = max(0, size - BLOCK)
    count = min(SAMPLED_BLOCKS, -(-size // BLOCK))
    crc = 0
    with path.open("rb") as file:
        for index in range(count):
            file.seek(index * BLOCK if size <= SAMPLED_BLOCKS * BLOCK else last * index // (SAMPLED_BLOCKS - 1))
            crc = zlib.crc32(file.read(BLOCK), crc)
    return f"{crc:08x}"


def versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
