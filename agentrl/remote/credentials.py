"""Credentials, which come from the environment and are removed from all answers of a server."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from urllib.parse import quote, quote_plus

from agentrl.errors import ConfigError
from agentrl.remote.faults import RemoteRefused, RemoteUnavailable
from agentrl.tool import ToolError

SECRET_LENGTH = 8
"""Characters from which on a value counts as a secret."""


def from_environment(variable: str) -> str:
    """Read a secret. Raises ConfigError, without the value, when it is not set or cannot stand in a header."""
    secret = os.environ.get(variable, "").strip()
    if not secret or not secret.isascii() or not secret.isprintable():
        state = "holds what cannot stand in a header" if secret else "is not set"
        raise ConfigError(f"the environment variable {variable} {state}; export it before the start")
    return secret


def check_set(key: str, variables: Iterable[str]) -> None:
    """Raise ConfigError, with the `key` that names them, for environment variables that are not set."""
    if unset := [name for name in variables if name not in os.environ]:
        raise ConfigError(f"{key}: {', '.join(unset)} not set in the environment; export before the start")


def passed_secrets(variables: Iterable[str]) -> Secrets:
    """Return the values of environment variables that a program is given, but short ones and paths of this machine."""
    values = (os.environ.get(name, "") for name in variables)
    return Secrets(one for one in values if not os.path.exists(one))  # noqa: PTH110 - a long text is no path


def _forms(value: str) -> Iterator[str]:
    """Yield a value as a server may echo it: plain, in a URL, in JSON."""
    escaped = json.dumps(value)[1:-1]
    yield from (value, quote(value, safe=""), quote_plus(value), escaped, escaped.replace("/", "\\/"))


class Secrets:
    """Texts that must not be shown to the model or in a log, though a server may echo them."""

    def __init__(self, values: Iterable[str], *, shortest: int = SECRET_LENGTH) -> None:
        """`values`: ones below `shortest` characters are left alone, as they stand in other words ("key", "test")."""
        forms = {form for value in values if len(value) >= shortest for form in _forms(value)}
        self._forms = sorted(forms, key=len, reverse=True)  # a value may begin with another one

    def hide(self, text: str) -> str:
        """Replace every secret in `text`, ones quoted for a URL or for JSON too, by `[secret]`."""
        for form in self._forms:
            text = text.replace(form, "[secret]")
        return text

    @contextmanager
    def hidden_in_errors(self) -> Iterator[None]:
        """Context that raises the errors of calls again without secrets, and without the errors that caused them."""
        try:
            yield
        except RemoteRefused as error:
            raise RemoteRefused(error.status, self.hide(error.detail)) from None
        except ToolError as error:
            raise type(error)(self.hide(str(error))) from None
        except RemoteUnavailable as error:
            raise RemoteUnavailable(error.kind, self.hide(str(error))) from None
