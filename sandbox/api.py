"""Requests and answers on the wire. Names and meanings are SandboxFusion's (bytedance/SandboxFusion); what we add is
marked, and may be ignored by its clients.
"""

from __future__ import annotations

import base64
import binascii
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, WithJsonSchema

from sandbox.languages import Language
from sandbox.limits import Limit
from sandbox.sessions import CellError
from sandbox.supervise import inside

MAX_SECONDS = 3600.0
MAX_FILES = 1000


class RunStatus(StrEnum):
    SUCCESS = "Success"
    FAILED = "Failed"
    """A command ended with another status than 0, or by a limit."""
    SANDBOX_ERROR = "SandboxError"
    """Nothing can be said about the program."""


class CommandStatus(StrEnum):
    FINISHED = "Finished"
    ERROR = "Error"
    """The command could not be started."""
    TIME_LIMIT = "TimeLimitExceeded"


def _encodable(text: str) -> str:
    text.encode()  # lone surrogates
    if "\0" in text:
        raise ValueError("a NUL byte")
    return text


def _base64(text: str) -> str:
    try:
        base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"not base64: {error}") from error
    return text


def _shown(schema: dict[str, str]) -> WithJsonSchema:
    return WithJsonSchema({"type": "string", **schema})


Text = Annotated[str, AfterValidator(_encodable), _shown({"pattern": r"^[^\u0000]*$"})]
Path = Annotated[
    str,
    AfterValidator(_encodable),
    AfterValidator(inside),
    _shown({"pattern": r"^(?!\.\.?(/|$))[^/\u0000]{1,100}(/(?!\.\.?(/|$))[^/\u0000]{1,100}){0,8}$"}),
]
Content = Annotated[
    str,
    AfterValidator(_encodable),
    AfterValidator(_base64),
    _shown({"pattern": "^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$", "format": "byte"}),
]
Seconds = Annotated[float, Field(gt=0, le=MAX_SECONDS, allow_inf_nan=False)]
Files = Annotated[
    dict[Path, Content | None], Field(max_length=MAX_FILES, json_schema_extra={"additionalProperties": False})
]
Fetch = Annotated[list[Text], Field(max_length=MAX_FILES)]
Memory = Annotated[int, Field(ge=-1, le=1 << 20)]


class RunCodeRequest(BaseModel):
    code: str
    language: Language
    compile_timeout: Seconds = 10
    run_timeout: Seconds = 10
    memory_limit_MB: Memory = -1
    """-1: the server's own."""
    stdin: str | None = None
    files: Files = {}
    """Relative path: base64."""
    fetch_files: Fetch = []
    args: Annotated[list[Text], Field(max_length=1000)] = []
    show_last_expression: Annotated[bool, Field(strict=True)] = False
    """Ours: a Python program whose last statement is an expression prints its repr, as a notebook does."""


class CommandResult(BaseModel):
    status: CommandStatus
    execution_time: float | None = None
    return_code: int | None = None
    """Minus the number of the signal that ended it."""
    stdout: str | None = None
    stderr: str | None = None
    limits: list[Limit] = []
    """Ours: the limits that it reached."""
    cut: list[Literal["stdout", "stderr"]] = []
    """Ours: what was longer than the server keeps."""


class RunCodeResponse(BaseModel):
    status: RunStatus
    message: str
    compile_result: CommandResult | None = None
    run_result: CommandResult | None = None
    executor_pod_name: str | None = None
    files: dict[str, str] = {}
    """Path: base64."""
    refused_files: dict[str, str] = {}
    """Ours: files that were asked for and are not there, and why."""


class RunJupyterRequest(BaseModel):
    cells: Annotated[list[str], Field(max_length=1000)]
    cell_timeout: Annotated[float, Field(ge=0, le=MAX_SECONDS, allow_inf_nan=False)] = 0
    """0: as long as all cells together may take."""
    total_timeout: Seconds = 45
    kernel: Literal["python3"] = "python3"
    files: Files = {}
    fetch_files: Fetch = []


class CellRunResult(BaseModel):
    stdout: str
    stderr: str
    display: list[dict[str, Any]]
    error: list[CellError]


class RunJupyterResponse(BaseModel):
    status: RunStatus
    message: str
    driver: CommandResult | None = None
    cells: list[CellRunResult] = []
    executor_pod_name: str | None = None
    files: dict[str, str] = {}


class RunSessionRequest(BaseModel):
    """Ours: one cell of a stateful session."""

    session_id: Annotated[str, Field(max_length=200, pattern=r"^[^\x00-\x1f\x7f]+$")]
    code: str
    run_timeout: Seconds = 10
    memory_limit_MB: Memory = -1
    """Memory limit of the session in MB, taken when it begins."""
    files: Files = {}
    fetch_files: Fetch = []


class RunSessionResponse(BaseModel):
    status: RunStatus
    message: str
    created: bool
    """The session began with this call; variables of earlier calls are gone."""
    alive: bool
    run_result: CommandResult | None = None
    result: str | None = None
    """The repr of the last expression."""
    error: CellError | None = None
    memory_bytes: int | None = None
    """Bytes of memory that the session uses after the cell, where the tier counts them."""
    files: dict[str, str] = {}
    refused_files: dict[str, str] = {}


class SessionClosed(BaseModel):
    closed: bool
    """True if there was a session to close."""


class Fault(BaseModel):
    """A fault of a request: its kind, its place in the request, and a message."""

    type: str
    loc: list[str | int]
    msg: str


class Refusal(BaseModel):
    detail: str | list[Fault]


class Health(BaseModel):
    status: Literal["ok"]
    tier: str
    guarantees: list[str]
    missing_guarantees: list[str]
    refused_tiers: dict[str, str]
    languages: list[str]
    preloaded: list[str]
    running: int
    waiting: int
    sessions: int
    session_memory_bytes: int
    """Bytes of memory that sessions use now, where the tier counts them."""
    reserved_memory_bytes: int
    """Reserved part of `total_memory_bytes`: limits of running programs and cells, and what idle sessions hold."""
    total_memory_bytes: int | None
    """Limit on the memory of all programs and sessions together, in bytes; None: not limited."""
