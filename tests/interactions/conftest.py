"""Fixtures of loops, of servers and of small runs."""

from tests.agent_loop.conftest import bench, chat, tiny_dir
from tests.e2e.conftest import data_dir, policy_dir, reward_file, small_run
from tests.remote.conftest import server

__all__ = ["bench", "chat", "data_dir", "policy_dir", "reward_file", "server", "small_run", "tiny_dir"]
