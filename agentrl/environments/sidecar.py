"""Client of a sidecar: its process, started or attached to, and the episodes in it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import random
import secrets
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from select import select
from typing import TypeAlias

import pydantic

from agentrl.environments.interpreter import PASSED, find_python, last_lines, virtual_environment
from agentrl.environments.serve import KEY, MARK, PROTOCOL, end_children
from agentrl.errors import CodeError, ConfigError, InfrastructureError, UserError
from agentrl.remote.client import RemoteClient, RemoteOptions
from agentrl.remote.credentials import check_set, passed_secrets
from agentrl.remote.faults import RemoteUnavailable
from agentrl.remote.url import checked_url
from agentrl.system.deadline import within
from agentrl.system.json_value import JSON, as_object, map_texts
from agentrl.system.loop_thread import run_apart
from agentrl.system.numbers import finite
from agentrl.system.threads import DaemonThreads
from agentrl.system.throttle import ThrottledWarnings
from agentrl.system.user_code import is_told_fault, read_traceback

Fields: TypeAlias = dict[str, JSON]
warnings = ThrottledWarnings(logging.getLogger(__name__))

_SERVE = Path(__file__).with_name("serve.py")
ADAPTERS = Path(__file__).with_name("adapters")
_ATTEMPTS = 4
_NO_ATTEMPT_LIMIT = 1e6
"""Seconds: an attempt may take as long as its call, since the same request again would only wait for the same
answer."""
_MOST_TASKS_BYTES = 1 << 30
_LOG_BYTES = 16 << 10
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 5.0
"""Seconds between two questions for a place in an environment that is full: the first pause, and the longest."""


class EnvironmentOptions(pydantic.BaseModel):
    """Options of an environment's entry."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    environment: str | None = None
    """Python file with the functions `tasks`, `start`, `step` and `score`, or the name of a ready adapter. Either this
    or `url`."""
    python: str | None = None
    """Version (`3.12`) or path of the interpreter; null: the trainer's own."""
    packages: Sequence[str] = ()
    """Packages to install, as pip takes them, into a virtual environment that is made once; none: the interpreter as it
    is."""
    pass_env: Sequence[str] = ()
    """Names of further environment variables of the trainer that the environment may see. Their values of 8 characters
    and more, paths aside, are hidden in all that the environment says."""
    start_timeout: float = pydantic.Field(120.0, gt=0)
    """Seconds in which the environment must be loaded; installing packages does not count."""
    url: str | None = None
    """Address of a sidecar that runs already."""
    key_env: str | None = None
    """Name of the environment variable with the key that the sidecar of `url` asks for."""
    task_options: dict[str, pydantic.JsonValue] = {}
    """Further arguments of `tasks`."""

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> EnvironmentOptions:
        if (self.environment is None) == (self.url is None):
            raise ValueError("set either `environment` (a file or an adapter) or `url` (of a sidecar that runs)")
        if self.url is not None:
            checked_url(self.url)
            if self.python is not None or self.packages or self.pass_env:
                raise ValueError("`python`, `packages` and `pass_env` have no effect on the sidecar of a `url`")
        elif self.key_env is not None:
            raise ValueError("`key_env` has no effect without `url`")
        return self


class RefusedRow(Exception):
    """Refusal of a row that the entry does not have."""


@dataclass(frozen=True, slots=True)
class Address:
    """A sidecar that answered."""

    url: str
    key: str
    process: subprocess.Popen[bytes] | None = None
    """None: it was attached to."""


