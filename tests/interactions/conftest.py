"""Fixtures of loops, of servers and of small runs."""

from tests.agent_loop.conftest import bench, chat, tiny_dir
from tests.remote.conftest import server

__all__ = ["bench", "chat", "server", "tiny_dir"]
