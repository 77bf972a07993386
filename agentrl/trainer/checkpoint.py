"""Checkpoints: directories `step_000012/` that are there whole or not at all.

A save writes into a hidden directory beside its place, flushes every file to the disk, and is published by one rename;
only then are older checkpoints removed, each by a rename out of the way first. So whenever the process is killed, every
`step_*` is complete, and the newest is that of the last save that returned, or of the one that was being published.
Checkpoints of later steps, of a continuation that was given up, are moved out of the way just before that rename.
`state.json`, written last, lists every file with its size and checksum.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
import zlib
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from agentrl.errors import CheckpointError
from agentrl.publish import flush_to_disk, is_disk_full

FORMAT = 1
STATE_FILE = "state.json"
PACKAGES = ("agentrl", "torch", "transformers")
BLOCK = 1 << 20
SAMPLED_BLOCKS = 64
"""A larger file's checksum is taken over so many blocks of 1 MiB, evenly spread, its first and last among them."""

_NAME = re.compile(r"step_(\d{6,})")
# A save that is not published; a checkpoint that a new one of its step is about to replace; one being removed.
_PARTIAL, _REPLACED, _REMOVED = ".partial", ".replaced", ".removed"

logger = logging.getLogger(__name__)


class DamagedCheckpointError(CheckpointError):
    """A checkpoint lacks a file or a file of it is not what was written."""


class CheckpointManager:
    """The checkpoints of one run, in `dir`. Only one process at a time may own a directory."""

    def __init__(
        self,
        dir: Path,
        *,
        keep: int | None,
        fingerprint: Mapping[str, Any] | None = None,
        warn: Callable[[str], None] = logger.warning,
    ) -> None:
        """`keep`: how many are kept (None: all). `fingerprint`: config keys with their values (JSON) that a checkpoint
        must share to be loaded, such as the model's shape. What a killed save left in `dir` is removed.
        """
        self.dir = dir
        self.keep = keep
        self.fingerprint: dict[str, Any] = json.loads(json.dumps(dict(fingerprint or {})))
        self._warn = warn
        self._clean_up()

    def save(self, step: int, writers: Mapping[str, Callable[[Path], None]], state: Mapping[str, Any]) -> Path:
        """Write `step_<step>/`: each writer fills the subdirectory of its name, `state` (JSON) is what `load` returns.

        Checkpoints of later steps belong to a continuation that was given up, and are removed with the old ones.
        Raises CheckpointError on a full disk, with the earlier checkpoints intact.
        """
        final = self.dir / f"step_{step:06d}"
        partial = self.dir / f".{final.name}{_PARTIAL}"
        self.dir.mkdir(parents=True, exist_ok=True)
        free = self._check_room(final)
        try:
            partial.mkdir()
            for name, write in writers.items():
                (partial / name).mkdir()
                write(partial / name)
            _seal(partial, step, self.fingerprint, state)
        except BaseException as error:
            full = is_disk_full(error) or shutil.disk_usage(self.dir).free < BLOCK
            written = sum(path.stat().st_size for path in partial.rglob("*") if path.is_file())
            shutil.rmtree(partial, ignore_errors=True)
            if full and isinstance(error, Exception):
                raise self._no_room(final, f"more than {written:,}", free) from error
            raise
        self._publish(partial, final, step)
        return final

    def latest(self) -> Path | None:
        """The newest checkpoint that is undamaged; damaged ones are warned of. None when there are none at all.

        Raises CheckpointError when there are checkpoints but none that can be used.
        """
        steps = self._steps()
        for step in sorted(steps, reverse=True):
            try:
                _verified(steps[step])
            except DamagedCheckpointError as error:
                self._warn(f"{error}; looking for an older one")
            else:
                return steps[step]
        if steps:
            raise CheckpointError(
                f"{self.dir} holds {len(steps)} checkpoints, and every one is damaged (see above). Restore one, or "
                "start over with trainer.resume_mode=disable"
            )
        return None

    def load(self, path: Path) -> dict[str, Any]:
        """Check the checkpoint whole and return its `state`; what the writers wrote is in its subdirectories.

        Raises CheckpointError when it is missing, damaged, of a newer format, or of another fingerprint.
        """
        if not path.is_dir():
            there = ", ".join(found.name for _, found in sorted(self._steps().items())) or "none"
            raise CheckpointError(f"{path}: there is no such checkpoint. In {self.dir} there are: {there}")
        record = _verified(path)
        theirs = record["fingerprint"]
        differing = [
            f"{key}: {_shown(theirs, key)} in the checkpoint, {_shown(self.fingerprint, key)} in this run"
            for key in sorted({*theirs, *self.fingerprint})
            if _shown(theirs, key) != _shown(self.fingerprint, key)
        ]
        if differing:
            raise CheckpointError(
                f"{path} is of another model or config: {'; '.join(differing)}. Set the keys as they were, or start "
                "another run (trainer.experiment_name)"
            )
        for package, found in _versions().items():
            wrote = record["versions"].get(package, found)
            if wrote != found:
                self._warn(f"{path} was written with {package} {wrote}, this is {found}: numbers may differ")
        state: dict[str, Any] = record["state"]
        return state

    def _steps(self) -> dict[int, Path]:
        found = ((_NAME.fullmatch(path.name), path) for path in self.dir.glob("step_*") if path.is_dir())
        return {int(match[1]): path for match, path in found if match}

    def _clean_up(self) -> None:
        """Undo or finish what a killed process was doing."""
        for path in self.dir.glob(".step_*"):
            original = self.dir / path.stem.removeprefix(".")
            if path.suffix == _REPLACED and not original.exists():
                path.rename(original)
            elif path.suffix in (_PARTIAL, _REPLACED, _REMOVED):
                shutil.rmtree(path)

    def _publish(self, partial: Path, final: Path, step: int) -> None:
        """Rename into place. What must never be resumed from again goes first, what is only old goes last."""
        steps = self._steps()
        abandoned = sorted(found for found in steps if found > step)
        if abandoned:
            self._warn(f"removing checkpoints of steps {abandoned}: the run went on from an earlier one")
        removed = [self._set_aside(steps[found], _REMOVED) for found in abandoned]
        if final.exists():
            removed.append(self._set_aside(final, _REPLACED))
        partial.rename(final)
        flush_to_disk(self.dir)
        if self.keep is not None:
            kept = sorted(self._steps().items())
            removed += [self._set_aside(path, _REMOVED) for _, path in kept[: -self.keep]]
        for path in removed:
            shutil.rmtree(path)

    def _set_aside(self, path: Path, suffix: str) -> Path:
        return path.rename(self.dir / f".{path.name}{suffix}")

    def _check_room(self, final: Path) -> int:
        """Free bytes. Raises CheckpointError when they are fewer than the newest checkpoint's size."""
        free = shutil.disk_usage(self.dir).free
        steps = self._steps()
        if steps:
            newest = steps[max(steps)]
            needed = sum(path.stat().st_size for path in newest.rglob("*") if path.is_file())
            if free < needed:
                raise self._no_room(final, f"about {needed:,}", free)
        return free

    def _no_room(self, final: Path, needed: str, free: int) -> CheckpointError:
        return CheckpointError(
            f"the disk is full: {final} needs {needed} bytes and {free:,} were free. Earlier checkpoints are intact. "
            "Make room (trainer.max_actor_ckpt_to_keep limits how many are kept) and start again: the run goes on from "
            "the last one"
        )


