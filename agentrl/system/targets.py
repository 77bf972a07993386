"""`package.module:object` and `path/to/file.py:object`, loaded here and on machines that have no such file."""

from __future__ import annotations

import hashlib
import linecache
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from agentrl.errors import ConfigError
from agentrl.system.plugin import import_module, nearest

_TARGET = re.compile(r"(\w+(?:\.\w+)*|[^:]+\.py):([^\W\d][\w.]*)")
_sources: dict[str, str] = {}
"""Source texts of the files that were loaded, by the path that was given."""


def is_target(name: str) -> bool:
    """Say whether `name` has the form of a target."""
    return _TARGET.fullmatch(name) is not None


def load_target(target: str, key: str) -> Any:
    """The object that `target` names. Raises ConfigError that begins with `key`, the config key that holds it."""
    match = _TARGET.fullmatch(target)
    if match is None:
        raise ConfigError(f"{key}: expected package.module:object or path/to/file.py:object, found {target!r}")
    where, name = match.groups()
    try:
        found: Any = load_file(where) if where.endswith(".py") else import_module(where)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error
    for part in name.split("."):
        holder, found = found, getattr(found, part, None)
        if found is None:
            candidates = [one for one in vars(holder) if not one.startswith("_")] if hasattr(holder, "__dict__") else []
            raise ConfigError(f"{key}: {where} has no {part!r}{nearest(part, candidates)}")
    return found


def load_file(path: str) -> ModuleType:
    """The module of a Python file, which is run once. Raises ConfigError."""
    given = str(Path(path).expanduser())
    name = "agentrl_user_" + Path(path).stem + "_" + hashlib.blake2b(given.encode(), digest_size=4).hexdigest()
    if name in sys.modules:
        return sys.modules[name]
    file = str(Path(given).absolute())
    try:
        source = Path(file).read_text(encoding="utf-8")
    except FileNotFoundError:
        if given not in _sources:
            raise ConfigError(f"no such file: {file}") from None
        source = _sources[given]
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)  # for error messages
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
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
    _sources[given] = source
    return module


def loaded_files() -> dict[str, str]:
    """Source texts of all files that were loaded, by the paths that configs give: for `take_files` elsewhere."""
    return dict(_sources)


def take_files(sources: Mapping[str, str]) -> None:
    """Load these texts where a config names a file that this machine does not have."""
    _sources.update(sources)
