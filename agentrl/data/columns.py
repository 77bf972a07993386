"""Checks of a data file's columns, a batch at a time without making Python rows.

A column of a wrong type spoils the whole file: `check_types` raises. A wrong value spoils its row: `bad_rows` names it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import pyarrow as pa
import pyarrow.compute as pc

from agentrl.data.messages import CALLS, OLD_ROLES, ROLES, Unfit, read_messages
from agentrl.errors import DataError

TEXT = ("data_source", "ability", "agent_name")
MAPPINGS = ("reward_model", "tools_kwargs", "interaction_kwargs", "extra_info")
IN_EXTRA_INFO = ("agent_name", "tools_kwargs", "interaction_kwargs")
"""Columns found at the top level, or else inside `extra_info`."""


@dataclass(frozen=True, slots=True)
class BadValue:
    """One row, numbered in its batch, and its fault."""

    row: int
    column: str
    expected: str
    found: str


def wanted_columns(schema: pa.Schema, prompt_key: str, image_key: str | None) -> list[str]:
    """List the columns of the file that rows are made of."""
    return [name for name in schema.names if name in (prompt_key, image_key, *TEXT, *MAPPINGS)]


def check_types(schema: pa.Schema, prompt_key: str, image_key: str | None, file: str) -> None:
    """Raise DataError for a file without prompts or with a column of a type that no row can have."""
    if prompt_key not in schema.names:
        raise DataError(
            f"{file}: there is no column {prompt_key!r} with the messages; its columns are {', '.join(schema.names)}. "
            "Name the right one with data.prompt_key"
        )
    check_names(schema, wanted_columns(schema, prompt_key, image_key), file)
    problem = prompt_problem(schema.field(prompt_key).type)
    if problem is not None:
        raise DataError(
            f"{file}, column {prompt_key}: expected a list of messages {{role, content}} in text, or that list in JSON "
            f"text, found {problem}"
        )
    if image_key in schema.names and not holds_images(schema.field(image_key).type):
        raise DataError(
            f"{file}, column {image_key}: expected a list of images, each {{bytes, path}}, bytes or a path, found "
            f"{schema.field(image_key).type}. If it holds something else, set data.image_key=null"
        )
    for name, column_type in typed_columns(schema):
        base = name.removeprefix("extra_info.")
        if base in TEXT and not is_text(column_type):
            raise DataError(f"{file}, column {name}: expected text, found {column_type}")
        if base in MAPPINGS and not is_struct(column_type):
            raise DataError(f"{file}, column {name}: expected a struct (a mapping), found {column_type}")
        if base == "tools_kwargs" and pa.types.is_struct(column_type):
            for field in column_type:
                if not is_struct(field.type):
                    raise DataError(
                        f"{file}, column {name}.{field.name}: expected a struct such as {{create_kwargs: {{...}}}}, "
                        f"found {field.type}"
                    )


def check_names(schema: pa.Schema, columns: Iterable[str], file: str) -> None:
    """Raise DataError when one of `columns`, or a field in one, is there twice, and so is ambiguous."""
    for name in columns:
        twice = name if schema.names.count(name) > 1 else _twice(schema.field(name).type, name)
        if twice is not None:
            raise DataError(
                f"{file}, column {twice}: expected one of that name, found several. Rename or drop the others"
            )


def _twice(column_type: pa.DataType, path: str) -> str | None:
    """Find a field that a type holds twice, by its dotted path."""
    if isinstance(column_type, pa.DictionaryType):
        column_type = column_type.value_type
    fields = [column_type.field(index) for index in range(column_type.num_fields)]
    names = [field.name for field in fields]
    own = next((f"{path}.{name}" for name in names if names.count(name) > 1), None)
    inside = (_twice(field.type, f"{path}.{field.name}") for field in fields)
    return own or next((found for found in inside if found is not None), None)


def prompt_problem(column_type: pa.DataType) -> str | None:
    """Explain why a column cannot hold messages; None when it can."""
    if is_text(column_type):
        return None
    if not is_list(column_type):
        return str(column_type)
    message = column_type.value_type
    if not pa.types.is_struct(message):
        return f"a list of {message}"
    names = [field.name for field in message]
    for name in ("role", "content"):
        if name not in names:
            return f"messages without {name}: {message}"
        kind = message.field(name).type
        is_parts = name == "content" and is_list(kind) and pa.types.is_struct(kind.value_type)
        if not (is_text(kind) or is_parts):
            return f"{name} of type {kind}"
    return None


def is_list(column_type: pa.DataType) -> bool:
    """Check for a list type."""
    return pa.types.is_list(column_type) or pa.types.is_large_list(column_type)


def holds_images(column_type: pa.DataType) -> bool:
    """Check for a list of images: {bytes, path}, bytes or paths."""
    if pa.types.is_null(column_type):
        return True
    if not is_list(column_type):
        return False
    item = column_type.value_type
    if pa.types.is_struct(item):
        return any(field.name in ("bytes", "path") for field in item)
    return is_text(item) or pa.types.is_binary(item) or pa.types.is_large_binary(item)


def typed_columns(schema: pa.Schema) -> Iterator[tuple[str, pa.DataType]]:
    """Iterate over name and type of every optional column; columns inside `extra_info` have dotted names."""
    for name in (*TEXT, *MAPPINGS):
        if name in schema.names:
            yield name, schema.field(name).type
    if "extra_info" in schema.names and pa.types.is_struct(schema.field("extra_info").type):
        for field in schema.field("extra_info").type:
            if field.name in IN_EXTRA_INFO:
                yield f"extra_info.{field.name}", field.type


def is_text(column_type: pa.DataType) -> bool:
    """Check for a type of text, dictionary-encoded ones and null columns included."""
    if pa.types.is_dictionary(column_type):
        column_type = column_type.value_type
    kinds = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_null)
    return any(kind(column_type) for kind in kinds)


def is_struct(column_type: pa.DataType) -> bool:
    """Check for a struct, null columns included."""
    return pa.types.is_struct(column_type) or pa.types.is_null(column_type)


def bad_rows(batch: pa.RecordBatch, prompt_key: str) -> list[BadValue]:
    """List every row that does not fit, with the first thing that is wrong with it, in the order of the rows."""
    first = {bad.row: bad for bad in unreadable(batch)}
    readable = [row for row in range(batch.num_rows) if row not in first]
    rest = batch.take(pa.array(readable, pa.int64())) if first else batch
    found = list(bad_prompts(rest, prompt_key))
    if "data_source" in rest.schema.names:
        rows = true_rows(pc.is_null(rest.column("data_source")))
        found += [BadValue(row, "data_source", "text", "null") for row in rows]
    for bad in found:
        row = readable[bad.row]
        first.setdefault(row, replace(bad, row=row))
    return [first[row] for row in sorted(first)]


def unreadable(batch: pa.RecordBatch) -> Iterator[BadValue]:
    """Find rows with a value that Python cannot hold: text that is not UTF-8, a map with the same key twice.

    A row may be found once a column.
    """
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            column.validate(full=True)
            if not _may_be_unreadable(column.type):
                continue
        except pa.ArrowInvalid:
            pass
        for row in range(batch.num_rows):
            try:
                column.slice(row, 1).to_pylist(maps_as_pydicts="strict")
            except UnicodeDecodeError as error:
                yield BadValue(row, name, "UTF-8 text", repr(error.object[max(0, error.start - 20) : error.end + 20]))
            except (ValueError, KeyError, OverflowError, pa.ArrowException) as error:
                yield BadValue(row, name, "a value that Python can hold (in a map no key twice)", str(error))


def _may_be_unreadable(column_type: pa.DataType) -> bool:
    """Check whether a valid value of a type may have no Python form: maps with a key twice, times too far away."""
    if isinstance(column_type, pa.DictionaryType):
        column_type = column_type.value_type
    if pa.types.is_map(column_type) or pa.types.is_temporal(column_type):
        return True
    return any(_may_be_unreadable(column_type.field(index).type) for index in range(column_type.num_fields))


def bad_prompts(batch: pa.RecordBatch, prompt_key: str) -> Iterator[BadValue]:
    """Find prompts that are empty, or have an invalid message. Plain messages are checked without Python rows."""
    prompt = batch.column(prompt_key)
    if is_text(prompt.type):
        yield from _bad_messages(prompt, range(len(prompt)), prompt_key)
        return
    empty = pc.fill_null(pc.equal(pc.list_value_length(prompt), 0), True)
    for row in true_rows(empty):
        yield BadValue(row, prompt_key, "at least one message", repr(prompt[row].as_py()))
    messages, rows = pc.list_flatten(prompt), pc.list_parent_indices(prompt)
    role = pc.struct_field(messages, "role").cast(pa.string())
    for position in true_rows(pc.invert(pc.is_in(role, pa.array([*ROLES, *OLD_ROLES])))):
        row = rows[position].as_py()
        yield BadValue(row, f"{prompt_key}.role", f"one of {', '.join(ROLES)}", repr(role[position].as_py()))
    calling = pc.is_null(role)
    for name in CALLS:
        if any(field.name == name for field in messages.type):
            calling = pc.or_(calling, pc.is_valid(pc.struct_field(messages, name)))
    no_content = pc.and_not(pc.is_null(pc.struct_field(messages, "content")), calling)
    for position in true_rows(no_content):
        yield BadValue(rows[position].as_py(), f"{prompt_key}.content", "text", "null")
    calling = pc.or_(calling, pc.fill_null(pc.is_in(role, pa.array(["tool", *OLD_ROLES])), False))
    yield from _bad_messages(prompt, pc.unique(rows.filter(calling)).to_pylist(), prompt_key)


def _bad_messages(prompt: pa.Array, rows: Iterable[int], prompt_key: str) -> Iterator[BadValue]:
    for row in rows:
        try:
            read_messages(prompt[row].as_py(maps_as_pydicts="strict"))
        except Unfit as bad:
            yield BadValue(row, f"{prompt_key}, {bad.place}".removesuffix(", "), bad.expected, bad.found)


def nameless(kwargs: pa.Array) -> pa.BooleanArray:
    """Find the rows whose `interaction_kwargs`, of a struct type, hold something but no name."""
    fields = {field.name: pc.is_valid(pc.struct_field(kwargs, field.name)) for field in kwargs.type}
    named = fields.pop("name", None)
    held = pa.repeat(pa.scalar(False), len(kwargs))
    for valid in fields.values():
        held = pc.or_(held, valid)
    return held if named is None else pc.and_not(held, named)


def names_in(batch: pa.RecordBatch, default_agent_loop: str) -> Iterator[tuple[str, str, pa.BooleanArray]]:
    """Iterate over (column, name, rows that have it) for every data source, agent loop, tool and interaction that rows
    name.

    The name is empty for interaction_kwargs without one.
    """
    size = batch.num_rows
    sources = [array for _, array in candidates(batch, "data_source")]
    agents = [array for _, array in candidates(batch, "agent_name")]
    yield from by_value("data_source", pc.coalesce(*texts(sources), pa.scalar("unknown")), size)
    yield from by_value("agent_name", pc.coalesce(*texts(agents), pa.scalar(default_agent_loop)), size)
    for _, kwargs in candidates(batch, "interaction_kwargs"):
        if not pa.types.is_struct(kwargs.type):
            continue
        if (rows := nameless(kwargs)).true_count:
            yield "interaction_kwargs", "", rows
        if any(field.name == "name" for field in kwargs.type):
            yield from by_value("interaction_kwargs", texts([pc.struct_field(kwargs, "name")])[0], size)
    for _, kwargs in candidates(batch, "tools_kwargs"):
        for field in kwargs.type if pa.types.is_struct(kwargs.type) else ():
            rows = pc.is_valid(pc.struct_field(kwargs, field.name))
            if rows.true_count:
                yield "tools_kwargs", field.name, rows


def rows_without_loop(batch: pa.RecordBatch) -> int:
    """Count the rows that name no agent loop."""
    agents = texts([array for _, array in candidates(batch, "agent_name")])
    return pc.coalesce(*agents).null_count if agents else batch.num_rows


def by_value(column: str, values: pa.Array | pa.Scalar, size: int) -> Iterator[tuple[str, str, pa.BooleanArray]]:
    """Iterate over (column, value, rows that have it) for the distinct values of a column."""
    if isinstance(values, pa.Scalar):  # no such column: the default holds for every row
        values = pa.repeat(values, size)
    for name in pc.unique(values).to_pylist():
        if name is not None:
            yield column, name, pc.fill_null(pc.equal(values, name), False)


def candidates(batch: pa.RecordBatch, name: str) -> Iterator[tuple[str, pa.Array]]:
    """Iterate over the column at the top level and the one inside `extra_info`, as far as they are there."""
    if name in batch.schema.names:
        yield name, batch.column(name)
    if name in IN_EXTRA_INFO and "extra_info" in batch.schema.names:
        extra = batch.column("extra_info")
        if pa.types.is_struct(extra.type) and any(field.name == name for field in extra.type):
            yield f"extra_info.{name}", pc.struct_field(extra, name)


def texts(arrays: list[pa.Array]) -> list[pa.Array]:
    """Cast arrays to strings."""
    return [array.cast(pa.string()) for array in arrays]


def true_rows(mask: pa.BooleanArray) -> list[int]:
    """List the indices where the mask is true."""
    return pc.indices_nonzero(mask).to_pylist() if mask.true_count else []
