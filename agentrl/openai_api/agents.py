"""Agents that speak to the endpoint: a Python callable in this process, or a command in its own."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import signal
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol, cast

from agentrl.errors import CodeError, ConfigError, InfrastructureError, UserError
from agentrl.system.json_value import JSON
from agentrl.system.numbers import finite
from agentrl.system.proxies import proxy_note, spare_own_addresses
from agentrl.system.targets import load_target
from agentrl.system.threads import DaemonThreads
from agentrl.system.user_code import PATHS, contract_error, read_traceback, user_code

MODEL = "policy"
"""Name of the only model; requests may name any."""
API_KEY = "unused"
"""Key that clients insist on. The secret is in the URL."""
PASSED_ON = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TMPDIR", "TZ", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE"),
    *("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH", "NODE_PATH", "SSL_CERT_FILE"),
)
"""Environment variables of the trainer that a command sees. All others, and with them the trainer's secrets, it does
not."""
TAIL = 16 << 10
"""Bytes of a command's output that are kept."""


class AgentFailed(InfrastructureError):
    """Failure of something that the agent asked, or of its command, whose errors nobody can attribute."""


class AgentError(UserError):
    """Error of an agent's program, perhaps provoked only by some texts of the policy: the try is left out."""

    def __init__(self, message: str, reason: str) -> None:
        """`reason`: what two tries that fail in the same way have in common."""
        super().__init__(message)
        self.reason = reason


def read_report(value: object) -> dict[str, float]:
    """Read an agent's report: None, or a mapping of names to finite numbers. Raises TypeError for anything else.

    `reward` goes to its last assistant turn, `score` to the scorer `reported`, and others to `score_extra`.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise TypeError(f"it returned {type(value).__name__}, expected None or a mapping of names to numbers")
    return read_numbers(value, "it returned ")


def read_numbers(value: Mapping[object, object], said: str = "") -> dict[str, float]:
    """Read a mapping of names to finite numbers. Raises TypeError, beginning with `said`, for anything else."""
    numbers = {}
    for name, number in value.items():
        if (known := finite(number)) is None:
            raise TypeError(f"{said}{name}={number!r:.100}, expected a finite number")
        numbers[str(name)] = known
    return numbers


class Agent(Protocol):
    """Program that acts on samples through the endpoint."""

    async def run(self, sample: Mapping[str, object], base_url: str) -> dict[str, float]:
        """Act on one sample in the session at `base_url`. When cancelled, all of it that can be stopped is stopped.

        Raises AgentFailed for what may pass, AgentError or CodeError for an error of its code.
        """

    def refused(self, failure: AgentFailed, refusal: str) -> UserError:
        """Make the error for a failure caused by the endpoint's `refusal` of a request."""

    def error(self, problem: str) -> CodeError:
        """Make the error for an agent that broke its contract."""


class AgentFunction(Protocol):
    """Function that acts on one sample; see `read_report` for what it may return, also as an awaitable."""

    def __call__(self, *, sample: dict[str, object], base_url: str, api_key: str, model: str) -> object: ...


class CallableAgent:
    """Python agent `function(sample, base_url, api_key, model)`.

    An async function runs on the event loop, any other in a thread.
    """

    def __init__(self, target: str) -> None:
        """Load `target`: `package.module:function` or `path/to/file.py:function`. Raises ConfigError."""
        self._name = target
        self._function = load_agent(target)
        self._threads = DaemonThreads(f"agent {target}", max_abandoned=1024)

    async def run(self, sample: Mapping[str, object], base_url: str) -> dict[str, float]:
        call = partial(self._function, sample=dict(sample), base_url=base_url, api_key=API_KEY, model=MODEL)
        try:
            with user_code(f"agent {self._name}", self._function):
                if inspect.iscoroutinefunction(self._function):
                    value = call()
                else:
                    value = await self._threads.run(call)
                if inspect.isawaitable(value):
                    value = await value
        except UserError:
            raise
        except Exception as error:
            said = f"agent {self._name}: {type(error).__name__}: {error}"
            raise AgentFailed(said + proxy_note(said, os.environ)) from error
        try:
            return read_report(value)
        except TypeError as error:
            raise self.error(str(error)) from error

    def refused(self, failure: AgentFailed, refusal: str) -> UserError:
        return self.error(f"{type(failure.__cause__).__name__}: {failure.__cause__}")

    def error(self, problem: str) -> CodeError:
        return contract_error(f"agent {self._name}", self._function, problem)


