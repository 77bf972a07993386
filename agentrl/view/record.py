"""One trajectory as JSON for the browser: messages, turns with their calls, and the numbers of every token."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TypeAlias, cast

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import xxhash

from agentrl.errors import DataError, first_line
from agentrl.system.json_value import JSON, as_list, as_object
from agentrl.trajectory.parquet import SCHEMA
from agentrl.view.folder import Stamp
from agentrl.view.images import pictures
from agentrl.view.parts import Part, source
from agentrl.view.run import Run

NUMBERS = (
    "logprobs",
    "trainer_logprobs",
    "entropy",
    "advantages",
    "weights",
    "ratio",
    "clipped",
    "weights_clipped",
    "reference_logprobs",
    "teacher_logprobs",
    "token_rewards",
)
"""Columns with a number for each token, as far as they are recorded."""
Record: TypeAlias = dict[str, object]
BY_TOKEN = ("ids", "mask", "logprobs")
ODD = (pa.ArrowException, AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError)
"""Errors by which values of another form than agentrl's show."""


def trajectory(run: Run, part: Part, row: int) -> Record:
    """Read one trajectory. Raises DataError without a trajectory there, and for values of another form."""
    try:
        return _trajectory(run, part, row)
    except ODD as error:
        raise DataError(
            f"{run.folder.url}/{part.file}, row {row}: want a trajectory as agentrl records it; its values have "
            f"another form ({type(error).__name__}: {first_line(error)})"
        ) from error


def _trajectory(run: Run, part: Part, row: int) -> Record:
    table, place = _row_of(run, part, row)
    values = {} if part.update is None else _update_of(run, part, part.update, row)
    plain = table.drop_columns([name for name in BY_TOKEN if name in table.column_names]).slice(place, 1)
    try:
        found: Record = plain.to_pylist(maps_as_pydicts="lossy")[0]
    except UnicodeDecodeError as error:
        raise run.folder.damaged(part.file, error) from error
    found |= {name: None for name in SCHEMA.names if name not in found and name not in BY_TOKEN}
    turns, calls = _dicts(found["turns"]), _dicts(found.pop("calls"))
    found["messages"] = _dicts(found["messages"])
    for index, turn in enumerate(turns):
        turn["calls"] = [call for call in calls if call["turn"] == index]
    found["turns"] = turns
    found["transcripts"] = transcripts = list(_transcripts(table, place, found, values))
    placed = [_dicts(one["images"]) for one in transcripts]
    found["pictures"] = pictures(run.folder, [str(image["digest"]) for images in placed for image in images])
    ids = [int(id) for one in transcripts for id in cast(npt.NDArray[np.int32], one["ids"]).tolist()]
    found["tokens"] = run.tokens.describe(ids)
    found["tokenizer"] = {"known": run.tokens.is_known, "origin": run.tokens.origin}
    found |= {"part": part.name, "set": part.set, "row": row, "step": part.step, "batch": part.batch}
    return found


def _row_of(run: Run, part: Part, row: int) -> tuple[pa.Table, int]:
    """Return the row group that holds the row, and the row's place in it."""
    if part.row_group is not None or part.file.endswith(".jsonl"):
        table = run.kept(part, lambda: source(run.folder, part))
        if row >= table.num_rows:
            raise DataError(f"{part.name} has {table.num_rows} trajectories; row {row} is none of them")
        return table.slice(row, 1), 0
    return _group_of(run, part.file, part.stamp, row)


def _group_of(run: Run, name: str, stamp: Stamp, row: int) -> tuple[pa.Table, int]:
    file, first = run.folder.parquet(name), 0
    for group in range(file.metadata.num_row_groups):
        rows = file.metadata.row_group(group).num_rows
        if first <= row < first + rows:
            try:
                return run.kept(
                    (name, stamp, group), partial(file.read_row_group, group, use_threads=False)
                ), row - first
            except (pa.ArrowException, OSError) as error:
                raise run.folder.damaged(name, error) from error
        first += rows
    raise DataError(f"{name} has {first} trajectories; row {row} is none of them")


def _update_of(run: Run, part: Part, update: str, row: int) -> dict[str, pa.Scalar]:
    """Return the update's values for the trajectory by column: of the rows with its uid, the row in its order."""
    uids = run.folder.parquet(part.file).read(["uid"])["uid"].to_pylist()
    try:
        theirs = run.folder.parquet(update).read(["uid"])["uid"].to_pylist()
    except (*ODD, OSError) as error:
        raise run.folder.damaged(update, error) from error
    found = [place for place, uid in enumerate(theirs) if uid == uids[row]]
    before = uids[:row].count(uids[row])
    if before >= len(found):
        return {}
    values, at = _group_of(run, update, part.stamp, found[before])
    return {name: values[name][at] for name in values.column_names if name in NUMBERS}


