"""Calls to servers that may be slow, full, restarting or gone: one client for tools, interactions and scorers."""

from agentrl.remote.client import Answer, RemoteClient, RemoteOptions
from agentrl.remote.faults import FaultKind, RemoteFault, RemoteRefused, RemoteUnavailable
from agentrl.remote.tool import RemoteTool
from agentrl.remote.url import checked_url, how_to_start

__all__ = [
    "Answer",
    "FaultKind",
    "RemoteClient",
    "RemoteFault",
    "RemoteOptions",
    "RemoteRefused",
    "RemoteTool",
    "RemoteUnavailable",
    "checked_url",
    "how_to_start",
]
