"""Data sets as TRL's trainers take them: a `datasets.Dataset`, a list of rows, or a file."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pyarrow
import pyarrow.parquet as pq

from agentrl.data.bad_rows import BadRow
from agentrl.data.json_lines import read_objects
from agentrl.errors import ConfigError, DataError, install_extra
from agentrl.system.publish import published
from agentrl.trajectory.sample import row_place

if TYPE_CHECKING:
    from typing import TypeAlias

    from datasets import Dataset

    from agentrl.trl.environments import Environments

    Rows: TypeAlias = str | Path | Sequence[Mapping[str, object]] | Dataset

SOURCE = "trl"
"""Data source of the rows."""
EMPTY = [{"role": "user", "content": ""}]
"""Prompt of a row that has none: its environment opens the conversation."""


@dataclass(frozen=True, slots=True)
class DataSet:
    """Rows of a data set, and the parquet file with their prompts that a run reads."""

    file: Path
    rows: Sequence[Mapping[str, object]]
    """By number in the file: the row with all columns, as the data set has it."""
    prompts: Sequence[Sequence[Mapping[str, object]]]
    has_environments: bool = False
    """Environments play the rows, and may add to their prompts."""

    def write(self) -> None:
        """Write the file where it is not there: its name holds a hash of its contents, and another run may read it."""
        if self.file.is_file():
            return
        columns: dict[str, list[object]] = {
            "prompt": [json.dumps(prompt) for prompt in self.prompts],
            "data_source": [SOURCE] * len(self.prompts),
        }
        if self.has_environments:  # a mark for the checks of records
            columns["extra_info"] = [{"environment": SOURCE}] * len(self.prompts)
        # A name of this process alone: another script with the same rows may write them now.
        own = self.file.with_name(f"{self.file.stem}-{os.getpid()}{self.file.suffix}")
        with published(own) as partial:
            pq.write_table(pyarrow.table(columns), partial)
        own.replace(self.file)


def read_data(given: Rows, argument: str, folder: Path, environments: Environments | None = None) -> DataSet:
    """Read a data set, whose file will be in a folder.

    argument: train_dataset or eval_dataset, for messages. environments: the ones that play the rows.

    Raises ConfigError or DataError for what cannot be trained.
    """
    rows, prompts = read_rows(given, argument), []
    for number, row in enumerate(rows):
        place = f"{argument}, row {number} (the first is 0)"
        if environments is not None and isinstance(row, Mapping):
            environments.name_of(row, place)
            row = {"prompt": EMPTY, **row}
        prompts.append(_prompt(row, place))
    if not prompts:
        raise DataError(f"{argument} has no row")
    digest = hashlib.sha256(json.dumps([prompts, environments is not None]).encode()).hexdigest()[:12]
    file = folder / f"{argument.partition('_')[0]}-{digest}.parquet"
    return DataSet(file, rows, prompts, has_environments=environments is not None)


def read_rows(given: Rows, argument: str) -> Sequence[Mapping[str, object]]:
    """Read the rows of a data set, all columns. Raises ConfigError for something else, DataError for a bad file."""
    if isinstance(given, str | Path):
        return _read_file(Path(given), argument)
    if isinstance(given, Mapping):
        raise ConfigError(f"{argument}: found a mapping of data sets ({', '.join(map(str, given))}); give one of them")
    if not hasattr(given, "__len__") or not hasattr(given, "__getitem__"):
        raise ConfigError(
            f"{argument}: expected a Dataset, a list of rows or a file, found {type(given).__name__}; of a stream give "
            "the rows to train on: list(stream.take(1000))"
        )
    return cast("Sequence[Mapping[str, object]]", given)


def _read_file(path: Path, argument: str) -> Sequence[Mapping[str, object]]:
    if not path.is_file():
        raise DataError(
            f"{argument}={path}: no such file; give a parquet or JSON lines file, or a Dataset of the package datasets "
            f"({install_extra('hub')}): load_dataset(NAME, split='train')"
        )
    if path.suffix != ".parquet":
        return _read_json(path, argument)
    try:
        table = pq.read_table(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{argument}={path}: expected a parquet or JSON lines file; {error}") from error
    return cast("list[dict[str, object]]", table.to_pylist())


def _read_json(path: Path, argument: str) -> Sequence[Mapping[str, object]]:
    """Read values as they are written. A column that a row does not have is None in it, as a `Dataset` has it."""
    rows: list[Mapping[str, object]] = []
    for number, row in enumerate(read_objects(str(path))):
        if isinstance(row, BadRow):
            raise DataError(
                f"{argument}={row_place(str(path), number)}: {row}; a file that is no .parquet is read as JSON lines"
            )
        rows.append(row)
    names = dict.fromkeys(name for row in rows for name in row if name != "prompt")
    return [{**names, **row} for row in rows]


def _is_empty(value: object) -> bool:
    return value is None or (isinstance(value, Sized) and len(value) == 0)  # an array of numpy has no truth value


def _prompt(row: object, place: str) -> list[Mapping[str, object]]:
    """Return the messages of a row. Raises DataError."""
    if not isinstance(row, Mapping) or "prompt" not in row:
        columns = ", ".join(map(str, row)) if isinstance(row, Mapping) else repr(row)[:80]
        raise DataError(f"{place}: expected a column prompt, found {columns}")
    if pictures := [name for name in ("image", "images") if not _is_empty(row.get(name))]:
        raise DataError(
            f"{place}: column {pictures[0]}: this door reads text; images are a column of agentrl (docs/vision.md)"
        )
    prompt = row["prompt"]
    if isinstance(prompt, str):
        raise DataError(
            f"{place}: prompt is a text, which TRL continues without a chat template; agentrl's policies answer "
            f"messages: give [{{'role': 'user', 'content': {prompt[:40]!r}}}]"
        )
    if not isinstance(prompt, list) or not all(isinstance(message, Mapping) for message in prompt):
        raise DataError(f"{place}: prompt: expected a list of messages, found {prompt!r:.100}")
    messages: list[Mapping[str, object]] = [
        {key: value for key, value in message.items() if value is not None} for message in prompt
    ]
    try:
        json.dumps(messages)
    except (TypeError, ValueError) as error:
        raise DataError(f"{place}: prompt: expected messages of texts, which JSON can write: {error}") from None
    return messages
