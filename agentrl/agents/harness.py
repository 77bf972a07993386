"""The contract of harnesses: programs that act on a task by themselves, made ready for one session each.

A harness writes the program's settings into an empty home folder and says how the program is started.
`agentrl.agents.harness_agent` has the parts that are the same for all harnesses: folders, the process and its end,
the check of the result.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from pydantic import BaseModel, ConfigDict

from agentrl.agents.task import API_KEY, MODEL
from agentrl.errors import ConfigError


class HarnessOptions(BaseModel):
    """The mapping `openai_proxy.harness_options`."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    arguments: list[str] = []
    """Further arguments of the program."""
    mcp_servers: dict[str, str] = {}
    """Addresses of MCP servers (streamable HTTP) by name. A row may choose some: `extra_info.mcp_servers`, names."""


@dataclass(frozen=True, slots=True)
class Errand:
    """One task, and the session in which a program acts on it."""

    instruction: str
    """Text of the row's user message."""
    system: str
    """Text of the row's system message; empty without one."""
    base_url: str
    """Address of the session, with its /v1."""
    home: Path
    """Empty folder, which is the program's HOME."""
    work: Path
    """Working folder, with the row's files; in a container it may be a folder that this machine does not have."""
    mcp_servers: Mapping[str, str] = field(default_factory=dict)
    """Addresses of MCP servers by name."""
    sample: Mapping[str, object] = field(default_factory=dict)
    """The row, as agents are shown it, without the files of the check."""
    model: str = MODEL
    """Name of the policy."""
    api_key: str = API_KEY
    """Key that clients insist on."""


@dataclass(frozen=True, slots=True)
class Launch:
    """How the program is started for an errand."""

    arguments: Sequence[str]
    """Words after the program's own."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Further variables. The addresses of the session stand in those that OpenAI's and Anthropic's clients read."""
    stdin: str = ""


class Harness(ABC):
    """One program. Subclasses with options of their own annotate the parameter `options` with them."""

    program: ClassVar[str]
    """Name of its executable."""
    install: ClassVar[str]
    """Command that installs the version that was tried."""
    version: ClassVar[str]
    """Version that was tried."""
    train: ClassVar[str] = "main"
    """Transcripts of its sessions that are trained on where `openai_proxy.train` is `auto`."""
    version_arguments: ClassVar[Sequence[str]] = ("--version",)
    """Arguments with which it prints its version."""
    takes_conversations: ClassVar[bool] = False
    """True: a row's prompt may be any conversation, and `Errand.instruction` is empty."""

    def __init__(self, options: HarnessOptions | None = None) -> None:
        self.options = options or HarnessOptions()

    @abstractmethod
    def prepare(self, errand: Errand) -> Launch:
        """Write settings into `errand.home`, and say how the program is started in `errand.work`."""

    def without_mcp(self) -> None:
        """Raise ConfigError where the options name MCP servers for a program that takes no servers."""
        if self.options.mcp_servers:
            raise ConfigError(f"openai_proxy.harness_options.mcp_servers: {self.program} takes no MCP servers")
