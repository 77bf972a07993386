"""Questions to a run's trajectories: SQL conditions, texts and regular expressions, a file at a time.

DuckDB reads, of each file, only the columns that a question needs. It runs in memory, cannot open files or load
extensions, and its regular expressions are RE2's, which take linear time; a question has a time limit.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeAlias

import duckdb
import pyarrow as pa

from agentrl.errors import DataError, first_line
from agentrl.system.json_value import JSON
from agentrl.tool import MALFORMED
from agentrl.trajectory.parquet import SCHEMA
from agentrl.view.parts import Part, source
from agentrl.view.run import Run

SECONDS = 20.0
"""Time limit of a question; what was found until then is shown, and said to be a part."""
MOST_ROWS = 5000
MEMORY = "1GB"
SETTINGS = (
    "threads = 2",
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
Found: TypeAlias = dict[str, JSON]

PROMPT = (
    "array_to_string(list_transform(messages[1:coalesce(nullif(list_position(list_transform(messages, "
    "lambda m: m.role), 'assistant'), 0) - 1, len(messages))], "
    "lambda m: m.role || ': ' || coalesce(m.content, m.other, '')), chr(10))"
)
_MALFORMED = ", ".join(f"'{one}'" for one in sorted(MALFORMED))
COLUMNS: Mapping[str, tuple[str, str]] = {
    "uid": ("uid", "the trajectory's name"),
    "group": ('"group"', "trajectories of one prompt share it"),
    "data_source": ("data_source", "where the prompt is from"),
    "agent_name": ("agent_name", "the agent loop"),
    "status": ("status", "how it ended: completed, length, turn_limit, malformed, timeout, aborted, failed"),
    "failure": ("failure", "cause of a failure"),
    "score": ("score", "the scorer's value"),
    "reward": ("reward", "what it was trained on"),
    "num_turns": ("num_turns", "assistant turns"),
    "tokens": (
        'coalesce(list_sum(list_transform(flatten(versions), lambda s: s."end" - s.start)), 0)::BIGINT',
        "tokens that the policy sampled",
    ),
    "length": (
        'greatest(coalesce(list_max(list_transform(turns, lambda t: t."end")), 0), coalesce(prompt_length[1], 0))',
        "tokens of the longest context window, prompt included",
    ),
    "num_calls": ("coalesce(len(calls), 0)", "tool calls"),
    "errors": ("coalesce(len(list_filter(calls, lambda c: c.error is not null)), 0)", "calls that ended in an error"),
    "malformed": (
        f"coalesce(len(list_filter(calls, lambda c: c.error in ({_MALFORMED}))), 0)",
        "calls of an unknown tool, or with unreadable or wrong arguments",
    ),
    "truncated": ("coalesce(len(list_filter(calls, lambda c: c.truncated)), 0)", "calls whose answer was cut"),
    "tool_seconds": ("coalesce(list_max(list_transform(calls, lambda c: c.seconds)), 0)", "longest wait for a tool"),
    "tools": ("list_sort(list_distinct(list_transform(calls, lambda c: c.name)))", "names of the tools called"),
    "kinds": ("list_sort(list_distinct(list_transform(calls, lambda c: c.error)))", "kinds of its calls' errors"),
    "seconds": ("map_extract(metrics, 'generate_seconds')[1]", "time that generating took"),
    "version": ("list_min(list_transform(flatten(versions), lambda s: s.version))", "oldest weights that sampled it"),
}
"""SQL and meaning of the columns of a table of trajectories. Beside them a condition may use those of the file."""
OF_THE_GROUP: Mapping[str, tuple[str, str]] = {
    "equal_group": (
        "count(reward) over one_group > 1 and min(reward) over one_group = max(reward) over one_group",
        "its group's rewards are all equal, so that it teaches nothing",
    )
}


def _pairs(left: str, right: str, value: str) -> str:
    """SQL list of `value` of z[1] and z[2], the numbers of two columns at each token that has both."""
    both = f"list_zip(flatten({left}), flatten({right}))"
    return f"list_transform(list_filter({both}, lambda z: z[1] is not null and z[2] is not null), lambda z: {value})"


OF_THE_UPDATE: Mapping[str, tuple[str, tuple[str, ...], str]] = {
    "gap_max": (
        f"list_max({_pairs('logprobs', 'trainer_logprobs', 'abs(z[1] - z[2])')})",
        ("trainer_logprobs",),
        "largest difference of the engine's and the trainer's log-probs",
    ),
    "gap_mean": (
        f"list_avg({_pairs('logprobs', 'trainer_logprobs', 'abs(z[1] - z[2])')})",
        ("trainer_logprobs",),
        "mean difference of the engine's and the trainer's log-probs",
    ),
    "entropy_mean": ("list_avg(flatten(entropy))", ("entropy",), "mean entropy of its tokens"),
    "advantage": ("list_avg(flatten(advantages))", ("advantages",), "mean advantage of its tokens"),
    "weight_max": ("list_max(flatten(weights))", ("weights",), "largest importance weight"),
    "clipped_share": (
        "list_avg(list_transform(flatten(clipped), lambda c: c::INT))",
        ("clipped",),
        "share of its tokens whose ratio was clipped",
    ),
}
"""SQL, columns of the update's file that it needs, and meaning."""
READY: Sequence[tuple[str, str, str]] = (
    ("Largest engine-trainer gap", "gap_max is not null", "-gap_max"),
    ("Malformed calls", "malformed > 0", "-malformed"),
    ("Groups of equal reward", "equal_group", ""),
    ("Longest tool wait", "num_calls > 0", "-tool_seconds"),
    ("Cut answers", "status = 'length' or truncated > 0", ""),
    ("Failed", "status in ('failed', 'timeout', 'aborted')", ""),
    ("Longest", "", "-tokens"),
    ("Right answers without a call", "score >= 1 and num_calls = 0", ""),
)
"""Name, condition and order of questions that are asked often."""


