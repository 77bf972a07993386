"""`python -m benchmarks.fields_page > docs/openai_fields.md`: the page of every field of a request, from the table."""

from __future__ import annotations

from collections.abc import Iterator

from agentrl.openai_api import endpoint as _readers  # noqa: F401 - its models declare the members that are used
from agentrl.openai_api.fields import ANYWHERE, APIS, OTHERS, TABLE, USED, Fate, Row
from benchmarks.no_options import no_options

HEAD = """\
# Fields of the endpoint's requests

What the [endpoint](openai_endpoint.md#what-the-endpoint-speaks) does with each field of a request. `*` stands for every
other name, or for every place. A place that ends with `.type` stands for the kinds of a list's members.

| fate | consequence |
|---|---|
| used | the field does what the API's documents say |
| hint | the field is dropped, counted as `trajectory/openai_dropped_NAME`, and named once in the log |
| label | the field is dropped without a word: no server's answer depends on it |
| refused | 400 that names the field, unless its value is null or stands in the table |
| elsewhere | the same, and the error names the path of the API that knows the field |

A hint of how to sample is checked first. A field without a row is a hint. With `openai_proxy.strict=true` it is refused
unless it holds nothing (null, false, empty), and so is a member of a kind that is a hint.
"""
TITLES = {"chat": "Chat Completions", "responses": "Responses", "messages": "Messages"}


def page() -> str:
    """Write the page."""
    return "\n".join([HEAD, *(line for api in APIS for line in _section(api))])


def _section(api: str) -> Iterator[str]:
    yield f"## {TITLES[api]}\n"
    yield "| place | fields | fate | why |"
    yield "|---|---|---|---|"
    rows = [row for row in TABLE if api in row.apis.split()]
    places = dict.fromkeys([place for known, place in USED if known == api] + [row.place for row in rows])
    for place in sorted(places, key=lambda place: (place != "request", place == ANYWHERE, place)):
        if used := USED.get((api, place)):
            yield f"| {_place(place)} | {_names(sorted(used))} | used | |"
        for row in rows:
            if row.place == place:
                yield f"| {_place(place)} | {_names(row.names.split())} | {row.fate} | {_why(row)} |"
    yield ""


def _place(place: str) -> str:
    return "`*`" if place == ANYWHERE else f"`{place}`"


def _names(names: list[str]) -> str:
    return ", ".join("`*`" if name == OTHERS else f"`{name}`" for name in names)


def _why(row: Row) -> str:
    taken = " or ".join(f"`{value!r}`" for value in row.harmless)
    return f"{row.why}; taken: {taken}" if taken and row.fate is Fate.REFUSED else row.why


if __name__ == "__main__":
    no_options(__doc__)
    print(page(), end="")