def _transcripts(
    table: pa.Table, place: int, found: Record, values: Mapping[str, pa.Scalar]
) -> Iterator[dict[str, object]]:
    """Yield the context windows of the row."""
    lengths, versions = _list(found.pop("prompt_length")), _list(found.pop("versions"))
    images, policies = _list(found.pop("images")), _list(found.pop("policy"))
    roles, ends = _list(found.pop("role", None)), _list(found.pop("trained_to", None))
    scores = _list(found.pop("transcript_score", None))
    ids = table["ids"][place] if "ids" in table.column_names else None
    for number in range(len(ids.values) if ids is not None and ids.is_valid else 0):
        one = {name: _numbers(table[name][place], number) for name in BY_TOKEN if name in table.column_names}
        mask = one["mask"].astype(bool)
        if len(mask) != len(one["ids"]):
            raise ValueError(f"{len(one['ids'])} ids and a mask of {len(mask)}")
        numbers = {"logprobs": one["logprobs"]} | {
            name: _numbers(scalar, number) for name, scalar in values.items() if scalar.is_valid
        }
        yield {
            "ids": one["ids"],
            "mask": one["mask"],
            "prompt_length": int(cast(int, lengths[number])),
            "versions": versions[number],
            "images": images[number] if number < len(images) else [],
            "policy": policies[number] if number < len(policies) else None,
            "role": roles[number] if number < len(roles) else "",
            "trained_to": ends[number] if number < len(ends) else None,
            "score": scores[number] if number < len(scores) else None,
            "values": {
                name: np.where(mask, array.astype(np.float32), np.float32(np.nan))
                for name, array in numbers.items()
                if len(array) == len(mask)
            },
        }


def _numbers(scalar: pa.Scalar, number: int) -> npt.NDArray[np.float64]:
    """Numbers of one context window; nulls become NaN."""
    lists = scalar.values
    if number >= len(lists) or not lists[number].is_valid:
        return np.empty(0)
    array = lists[number].values
    if pa.types.is_boolean(array.type):
        array = array.cast(pa.int8())
    found: npt.NDArray[np.float64] = array.to_numpy(zero_copy_only=False)
    return found


def _dicts(value: object) -> list[dict[str, object]]:
    return [dict(one) for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def of_window(record: Record, number: int) -> Record:
    """Return the trajectory with one of its context windows alone, the last one where it has no such."""
    transcripts = cast(list[dict[str, object]], record["transcripts"])
    number = max(0, min(number, len(transcripts) - 1))
    turns = [{**turn, "transcript": 0} for turn in _dicts(record["turns"]) if turn["transcript"] == number]
    return {**record, "transcripts": transcripts[number : number + 1], "turns": turns}


def pieces(run: Run, record: Record, first: int, cut: int | None = None) -> list[dict[str, JSON]]:
    """Texts of the first context window from token `first` on, separated by author and at token `cut`.

    Without tokens, a piece is a turn, and `first` counts turns.
    """
    transcripts = cast(list[dict[str, object]], record["transcripts"])
    turns = _dicts(record["turns"])
    if not transcripts:
        return [
            {"kind": str(turn["role"]), "text": cast(str, turn["text"]), "start": place}
            for place, turn in enumerate(turns)
            if place >= first
        ]
    ids = cast(npt.NDArray[np.int32], transcripts[0]["ids"])
    mask = cast(npt.NDArray[np.int8], transcripts[0]["mask"])
    owner = np.zeros(len(ids), np.int32)
    for number, turn in enumerate(turns, 1):
        if turn["transcript"] == 0:
            owner[cast(int, turn["start"]) : cast(int, turn["end"])] = number
    label = np.where(np.arange(len(ids)) < cast(int, transcripts[0]["prompt_length"]), -1, owner * 2 + mask)
    cuts = {first, len(ids), *(np.flatnonzero(np.diff(label)) + 1).tolist(), *([] if cut is None else [cut])}
    places = sorted(place for place in cuts if first <= place <= len(ids))
    found: list[dict[str, JSON]] = []
    for start, end in itertools.pairwise(places):
        role = "prompt" if label[start] == -1 else "policy" if mask[start] else "template"
        if role == "template" and owner[start]:
            role = str(turns[owner[start] - 1]["role"])
        found.append({"kind": role, "text": run.tokens.text(ids[start:end].tolist()), "start": int(start)})
    return found


def common_beginning(one: Record, other: Record) -> int | None:
    """Count the tokens that two first context windows share at the start, or the turns where one has no tokens.

    None where all of both is alike.
    """
    left, right = _units(one), _units(other)
    shortest = min(len(left), len(right))
    places = np.flatnonzero(left[:shortest] != right[:shortest])
    if len(places):
        return int(places[0])
    return None if len(left) == len(right) else shortest


def length(record: Record) -> int:
    """Count the tokens of the first context window, or the turns without a window."""
    return len(_units(record))


def _units(record: Record) -> npt.NDArray[np.int64]:
    """Ids of the first context window; without one, a number for the text of each turn."""
    transcripts = cast(list[dict[str, object]], record["transcripts"])
    if transcripts:
        return np.asarray(transcripts[0]["ids"], np.int64)
    return np.array(
        [xxhash.xxh3_64_intdigest(str(turn["text"]).encode()) >> 1 for turn in _dicts(record["turns"])], np.int64
    )


def to_json(value: object) -> bytes:
    """Write JSON; numbers that are not finite become null."""
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS, default=str)


def mean_of(record: Record, name: str) -> float | None:
    """Mean of a token number over all of a trajectory's tokens that have it."""
    windows = as_list(cast(JSON, record["transcripts"]))
    arrays = [np.asarray(as_object(as_object(one)["values"]).get(name, [])) for one in windows]
    finite = np.concatenate([array[np.isfinite(array)] for array in arrays]) if arrays else np.empty(0)
    return float(finite.mean()) if len(finite) else None
