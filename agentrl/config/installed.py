"""The software of servers that a config asks for, where it is not installed here."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from agentrl.config.section import Finding
from agentrl.errors import install_extra

SOFTWARE = {
    "sglang": ("SGLang", "server_urls=[http://host:30000]"),
    "vllm": ("vLLM", "server_urls=[http://host:8000], or take {section}.name=sglang"),
}
"""The name of each software, and the keys of a section that do without it."""


def is_installed(package: str) -> bool:
    """Check whether a package can be imported, without importing it.

    A mere folder of that name, without `__init__.py`, does not count.
    """
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def not_installed(package: str, key: str, section: str, instead: str = "") -> Iterator[Finding]:
    """Say where `package` is missing that `key` starts servers of; `section` may name servers that run already."""
    if package in SOFTWARE and not is_installed(package):
        name, attached = SOFTWARE[package]
        yield Finding(
            f"{key} starts {name} servers, and {name} is not installed here. On a machine with a GPU: "
            f"{install_extra(package)}; on a CPU: make setup-{package}, in a clone. Or attach to servers that run "
            f"already: {section}.{attached.format(section=section)}{instead}",
            "not installed",
        )