class Sidecar:
    """One environment, for all trajectories. Its process is started when it is needed, and again when it has died."""

    def __init__(self, options: EnvironmentOptions) -> None:
        self.options = options
        self.name = options.url or Path(options.environment or "").stem
        self._what = f"environment {self.name}"
        limits = RemoteOptions(attempts=_ATTEMPTS, attempt_timeout=_NO_ATTEMPT_LIMIT, breaker_failures=0)
        self._client = RemoteClient(self._what, limits)
        self._address: Address | None = None
        self._starting = threading.Lock()
        self._threads = DaemonThreads(self._what)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the object
        self._mark = secrets.token_hex(16)
        self._secrets = passed_secrets(options.pass_env)

    def start(self) -> Address:
        """Return the address of the sidecar, which is started unless it runs. Raises ConfigError."""
        with self._starting:
            address = self._address
            if address is None or (address.process is not None and address.process.poll() is not None):
                address = self._address = self._attached() if self.options.url is not None else self._started()
            return address

    async def ready(self) -> Address:
        """Do as `start`, without holding up the event loop."""
        address = self._address
        if address is not None and (address.process is None or address.process.poll() is None):
            return address
        return await self._threads.run(self.start)

    async def tasks(self, split: str, seed: int, count: int, timeout: float) -> list[Fields]:
        """Ask for the tasks of a split. Raises CodeError, ConfigError, InfrastructureError."""
        asked: Fields = {"split": split, "seed": seed, "count": count, "options": dict(self.options.task_options)}
        address = await self.ready()
        async with within(timeout):
            found = (await self.ask(address, "tasks", asked, most=_MOST_TASKS_BYTES)).get("tasks")
        if not isinstance(found, list) or not all(isinstance(task, dict) for task in found):
            raise CodeError(f"{self._what}: tasks must yield dicts, found {found!r:.200}")
        return [as_object(task) for task in found]

    async def ask(self, address: Address, path: str, asked: Fields, most: int = 64 << 20) -> Fields:
        """Make one request of the protocol; it may arrive twice without effect.

        Raises CodeError for an error of the environment's code, RefusedRow for a row of another environment,
        InfrastructureError for faults, also of services that the environment asked.
        """
        headers = {"Authorization": f"Bearer {address.key}"} if address.key else {}
        url, body = f"{address.url}/v1/{path}", json.dumps(asked).encode()
        try:
            answer = await self._client.request(
                "POST", url, safe=True, body=body, headers=headers, max_answer_bytes=most
            )
        except RemoteUnavailable as error:
            raise self._died(address, error) from error
        try:
            found = as_object(json.loads(answer.body))  # which takes NaN, for the message to show it
            if self.options.pass_env:
                found = map_texts(found, self._secrets.hide)
        except ValueError as error:
            raise InfrastructureError(f"{self._what}: its answer is not JSON ({error})") from error
        if isinstance(trace := found.get("error"), str):
            raise self._blamed(path, trace, found.get("raised"))
        if isinstance(problem := found.get("refused"), str):
            raise RefusedRow(problem)
        return found

    async def close(self) -> None:
        """End the process that was started, with its children, and close the connections."""
        await self._client.close()
        address, self._address = self._address, None
        if address is not None and address.process is not None:
            _end(address.process)
            end_children(self._mark)

    def _died(self, address: Address, error: RemoteUnavailable) -> InfrastructureError:
        process = address.process
        if process is None:
            return error
        with contextlib.suppress(subprocess.TimeoutExpired):  # its connections break a moment before it has ended
            process.wait(0.2)
        if process.returncode is None:
            return error
        return InfrastructureError(f"{self._what}: {_ending(process.returncode)}; its last lines:\n{self._tail()}")

    def _blamed(self, path: str, trace: str, raised: JSON) -> Exception:
        line = (read_traceback(trace) or last_lines(trace).splitlines()[-1:])[0]
        if is_told_fault(raised):
            return InfrastructureError(f"{self._what}: {path}: {line}")
        frames = trace.splitlines()
        own = [at for at, one in enumerate(frames) if one.startswith("  File ") and str(_SERVE) not in one]
        places = [text.strip() for at in own[-4:] for text in frames[at : at + 2]]
        return CodeError("\n  ".join([f"{self._what}: {path}: {line}", *places]), places[-2] if places else self._what)

    def _attached(self) -> Address:
        assert self.options.url is not None
        key = ""
        if self.options.key_env is not None:
            key = os.environ.get(self.options.key_env, "")
            if not key:
                raise ConfigError(f"{self._what}: key_env: the environment variable {self.options.key_env} is not set")
        address = Address(self.options.url.rstrip("/"), key)
        try:
            found = run_apart("sidecar", self._hello(address))
        except InfrastructureError as error:
            raise ConfigError(f"{self._what}: no sidecar answers at {address.url}: {error}") from error
        if found.get("protocol") != PROTOCOL:
            raise ConfigError(
                f"{self._what}: expected protocol {PROTOCOL} at {address.url}, found {found!r:.100}; start it with "
                f"{_SERVE}"
            )
        return address

    async def _hello(self, address: Address) -> Fields:
        client = Sidecar(self.options)
        try:
            async with within(self.options.start_timeout):
                return await client.ask(address, "environment", {})
        finally:
            await client.close()

    def _started(self) -> Address:
        options, key = self.options, f"{self._what}: python"
        file = environment_file(options.environment or "", self._what)
        python = find_python(options.python, key)
        if options.packages:
            python = virtual_environment(self.name, python, options.packages, f"{self._what}: packages")
        end_children(self._mark)  # of a process that died
        check_set(f"{self._what}: pass_env", options.pass_env)
        secret = secrets.token_urlsafe(24)
        passed = {name: os.environ[name] for name in (*PASSED, *options.pass_env) if name in os.environ}
        process = subprocess.Popen(
            [python, str(_SERVE), str(file), "--starter", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            # Sets of texts have one order, so a row stands for the same task in each process.
            env={"PYTHONHASHSEED": "0", **passed, "PYTHONUNBUFFERED": "1", KEY: secret, MARK: self._mark},
            start_new_session=True,
        )
        line = _first_line(process, options.start_timeout)
        try:
            port = json.loads(line)["port"]
        except (ValueError, KeyError, TypeError):
            ended = process.poll()
            _end(process)
            end_children(self._mark)
            how = f"not ready within {options.start_timeout:g} s (start_timeout)" if ended is None else _ending(ended)
            tail = self._tail()
            hint = "\nInstall the missing module: name its package in `packages`" * ("ModuleNotFoundError" in tail)
            raise ConfigError(
                f"{self._what}: it does not start: {how}. Command: {python} {_SERVE} {file}\n{tail}{hint}"
            ) from None
        return Address(f"http://127.0.0.1:{port}", secret, process)

    def _tail(self) -> str:
        """Return the last lines that the sidecar wrote."""
        size = os.fstat(self._log.fileno()).st_size
        written = os.pread(self._log.fileno(), _LOG_BYTES, max(0, size - _LOG_BYTES)).decode(errors="replace")
        return last_lines(self._secrets.hide(written))


@dataclass(slots=True)
class Play:
    """One trajectory's episode in a sidecar."""

    sidecar: Sidecar
    address: Address
    timeout: float
    """Seconds of one call."""
    place: str
    """Task and row, as messages name them."""
    session: str = field(default_factory=lambda: secrets.token_hex(16))
    steps: int = 0
    done: bool = False
    role: str | None = None
    """Role that moves next, as the environment named it; None in an episode without roles."""

    async def start(self, task: Mapping[str, JSON], seed: int) -> str | None:
        """Begin the episode, once the environment has a place for it; return its first observation.

        Raises RefusedRow for a row of another environment.
        """
        options, pause = dict(self.sidecar.options.task_options), _FIRST_PAUSE
        asked: Fields = {"task": dict(task), "seed": seed, "options": options}
        while "full" in (found := await self._ask("start", asked)):
            what = f"environment {self.sidecar.name}"
            warnings.warn(what, f"it has no place for another episode ({found['full']}); trajectories wait")
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, _LONGEST_PAUSE)
        self.role = self.text(found, "role")
        return self.text(found, "observation")

    async def step(self, text: str, calls: Sequence[Fields]) -> Fields:
        """Act, and return the environment's answer, checked: `observation`, `answers`, `reward`, `done`, `metrics`."""
        self.steps += 1
        found = await self._ask("step", {"number": self.steps, "action": {"text": text, "calls": list(calls)}})
        answers = found.setdefault("answers", [])
        if not isinstance(answers, list) or len(answers) != len(calls) or not all(isinstance(a, str) for a in answers):
            raise self.error(f"answers must be a list of {len(calls)} texts, one a call, found {answers!r:.200}")
        found["answers"] = [_clean(str(one)) for one in answers]
        found["observation"], self.role = self.text(found, "observation"), self.text(found, "role")
        found.pop("role", None)
        if found.setdefault("reward", None) is not None:
            found["reward"] = self.number(found, "reward")
        self.done = found.setdefault("done", False) is True
        if not isinstance(found["done"], bool):
            raise self.error(f"done must be true or false, found {found['done']!r:.100}")
        if not self.done and not calls and found["observation"] is None:
            raise self.error("an episode that is not done must give an observation to answer, found none")
        return found

    async def score(self) -> dict[str, float]:
        """Ask for the episode's score; further numbers are metrics. Without a score there is no `score`."""
        found = await self._ask("score", {"number": self.steps + 1})
        if found.get("score", 0) is None:
            del found["score"]
        elif "score" not in found:
            raise self.error("score must return a number, None, or a dict with `score`; found a dict without it")
        return {name: self.number(found, name) for name in found}

    async def role_scores(self) -> tuple[dict[str, float] | None, dict[str, float]]:
        """Ask for the scores of an episode with roles: (by role, further numbers). None: a role has no score."""
        found = await self._ask("score", {"number": self.steps + 1})
        scores = found.pop("scores", None)
        if not isinstance(scores, dict) or "score" in found:
            raise self.error('score must be a dict with "scores", a number for each role, and without "score"')
        numbers = {name: self.number(found, name) for name in found}
        if None in scores.values():
            return None, numbers
        return {name: self.number(scores, name) for name in scores}, numbers

    def next_role(self, roles: Sequence[str]) -> str:
        """Return the role that moves next, one of `roles`."""
        if self.role is None or self.role not in roles:
            raise self.error(f"role must be one of the task's roles ({', '.join(roles)}), found {self.role!r:.100}")
        return self.role

    async def close(self) -> None:
        """End the episode; a fault here changes no result, as the sidecar closes what nobody asks for."""
        if self.address is not self.sidecar._address:  # its process has ended, and the episode with it
            return
        with contextlib.suppress(InfrastructureError, TimeoutError, UserError):
            await self._ask("close", {})

    def text(self, found: Fields, name: str) -> str | None:
        """Read a text or null."""
        value = found.get(name)
        if value is not None and not isinstance(value, str):
            raise self.error(f"{name} must be a text or None, found {value!r:.100}")
        return value if value is None else _clean(value)

    def number(self, found: Fields, name: str) -> float:
        """Read a finite number."""
        if (number := finite(found.get(name))) is None:
            raise self.error(f"{name} must be a finite number, found {found.get(name)!r:.100}")
        return number

    def error(self, problem: str) -> CodeError:
        """Make the error for an answer that the contract forbids."""
        at = f"step {self.steps}" if self.steps else "start"
        what = f"environment {self.sidecar.name}: {at} of {self.place}: {problem}"
        return CodeError(what, self.sidecar.name, after_turn=self.steps > 0)

    async def _ask(self, path: str, asked: Fields) -> Fields:
        asked = {"session": self.session, **({"number": 0} if path == "start" else {}), **asked}
        try:
            async with within(self.timeout):
                return await self.sidecar.ask(self.address, path, asked)
        except CodeError as error:
            error.after_turn = self.steps > 0
            raise


def environment_file(name: str, what: str) -> Path:
    """Find the file of an environment: a path, or the name of a ready adapter. Raises ConfigError."""
    ready = {path.stem: path for path in sorted(ADAPTERS.glob("*.py"))}
    if name in ready:
        return ready[name]
    if not (file := Path(name)).is_file():
        raise ConfigError(
            f"{what}: environment: expected a Python file, or one of {', '.join(ready)}; found {name}, which is no file"
        )
    return file.absolute()


def _first_line(process: subprocess.Popen[bytes], seconds: float) -> bytes:
    assert process.stdout is not None
    ends, read = time.monotonic() + seconds, b""
    while b"\n" not in read and (left := ends - time.monotonic()) > 0:
        if select([process.stdout], [], [], left)[0]:
            part = os.read(process.stdout.fileno(), 4096)
            if not part:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(5)
                break
            read += part
    return read


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _ending(status: int) -> str:
    return f"it was killed by signal {-status}" if status < 0 else f"it ended with status {status}"


def _clean(text: str) -> str:
    """Replace surrogates, which no tokenizer takes."""
    return text.encode(errors="replace").decode()
