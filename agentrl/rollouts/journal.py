"""Journal of samples and answers that are in no checkpoint, so that a kill loses no sample and no answer.

It lies in `journal/` of the run's folder. Its files are only appended to, and each checkpoint replaces them by a new
one. A record holds the trajectories of one prompt that have all ended, a checksum, and the numbers that the schedule
needs.
A prompt that has not ended has entries, one for each answer to one of its trajectories (`agentrl.system.call_journal`),
until its record takes their place. Frames that a kill has cut off are left out. Records survive the process and, with
`async_training.journal_fsync`, a loss of power; so do the entries before a record.

Records leave out three kinds of trajectories: those with images, with the experts of their tokens (which would be most
of the file), or with prompts of a privileged teacher. The entries of trajectories with images or such prompts stay.
Trajectories with experts have no entries and restart.
"""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

import xxhash
from pydantic_core import from_json, to_json

from agentrl.config import Config, config_to_dict
from agentrl.errors import DataError
from agentrl.rollouts.staleness_scheduler import GroupStatus
from agentrl.system.call_journal import Entry, Kind
from agentrl.system.json_value import JSON, as_mapping, as_object
from agentrl.system.publish import AppendedFile, flush_to_disk, published
from agentrl.trajectory import Trajectory
from agentrl.trajectory.parquet import from_row, to_row, turn_row, valid_unicode
from agentrl.trajectory.sample import Sample
from agentrl.trajectory.staleness import newest_version

_FRAME = struct.Struct("<IQ16s")
"""Bytes of the header, bytes of the trajectories, and the checksum of both."""
_SUFFIX = ".groups"
_BY_TOKEN = {"ids": "i", "mask": "b", "logprobs": "f"}
"""Types of the values by token."""
OF_THE_UPDATE = ("seed", "total_training_steps", "total_epochs", "critic_warmup")
"""Keys of `trainer` that the policy's updates depend on; schedules read the number of steps."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A record: how the trajectories of a prompt ended, and where they are."""

    ordinal: int
    outcome: GroupStatus
    oldest: int | None
    """Version of the oldest token that is trained on; None without such tokens."""
    newest: int
    """Version of the newest token; -1 where nothing was sampled."""
    prompt: str
    """`identity` of the row that the prompt was made of."""

    def header(self) -> bytes:
        """Write all of it as JSON."""
        found = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return json.dumps(found, default=str).encode()

    @staticmethod
    def load(found: Mapping[str, JSON]) -> Ended:
        """Read the output of `header`. Raises TypeError or ValueError for another form."""
        match found:
            case {
                "ordinal": int(ordinal),
                "outcome": str(outcome),
                "oldest": int() | None as oldest,
                "newest": int(newest),
                "prompt": str(prompt),
            }:
                return Ended(ordinal, GroupStatus(outcome), oldest, newest, prompt)
        raise TypeError(f"expected a record of the journal, found {found!r:.200}")


@dataclass(frozen=True, slots=True)
class _Place:
    """A frame in a file."""

    path: Path
    start: int
    size: int
    """Bytes of it."""


@dataclass(slots=True)
class Unfinished:
    """A prompt whose trajectories have not all ended, and the answers they were given."""

    prompt: str
    """`identity` of its row."""
    entries: dict[str, dict[tuple[str, int], tuple[Entry, _Place]]] = field(default_factory=dict)
    """Entries by the trajectory's name and the call; an answer takes its call's place."""

    def all(self) -> list[tuple[Entry, _Place]]:
        """Return the entries of all its trajectories."""
        return [found for entries in self.entries.values() for found in entries.values()]

    def up_to(self, newest: int | None) -> list[tuple[Entry, _Place]]:
        """Return the entries of `all` that hold no sample by weights after version `newest`, if there is one."""
        return [
            found for found in self.all() if (spanned := found[0].versions) is None or not _is_after(spanned[1], newest)
        ]

    @property
    def oldest(self) -> int | None:
        """Version of the oldest token that was sampled; None without such tokens."""
        return min((entry.versions[0] for entry, _ in self.all() if entry.versions is not None), default=None)

    def add(self, entry: Entry, place: _Place) -> None:
        """Take in an entry; reading one again changes nothing."""
        its = self.entries.setdefault(entry.trajectory, {})
        if entry.kind is Kind.ANEW:
            its.clear()
            return
        if entry.kind is Kind.FAILED:
            self.entries[entry.trajectory] = its = {
                call: found for call, found in its.items() if found[0].kind is Kind.FAILED
            }
        its[entry.key, entry.nth] = entry, place


