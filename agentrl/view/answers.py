"""The process that answers questions with DuckDB: see `agentrl.view.questions`, whose child it is.

DuckDB reads, of each file, only the columns that a question needs. It runs in memory, cannot open files or load
extensions, and its regular expressions are RE2's, which take linear time. A question is interrupted at its time limit.
Where a function ignores interrupts, or takes memory outside DuckDB's own, the process is ended
(`agentrl.view.children`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import duckdb
import pyarrow as pa
from pydantic import TypeAdapter

from agentrl.errors import DataError, first_line
from agentrl.trajectory.parquet import SCHEMA
from agentrl.view.children import Said, answer_all
from agentrl.view.folder import Folder
from agentrl.view.parts import Part, source
from agentrl.view.questions import (
    COLUMNS,
    CONDITIONS,
    MEMORY,
    MOST_ROWS,
    OF_THE_GROUP,
    OF_THE_UPDATE,
    PROMPT,
    TOO_LARGE,
    Found,
    Question,
)

THREADS = 2
SETTINGS = (
    f"threads = {THREADS}",
    f"memory_limit = '{MEMORY}'",
    "temp_directory = ''",
    "python_enable_replacements = false",
    "autoinstall_known_extensions = false",
    "autoload_known_extensions = false",
    "allow_community_extensions = false",
    "enable_external_access = false",
    "lock_configuration = true",
)
"""DuckDB's, in this order: the last ones forbid to change any."""


class _TooLong(Exception):
    """A question's time is over."""


def answer(request: Said) -> Iterator[Mapping[str, object]]:
    """Yield a line that the question has a meaning, and a line for each part; or a line that names its fault."""
    folder, parts = Folder(str(request["folder"])), TypeAdapter(list[Part]).validate_python(request["parts"])
    try:
        if "row" in request:
            yield {"prompt": _prompt(folder, parts[0], int(str(request["row"])))}
        else:
            question = TypeAdapter(Question).validate_python(request["question"])
            yield from _found(folder, parts, question, float(str(request["seconds"])))
    except DataError as error:
        yield {"error": str(error)}


def _found(folder: Folder, parts: Sequence[Part], question: Question, seconds: float) -> Iterator[Mapping[str, object]]:
    """Raises DataError for a question without a meaning."""
    end, rows = time.monotonic() + seconds, 0
    try:
        check(question, seconds)
    except _TooLong as error:
        raise DataError(question.too_long(seconds)) from error
    yield {"has_meaning": True}
    with _database() as database:
        for part in parts:
            left = end - time.monotonic()
            if left <= 0 or (not question.order and rows >= question.limit):
                return
            try:
                found = _ask_part(database, folder, part, question, left)
            except DataError as error:
                yield {"problem": str(error)}
            except _TooLong:
                return
            else:
                rows += len(found)
                yield {"rows": found}


def check(question: Question, seconds: float) -> None:
    """Raise DataError for a question that no file could answer, e.g. a condition that is no SQL, and _TooLong."""
    try:
        if question.where:
            duckdb.SQLExpression(question.where)
    except duckdb.Error as error:
        raise DataError(f"where={question.where:.200}: want one SQL condition. {first_line(error)}") from error
    with _database() as database:
        if question.regex:  # by itself: over no rows DuckDB need not look at a pattern
            _execute(database, "select regexp_matches('', ?)", question, [question.regex], seconds)
        names = [name for name in _names(question) if name != "row"]
        empty = _view(SCHEMA.names, _update_columns() if question.words & OF_THE_UPDATE.keys() else None, question)
        database.register("raw", SCHEMA.empty_table())
        if question.words & OF_THE_UPDATE.keys():
            fields = {"uid": pa.string(), **{name: pa.list_(pa.list_(pa.float32())) for name in _update_columns()}}
            database.register("raw_update", pa.schema(fields).empty_table())
        conditions, parameters = _conditions(question)
        sql = f"select {_quoted(names)} from ({empty}) {conditions}"
        _execute(database, sql, question, parameters, seconds)


