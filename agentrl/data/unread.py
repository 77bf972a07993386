"""Columns of data files that nothing reads. They are named once for each file of any format."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import pyarrow as pa

from agentrl.data.messages import EMPTY

MOST_NAMED = 20
"""Columns that a note names; rows of JSON may have any number of members."""


class UnreadColumns:
    """The columns of one file that rows fill and nothing reads, in the order in which they come."""

    def __init__(self, read: Collection[str]) -> None:
        """`read`: names of the columns that are read."""
        self._read = frozenset(read)
        self._found: dict[str, None] = {}

    def note_schema(self, schema: pa.Schema) -> None:
        """Note the columns of a table, but for those without any value."""
        self.note(field.name for field in schema if not pa.types.is_null(field.type))

    def note_row(self, row: Mapping[str, object]) -> None:
        """Note the members of a row of JSON that are filled."""
        if not self._read.issuperset(row):
            self.note(name for name, value in row.items() if value not in EMPTY)

    def note(self, names: Iterable[str]) -> None:
        """Note columns by their names."""
        self._found.update((name, None) for name in names if name not in self._read)

    def told(self) -> str:
        """Write the note; empty where every column is read."""
        if not self._found:
            return ""
        named = ", ".join(list(self._found)[:MOST_NAMED])
        more = len(self._found) - MOST_NAMED
        return f"columns that are not read: {named}{f' and {more} more' if more > 0 else ''}"
