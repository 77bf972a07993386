"""`agentrl COMMAND ...`, the console command: the same as `python -m agentrl.COMMAND ...`."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence

from agentrl import __version__
from agentrl.system.plugin import nearest

COMMANDS = {
    "train": "train a policy by reinforcement learning: the main job",
    "sft": "train a policy on conversations",
    "preferences": "train a policy or a reward model on preferred and rejected answers",
    "plan": "show the memory and the time that a training will need",
    "evaluate": "score answers that are there already",
    "generate": "write trajectories with a policy, and train nothing",
    "view": "show runs in a browser",
    "replay": "begin recorded trajectories again from a turn",
    "verl": "check launch scripts made for verl",
}
"""Modules of the package that are commands, with their purpose."""


def usage() -> str:
    """List the commands."""
    lines = [f"  agentrl {name:<12} {does}" for name, does in COMMANDS.items()]
    return "\n".join([f"agentrl {__version__}", *lines, "agentrl COMMAND --help says more.", ""])


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return the exit status, 2 where there is no such command."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "--version"):
        print(usage(), end="", file=sys.stdout if words else sys.stderr)
        return 0 if words else 2
    name, *rest = words
    if name not in COMMANDS:
        print(f"error: no command {name!r}{nearest(name, list(COMMANDS))}\n{usage()}", end="", file=sys.stderr)
        return 2
    # As `python -m` does, so that a user's own modules are found from the folder that the command starts in.
    if "" not in sys.path:
        sys.path.insert(0, "")
    sys.argv = [f"agentrl {name}", *rest]
    runpy.run_module(f"agentrl.{name}", run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
