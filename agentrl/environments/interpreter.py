"""Interpreters of this machine, and virtual environments made with them: once, and then used offline."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread
from urllib.parse import SplitResult, urlsplit

from agentrl.errors import ConfigError
from agentrl.remote.credentials import Secrets
from agentrl.system.user_cache import user_cache

logger = logging.getLogger(__name__)

PASSED = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TMPDIR", "TZ", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE"),
    *("LD_LIBRARY_PATH", "SSL_CERT_FILE"),
)
"""Environment variables of the trainer that an environment sees; all others, and with them the trainer's secrets and
its packages, it does not. Programs of its packages, which pip runs, see those of pip, too."""
MADE = "made.txt"
"""File of a virtual environment that is complete: what `pip freeze` lists in it."""
_SHOWN_LINES = 12
_SHOWN_WIDTH = 120
"""Characters of pip's newest line that are shown: its last one lists all packages."""
_SHOWN_EVERY = 5.0
"""Seconds between two lines about an installation."""


def find_python(wanted: str | None, key: str) -> str:
    """Find an interpreter by version (`3.12`) or path; None: this one. It counts once it has run `-c 1`.

    Raises ConfigError that begins with `key`, with the versions that are there.
    """
    if wanted is None:
        return sys.executable
    if not all(part.isdecimal() for part in wanted.split(".")):
        if not _version_of(found := str(Path(wanted).expanduser())):
            raise ConfigError(f"{key}: expected a Python that runs, or a version like 3.12; found {wanted}")
        return found
    tried = {path: _version_of(path) for path in _candidates()}
    for path, version in tried.items():
        if version is not None and f"{version}.".startswith(f"{wanted}."):
            return path
    known = ", ".join(sorted({version for version in tried.values() if version}))
    raise ConfigError(
        f"{key}: Python {wanted} is not on this machine (found: {known}). Install it, e.g. by `pyenv install {wanted}` "
        f"or `uv python install {wanted}`, or give the path of an interpreter"
    )


def _candidates() -> Iterator[str]:
    yield sys.executable
    folders = [Path(one) for one in os.environ.get("PATH", "").split(os.pathsep) if one]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    folders += [*sorted(pyenv.glob("versions/*/bin")), *sorted(Path.home().glob(".local/share/uv/python/*/bin"))]
    for folder in folders:
        yield from map(str, sorted(folder.glob("python3.[0-9]")) + sorted(folder.glob("python3.[0-9][0-9]")))


def _version_of(python: str) -> str | None:
    """Version of an interpreter that runs; None where it does not run, e.g. a shim without its Python."""
    program = "import sys; print('.'.join(map(str, sys.version_info[:3])))"
    try:
        done = subprocess.run([python, "-c", program], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def virtual_environment(name: str, python: str, packages: Sequence[str], key: str) -> str:
    """Return the interpreter of a virtual environment with `packages`, which is made unless it is there.

    Processes that want the same one wait for the first. Raises ConfigError with pip's last lines.
    """
    files = [Path(one[3:].strip()).read_text() for one in packages if one.startswith("-r ")]
    parts = json.dumps([_version_of(python), list(packages), files])
    folder = user_cache() / "environments" / f"{name}-{hashlib.sha256(parts.encode()).hexdigest()[:12]}"
    made, found = folder / MADE, str(folder / "bin" / "python")
    if made.exists():
        return found
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            logger.warning("environment %s: installing %s into %s", name, " ".join(packages), folder)
            shutil.rmtree(folder, ignore_errors=True)
            _run([python, "-m", "venv", str(folder)], f"{key}: no virtual environment can be made with {python}")
            given = [part for one in packages for part in (one.split(" ", 1) if one.startswith("-r ") else [one])]
            wish = [found, "-m", "pip", "install", "--disable-pip-version-check", *given]
            _install(name, wish, f"{key}: pip cannot install {' '.join(packages)}")
            frozen = _run([found, "-m", "pip", "freeze", "--disable-pip-version-check"], f"{key}: pip freeze fails")
            partial = made.with_suffix(".partial")
            partial.write_text(frozen)
            partial.replace(made)
    return found


def _run(command: Sequence[str], problem: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env=_own_environment())
    if done.returncode:
        raise ConfigError(f"{problem}; its last lines:\n{_hidden(last_lines(done.stdout + done.stderr))}")
    return done.stdout


def _install(name: str, command: Sequence[str], problem: str) -> None:
    """Run pip, and log its newest line every few seconds, also while it writes nothing (a large download)."""
    lines, began = list[str](), time.monotonic()
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=_own_environment(),
    ) as process:
        written = process.stdout
        assert written is not None

        def read() -> None:
            for line in written:
                lines.append(line)

        reading = Thread(target=read, name="pip", daemon=True)
        reading.start()
        try:
            reading.join(_SHOWN_EVERY)
            while reading.is_alive():
                newest = lines[-1].strip() if lines else "pip begins"
                shown = newest if len(newest) <= _SHOWN_WIDTH else f"{newest[:_SHOWN_WIDTH]} ..."
                logger.warning("environment %s: %.0f s, %s", name, time.monotonic() - began, _hidden(shown))
                reading.join(_SHOWN_EVERY)
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise ConfigError(f"{problem}; its last lines:\n{_hidden(last_lines(''.join(lines)))}")


def _own_environment() -> dict[str, str]:
    """Variables that pip sees, and with it programs that packages bring."""
    return {name: value for name, value in os.environ.items() if name in PASSED or name.startswith("PIP_")}


def _hidden(text: str) -> str:
    """Hide passwords of pip's URLs."""
    urls = [word for name, value in _own_environment().items() if name.startswith("PIP_") for word in value.split()]
    passwords = (parts.password for word in urls if (parts := _parts(word)) and parts.password)
    return Secrets(passwords, shortest=1).hide(text)


def _parts(url: str) -> SplitResult | None:
    with suppress(ValueError):
        return urlsplit(url)
    return None


def last_lines(text: str) -> str:
    """Return the last lines of an output that are not empty."""
    return "\n".join([line.rstrip() for line in text.splitlines() if line.strip()][-_SHOWN_LINES:]) or "(no output)"