def _update_columns() -> list[str]:
    return sorted({name for _, needed, _ in OF_THE_UPDATE.values() for name in needed})


@contextmanager
def _database() -> Iterator[duckdb.DuckDBPyConnection]:
    """Open a database in memory that can reach only the tables registered in it."""
    with duckdb.connect(":memory:") as database:
        for setting in SETTINGS:
            database.execute(f"set {setting}")
        yield database


def _ask_part(
    database: duckdb.DuckDBPyConnection, folder: Folder, part: Part, question: Question, seconds: float
) -> list[Found]:
    """Return the rows of one part. Raises DataError for a file that cannot be read, _TooLong."""
    raw = source(folder, part)
    columns, values = list(raw.schema.names), None
    database.register("raw", raw)
    if part.update is not None and question.words & OF_THE_UPDATE.keys():
        update = folder.dataset(part.update)
        values = list(update.schema.names)
        database.register("raw_update", update)
    conditions, parameters = _conditions(question)
    order = question.order
    ordered = f'order by "{order.removeprefix("-")}" {"desc" if order.startswith("-") else "asc"} nulls last, row'
    view = f"from ({_view(columns, values, question, COLUMNS)})"
    last = f"{ordered if order else 'order by row'} limit {question.limit + 1}"
    begun = time.monotonic()
    try:
        if conditions and question.limit < MOST_ROWS:
            # Finding these rows takes the columns of the conditions alone: most files have no such row.
            few = _view(columns, values, question, [name for name in COLUMNS if name in question.words])
            found = _execute(database, f"select row from ({few}) {conditions} {last}", question, parameters, seconds)
            rows = found["row"].to_pylist()
            if not rows:
                return []
            conditions, parameters = f"where row in ({', '.join(map(str, rows))})", []
            seconds -= time.monotonic() - begun
        sql = f"select {_quoted(_names(question))} {view} {conditions} {last}"
        table = _execute(database, sql, question, parameters, max(seconds, 0.1))
        where: Found = {"part": part.name, "set": part.set, "step": part.step, "batch": part.batch}
        return [{**where, **row} for row in table.to_pylist()]
    except MemoryError as error:  # Arrow's is one, too
        raise DataError(TOO_LARGE) from error
    except (pa.ArrowException, OSError, ValueError) as error:
        raise folder.damaged(part.file, error) from error


def _execute(
    database: duckdb.DuckDBPyConnection, sql: str, question: Question, parameters: Sequence[object], seconds: float
) -> pa.Table:
    timer = threading.Timer(seconds, database.interrupt)
    timer.start()
    try:
        return database.sql(sql, params=list(parameters)).to_arrow_table()
    except (duckdb.InterruptException, RuntimeError) as error:
        if "interrupted" not in str(error).lower():  # fetching says so with a plain RuntimeError
            raise
        raise _TooLong from error
    except duckdb.OutOfMemoryException as error:
        raise DataError(TOO_LARGE) from error
    except duckdb.Error as error:
        raise DataError(f"the question {question.asked!r:.200} cannot be asked: {first_line(error)}") from error
    finally:
        timer.cancel()


def _names(question: Question) -> list[str]:
    more = [name for name in (*OF_THE_GROUP, *OF_THE_UPDATE) if name in question.words]
    return ["row", *COLUMNS, *more]


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


def _view(
    columns: Sequence[str], values: Sequence[str] | None, question: Question, of_all: Collection[str] = COLUMNS
) -> str:
    """SQL of the table that is asked: the file's columns, `of_all` of COLUMNS, and the others that it names."""
    missing = [f'null::{_sql_type(name)} as "{name}"' for name in SCHEMA.names if name not in columns]
    base = f"select *, row_number() over () - 1 as row{''.join(f', {one}' for one in missing)} from raw"
    kept = [name for name in SCHEMA.names if name not in COLUMNS]
    derived = _derived(question, of_all)
    wanted = [name for name in OF_THE_UPDATE if name in question.words]
    if wanted and values is not None:
        base = _with_update(base, [name for name in _update_columns() if name in values])
    for name in wanted:
        sql, needed, _ = OF_THE_UPDATE[name]
        derived.append(f"{sql if values is not None and {*needed} <= {*values} else 'null::DOUBLE'} as {name}")
    return f'select row, {_quoted(kept)}, {", ".join(derived)} from ({base}) window one_group as (partition by "group")'


