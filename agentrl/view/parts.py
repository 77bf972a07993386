"""Files of trajectories in a run, found by their names alone, and how each is read.

Four kinds: records of a run in `trajectories/`; lines of JSON as verl dumps them, and as `trainer.rollout_data_dir`
writes them; output of `agentrl.generate`, a part for each row group; and its parts while it runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import orjson
import pyarrow as pa
import pyarrow.dataset as ds

from agentrl.errors import DataError
from agentrl.system.json_value import JSON, as_object
from agentrl.trajectory.files import FileName
from agentrl.trajectory.parquet import SCHEMA, valid_unicode
from agentrl.view.folder import Folder, Stamp

LINES = re.compile(r"(?P<step>\d{1,9})\.jsonl")
PIECE = re.compile(r"(?P<row>\d{12})\.parquet")
Row: TypeAlias = dict[str, object]
Source: TypeAlias = "ds.Dataset | pa.Table"


@dataclass(frozen=True, slots=True)
class Part:
    """One file (or row group of a file) of trajectories."""

    name: str
    """Its name in addresses, e.g. train_000012.1of2: looked up, never joined to a path."""
    set: str
    """Parts of one set and step are shown together: `train`, `val_sampled`, `generate`."""
    step: int
    batch: str
    """A further batch of the step: `_001` of generation, whose groups are numbered from 0 again; `_000064` of a
    validation, whose first prompt it names."""
    file: str
    """Place below the folder."""
    stamp: Stamp
    row_group: int | None = None
    """Number of a row group of a file that `agentrl.generate` wrote."""
    update: str | None = None
    """Place, below the folder, of the file with the update's values for each token."""


def recorded(files: Mapping[str, Stamp], below: str = "", updates: Mapping[str, str] | None = None) -> list[Part]:
    """Find the parts that a run recorded, from the names of its files of trajectories.

    below: their folder. updates: places of the files of updates, by their names.
    """
    found = list[Part]()
    for file, stamp in files.items():
        if (name := FileName.read(file)) is not None:
            kind, line, number = name.part.rpartition("_")
            kind, batch = (kind, line + number) if number.isdigit() else (name.part, "")
            update = (updates or {}).get(file)
            found.append(Part(name.stem, name.split + kind, name.step, batch, f"{below}{file}", stamp, update=update))
    return found


def dumped(files: Mapping[str, Stamp]) -> list[Part]:
    """Find lines of JSON that are named by their step."""
    matches = ((LINES.fullmatch(name), stamp) for name, stamp in files.items())
    return [Part(match["step"], "dump", int(match["step"]), "", match[0], stamp) for match, stamp in matches if match]


def generated(folder: Folder, files: Mapping[str, Stamp]) -> list[Part]:
    """Find the row groups of parquet files with a column `responses`.

    Raises DataError for a file without that column.
    """
    found = list[Part]()
    for name, stamp in sorted(files.items()):
        file = folder.parquet(name)
        if "responses" not in file.schema_arrow.names:
            raise DataError(
                f"{folder.url}/{name}: want a file of trajectories (a column `ids`) or of responses (a column "
                f"`responses`); its columns are {', '.join(file.schema_arrow.names[:8])}"
            )
        for group in range(file.metadata.num_row_groups):
            found.append(Part(f"part_{len(found)}", "generate", len(found), "", name, stamp, group))
    return found


def source(folder: Folder, part: Part) -> Source:
    """Open a part's trajectories, with the columns of SCHEMA as far as it has them. Raises DataError."""
    if part.row_group is not None:
        try:
            table = folder.parquet(part.file).read_row_group(part.row_group)
        except (pa.ArrowException, OSError) as error:
            raise folder.damaged(part.file, error) from error
        return _table(_responses(table, part.step))
    if part.file.endswith(".jsonl"):
        return _table(_lines(folder, part))
    return folder.dataset(part.file)


def _table(rows: Iterator[Row]) -> pa.Table:
    return pa.Table.from_pylist(list(rows), schema=SCHEMA)


