"""Proxies: from the environment, never for this machine's own addresses, or from a config key."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping
from urllib.parse import urlsplit

from agentrl.errors import ConfigError

VARIABLES = ("http_proxy", "https_proxy", "all_proxy")
OWN_ADDRESSES = ("127.0.0.1", "localhost", "::1")
_CREDENTIALS = re.compile(r"(?<=//)[^/@]*@")


def spare_own_addresses(environment: MutableMapping[str, str]) -> None:
    """Except this machine's own addresses from the proxies that clients read in `environment`.

    Both spellings are set: most clients prefer the lower one.
    """
    excepted = environment.get("no_proxy") or environment.get("NO_PROXY") or ""
    hosts = [host.strip() for host in excepted.split(",") if host.strip()]
    if "*" not in hosts:
        excepted = ",".join([*hosts, *(own for own in OWN_ADDRESSES if own not in hosts)])
    environment["no_proxy"] = environment["NO_PROXY"] = excepted


def named_proxies(environment: Mapping[str, str]) -> str:
    """Write the proxies that an environment names, without credentials; empty without any."""
    found = {name.lower(): value for name, value in environment.items() if name.lower() in VARIABLES and value}
    return ", ".join(f"{name}={shown(value)}" for name, value in sorted(found.items()))


def proxy_note(said: str, environment: Mapping[str, str]) -> str:
    """Write the addition to a message about a connection where the environment names a proxy."""
    named = named_proxies(environment)
    return f" (the environment names a proxy: {named})" if named and re.search("(?i)connect|proxy", said) else ""


def proxy_url(value: str, name: str) -> str:
    """Return the URL of a proxy: `value` itself, or the content of the environment variable `value`.

    Raises ConfigError, without the variable's value, that begins with `name`.
    """
    url, source = (value, repr(value)) if "://" in value else (os.environ.get(value, ""), f"the variable {value}")
    try:
        parts = urlsplit(url)
        is_url = parts.scheme == "http" and bool(parts.hostname) and parts.port is not None
    except ValueError:
        is_url = False
    if not is_url:
        raise ConfigError(
            f"{name}: proxy: expected http://HOST:PORT, or the name of an environment variable that holds it, found "
            f"{source}" + ("" if "://" in value else " with no such URL")
        )
    if "://" in value and parts.username is not None:
        raise ConfigError(f"{name}: proxy: credentials do not belong in a file; name an environment variable instead")
    return url


def shown(url: str) -> str:
    """Return a proxy's URL as messages show it, without credentials."""
    return _CREDENTIALS.sub("", url)
