"""`python killed.py POINT NUMBER ARGUMENTS...`: `python -m agentrl.serve ARGUMENTS` that kills itself at a moment.

POINT names a method below, and NUMBER the call of it behind which (or, with a minus, before which) the process ends.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from agentrl.checkpoint.manager import CheckpointManager
from agentrl.rollouts.async_source import AsyncSource
from agentrl.rollouts.journal import Journal
from agentrl.rollouts.ledger import LedgerFile
from agentrl.serve.__main__ import main
from agentrl.serve.store import Store

POINTS: dict[str, tuple[type, str]] = {
    "session begun": (Store, "begin"),
    "answer written": (Store, "keep"),
    "feedback written": (Store, "give"),
    "session taken": (Store, "take"),
    "group journalled": (Journal, "add"),
    "batch in the ledger": (LedgerFile, "add"),
    "weights sent": (AsyncSource, "publish"),
    "checkpoint saved": (CheckpointManager, "save"),
}


def arm(point: str, number: int) -> None:
    """Have a method's call kill this process."""
    owner, name = POINTS[point]
    method, calls = getattr(owner, name), 0

    def called(*given: Any, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == -number:
            os.kill(os.getpid(), signal.SIGKILL)
        result = method(*given, **more)
        if calls == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, called)


if __name__ == "__main__":
    if sys.argv[1]:
        arm(sys.argv[1], int(sys.argv[2]))
    sys.exit(main(sys.argv[3:]))