class CommandAgent:
    """Agent that is a command.

    It is given the sample as JSON on stdin, and its session by the variables that OpenAI's and Anthropic's clients
    read (OPENAI_BASE_URL, ANTHROPIC_BASE_URL, ..._API_KEY, ..._MODEL). It
    must end with status 0. A JSON object on the last line of its output is its report. When it ends, and when it is
    cancelled, every process that it started is killed.
    """

    def __init__(self, command: Sequence[str], *, passed_on: Sequence[str] = ()) -> None:
        """`passed_on`: further variables of this process's environment that the command may see. Raises ConfigError."""
        if not command:
            raise ConfigError("openai_proxy.command is empty")
        self._command = list(command)
        self._passed_on = (*PASSED_ON, *passed_on)

    async def run(self, sample: Mapping[str, object], base_url: str) -> dict[str, float]:
        environment = {name: os.environ[name] for name in self._passed_on if name in os.environ}
        for vendor, address in (("OPENAI", base_url), ("ANTHROPIC", base_url.removesuffix("/v1"))):
            named = {"BASE_URL": address, "API_KEY": API_KEY, "MODEL": MODEL}
            environment |= {f"{vendor}_{name}": value for name, value in named.items()}
        spare_own_addresses(environment)
        loop = asyncio.get_running_loop()
        try:
            transport, process = await loop.subprocess_exec(
                _Process, *self._command, env=environment, start_new_session=True
            )
        except OSError as error:
            problem = f"openai_proxy.command {self._command}: {error}"
            raise (AgentError(problem, problem) if isinstance(error, PATHS) else AgentFailed(problem)) from error
        pid = transport.get_pid()
        try:
            stdin = cast(asyncio.WriteTransport, transport.get_pipe_transport(0))
            stdin.write(json.dumps(sample, default=str).encode())
            stdin.close()  # When it is written.
            await process.exited
            await asyncio.to_thread(_kill_all, pid, base_url)  # Else a child may hold the pipes open.
            await process.closed
        except BaseException:
            _kill_all(pid, base_url)  # Not awaited: a second cancellation must not come between.
            raise
        status = transport.get_returncode()
        assert status is not None
        output, errors = process.tails[1], process.tails[2]
        if status != 0:
            ended = f"status {status}" if status > 0 else f"signal {signal.Signals(-status).name}"
            said = bytes(errors or output).decode(errors="replace").strip()
            problem = f"agent command {self._command[0]} ended with {ended}: {said or 'it wrote nothing'}"
            raised = read_traceback(said)
            if status > 0 and raised is not None and not raised[1]:
                raise AgentError(problem, raised[0].replace(base_url, ""))
            raise AgentFailed(problem + proxy_note(said, environment))
        try:
            return read_report(_last_object(bytes(output)))
        except TypeError as error:  # It may have printed the policy's text.
            raise AgentError(f"agent command {self._command[0]}: {error}", str(error)) from error

    def refused(self, failure: AgentFailed, refusal: str) -> UserError:
        return AgentError(str(failure), refusal)

    def error(self, problem: str) -> CodeError:
        return CodeError(f"agent command {' '.join(self._command)}: {problem}")


class _Process(asyncio.SubprocessProtocol):
    """Process protocol that keeps the tails of the output, and knows the end of the process and of all its pipes."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.tails = {1: bytearray(), 2: bytearray()}
        self.exited: asyncio.Future[None] = loop.create_future()
        self.closed: asyncio.Future[None] = loop.create_future()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self.tails[fd] += data
        del self.tails[fd][:-TAIL]

    def process_exited(self) -> None:
        if not self.exited.done():
            self.exited.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)


def _last_object(output: bytes) -> dict[str, JSON] | None:
    lines = output.decode(errors="replace").strip().splitlines()
    if not lines or not lines[-1].startswith("{"):
        return None
    try:
        value = json.loads(lines[-1])
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _kill_all(group: int, secret: str) -> None:
    """Kill the process group, and processes that left it: their environment names the session, which is unguessable."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
    marker = secret.encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if marker in (folder / "environ").read_bytes() and int(folder.name) != os.getpid():
                os.kill(int(folder.name), signal.SIGKILL)


def load_agent(target: str) -> AgentFunction:
    """The function of `package.module:function` or `path/to/file.py:function`. Raises ConfigError."""
    function = load_target(target, "openai_proxy.target")
    if not callable(function):
        raise ConfigError(f"openai_proxy.target: expected a function, {target} is {function!r:.200}")
    try:
        inspect.signature(function).bind(sample=None, base_url=None, api_key=None, model=None)
    except TypeError as error:
        raise ConfigError(
            f"openai_proxy.target: {target} must take the parameters sample, base_url, api_key, model: {error}"
        ) from error
    return cast(AgentFunction, function)
