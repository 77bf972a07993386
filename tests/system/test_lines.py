"""Lines of JSON that a run appends: what a kill cuts off is left out once, and spoils no line after it."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import cast

import pytest

from agentrl.errors import DataError, TrainingError
from agentrl.system.json_value import JSON, as_mapping
from agentrl.system.lines import AppendedLines, keep_steps, read_lines

LINES = [{"step": step, "text": "ä" * step} for step in (1, 2, 3)]


def written(path: Path) -> bytes:
    """Write the lines; return the file's content."""
    with AppendedLines(path) as file:
        file.add([json.dumps(line, ensure_ascii=False) for line in LINES])
    return path.read_bytes()


def read(path: Path) -> list[JSON]:
    def broken(number: int, line: bytes, error: Exception) -> DataError:
        return DataError(f"line {number}: {line!r}")

    return read_lines(path, lambda value: as_mapping(value), broken)


def test_a_file_cut_at_any_byte_is_read_and_goes_on(tmp_path: Path) -> None:
    whole = written(tmp_path / "folder" / "lines")
    path = tmp_path / "cut"
    for end in range(len(whole) + 1):
        path.write_bytes(whole[:end])
        ends = [at for at, byte in enumerate(whole) if byte == 10]
        there = cast(list[JSON], LINES[: sum(at <= end for at in ends)])  # the end of a line is no part of it
        assert read(path) == there
        with AppendedLines(path) as file:
            file.add(['{"step": 9}'], fsync=True)
            assert file.size == path.stat().st_size
        assert read(path) == [*there, {"step": 9}], end


@pytest.mark.parametrize("line", [b"{", b"[2]", b"\xff", b"[" * 100_000, b'"text"'])
def test_another_line_than_the_last_is_named(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b'{"step": 1}\n\n' + line + b'\n{"step": 3}\n')
    with pytest.raises(DataError, match="line 3"):
        read(path)


def test_lines_of_later_steps_go_and_all_others_stay_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    keep_steps(path, 2)
    assert not path.exists()
    first = b'{"step":  1, "odd": "white space"}\n'
    path.write_bytes(first + b'{"step": 3}\n{"step": 2}\n{"step": true}\n[1]\n{"st')
    keep_steps(path, 2)
    assert path.read_bytes() == first + b'{"step": 2}\n'
    before = path.stat().st_mtime_ns, path.stat().st_ino
    keep_steps(path, 5)
    assert (path.stat().st_mtime_ns, path.stat().st_ino) == before
    keep_steps(path, 0)
    assert path.read_bytes() == b"" and list(tmp_path.iterdir()) == [path]


def test_fault_injection_a_full_disk_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = written(path := tmp_path / "lines")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with AppendedLines(path) as file:
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(TrainingError, match="the disk is full"):
            file.add(['{"step": 4}', '{"step": 5}'], fsync=True)
    assert path.read_bytes() == whole
