"""Tool for any HTTP endpoint: request and shown part of the answer are described in the YAML."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any, Literal, TypeVar
from urllib.parse import urlencode

import orjson
import pydantic

from agentrl.errors import ConfigError, DataError
from agentrl.remote import Answer, RemoteOptions, RemoteRefused, RemoteTool
from agentrl.remote.credentials import Secrets, from_environment
from agentrl.system.call_journal import OnResume
from agentrl.system.json_value import JSON
from agentrl.tool import ToolArgumentsError, ToolError, ToolFailed, ToolResponse, ToolSchema, parameters_of
from tools.http_template import Fields, Json, Url, Values

Template = TypeVar("Template")
Part = TypeVar("Part")

_OURS = frozenset({"host", "content-length", "transfer-encoding", "connection", "accept-encoding"})
"""Headers that the connection sets itself."""
_CHARSETS = ("iso-8859-", "windows-125", "utf-16", "shift_jis", "gb18030", "euc-", "big5")
"""Encodings that a server may choose besides UTF-8: their decoders take time in proportion to the text."""


class HttpConfig(RemoteOptions):
    """Config of an HTTP tool. `{{ name }}` is an argument of the tool, or one of `variables`."""

    method: Literal["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"] = "GET"
    url: str
    """URL http://HOST/PATH?QUERY, with names in path and query."""
    query: dict[str, Any] = {}
    """Parameters added to the URL's."""
    headers: dict[str, Any] = {}
    """Headers sent with every request."""
    body: dict[str, Any] | list[Any] | None = None
    """JSON body. A text that is one `{{ name }}` and nothing else becomes the value itself, of whatever type."""
    form: dict[str, Any] | None = None
    """Fields of a form (application/x-www-form-urlencoded)."""
    variables: dict[str, Any] = {}
    """Names that the row fills, by `create_kwargs`, with their defaults. The model neither sees nor sets them."""
    auth_env: str | None = None
    """Environment variable that holds the credentials."""
    auth_header: str = "Authorization"
    """Header in which the credentials are sent."""
    auth_prefix: str = "Bearer "
    """Text before the credentials in that header; empty for a bare key."""
    response_path: str = ""
    """Part of a JSON answer that is shown: keys and positions with dots between, `*` for each, e.g. `results.*.text`.
    Empty: the answer as it is."""
    safe: bool | None = None
    """Permission to repeat a request when it is not known what became of it. Null: GET and HEAD may be, others not."""
    max_answer_bytes: int = pydantic.Field(4 << 20, gt=0)
    """Bytes of an answer; a longer one is a fault of the server."""