class Journal:
    """The journal of a run. `key`: validity of its records (`validity`); records with another key are removed on
    reading.

    `fsync`: a record is on the disk when it was added.
    """

    def __init__(self, folder: Path, key: str, *, fsync: bool = False) -> None:
        self.folder, self.key, self.fsync = folder / "journal", key, fsync
        self.ended: dict[int, Ended] = {}
        """Records by the prompt's ordinal; of several of a prompt the last one."""
        self.unfinished: dict[int, Unfinished] = {}
        """Prompts that have entries but no record, by ordinal."""
        self.anew = 0
        """Times that trajectories were restarted since the journal was opened."""
        self.size = 0
        """Bytes on the disk."""
        self._places: dict[int, _Place] = {}
        self._live: list[Path] = []
        """Files that the last checkpoint that was saved needs."""
        self._current: AppendedFile | None = None
        """The file that is appended to; None: it is yet to be made."""

    def begin(self) -> int:
        """Remove the files that an earlier run has left. Return of how many prompts."""
        left = self.read() + len(self.ended) + len(self.unfinished)
        for path in self._files():
            path.unlink()
        self.ended, self.unfinished, self._places, self._live, self.size = {}, {}, {}, [], 0
        return left

    def close(self) -> None:
        """Close the file that is appended to."""
        if self._current is not None:
            self._current.close()
            self._current = None

    def read(self) -> int:
        """Find the prompts that the files hold. Return of how many prompts it was removed, as it was made with another
        config.

        Raises DataError for a whole frame of another form.
        """
        self.close()
        self.ended, self.unfinished, self._places, self._live = {}, {}, {}, []
        removed: set[int] = set()
        for path in self._files():
            frames = _frames(path)
            is_ours = next((text for text, _, _ in frames), None) == self.key.encode()
            for text, content, place in frames:
                try:
                    header = as_mapping(json.loads(text))
                    if not is_ours:
                        removed.add(int(str(header.get("ordinal"))))
                    elif "kind" in header:
                        self._take_entry(*_entry(header, content), place)
                    else:
                        self._take(Ended.load(header), place)
                except (TypeError, ValueError, RecursionError) as error:
                    raise DataError(
                        f"{path}, byte {place.start:,}: expected a record or an entry of a prompt, found "
                        f"{text[:80]!r}. Remove the file: its prompts are then sampled again"
                    ) from error
            if is_ours:
                self._live.append(path)
            else:
                path.unlink()
        self.size = sum(path.stat().st_size for path in self._live)
        return len(removed)

    def add(self, record: bytes) -> None:
        """Take down a record (`record_of`). Raises TrainingError on a full disk."""
        size, _, _ = _FRAME.unpack_from(record)
        header: JSON = json.loads(record[_FRAME.size : _FRAME.size + size])
        self._take(Ended.load(as_object(header)), self._append(record, fsync=self.fsync))

    def answered(self, ordinal: int, prompt: str, entry: Entry) -> None:
        """Record an event in a trajectory of a prompt, or in all of them (no name).

        `prompt`: the row's `identity`. Raises TrainingError on a full disk.
        """
        call = [entry.who, entry.key, entry.nth, entry.versions]
        told = {"ordinal": ordinal, "prompt": prompt, "trajectory": entry.trajectory, "kind": entry.kind, "call": call}
        place = self._append(_frame(json.dumps(told).encode(), entry.content), fsync=False)
        self.anew += entry.kind is Kind.ANEW
        self._take_entry(ordinal, prompt, entry, place)

    def _append(self, frame: bytes, *, fsync: bool) -> _Place:
        if self._current is None:
            self._rotate(())
        assert self._current is not None
        start = self._current.append(frame, fsync=fsync)
        self.size += len(frame)
        return _Place(self._current.path, start, len(frame))

    def _take(self, ended: Ended, place: _Place) -> None:
        self.ended[ended.ordinal], self._places[ended.ordinal] = ended, place
        self.unfinished.pop(ended.ordinal, None)

    def _take_entry(self, ordinal: int, prompt: str, entry: Entry, place: _Place) -> None:
        if not entry.trajectory:
            self.ended.pop(ordinal, None)
            self.unfinished.pop(ordinal, None)
        elif ordinal not in self.ended:
            self.unfinished.setdefault(ordinal, Unfinished(prompt)).add(entry, place)

    @property
    def newest(self) -> int:
        """Version of the newest token in it; -1 without tokens."""
        entries = (entry for its in self.unfinished.values() for entry, _ in its.all())
        sampled = (entry.versions[1] for entry in entries if entry.versions is not None)
        return max((*(one.newest for one in self.ended.values()), *sampled), default=-1)

    def record(self, ordinal: int) -> bytes:
        """Read a record, for `trajectories_in`."""
        return _read(self._places[ordinal])

    def entries(self, ordinal: int) -> list[Entry]:
        """Return the entries of a prompt that has not ended."""
        found = self.unfinished.get(ordinal)
        return [] if found is None else [entry for entry, _ in found.all()]

    def keep(self, needed: Callable[[int], bool], *, newest: int | None = None) -> None:
        """Begin a new file with the records and entries of `needed` prompts; call it when a checkpoint is saved.

        The files since the checkpoint before it stay until the next call, as that checkpoint may be the newest whole
        one. With `newest` these files are removed, and so are all samples by weights after this version. Raises
        TrainingError on a full disk.
        """
        stays = self._live if newest is None else []
        ended = [one for one, its in self.ended.items() if needed(one) and not _is_after(its.newest, newest)]
        needed_ones = [(ordinal, its) for ordinal, its in self.unfinished.items() if needed(ordinal)]
        entries = [(ordinal, *found) for ordinal, its in needed_ones for found in its.up_to(newest)]
        self._live = []
        places = self._rotate([*(self._places[one] for one in ended), *(place for _, _, place in entries)])
        for path in self._files():
            if path not in (*stays, *self._live):
                self.size -= path.stat().st_size
                path.unlink()
        self.ended = {ordinal: self.ended[ordinal] for ordinal in ended}
        self._places = dict(zip(ended, places[: len(ended)], strict=True))
        unfinished: dict[int, Unfinished] = {}
        for (ordinal, entry, _), place in zip(entries, places[len(ended) :], strict=True):
            unfinished.setdefault(ordinal, Unfinished(self.unfinished[ordinal].prompt)).add(entry, place)
        self.unfinished = unfinished

    def _rotate(self, kept: Iterable[_Place]) -> list[_Place]:
        numbers = [int(path.stem) for path in self._files()]
        path = self.folder / f"{max(numbers, default=0) + 1:06d}{_SUFFIX}"
        places: list[_Place] = []
        with published(path) as temporary, temporary.open("wb") as file:
            file.write(_frame(self.key.encode(), b""))
            for old in kept:
                places.append(_Place(path, file.tell(), old.size))
                file.write(_read(old))
        if self.fsync:
            flush_to_disk(self.folder.parent)  # the name of a folder that is new
        self.close()
        self._current = AppendedFile(path)
        self._live.append(path)
        self.size += self._current.size
        return places

    def _files(self) -> list[Path]:
        return sorted(path for path in self.folder.glob(f"*{_SUFFIX}") if path.stem.isdecimal())


