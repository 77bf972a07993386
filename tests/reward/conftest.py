"""Fixtures of servers that judges and reward models are asked at."""

from tests.openai_api.conftest import chat, tiny_dir
from tests.remote.conftest import server

__all__ = ["chat", "server", "tiny_dir"]
