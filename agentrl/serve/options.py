"""Options of `python -m agentrl.serve --learn`, and the keys of clients and of the operator."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

from agentrl.errors import ConfigError

SHORTEST_KEY = 16
FLAGS = ("--host", "--port")
LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, slots=True)
class LiveOptions:
    """Address of the endpoint, keys of its callers, and how long sessions and feedback are waited for."""

    host: str = "127.0.0.1"
    port: int = 8000
    """0: any that is free."""
    client_key: str = field(default="", repr=False)
    """Key of the clients, who are served by the policy."""
    operator_key: str = field(default="", repr=False)
    """Key of the operator, who gives feedback."""
    idle_seconds: float = 600.0
    """Seconds of silence after which a session with feedback may be trained on."""
    feedback_window: float = 7 * 86400.0
    """Seconds after a session's last answer in which feedback is waited for."""


@dataclass(frozen=True, slots=True)
class Keys:
    """Two keys, and which of them were made up for this process."""

    client: str
    operator: str
    made_up: Mapping[str, str]


def read_keys(client_env: str | None, operator_env: str | None, host: str) -> Keys:
    """Read both keys from the environment variables of these names, or make them up where no variable is named.

    Raises ConfigError for a variable without a sound key, for one key for both, and for made-up keys at an address that
    other machines reach.
    """
    made_up: dict[str, str] = {}
    found = {}
    for flag, name in (("--client-key-env", client_env), ("--operator-key-env", operator_env)):
        if name is None:
            if host not in LOOPBACK:
                raise ConfigError(f"{flag}: expected the name of an environment variable with a key, as --host={host}")
            found[flag] = made_up[flag] = secrets.token_urlsafe(24)
            continue
        key = os.environ.get(name, "")
        if len(key) < SHORTEST_KEY or not key.isascii() or not key.isprintable():
            raise ConfigError(
                f"{flag}: expected a key of at least {SHORTEST_KEY} printable ASCII characters in the environment "
                f"variable {name}, found {f'{len(key)} characters' if key else 'nothing'}; e.g. python -c "
                "'import secrets; print(secrets.token_urlsafe())'"
            )
        found[flag] = key
    client, operator = found.values()
    if client == operator:
        raise ConfigError(
            "--client-key-env and --operator-key-env: expected two keys, found one. A client that has the operator's "
            "key scores the policy's answers itself"
        )
    return Keys(client, operator, made_up)