class HttpTool(RemoteTool):
    """Tool that makes one request to an HTTP endpoint.

    Arguments that no template names are sent too, as long as neither `query`, `body` nor `form` is given: in the query
    of GET, HEAD and DELETE, else as keys of a JSON body.

    The model is told of a status of 4xx; a server that fails, redirects or refuses the credentials fails the
    trajectory, which is tried again.
    """

    # The row's variables are all that is kept here, and `create` is given them in each process.
    on_resume: OnResume = "answers"
    config_model = HttpConfig
    options: HttpConfig

    def __init__(self, config: dict[str, Any] | None = None, schema: ToolSchema | None = None) -> None:
        """Read the templates. Raises ConfigError: a bad template, a name that nothing fills, an argument that is never
        sent."""
        super().__init__(config, schema)
        options = self.options
        self._url = _read("url", Url, options.url)
        self._query = _read("query", Fields, options.query)
        self._headers = _read("headers", Fields, options.headers)
        self._body = _read("body", Json, options.body) if options.body is not None else None
        self._form = _read("form", Fields, options.form) if options.form is not None else None
        self._path = options.response_path.split(".") if options.response_path else []
        self._safe = options.method in ("GET", "HEAD") if options.safe is None else options.safe
        self._rest = self._check_names(options)
        self._rows: dict[str, dict[str, Any]] = {}

    def _check_names(self, options: HttpConfig) -> list[str]:
        """Check the names in all templates; return the arguments that none of them names. Raises ConfigError."""
        arguments = list(parameters_of(self.schema))
        parts = (self._url, self._query, self._headers, self._body, self._form)
        used = {name for part in parts if part is not None for name in part.names}
        known = [*arguments, *options.variables]
        for name in used - set(known):
            raise ConfigError(f"{{{{ {name} }}}} is neither an argument of the tool nor one of `variables`: {known}")
        for name in set(arguments) & set(options.variables):
            raise ConfigError(f"variables: {name!r} is an argument of the tool too, which the model would set")
        _check_parts(options)
        rest = [name for name in arguments if name not in used]
        if rest and (options.query or self._body is not None or self._form is not None):
            raise ConfigError(f"the argument {rest[0]!r} is never sent: name it as {{{{ {rest[0]} }}}} in a template")
        return rest

    @property
    def is_stateful(self) -> bool:
        return bool(self.options.variables)

    @cached_property
    def _secret(self) -> str | None:
        """Credentials, read when the run starts, not when the YAML is loaded: a replay needs none. Raises
        ConfigError."""
        if self.options.auth_env is None:
            return None
        secret = from_environment(self.options.auth_env)
        self.client.secrets = Secrets([secret])
        return secret

    async def start(self, run: str) -> None:
        await super().start(run)
        try:
            _ = self._secret
        except ConfigError as error:
            raise ConfigError(f"tool {self.name}: auth_env: {error}") from error

    async def create(self, instance_id: str, **create_kwargs: Any) -> None:
        variables = self.options.variables
        for name in create_kwargs:
            if name not in variables:
                raise DataError(f"create_kwargs of tool {self.name!r}: {name!r} is none of `variables` in its YAML")
        self._rows[instance_id] = {**variables, **create_kwargs}

    async def release(self, instance_id: str) -> None:
        self._rows.pop(instance_id, None)

    async def execute(self, instance_id: str, arguments: dict[str, Any]) -> ToolResponse:
        options = self.options
        # The row's variables last: arguments that the schema does not declare are the model's.
        values = {**arguments, **self._rows.get(instance_id, options.variables)}
        try:
            url, headers, body = self._request(values)
        except ValueError as error:  # no text of Unicode, or no number of JSON
            raise ToolArgumentsError(str(error)) from error
        secrets = self.client.secrets
        with secrets.hidden_in_errors():
            try:
                answer = await self.client.request(
                    options.method,
                    url,
                    safe=self._safe,
                    body=body,
                    headers=headers,
                    max_answer_bytes=options.max_answer_bytes,
                )
            except RemoteRefused as error:
                kind = ToolError if error.status in (400, 413, 422) else ToolFailed  # arguments
                raise kind(f"status {error.status}: {error.detail}") from None
            return ToolResponse(secrets.hide(_shown(answer, self._path, secrets)))

    def _request(self, values: Values) -> tuple[str, dict[str, str], bytes | None]:
        """Fill the templates: URL, headers and body. Raises ToolArgumentsError, ValueError."""
        options = self.options
        query, headers = self._query.fill(values), self._headers.headers(values)
        rest = {name: values[name] for name in self._rest if name in values}
        content: bytes | None = None
        if self._form is not None:
            content = urlencode(self._form.fill(values)).encode()
            headers.setdefault("Content-Type", "application/x-www-form-urlencoded")
        elif self._body is not None or (rest and options.method in ("POST", "PUT", "PATCH")):
            sent = self._body.fill(values) if self._body is not None else rest
            content = json.dumps(sent, ensure_ascii=False, allow_nan=False).encode()
            headers.setdefault("Content-Type", "application/json")
        elif rest:
            query = Fields({name: f"{{{{ {name} }}}}" for name in rest}).fill(rest)
        if self._secret is not None:
            headers[options.auth_header] = options.auth_prefix + self._secret
        return self._url.fill(values, query), headers, content


def _check_parts(options: HttpConfig) -> None:
    """Raise ConfigError for parts of a request that cannot be sent together."""
    for name in options.headers:
        if name.lower() in _OURS | ({options.auth_header.lower()} if options.auth_env else set()):
            raise ConfigError(f"headers: {name!r} is set by the tool itself")
    if options.body is not None and (options.form is not None or options.method in ("GET", "HEAD")):
        raise ConfigError(f"body: a request has one, and {options.method} none; give `form` or `query` instead")
    if options.form is not None and options.method in ("GET", "HEAD"):
        raise ConfigError(f"form: {options.method} has no body; give `query` instead")


def _read(key: str, part: Callable[[Template], Part], template: Template) -> Part:
    """Make a part of a request of its template. Raises ConfigError that begins with `key`."""
    try:
        return part(template)
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from None


def _shown(answer: Answer, path: list[str], secrets: Secrets) -> str:
    """Return the part of an answer that the model sees. Raises ToolFailed, without `secrets`."""
    if not path:
        return _text(answer) or f"(status {answer.status}, no content)"
    try:
        document = orjson.loads(answer.body)
    except orjson.JSONDecodeError:
        raise ToolFailed(f"the answer is no JSON: {secrets.hide(_text(answer))[:200]}") from None
    found = list(_at(document, path))
    if not found and "*" not in path:
        raise ToolFailed(f"the answer has no {'.'.join(path)}: {secrets.hide(_text(answer))[:200]}")
    return "\n".join(each if isinstance(each, str) else orjson.dumps(each).decode() for each in found) or "No results."


def _at(value: JSON, path: list[str]) -> Iterator[JSON]:
    if not path:
        yield value
    elif path[0] == "*":
        for item in value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ():
            yield from _at(item, path[1:])
    elif isinstance(value, Mapping) and path[0] in value:
        yield from _at(value[path[0]], path[1:])
    elif isinstance(value, list) and path[0].isdecimal() and int(path[0]) < len(value):
        yield from _at(value[int(path[0])], path[1:])


def _text(answer: Answer) -> str:
    kind = answer.headers.get("Content-Type", "of unknown type").lower()
    charset = kind.partition("charset=")[2].strip(' "')
    try:
        return answer.body.decode(charset if charset.startswith(_CHARSETS) else "utf-8")
    except (LookupError, UnicodeDecodeError):
        return f"({len(answer.body)} bytes that are no text: {kind[:100]})"