def _entry(found: Mapping[str, JSON], content: bytes) -> tuple[int, str, Entry]:
    """Read an entry. Raises TypeError or ValueError for another form."""
    match found:
        case {
            "ordinal": int(ordinal),
            "prompt": str(prompt),
            "trajectory": str(trajectory),
            "kind": str(kind),
            "call": [str(who), str(key), int(nth), versions],
        }:
            match versions:
                case [int(oldest), int(newest)]:
                    spanned: tuple[int, int] | None = (oldest, newest)
                case _:
                    spanned = None
            return ordinal, prompt, Entry(trajectory, Kind(kind), who, key, nth, spanned, content)
    raise TypeError(f"expected an entry of the journal, found {found!r:.200}")


def _is_after(version: int, newest: int | None) -> bool:
    return newest is not None and version > newest


def record_of(
    ordinal: int,
    sample: Sample,
    outcome: GroupStatus,
    oldest: int | None,
    trajectories: Sequence[Trajectory],
    *,
    whole: bool = True,
) -> bytes | None:
    """Write how a prompt's trajectories ended; None where they have parts that are not recorded.

    Not `whole`: without the trajectories, as they will not be trained on.
    """
    transcripts = [transcript for one in trajectories for transcript in one.transcripts]
    if whole and any(one.images or one.experts is not None or one.teacher_prompt for one in transcripts):
        return None
    newest = newest_version(trajectories)
    ended = Ended(ordinal, outcome, oldest, -1 if newest is None else newest, identity(sample))
    return _frame(ended.header(), _written(trajectories if whole else ()))


