"""Code interpreter: programs that the policy writes, run by a sandbox server (`python -m sandbox.server`).

Stateless: each call is a program in a sandbox of its own. With `session: true` a trajectory has one Python interpreter,
which keeps variables and files from call to call and ends with the trajectory.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import uuid
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson
import pydantic

from agentrl.errors import ConfigError, DataError
from agentrl.remote import (
    FaultKind,
    RemoteOptions,
    RemoteRefused,
    RemoteTool,
    RemoteUnavailable,
    checked_url,
    how_to_start,
)
from agentrl.system.call_journal import OnResume
from agentrl.system.deadline import within
from agentrl.system.json_value import JSON
from agentrl.system.paths import file_below
from agentrl.tool import FunctionSchema, Metrics, ToolArgumentsError, ToolResponse, ToolSchema
from tools.program_report import Command, report

FOR_THE_QUEUE = 60.0
"""Seconds that a call has beside its program's, where `timeout` does not say: a busy server lets programs wait."""
FOR_THE_END = 5.0
"""Seconds in which a session is ended, else with a later one, or at the end of the run."""
_RESTARTED = "The session has ended; variables and files are gone. The next call starts a new one."
_WHERE = "create_kwargs of code_interpreter"
_MAX_ANSWER = 128 << 20
"""Bytes of an answer; files that are collected may fill it."""


class CodeInterpreterConfig(RemoteOptions):
    """Config of the code interpreter."""

    url: str
    """Server, e.g. http://127.0.0.1:8080, with or without /run_code at its end."""
    session: bool = False
    """One interpreter a trajectory; false: a fresh sandbox each call. Only agentrl's own server has sessions."""
    language: str = "python"
    """Language of the programs: python, bash, or another that the server has. Sessions are Python's."""
    run_timeout: float = pydantic.Field(10.0, gt=0, le=3600)
    """Seconds of one program. One that takes longer is stopped, and the model is told."""
    memory_limit_mb: int | None = pydantic.Field(None, gt=0)
    """Megabytes of one program, or of a session; null: the server's own limit."""
    show_last_expression: bool = True
    """Show the value of a last line that is a Python expression without print(), as in a notebook. A stateless
    program's is shown only by agentrl's own server."""
    max_file_bytes: int = pydantic.Field(65536, gt=0)
    """Bytes of each file that is collected for the reward function; the model is told of one that is larger."""
    attempt_timeout: float = pydantic.Field(0.0, ge=0)
    """Seconds of one request, waiting for its turn included; 0: all of `timeout`."""

    @pydantic.field_validator("url")
    @classmethod
    def _is_http(cls, url: str) -> str:
        checked_url(url)
        return url.rstrip("/").removesuffix("/run_code")

    @pydantic.model_validator(mode="after")
    def _fit_together(self) -> CodeInterpreterConfig:
        if self.session and self.language != "python":
            raise ValueError(f"session: true needs language: python, found {self.language!r}")
        if 0 < self.attempt_timeout <= self.run_timeout:
            raise ValueError(f"attempt_timeout must be above run_timeout={self.run_timeout:g}, or 0")
        return self


class _Ended(pydantic.BaseModel):
    """Answer of the server to /run_code or /run_session."""

    status: str
    message: str = ""
    compile_result: Command | None = None
    run_result: Command | None = None
    created: bool = False
    alive: bool = False
    result: str | None = None
    error: dict[str, Any] | None = None
    files: dict[str, str] = {}


