"""`package.module:object` and `path/to/file.py:object`, loaded here and on machines that have no such file."""

from __future__ import annotations

import hashlib
import linecache
import re
import sys
from pathlib import Path
from types import ModuleType

from agentrl.errors import ConfigError
from agentrl.system.plugin import import_module, nearest
from agentrl.system.registrations import loading
from agentrl.system.texts import read_text

_TARGET = re.compile(r"(\w+(?:\.\w+)*|[^:]+\.py):([^\W\d][\w.]*)")
_USERS = re.compile(r"^agentrl_user_(\w+)_[0-9a-f]{8}(?=\.|$)")
MOST_LISTED = 20
"""Names of a module that a message lists."""


def is_target(name: str) -> bool:
    """Check whether `name` has the form of a target."""
    return _TARGET.fullmatch(name) is not None


def load_target(target: str, key: str) -> object:
    """The object that `target` names. Raises ConfigError that begins with `key`, the config key that holds it."""
    match = _TARGET.fullmatch(target)
    if match is None:
        raise ConfigError(f"{key}: expected package.module:object or path/to/file.py:object, found {target!r}")
    where, name = match.groups()
    try:
        found = load_file(where) if where.endswith(".py") else import_module(where)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error
    return member(found, name, where, key)


def member(holder: object, name: str, where: str, key: str) -> object:
    """The object `name`, which may be dotted, of a module or class. Raises ConfigError naming `key` and `where`."""
    for part in name.split("."):
        found = getattr(holder, part, None)
        if found is None:
            public = [one for one in getattr(holder, "__dict__", {}) if not one.startswith("_")]
            defined = [one for one in public if _is_own(getattr(holder, one), holder)]
            listed = ", ".join([*defined[:MOST_LISTED], *["..."][: len(defined) > MOST_LISTED]]) or "nothing"
            raise ConfigError(f"{key}: {where} has no {part!r}{nearest(part, public)}; it defines {listed}")
        holder = found
    return holder


def _is_own(value: object, holder: object) -> bool:
    """Check whether a module or class defines `value` itself, rather than imports it."""
    place = holder.__name__ if isinstance(holder, ModuleType) else holder.__module__
    return not isinstance(value, ModuleType) and getattr(value, "__module__", place) == place


def load_file(path: str) -> ModuleType:
    """The module of a Python file, which is run once. Raises ConfigError.

    Text that `take_files` received runs in place of the file: all processes of a run have the same code, also where the
    file was edited meanwhile.
    """
    given = str(Path(path).expanduser())
    name = "agentrl_user_" + Path(path).stem + "_" + hashlib.blake2b(given.encode(), digest_size=4).hexdigest()
    with loading(name):
        return sys.modules[name] if name in sys.modules else _run_file(given, name)


def _run_file(given: str, name: str) -> ModuleType:
    file = str(Path(given).absolute())
    source = _source(given)
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)  # for error messages
    module = ModuleType(name)
    module.__file__ = file
    sys.modules[name] = module  # dataclasses look their module up there
    try:
        exec(compile(source, file, "exec"), vars(module))
    except BaseException as error:
        del sys.modules[name]
        if not isinstance(error, (Exception, SystemExit)):
            raise
        raise ConfigError(f"running {file} failed: {type(error).__name__}: {error}") from error
    return module


def _source(given: str) -> str:
    file = Path(given).absolute()
    if not given.endswith(".py"):
        raise ConfigError(f"{file} is no Python file (its name must end in .py)")
    try:
        return read_text(given)
    except FileNotFoundError:
        raise ConfigError(f"no such file: {file}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error


def plain_name(module: str) -> str:
    """A module's name for messages; for a user's file, its stem."""
    return _USERS.sub(r"\1", module)