def trajectories_in(record: bytes) -> list[Trajectory]:
    """Read the trajectories of a record."""
    header, _, _ = _FRAME.unpack_from(record)
    told, _, tokens = record[_FRAME.size + header :].partition(b"\n")
    rows, place = from_json(told), 0
    for row in rows:
        for name, kind in _BY_TOKEN.items():
            row[name] = []
            for length in row["lengths"]:
                values = array(kind)
                end = place + length * values.itemsize
                values.frombytes(tokens[place:end])
                row[name].append(values.tolist())
                place = end
    return [from_row(row) for row in rows]


def _written(trajectories: Sequence[Trajectory]) -> bytes:
    """Write the rows of the files of trajectories and the fields these leave out as JSON, followed by the arrays by
    token.

    Arrow, which is made for many rows, takes four times as long for the few of a prompt.
    """
    rows, tokens = [], []
    for one in trajectories:
        row = to_row(one, 0, "train", None)
        for name, kind in _BY_TOKEN.items():
            tokens += [array(kind, getattr(transcript, name)).tobytes() for transcript in one.transcripts]
        row |= dict.fromkeys(_BY_TOKEN) | {"lengths": [len(transcript.ids) for transcript in one.transcripts]}
        row["turns"] = [{**turn_row(turn), "state": turn.state and valid_unicode(turn.state)} for turn in one.turns]
        rows.append(row)
    told = to_json(rows, inf_nan_mode="constants", fallback=float)
    return b"\n".join((told, b"".join(tokens)))


def identity(sample: Sample) -> str:
    """Return a short hash of a row's content, by which a ledger knows it again."""
    content = (sample.prompt, sample.data_source, sample.agent_name, sample.ground_truth, sample.extra_info)
    text = json.dumps(content, sort_keys=True, default=repr)
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=6).hexdigest()


def validity(config: Config) -> str:
    """Return a hash of the settings that trajectories and the weights that sample them depend on: most keys."""
    keys = config_to_dict(config)
    keys["async_training"] = {**as_object(keys["async_training"]), "journal_fsync": None}
    keys["trainer"] = {name: getattr(config.trainer, name) for name in OF_THE_UPDATE}
    keys["form of the records"] = 2
    return blake2b(json.dumps(keys, sort_keys=True, default=repr).encode(), digest_size=16).hexdigest()


def _frame(header: bytes, content: bytes) -> bytes:
    return _FRAME.pack(len(header), len(content), xxhash.xxh3_128_digest(header + content)) + header + content


def _read(place: _Place) -> bytes:
    with place.path.open("rb") as file:
        file.seek(place.start)
        return file.read(place.size)


def _frames(path: Path) -> Iterator[tuple[bytes, bytes, _Place]]:
    """Yield header, content and place of each frame up to the first that is not whole."""
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
            yield body[:header], body[header:], _Place(path, start, size)