def _lines(folder: Folder, part: Part) -> Iterator[Row]:
    """Yield rows of SCHEMA from lines such as {"input": ..., "output": ..., "score": ..., "step": ...}."""
    text = folder.read(part.file)
    groups: dict[str, int] = {}
    for number, line in enumerate((text or b"").split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            value = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise DataError(f"{folder.url}/{part.file}, line {number}: want a JSON object ({error})") from error
        if not isinstance(value, dict) or not isinstance(value.get("input"), str):
            raise DataError(
                f"{folder.url}/{part.file}, line {number}: want an object with the texts `input` and `output`, and "
                "perhaps `score` and `step`"
            )
        output = value.get("output")
        yield _row(
            part.step,
            f"line {number}" if not isinstance(value.get("uid"), str) else valid_unicode(str(value["uid"])),
            groups.setdefault(value["input"], len(groups)),
            [{"role": "user", "content": value["input"]}],
            output if isinstance(output, str) else "" if output is None else orjson.dumps(output).decode(),
            value,
        )


KNOWN = frozenset({"input", "output", "gts", "step", "uid", "score", "reward", "status", "data_source", "agent_name"})


def _row(
    step: int, uid: str, group: int, prompt: list[dict[str, JSON]], answer: str | None, more: Mapping[str, JSON]
) -> Row:
    """Make a row of SCHEMA of a prompt and one answer, without tokens."""
    messages = [
        {
            "role": str(one.get("role", "user")),
            "content": _text(content) if isinstance(content := one.get("content"), str) else None,
            "other": None if isinstance(one.get("content"), str) else _text(orjson.dumps(one, default=str).decode()),
        }
        for one in prompt
    ]
    turns = []
    if answer is not None:
        turns.append({"role": "assistant", "text": _text(answer), "transcript": 0, "start": 0, "end": 0})
        messages.append({"role": "assistant", "content": _text(answer), "other": None})
    texts = {name: more.get(name) for name in ("data_source", "agent_name", "status", "failure")}
    return {
        "step": step,
        "uid": uid,
        "group": group,
        **{name: _text(value) if isinstance(value, str) else None for name, value in texts.items()},
        "score": _number(more.get("score")),
        "reward": _number(more.get("reward")),
        "num_turns": len(turns),
        "messages": messages,
        "turns": turns,
        "calls": [],
        **{name: [] for name in ("prompt_length", "ids", "mask", "logprobs", "versions", "images", "policy", "role")},
        "score_extra": {
            _text(name): value
            for name, one in more.items()
            if name not in KNOWN and (value := _number(one)) is not None
        },
        "metrics": {},
        "ground_truth": None
        if (truth := more.get("gts")) is None
        else _text(orjson.dumps(truth, default=str).decode()),
    }


def _responses(table: pa.Table, step: int) -> Iterator[Row]:
    """Yield rows of SCHEMA, one a response, from a file of `agentrl.generate`."""
    for number, row in enumerate(table.to_pylist(maps_as_pydicts="lossy")):
        records = row.get("trajectories")
        if isinstance(records, list):
            yield from ({**record, "step": step, "group": number} for record in records if record is not None)
            continue
        answers = row["responses"] if isinstance(row["responses"], list) else [row["responses"]]
        prompt = row.get("prompt")
        messages = [as_object(one) for one in prompt] if isinstance(prompt, list) else []
        for index, answer in enumerate(answers):
            more: dict[str, JSON] = {"data_source": row.get("data_source"), "agent_name": row.get("agent_name")}
            for name in ("score", "status", "failure", "turns", "tool_calls", "tokens"):
                values = row.get(f"response_{name}")
                more[name] = values[index] if isinstance(values, list) and index < len(values) else None
            yield _row(step, f"{number}/{index}", number, messages, answer, more)


def _number(value: JSON) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _text(text: str) -> str:
    return valid_unicode(text)
