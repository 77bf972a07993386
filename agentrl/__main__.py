"""`agentrl COMMAND ...`, the console command: the same as `python -m agentrl.COMMAND ...`."""

from __future__ import annotations

import ast
import importlib.util
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

from agentrl import __version__
from agentrl.errors import ConfigError
from agentrl.system.parts import parts
from agentrl.system.plugin import nearest
from agentrl.system.targets import load_target

COMMANDS = {
    "train": "train a policy by reinforcement learning: the main job",
    "sft": "train a policy on conversations",
    "preferences": "train a policy or a reward model on preferred and rejected answers",
    "plan": "show the memory and the time that a training will need",
    "evaluate": "score answers that are there already",
    "generate": "write trajectories with a policy, and train nothing",
}
"""Modules of the core that are commands, with their purpose. Entry points `agentrl.commands` are further ones."""


def usage() -> str:
    """List the commands."""
    listed = COMMANDS | {name: purpose(target) for name, target in sorted(parts("commands").items())}
    lines = [f"  agentrl {name:<12} {does}" for name, does in listed.items()]
    return "\n".join([f"agentrl {__version__}", *lines, "agentrl COMMAND --help says more.", ""])


def purpose(target: str) -> str:
    """Read the purpose of a command: what its module's docstring says first, after the command and a colon.

    The module is read, and not run.
    """
    try:
        spec = importlib.util.find_spec(target.partition(":")[0])
        source = Path(str(spec and spec.origin)).read_text(encoding="utf-8")
    except (ImportError, OSError, ValueError):
        return f"(cannot be found: {target})"
    first = (ast.get_docstring(ast.parse(source)) or "").partition("\n\n")[0]
    return " ".join(first.rpartition("`: ")[2].split()).partition(". ")[0].rstrip(".")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return the exit status, 2 where there is no such command."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "--version"):
        print(usage(), end="", file=sys.stdout if words else sys.stderr)
        return 0 if words else 2
    name, *rest = words
    try:
        further = {} if name in COMMANDS else parts("commands")
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    known = [*COMMANDS, *further]
    if name not in known:
        print(f"error: no command {name!r}{nearest(name, known)}\n{usage()}", end="", file=sys.stderr)
        return 2
    # As `python -m` does, so that a user's own modules are found from the folder that the command starts in.
    if "" not in sys.path:
        sys.path.insert(0, "")
    sys.argv = [f"agentrl {name}", *rest]
    if name in further:
        return cast(Callable[[Sequence[str]], int], load_target(further[name], f"agentrl {name}"))(rest)
    runpy.run_module(f"agentrl.{name}", run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