CONDITIONS: Mapping[str, str] = {
    "status": "status = ?",
    "tool": "list_contains(tools, ?)",
    "error": "list_contains(kinds, ?)",
    "source": "data_source = ?",
    "prompt": "prompt = ?",
}
"""SQL of the options that are one value."""


@dataclass(frozen=True, slots=True)
class Question:
    """Conditions that must all hold."""

    where: str = ""
    """SQL over COLUMNS, OF_THE_GROUP, OF_THE_UPDATE and the file's own columns."""
    text: str = ""
    """Is found in a message, turn, call or answer; capitals count as small letters."""
    regex: str = ""
    """The same as a regular expression (RE2)."""
    status: str = ""
    tool: str = ""
    error: str = ""
    source: str = ""
    reward_from: float | None = None
    reward_to: float | None = None
    prompt: str = ""
    """The prompt's whole text, as PROMPT has it."""
    order: str = ""
    """A column's name, with - before it descending; empty: as in the files."""
    limit: int = 200

    @property
    def words(self) -> set[str]:
        """Names that stand in it, and those that its other conditions read."""
        read = [
            name for option in CONDITIONS if getattr(self, option) for name in re.findall(r"\w+", CONDITIONS[option])
        ]
        others = ["reward", "score", "uid", "failure"]
        return {*re.findall(r"[A-Za-z_]\w*", f"{self.where} {self.order}".lower()), *read, *others}


@dataclass(slots=True)
class Answer:
    """Rows that were found, and how much was searched."""

    rows: list[Found]
    searched: int
    parts: int
    problems: list[str]
    """Files that could not be read."""
    is_cut: bool = False
    """There may be more rows than the limit."""


class _TooLong(Exception):
    """A question's time is over."""


def ask(run: Run, parts: Sequence[Part], question: Question) -> Answer:
    """Ask the parts in their order. Raises DataError, in words, for a condition that is no SQL or has no meaning."""
    check(question)
    answer = Answer([], 0, len(parts), [])
    begun = time.monotonic()
    with _database() as database:
        for part in parts:
            left = SECONDS - (time.monotonic() - begun)
            if left <= 0 or (not question.order and len(answer.rows) >= question.limit):
                break
            try:
                answer.rows += _ask_part(database, run, part, question, left)
            except DataError as error:
                answer.problems.append(str(error))
            except _TooLong:
                break
            answer.searched += 1
            _keep_best(answer, question)
    return answer


def check(question: Question) -> None:
    """Raise DataError for a question that no file could answer: a condition that is no SQL, an unknown order."""
    known = {*COLUMNS, *OF_THE_GROUP, *OF_THE_UPDATE}
    if question.order and question.order.removeprefix("-") not in known:
        raise DataError(f"order={question.order}: want one of {', '.join(sorted(known))}, perhaps with - before it")
    if not 0 < question.limit <= MOST_ROWS:
        raise DataError(f"limit={question.limit}: want a number from 1 to {MOST_ROWS}")
    try:
        if question.where:
            duckdb.SQLExpression(question.where)
    except duckdb.Error as error:
        raise DataError(f"where={question.where}: want one SQL condition. {first_line(error)}") from error
    with _database() as database:
        if question.regex:  # by itself: over no rows DuckDB need not look at a pattern
            _execute(database, "select regexp_matches('', ?)", question, [question.regex], SECONDS)
        names = [name for name in _names(question) if name != "row"]
        empty = _view(SCHEMA.names, _update_columns() if question.words & OF_THE_UPDATE.keys() else None, question)
        database.register("raw", SCHEMA.empty_table())
        if question.words & OF_THE_UPDATE.keys():
            fields = {"uid": pa.string(), **{name: pa.list_(pa.list_(pa.float32())) for name in _update_columns()}}
            database.register("raw_update", pa.schema(fields).empty_table())
        conditions, parameters = _conditions(question)
        sql = f"select {_quoted(names)} from ({empty}) {conditions}"
        try:
            _execute(database, sql, question, parameters, SECONDS)
        except _TooLong as error:
            raise DataError(f"where={question.where}: it alone takes more than {SECONDS:.0f} seconds") from error


