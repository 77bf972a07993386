"""The journal: prompts whose trajectories have ended and that are in no checkpoint, so that a kill costs none of them.

It lies in `journal/` of the run's folder, in files that are only appended to, and replaced by a new one with each
checkpoint. A record holds the trajectories of one prompt, a checksum, and what the flow needs to know of them. What a
kill has cut off is left out. Records survive the process and, with `async_training.journal_fsync`, a loss of power.

Not recorded are trajectories with images, or with the experts of their tokens, which would be most of it: they begin
anew.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from io import BytesIO
from pathlib import Path

import pyarrow as pa
import xxhash

from agentrl.config import Config, config_to_dict
from agentrl.rollouts.flow import Outcome
from agentrl.rollouts.ledger import append
from agentrl.system.json_value import JSON, as_list, as_object
from agentrl.system.publish import flush_to_disk, published
from agentrl.trajectory import Trajectory
from agentrl.trajectory.parquet import SCHEMA, from_row, to_row
from agentrl.trajectory.sample import Sample
from agentrl.trajectory.staleness import newest_version

_FRAME = struct.Struct("<IQ16s")
"""Bytes of the header, bytes of the trajectories, and the checksum of both."""
_SUFFIX = ".groups"
OF_THE_UPDATE = ("seed", "total_training_steps", "total_epochs", "critic_warmup")
"""Keys of `trainer` that the policy's updates depend on; schedules read the number of steps."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A record: how the trajectories of a prompt ended, and where they are."""

    ordinal: int
    outcome: Outcome
    oldest: int | None
    """Version of the oldest token that is trained on; None where none is."""
    newest: int
    """Version of the newest token; -1 where nothing was sampled."""
    prompt: str
    """`identity` of the row that the prompt was made of."""
    baseline: list[bool]
    """By trajectory, as the next one: what the files of trajectories do not hold."""
    states: list[list[str | None]]
    """States of the turns."""

    def header(self) -> bytes:
        """Write all of it as JSON."""
        found = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return json.dumps(found, default=str).encode()

    @staticmethod
    def load(header: bytes) -> Ended:
        """Read what `header` wrote. Raises TypeError or ValueError for another form."""
        found: dict[str, JSON] = json.loads(header)
        match found:
            case {
                "ordinal": int(ordinal),
                "outcome": str(outcome),
                "oldest": int() | None as oldest,
                "newest": int(newest),
                "prompt": str(prompt),
                "baseline": list(baseline),
                "states": list(states),
            }:
                turns = [[None if one is None else str(one) for one in as_list(turns)] for turns in states]
                return Ended(
                    ordinal, Outcome(outcome), oldest, newest, prompt, [one is True for one in baseline], turns
                )
        raise TypeError(f"expected a record of the journal, found {header[:200]!r}")


@dataclass(frozen=True, slots=True)
class _Place:
    """A frame in a file."""

    path: Path
    start: int
    header: int
    """Bytes of the header."""
    size: int
    """Bytes of the whole frame."""


class Journal:
    """The journal of a run. `key`: what its records are valid with (`validity`); others are removed when it is read.

    `fsync`: a record is on the disk when it was added.
    """

    def __init__(self, folder: Path, key: str, *, fsync: bool = False) -> None:
        self.folder, self.key, self.fsync = folder / "journal", key, fsync
        self.ended: dict[int, Ended] = {}
        """Records by the prompt's ordinal; of several of a prompt the last one."""
        self.size = 0
        """Bytes on the disk."""
        self._places: dict[int, _Place] = {}
        self._live: list[Path] = []
        """Files that the last checkpoint that was saved needs."""
        self._current: Path | None = None
        """The file that is appended to; None: it is yet to be made."""

    def begin(self) -> None:
        """Remove what a run before has left."""
        for path in self._files():
            path.unlink()

    def read(self) -> int:
        """Find the records that are there. Return how many were removed, as they were made with another config."""
        self.ended, self._places, self._live, self._current = {}, {}, [], None
        removed = 0
        for path in self._files():
            frames = list(_frames(path))
            if not frames or frames[0][0] != self.key.encode():
                removed += len(frames[1:])
                path.unlink()
                continue
            for header, place in frames[1:]:
                ended = Ended.load(header)
                self.ended[ended.ordinal], self._places[ended.ordinal] = ended, place
            self._live.append(path)
        self.size = sum(path.stat().st_size for path in self._live)
        return removed

    def add(self, record: bytes) -> None:
        """Take down how a prompt's trajectories ended, as `record_of` says it. Raises TrainingError on a full disk."""
        header, _, _ = _FRAME.unpack_from(record)
        ended = Ended.load(record[_FRAME.size : _FRAME.size + header])
        if self._current is None:
            self._rotate(())
        assert self._current is not None
        start = append(self._current, record, fsync=self.fsync)
        self.size += len(record)
        self.ended[ended.ordinal] = ended
        self._places[ended.ordinal] = _Place(self._current, start, header, len(record))

    def record(self, ordinal: int) -> bytes:
        """Read a record, for `trajectories_in`."""
        place = self._places[ordinal]
        with place.path.open("rb") as file:
            file.seek(place.start)
            return file.read(place.size)

    def keep(self, needed: Callable[[int], bool], *, only: bool = False) -> None:
        """Begin a new file with the records that are `needed`; call it when a checkpoint is saved.

        The files since the checkpoint before it stay until the next call, as that one may be the newest that is whole;
        with `only` nothing of them stays. Raises TrainingError on a full disk.
        """
        stays = [] if only else self._live
        kept = [ordinal for ordinal in self.ended if needed(ordinal)]
        self._live = []
        self._rotate(kept)
        for path in self._files():
            if path not in (*stays, *self._live):
                self.size -= path.stat().st_size
                path.unlink()
        self.ended = {ordinal: self.ended[ordinal] for ordinal in kept}
        self._places = {ordinal: self._places[ordinal] for ordinal in kept}

    def _rotate(self, kept: Iterable[int]) -> None:
        numbers = [int(path.stem) for path in self._files()]
        path = self.folder / f"{max(numbers, default=0) + 1:06d}{_SUFFIX}"
        places: dict[int, _Place] = {}
        with published(path) as temporary, temporary.open("wb") as file:
            file.write(_frame(self.key.encode(), b""))
            for ordinal in kept:
                old = self._places[ordinal]
                places[ordinal] = _Place(path, file.tell(), old.header, old.size)
                with old.path.open("rb") as source:
                    source.seek(old.start)
                    file.write(source.read(old.size))
        if self.fsync:
            flush_to_disk(self.folder.parent)  # the name of a folder that is new
        self._places |= places
        self._current = path
        self._live.append(path)
        self.size += path.stat().st_size

    def _files(self) -> list[Path]:
        return sorted(path for path in self.folder.glob(f"*{_SUFFIX}") if path.stem.isdecimal())