@dataclass(slots=True)
class _Instance:
    """State that a trajectory's programs share."""

    files: dict[str, str] = field(default_factory=dict)
    """Path: base64. Files that the programs find."""
    fetch: list[str] = field(default_factory=list)
    """Paths of their files that are collected."""
    session: str = field(default_factory=lambda: uuid.uuid4().hex)
    opened: bool = False
    """True once a cell has been sent: the server may hold the session."""
    alive: bool = False
    """True when the last cell left the session alive."""
    order: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Lock by which the cells of one message run in the order of its calls."""


class CodeInterpreterTool(RemoteTool):
    """Tool `code_interpreter(code)`.

    What a program does, and fails with, is the policy's; a server that gives no answer, or has lost a session, is a
    fault of the infrastructure.

    A row's `create_kwargs`: `files` ({path: text}) and `files_base64` are put into the working folder of every
    stateless program, and of a session when it begins; `fetch_files` ([path]) are collected after each program, for the
    reward function.
    """

    config_model = CodeInterpreterConfig
    options: CodeInterpreterConfig
    default_schema = {
        "type": "function",
        "function": {
            "name": "code_interpreter",
            "description": "Run a program and get its output.",
            "parameters": {
                "type": "object",
                "properties": {"code": {"type": "string", "description": "The program."}},
                "required": ["code"],
            },
        },
    }

    def __init__(self, config: dict[str, Any] | None = None, schema: ToolSchema | None = None) -> None:
        """Complete config and description. Raises ConfigError, pydantic.ValidationError."""
        super().__init__(config, schema)
        options = self.options
        given = self.config.get("timeout")
        timeout = given if isinstance(given, int | float) else options.run_timeout + FOR_THE_QUEUE
        if timeout <= options.run_timeout:
            raise ConfigError(f"timeout={timeout:g} must be above run_timeout={options.run_timeout:g}")
        self.config = {"timeout": timeout, **self.config}
        options.attempt_timeout = options.attempt_timeout or float(timeout)
        if schema is None:
            function: FunctionSchema = {**self.schema["function"], "description": _description(options)}
            self.schema = {**self.schema, "function": function}
        self._instances: dict[str, _Instance] = {}
        self._left: set[str] = set()
        """Sessions that the server may still hold, and nobody needs."""
        self._counts: Counter[str] = Counter()

    @property
    def on_resume(self) -> OnResume:
        """By answers where each program begins with the row's files alone. A session's programs run again in a new
        session: they reach nothing outside it."""
        return "calls" if self.options.session else "answers"

    @property
    def remembers(self) -> bool:
        return self.options.session

    async def start(self, run: str) -> None:
        """Run an empty program under the configured limits. Raises ConfigError when that fails."""
        await super().start(run)
        options = self.options
        probe = _Instance()
        try:
            await self._run(probe, "")
            self._leave(probe)
            await self._end_sessions()
        except RemoteRefused as error:
            raise ConfigError(f"tool {self.name}: {options.url} refuses an empty program: {error}") from error
        except RemoteUnavailable as error:
            start = f"; {how_to_start('python -m sandbox.server', options.url)}" if error.kind == "connect" else ""
            raise ConfigError(f"tool {self.name}: {options.url} runs no program: {error}{start}") from error

    async def create(self, instance_id: str, **create_kwargs: Any) -> None:
        """Keep the trajectory's files. Raises DataError for a wrong key or file."""
        for key in create_kwargs:
            if key not in ("files", "files_base64", "fetch_files"):
                raise DataError(f"{_WHERE}: expected files, files_base64 and fetch_files, found {key!r}")
        fetch = [_relative("fetch_files", path) for path in create_kwargs.get("fetch_files") or ()]
        self._instances[instance_id] = _Instance(_files(create_kwargs), fetch)

    async def execute(self, instance_id: str, arguments: dict[str, Any]) -> ToolResponse:
        options = self.options
        code = unfenced(arguments["code"])
        if not code.strip():
            raise ToolArgumentsError("code is empty")
        instance = self._instances[instance_id]
        if options.session:
            async with instance.order:
                ended = await self._run(instance, code)
        else:
            ended = await self._run(instance, code)
        self._counts["programs"] += 1
        self._counts["failed"] += ended.status != "Success"
        text, files = self._shown(ended), {}
        for path, content in ended.files.items():
            if len(content) // 4 * 3 - content[-2:].count("=") > options.max_file_bytes:
                text += f"\nThe file {path} is larger than {options.max_file_bytes} bytes and is not collected."
            else:
                files[path] = content
        return ToolResponse(text, files=files)

    async def release(self, instance_id: str) -> None:
        self._leave(self._instances.pop(instance_id))
        await self._end_sessions()

    async def close(self) -> None:
        try:
            await self._end_sessions()
        finally:
            await super().close()

    def take_metrics(self) -> Metrics:
        """Return and reset the client's numbers, and the fraction of programs that failed."""
        counts, self._counts = self._counts, Counter()
        metrics = super().take_metrics()
        if counts["programs"]:
            metrics.mean("failed_rate", counts["failed"] / counts["programs"], counts["programs"])
        return metrics

    async def _run(self, instance: _Instance, code: str) -> _Ended:
        """Run a program, in the trajectory's session if there are such. Raises RemoteRefused, RemoteUnavailable."""
        options = self.options
        asked: dict[str, JSON] = {
            "code": code if code.isascii() else code.encode("utf-8", "replace").decode(),  # lone surrogates
            "run_timeout": options.run_timeout,
            "memory_limit_MB": options.memory_limit_mb or -1,
            "files": {} if instance.alive else instance.files,
            "fetch_files": instance.fetch,
        }
        if not options.session:
            asked |= {"language": options.language, "show_last_expression": options.show_last_expression}
            return await self._ask("/run_code", asked, safe=True)
        instance.opened, expected = True, instance.alive
        ended = await self._ask("/run_session", {"session_id": instance.session, **asked}, safe=False)
        instance.alive = ended.alive
        if ended.created and expected:
            raise RemoteUnavailable(
                FaultKind.SERVER,
                f"tool {self.name}: the session was restarted and its variables are gone: the server was restarted, or "
                "ended it because it was idle for too long (--idle-seconds)",
            )
        return ended

    async def _ask(self, path: str, asked: Mapping[str, JSON], *, safe: bool) -> _Ended:
        url = self.options.url + path
        try:
            answer = await self.client.request(
                "POST", url, body=orjson.dumps(asked), safe=safe, max_answer_bytes=_MAX_ANSWER
            )
        except RemoteRefused as error:
            if error.status not in (404, 405):
                raise
            problem = f"{url} is no endpoint of that server" + (": it has no sessions" if self.options.session else "")
            raise RemoteUnavailable(FaultKind.ANSWER, problem) from error
        try:
            ended = _Ended.model_validate_json(answer.body)
        except pydantic.ValidationError as error:
            raise RemoteUnavailable(FaultKind.ANSWER, f"{url} answered {answer.body[:80]!r}") from error
        if ended.status == "SandboxError":
            raise RemoteUnavailable(FaultKind.SERVER, f"{url}: {ended.message}")
        return ended

    def _leave(self, instance: _Instance) -> None:
        if instance.opened and self.options.session:
            self._left.add(instance.session)

    async def _end_sessions(self) -> None:
        """End the sessions that were left, also earlier ones that a busy server did not end."""
        async with within(FOR_THE_END):
            while self._left:
                session = self._left.pop()
                try:
                    await self.client.request("DELETE", f"{self.options.url}/sessions/{session}", safe=True)
                except BaseException:
                    self._left.add(session)
                    raise

    def _shown(self, ended: _Ended) -> str:
        options = self.options
        limits = options.run_timeout, options.memory_limit_mb
        compiled, command = ended.compile_result, ended.run_result
        if command is None:
            return "The program could not be compiled.\n" + (report(compiled, *limits) if compiled else ended.message)
        if ended.result is not None and options.show_last_expression:
            command.stdout = _with(command.stdout, ended.result)
        if ended.error is not None:
            command.stderr = _with(command.stderr, _traceback(ended.error))
        gone = _RESTARTED if options.session and not ended.alive else ""
        return report(command, *limits, gone) or "No output."


