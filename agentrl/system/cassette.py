"""Cassettes: recorded answers of tools and interactions, replayed in another run without their servers.

A call is identified by the tool or interaction and by its arguments. Where the tool or interaction keeps state for a
trajectory, the row's create_kwargs and the trajectory's earlier calls count, too. A call that was made several times is
answered as it was in the trajectory of the same name, else as it was the first time. Where a file was recorded to more
than once, what a trajectory recorded later takes the place of what it recorded before.

The file holds one JSON object a line: the tools of sources first (e.g. of an MCP server), then the answers.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict, cast, final

from agentrl.errors import ConfigError, TrainingError
from agentrl.system.json_value import JSON
from agentrl.system.lines import AppendedLines, read_lines
from agentrl.system.numbers import number_of

Mode = Literal["record", "replay"]
_SHOWN = 200


class NotOnCassette(TrainingError):
    """A call that was not recorded."""


@dataclass(frozen=True, slots=True)
class MethodCall:
    """One call of a method of a tool or an interaction, for a trajectory."""

    who: str
    method: str
    instance: str
    """The trajectory's name."""
    arguments: Mapping[str, object]
    state: str = ""
    """Key of the call before it, by which the earlier calls count where the tool or interaction keeps state."""

    @property
    def key(self) -> str:
        """Digest (32 hex digits) of everything that identifies the call, the trajectory's name aside."""
        text = json.dumps([self.who, self.method, self.state, self.arguments], sort_keys=True, default=_plain)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@final
class _AnswerLine(TypedDict):
    """Line of a call's outcome."""

    key: str
    nth: int
    """Earlier calls with the key in the same trajectory."""
    instance: str
    who: str
    method: str
    arguments: Mapping[str, object]
    outcome: Mapping[str, object]


@final
class _SourceLine(TypedDict):
    """Line of a source's tools: each one's schema, and whether it keeps state for a trajectory."""

    source: str
    tools: Sequence[tuple[Mapping[str, object], bool]]


class Cassette:
    """File of recorded answers. Each answer is written at once, so that a killed run loses no answer."""

    def __init__(self, path: str | Path, mode: Mode) -> None:
        """Open `path` to record or to replay. Raises ConfigError: nothing to replay, no cassette, or a path that cannot
        be written."""
        self.path, self.mode = Path(path), mode
        self.missed: str | None = None
        """Message about the first call that was not found; None: all were."""
        self._sources: dict[str, list[tuple[dict[str, object], bool]]] = {}
        self._answers: dict[tuple[str, str, int], Mapping[str, object]] = {}
        self._first: dict[str, _AnswerLine] = {}
        self._counts: Counter[tuple[str, str]] = Counter()
        self._file: AppendedLines | None = None
        if mode == "replay":
            self._read()
            return
        try:
            self._file = AppendedLines(self.path)
        except OSError as error:
            raise ConfigError(f"tools.cassette_path: {self.path} cannot be written: {error.strerror}") from error

    def record(self, call: MethodCall, outcome: Mapping[str, object]) -> None:
        """Store the outcome of a call. One with a true `is_fault` is replayed only to the trajectory that met it."""
        place = (call.instance, call.key)
        self._write(
            {
                "key": call.key,
                "nth": self._counts[place],
                "instance": call.instance,
                "who": call.who,
                "method": call.method,
                "arguments": call.arguments,
                "outcome": outcome,
            }
        )
        self._counts[place] += 1

    def replay(self, call: MethodCall) -> Mapping[str, Any]:
        """Return the recorded outcome of a call. Raises NotOnCassette, naming the call."""
        place = (call.instance, call.key)
        found = self._answers.get((*place, self._counts[place]))
        if found is None and (first := self._first.get(call.key)) is not None:
            found = first["outcome"]
        self._counts[place] += 1
        if found is None:
            arguments = json.dumps(call.arguments, default=_plain)
            arguments = arguments if len(arguments) <= _SHOWN else arguments[:_SHOWN] + " ..."
            problem = (
                f"{self.path} holds no answer of {call.who} ({call.method}) to {arguments}, asked by trajectory "
                f"{call.instance}{' after other calls' if call.state else ''}: record it with tools.cassette=record"
            )
            self.missed = self.missed or problem
            raise NotOnCassette(problem)
        return found

    def check(self) -> None:
        """Raise NotOnCassette when a call was not found since the cassette was opened."""
        if self.missed is not None:
            raise NotOnCassette(self.missed)

    def record_source(self, entry: str, tools: Sequence[tuple[Mapping[str, object], bool]]) -> None:
        """Store the tools of a source: each one's schema, and whether it keeps state for a trajectory."""
        self._write({"source": entry, "tools": tools})

    def replay_source(self, entry: str) -> list[tuple[dict[str, object], bool]]:
        """Return a source's (schema, keeps state) pairs. Raises ConfigError when they were not recorded."""
        if entry not in self._sources:
            raise ConfigError(f"{self.path} holds no tools of {entry}: record it with tools.cassette=record")
        return self._sources[entry]

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _write(self, line: _AnswerLine | _SourceLine) -> None:
        assert self._file is not None
        self._file.add([json.dumps(line, default=_plain)])

    def _read(self) -> None:
        try:
            read_lines(self.path, self._take, self._broken)
        except OSError as error:
            raise ConfigError(f"tools.cassette_path: {self.path} cannot be read: {error.strerror}") from error

    def _broken(self, number: int, line: bytes, error: Exception) -> ConfigError:
        return ConfigError(f"{self.path}:{number}: no line of a cassette ({error})")

    def _take(self, value: JSON) -> None:
        line = cast(_AnswerLine | _SourceLine, value)
        if "source" in line:
            self._sources[line["source"]] = [(dict(schema), bool(stateful)) for schema, stateful in line["tools"]]
            return
        instance, key, nth = line["instance"], line["key"], line["nth"]
        later = nth  # of an earlier recording of the trajectory
        while self._answers.pop((instance, key, later), None) is not None:
            later += 1
        self._answers[instance, key, nth] = line["outcome"]
        first = self._first.get(key)
        if first is not None and first["instance"] == instance and nth <= first["nth"]:
            del self._first[key]
        if not line["outcome"].get("is_fault"):
            self._first.setdefault(key, line)


def _plain(value: object) -> object:
    """Convert a value that JSON has no form for: numbers of numpy and the like to floats, arrays to lists, other values
    to text."""
    if (number := number_of(value)) is not None:
        return number
    return value.tolist() if hasattr(value, "tolist") else str(value)
