"""Messages are tested by what they name (file, row, key, value found, remedy), not by their sentences."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest

Name = str | int | Path
Names = Name | Sequence[Name]
"""One name, or several: a case of a table."""
E = TypeVar("E", bound=BaseException)


def assert_names(message: object, *names: Names) -> None:
    """Check that a message names each of these as a whole: `row 1` is not in `row 12`, nor `data.x` in `data.x.y`.

    A name is a file, a row, a key, a value that was found, or a key that helps. Where a message has none, the name is
    the word that distinguishes it. The message of an exception has its notes, too.
    """
    __tracebackhide__ = True
    text = "\n".join([str(message), *getattr(message, "__notes__", ())])
    for name in [str(one) for given in names for one in ([given] if isinstance(given, Name) else given)]:
        begin = r"(?<!\w)(?<!\d\.)" if re.match(r"\w", name) else ""
        end = r"(?!\w|\.\w)" if re.search(r"\w$", name) else ""
        assert re.search(begin + re.escape(name) + end, text), f"{name!r} is not named in: {text}"


@contextmanager
def naming(error: type[E] | tuple[type[E], ...], *names: Names) -> Iterator[pytest.ExceptionInfo[E]]:
    """Expect an error whose message names each of these."""
    __tracebackhide__ = True
    with pytest.raises(error) as told:
        yield told
    assert_names(told.value, *names)