def unfenced(code: str) -> str:
    """Remove the Markdown fence that models like to put around a program."""
    text = code.strip()
    if not text.startswith("```"):
        return code
    _, line_end, program = text.partition("\n")
    return program.removesuffix("```") if line_end else text.strip("`")


def _with(output: str | None, more: str) -> str:
    """Append `more` on lines of its own."""
    return "\n".join((output.rstrip("\n"), more)) if output else more


def _traceback(error: Mapping[str, JSON]) -> str:
    lines = error.get("traceback")
    if isinstance(lines, list) and lines:
        return "".join(map(str, lines))
    return f"{error.get('ename')}: {error.get('evalue')}"


def _description(options: CodeInterpreterConfig) -> str:
    language = options.language.capitalize()
    if options.session:
        keeps = "Variables, imports and files are kept for the next call."
    else:
        keeps = "Every call is a new program: nothing is kept from earlier calls."
    shown = "what it prints"
    if options.language == "python" and options.show_last_expression:
        shown += " and the value of its last line"
    seconds = f"It may take {options.run_timeout:g} s."
    return f"Run a {language} program and get {shown}. {keeps} {seconds} There is no network."


def _files(create_kwargs: Mapping[str, Any]) -> dict[str, str]:
    """Read the files of a row, path: base64. Parquet fills the files that other rows name with null."""
    files: dict[str, str] = {}
    for key in ("files", "files_base64"):
        given = {path: content for path, content in (create_kwargs.get(key) or {}).items() if content is not None}
        for path, content in given.items():
            try:
                text = content if key == "files_base64" else base64.b64encode(content.encode()).decode()
                base64.b64decode(text, validate=True)
            except (AttributeError, TypeError, UnicodeEncodeError, binascii.Error) as error:
                raise DataError(f"{_WHERE}: {key}: {path!r}: {error}") from error
            files[_relative(key, path)] = text
    return files


def _relative(key: str, path: object) -> str:
    """Return a path as the row has it: answers name files by it."""
    if file_below(path) is None:
        raise DataError(f"{_WHERE}: {key}: expected a path below the session's folder, found {path!r:.200}")
    return str(path)
