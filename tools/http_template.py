"""Templates with `{{ name }}` for the parts of a request, filled with what a model wrote.

A template is read once, when the tool is loaded; a value is only ever put into it, quoted for the place where it
stands, and never read as a template itself. So a value changes neither the host nor the shape of the path, and adds no
header and no parameter.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from agentrl.remote import checked_url
from agentrl.system.json_value import JSON
from agentrl.tool import ToolArgumentsError

Values = Mapping[str, JSON]
"""Arguments and row variables by name. One that is absent leaves out the key whose text names it.

So does null, except where JSON has it as the value itself."""

_NAME = re.compile(r"\{\{\s*([\w.-]+)\s*\}\}")
_NO_SEGMENT = re.compile(r"[/\\\x00-\x1f\x7f]")
_NO_HEADER = re.compile(r"[^\t\x20-\x7e\x80-\xff]")


class Text:
    """Text with names in it."""

    def __init__(self, template: str) -> None:
        """Split the template. Raises ValueError for braces around anything but a name."""
        self.template = template
        parts = _NAME.split(template)
        self._literals, self.names = parts[::2], parts[1::2]
        if any("{{" in literal or "}}" in literal for literal in self._literals):
            raise ValueError(f"expected {{{{ name }}}} in {template!r}")

    def fill(self, values: Values) -> str | None:
        """Put the values in; None when a name has no value."""
        texts = [self._literals[0]]
        for name, literal in zip(self.names, self._literals[1:], strict=True):
            if values.get(name) is None:
                return None
            texts += (_as_text(values[name]), literal)
        return "".join(texts)

    def fill_value(self, values: Values) -> JSON:
        """Put the values in as `fill` does; a template that is one name and nothing else gives the value as it is."""
        return values.get(self.names[0]) if self._is_value else self.fill(values)

    def has_value(self, values: Values) -> bool:
        """Return True where `fill_value` puts in a value for each name."""
        return self.names[0] in values if self._is_value else self.fill(values) is not None

    @property
    def _is_value(self) -> bool:
        return len(self.names) == 1 and not any(self._literals)


class Fields:
    """Fixed names with template texts: a query, a form, headers."""

    def __init__(self, fields: Mapping[str, object]) -> None:
        self._fields = {key: Text(_as_text(value)) for key, value in fields.items()}
        self.names = [name for text in self._fields.values() for name in text.names]

    def fill(self, values: Values) -> dict[str, str]:
        """Put the values in, without the fields whose text has no value."""
        filled = ((key, text.fill(values)) for key, text in self._fields.items())
        return {key: text for key, text in filled if text is not None}

    def headers(self, values: Values) -> dict[str, str]:
        """Fill header fields. Raises ToolArgumentsError for characters that cannot stand in a header."""
        headers = self.fill(values)
        for key, text in headers.items():
            if _NO_HEADER.search(text):
                names = ", ".join(self._fields[key].names)
                raise ToolArgumentsError(f"{names}: line ends and characters beyond Latin-1 are not allowed here")
        return headers


class Url:
    """URL with a fixed scheme and host, and a path and a query with names in them."""

    def __init__(self, template: str) -> None:
        """Split the template. Raises ValueError that says what is wrong with it."""
        if "{{" in urlsplit(template).netloc:
            raise ValueError("the host is fixed: {{ name }} may stand in the path and the query only")
        parts = checked_url(template, "http://HOST/PATH or https://HOST/PATH")
        if parts.fragment:
            raise ValueError("a part after # is never sent")
        self._origin = f"{parts.scheme}://{parts.netloc}"
        self._segments = [Text(segment) for segment in parts.path.split("/")[1:]]
        pairs = parse_qsl(parts.query, keep_blank_values=True)
        if len(dict(pairs)) < len(pairs):
            raise ValueError("a parameter stands twice in the query")
        self._query = Fields(dict(pairs))
        self.names = [name for segment in self._segments for name in segment.names] + self._query.names

    def fill(self, values: Values, query: Mapping[str, str]) -> str:
        """Make the URL, with `query` added to its own. Raises ToolArgumentsError for values that would change the
        path's shape."""
        path = "".join("/" + _segment(segment, values) for segment in self._segments)
        pairs = urlencode({**self._query.fill(values), **query}, quote_via=quote, safe="")
        return self._origin + path + ("?" + pairs if pairs else "")


class Json:
    """JSON value whose texts are templates."""

    def __init__(self, template: JSON) -> None:
        self._template: Text | dict[str, Json] | list[Json] | JSON = template
        self.names: list[str] = []
        if isinstance(template, str):
            text = self._template = Text(template)
            self.names = text.names
        elif isinstance(template, Mapping):
            fields = self._template = {str(key): Json(value) for key, value in template.items()}
            self.names = [name for value in fields.values() for name in value.names]
        elif isinstance(template, Sequence):
            items = self._template = [Json(value) for value in template]
            self.names = [name for value in items for name in value.names]

    def fill(self, values: Values) -> JSON:
        """Put the values in, without the keys and items whose text has no value."""
        if isinstance(self._template, Text):
            return self._template.fill_value(values)
        if isinstance(self._template, dict):
            return {key: value.fill(values) for key, value in self._template.items() if value._is_given(values)}
        if isinstance(self._template, list):
            return [value.fill(values) for value in self._template if value._is_given(values)]
        return self._template

    def _is_given(self, values: Values) -> bool:
        return not isinstance(self._template, Text) or self._template.has_value(values)


def _segment(segment: Text, values: Values) -> str:
    text = segment.fill(values)
    if not segment.names:
        return quote(text or "", safe="%!$&'()*+,;=:@-._~")  # the YAML's own, perhaps quoted already
    names = ", ".join(segment.names)
    if not text or text in (".", "..") or _NO_SEGMENT.search(text):
        raise ToolArgumentsError(f"{names}: must not be empty, `.` or `..`, and must hold no / or \\ and no line end")
    return quote(text, safe="")


def _as_text(value: object) -> str:
    """Return a text as it is, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, allow_nan=False)
