"""The program of `agent.py` as a harness: `openai_proxy.harness=examples/repairs/harness.py:Repair`."""

from __future__ import annotations

import platform
import shutil
from pathlib import Path

from agentrl.agents.harness import Errand, Harness, Launch


class Repair(Harness):
    """Python, which is given the program with each task."""

    program = "python3"
    install = "add python3"
    version = platform.python_version()
    train = "all"

    def prepare(self, errand: Errand) -> Launch:
        shutil.copy(Path(__file__).with_name("agent.py"), errand.home)
        return Launch([str(errand.home / "agent.py")], stdin=errand.instruction)
