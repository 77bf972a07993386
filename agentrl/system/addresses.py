"""Addresses that a user names."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """Return True for an address of this machine's own network, or its name `localhost`; other names are not asked."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"
