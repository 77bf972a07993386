"""A server process ends with the process that started it, however that one ends (SIGKILL too).

Its stdin is a pipe whose other end only the starter holds, and its parent's id changes when the starter is gone.
PR_SET_PDEATHSIG would not do: it fires when the thread that started the process ends, not the process.
"""

from __future__ import annotations

import os
import select
import signal

STARTER = "AGENTRL_SERVER_STARTER"
"""Environment variable of a server: the id of the process that started it and holds the other end of its stdin."""
KEY = "AGENTRL_SERVER_KEY"
"""Environment variable of a server: the key that its callers have to send. A command line could be read by everyone."""
LOOK_EVERY = 0.5  # seconds between two looks at the parent's id


def end_with(starter: int) -> None:
    """Kill this process's group as soon as process `starter` is gone or closes our stdin. Never returns."""
    while os.getppid() == starter:
        readable, _, _ = select.select([0], [], [], LOOK_EVERY)
        if readable and not os.read(0, 1):
            break
    os.killpg(0, signal.SIGKILL)
