"""Launcher of an MCP server that ends with its starter: `python -I -S launch.py STARTER COMMAND...`.

STARTER is a process id. The command has this process's standard streams. However the starter ends (SIGKILL too), the
server and what it has started are killed: all of them are of this process's group, unless they have left it on purpose.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Start the command, and kill it when the starter has ended."""
    starter, command = int(sys.argv[1]), sys.argv[2:]
    watched = os.pidfd_open(starter)
    if os.getppid() != starter:
        return
    server = os.fork()
    if server == 0:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # where this process alone is killed
        try:
            os.execvp(command[0], command)
        except OSError as error:
            print(f"{command[0]}: {error.strerror}", file=sys.stderr, flush=True)
            os._exit(127)
    ended, own = select.poll(), os.pidfd_open(server)
    ended.register(watched, select.POLLIN)
    ended.register(own, select.POLLIN)
    if any(descriptor == own for descriptor, _ in ended.poll()):
        status = os.waitstatus_to_exitcode(os.waitpid(server, 0)[1])
        print(f"(the server ended with status {status})", file=sys.stderr, flush=True)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