def record_of(
    ordinal: int,
    sample: Sample,
    outcome: Outcome,
    oldest: int | None,
    trajectories: Sequence[Trajectory],
    *,
    whole: bool = True,
) -> bytes | None:
    """Write how a prompt's trajectories ended; None where they have images or their tokens' experts.

    Not `whole`: without the trajectories, as nothing is to be trained on them.
    """
    transcripts = [transcript for one in trajectories for transcript in one.transcripts]
    if whole and any(transcript.images or transcript.experts is not None for transcript in transcripts):
        return None
    newest = newest_version(trajectories)
    trajectories = trajectories if whole else ()
    ended = Ended(
        ordinal,
        outcome,
        oldest,
        -1 if newest is None else newest,
        identity(sample),
        [one.baseline for one in trajectories],
        [[turn.state for turn in one.turns] for one in trajectories],
    )
    rows = pa.Table.from_pylist([to_row(one, 0, "train", None) for one in trajectories], schema=SCHEMA)
    buffer = BytesIO()
    with pa.ipc.new_stream(buffer, SCHEMA) as stream:
        stream.write_table(rows)
    return _frame(ended.header(), buffer.getvalue())


def trajectories_in(record: bytes) -> list[Trajectory]:
    """Read the trajectories of a record."""
    header, _, _ = _FRAME.unpack_from(record)
    ended = Ended.load(record[_FRAME.size : _FRAME.size + header])
    rows = pa.ipc.open_stream(record[_FRAME.size + header :]).read_all().to_pylist(maps_as_pydicts="strict")
    found = [from_row(row) for row in rows]
    for trajectory, baseline, states in zip(found, ended.baseline, ended.states, strict=True):
        trajectory.baseline = baseline
        for turn, state in zip(trajectory.turns, states, strict=True):
            turn.state = state
    return found


def identity(sample: Sample) -> str:
    """Return a short hash of a row's content, by which a ledger knows it again."""
    content = (sample.prompt, sample.data_source, sample.agent_name, sample.ground_truth, sample.extra_info)
    text = json.dumps(content, sort_keys=True, default=repr)
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=6).hexdigest()


def validity(config: Config) -> str:
    """Return a hash of what trajectories and the weights that sample them depend on: most keys."""
    keys = config_to_dict(config)
    keys["async_training"] = {**as_object(keys["async_training"]), "journal_fsync": None}
    keys["trainer"] = {name: getattr(config.trainer, name) for name in OF_THE_UPDATE}
    return blake2b(json.dumps(keys, sort_keys=True, default=repr).encode(), digest_size=16).hexdigest()


def _frame(header: bytes, content: bytes) -> bytes:
    return _FRAME.pack(len(header), len(content), xxhash.xxh3_128_digest(header + content)) + header + content


def _frames(path: Path) -> Iterator[tuple[bytes, _Place]]:
    """Yield header and place of each frame up to the first that is not whole."""
    with path.open("rb") as file:
        while len(prefix := file.read(_FRAME.size)) == _FRAME.size:
            header, content, checksum = _FRAME.unpack(prefix)
            start = file.tell() - _FRAME.size
            size = _FRAME.size + header + content
            if start + size > path.stat().st_size:
                return
            body = file.read(header + content)
            if xxhash.xxh3_128_digest(body) != checksum:
                return
            yield body[:header], _Place(path, start, header, size)