def _derived(question: Question, of_all: Collection[str]) -> list[str]:
    """SQL of the columns derived from a row, and from its group where the question asks for it."""
    found = [f'{sql} as "{name}"' for name, (sql, _) in COLUMNS.items() if name in of_all]
    found += [f"{sql} as {name}" for name, (sql, _) in OF_THE_GROUP.items() if name in question.words]
    return [*found, f"{PROMPT} as prompt"] if question.prompt else found


def _with_update(base: str, columns: Sequence[str]) -> str:
    """SQL of a table with `columns` of the update's file next to its own, by uid and, of equal ones, by order."""
    numbers = "".join(f', u."{name}"' for name in columns)
    nth = "row_number() over (partition by uid order by {}) as nth"
    places = "select *, row_number() over () as place from raw_update"
    return (
        f"select r.*{numbers} from (select *, {nth.format('row')} from ({base})) r "
        f"left join (select *, {nth.format('place')} from ({places})) u on r.uid = u.uid and r.nth = u.nth"
    )


def _sql_type(name: str) -> str:
    """SQL type of a column of SCHEMA that an older file may lack."""
    field = SCHEMA.field(name).type
    if pa.types.is_list(field) and pa.types.is_string(field.value_type):
        return "VARCHAR[]"
    if pa.types.is_map(field):
        return "MAP(VARCHAR, DOUBLE)"
    plain = {"int64": "BIGINT", "int32": "INTEGER", "double": "DOUBLE", "bool": "BOOLEAN"}
    return plain.get(str(field), "VARCHAR")


TEXTS = (
    "list_concat(list_transform(messages, lambda m: m.content), list_transform(messages, lambda m: m.other), "
    "list_transform(turns, lambda t: t.text), list_transform(calls, lambda c: c.response), "
    "list_transform(calls, lambda c: c.arguments), [uid, failure])"
)


def _conditions(question: Question) -> tuple[str, list[object]]:
    """SQL of all conditions, and the values of its parameters."""
    found, parameters = list[str](), list[object]()

    def add(sql: str, value: object) -> None:
        found.append(sql)
        parameters.append(value)

    if question.where:
        found.append(f"(\n{question.where}\n)")
    if question.text:
        add(f"len(list_filter({TEXTS}, lambda t: contains(lower(t), lower(?)))) > 0", question.text)
    if question.regex:
        add(f"len(list_filter({TEXTS}, lambda t: regexp_matches(t, ?))) > 0", question.regex)
    for name, sql in CONDITIONS.items():
        if value := getattr(question, name):
            add(sql, value)
    if question.reward_from is not None:
        add("coalesce(reward, score) >= ?", question.reward_from)
    if question.reward_to is not None:
        add("coalesce(reward, score) <= ?", question.reward_to)
    return (f"where {' and '.join(found)}" if found else ""), parameters


def _prompt(folder: Folder, part: Part, row: int) -> str:
    with _database() as database:
        database.register("raw", source(folder, part))
        sql = f"select {PROMPT} from (select messages, turns, row_number() over () - 1 as row from raw) where row = ?"
        try:
            found = database.execute(sql, [row]).fetchone()
        except (duckdb.Error, pa.ArrowException, OSError) as error:
            raise folder.damaged(part.file, error) from error
    if found is None or not found[0]:
        raise DataError(f"{part.name}, row {row}: there is no prompt")
    return str(found[0])


if __name__ == "__main__":
    pa.set_cpu_count(THREADS)
    answer_all(answer)