def _seal(dir: Path, step: int, fingerprint: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Flush everything in `dir` to the disk and write its state.json."""
    paths = sorted(path for path in dir.rglob("*") if path.is_file())
    record = {
        "format": FORMAT,
        "step": step,
        "fingerprint": fingerprint,
        "versions": _versions(),
        "files": {
            str(path.relative_to(dir)): {"bytes": path.stat().st_size, "crc32": _checksum(path)} for path in paths
        },
        "state": state,
    }
    (dir / STATE_FILE).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    for path in [*paths, dir / STATE_FILE, *(path for path in dir.rglob("*") if path.is_dir()), dir]:
        flush_to_disk(path)


def _verified(path: Path) -> dict[str, Any]:
    """The record in state.json, after every file has been checked against it."""
    try:
        record: dict[str, Any] = json.loads((path / STATE_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DamagedCheckpointError(
            f"{path} has no {STATE_FILE}: it is half-written, or not a checkpoint (those are named step_000012)"
        ) from None
    except ValueError as error:
        raise DamagedCheckpointError(f"{path / STATE_FILE} is damaged: {error}") from error
    if record.get("format", 0) > FORMAT:
        raise CheckpointError(
            f"{path} has format {record['format']}, this agentrl reads up to {FORMAT}: use the agentrl that wrote it "
            f"({record.get('versions', {}).get('agentrl', 'newer')})"
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


def _versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _shown(fingerprint: Mapping[str, Any], key: str) -> str:
    return json.dumps(fingerprint[key], sort_keys=True) if key in fingerprint else "not set"