def _update_columns() -> list[str]:
    return sorted({name for _, needed, _ in OF_THE_UPDATE.values() for name in needed})


@contextmanager
def _database() -> Iterator[duckdb.DuckDBPyConnection]:
    """Open a database in memory that can reach nothing but what is registered in it."""
    with duckdb.connect(":memory:") as database:
        for setting in SETTINGS:
            database.execute(f"set {setting}")
        yield database


def _ask_part(
    database: duckdb.DuckDBPyConnection, run: Run, part: Part, question: Question, seconds: float
) -> list[Found]:
    """Return the rows of one part. Raises DataError for a file that cannot be read, _TooLong."""
    raw = source(run.folder, part)
    columns, values = list(raw.schema.names), None
    database.register("raw", raw)
    if part.update is not None and question.words & OF_THE_UPDATE.keys():
        update = run.folder.dataset(part.update)
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
            # Which rows they are takes the columns of the conditions alone: most files have none of them.
            few = _view(columns, values, question, [name for name in COLUMNS if name in question.words])
            found = _execute(database, f"select row from ({few}) {conditions} {last}", question, parameters, seconds)
            rows = found["row"].to_pylist()
            if not rows:
                return []
            conditions, parameters = f"where row in ({', '.join(map(str, rows))})", []
            seconds -= time.monotonic() - begun
        sql = f"select {_quoted(_names(question))} {view} {conditions} {last}"
        table = _execute(database, sql, question, parameters, max(seconds, 0.1))
    except (pa.ArrowException, OSError) as error:
        raise run.folder.damaged(part.file, error) from error
    where: Found = {"part": part.name, "set": part.set, "step": part.step, "batch": part.batch}
    return [{**where, **row} for row in table.to_pylist()]


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
        raise DataError(f"the question needs more than {MEMORY} of memory: ask for fewer columns") from error
    except duckdb.Error as error:
        asked = question.where or question.regex or question.text
        raise DataError(f"the question {asked!r} cannot be asked: {first_line(error)}") from error
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
    """SQL of what is made of a row, and of its group where that is asked for."""
    found = [f'{sql} as "{name}"' for name, (sql, _) in COLUMNS.items() if name in of_all]
    found += [f"{sql} as {name}" for name, (sql, _) in OF_THE_GROUP.items() if name in question.words]
    return [*found, f"{PROMPT} as prompt"] if question.prompt else found


def _with_update(base: str, columns: Sequence[str]) -> str:
    """SQL of a table with `columns` of the update's file beside its own, by uid and, of equal ones, by order."""
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


def _keep_best(answer: Answer, question: Question) -> None:
    """Sort by the order asked for, and keep the first rows."""
    if question.order:
        name = question.order.removeprefix("-")
        known = [row for row in answer.rows if row[name] is not None]
        none = [row for row in answer.rows if row[name] is None]
        known.sort(key=lambda row: _sortable(row[name]), reverse=question.order.startswith("-"))
        answer.rows = known + none
    answer.is_cut |= len(answer.rows) > question.limit
    del answer.rows[question.limit :]


def _sortable(value: JSON) -> tuple[float, str]:
    return (float(value), "") if isinstance(value, int | float) else (0.0, str(value))


def step_question(parts: Sequence[Part]) -> Question:
    """Ask for all of a step's trajectories, with the update's numbers where a file of them is there."""
    names = [*OF_THE_UPDATE] if any(part.update for part in parts) else []
    condition = " or ".join(f"{name} is null or true" for name in ["equal_group", *names])
    return replace(Question(), where=condition, limit=MOST_ROWS)


def prompt_of(run: Run, part: Part, row: int) -> str:
    """Return the text of a trajectory's prompt. Raises DataError where there is none."""
    with _database() as database:
        raw = source(run.folder, part)
        database.register("raw", raw)
        sql = f"select {PROMPT} from (select messages, row_number() over () - 1 as row from raw) where row = ?"
        found = database.execute(sql, [row]).fetchone()
    if found is None or not found[0]:
        raise DataError(f"{part.name}, row {row}: there is no prompt")
    return str(found[0])
