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
from agentrl.errors import ConfigError, UserError
from agentrl.system.parts import parts
from agentrl.system.plugin import nearest
from agentrl.system.targets import load_target
from agentrl.system.versions import this_agentrl
from agentrl.system.visible import complain

COMMANDS = {
    "train": "train a policy by reinforcement learning: the main job",
    "sft": "train a policy on conversations",
    "preferences": "train a policy or a reward model on preferred and rejected, or good and bad, answers",
    "plan": "show the memory and the time that a training will need",
    "evaluate": "score answers that are there already",
    "generate": "write trajectories with a policy, and train nothing",
}
"""Modules of the core that are commands, with their purpose. Entry points `agentrl.commands` are further ones."""


def usage() -> str:
    """List the commands."""
    listed = dict(COMMANDS)
    for name, target in sorted(parts("commands").items()):
        listed[name] = f"{COMMANDS[name]} (not {target})" if name in COMMANDS else purpose(target)
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
    try:
        return _run(words)
    except UserError as error:
        return complain(error)


def _run(words: Sequence[str]) -> int:
    if words[:1] == ["--version"]:
        print(this_agentrl())
        return 0
    if not words or words[0] in ("-h", "--help"):
        print(usage(), end="", file=sys.stdout if words else sys.stderr)
        return 0 if words else 2
    name, *rest = words
    further = {} if name in COMMANDS else parts("commands")
    known = [*COMMANDS, *further]
    if name not in known:
        print(f"error: no command {name!r}{nearest(name, known)}\n{usage()}", end="", file=sys.stderr)
        return 2
    # As `python -m` does, so that a user's own modules are found from the folder that the command starts in.
    if "" not in sys.path:
        sys.path.insert(0, "")
    sys.argv = [f"agentrl {name}", *rest]
    if name in further:
        return _loaded(name, further[name])(rest)
    runpy.run_module(f"agentrl.{name}", run_name="__main__", alter_sys=True)
    return 0


def _loaded(name: str, target: str) -> Callable[[Sequence[str]], int]:
    """Load the command of an entry point. Raises ConfigError where it cannot be called, or its module cannot run."""
    where = f"agentrl {name} (entry point agentrl.commands: {name} = {target})"
    try:
        found = load_target(target, where)
    except UserError:
        raise
    except Exception as error:  # of the module, as it is imported
        raise ConfigError(f"{where}: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise ConfigError(f"{where}: expected a function of the words that follow, found {found!r:.100}")
    return cast(Callable[[Sequence[str]], int], found)


if __name__ == "__main__":
    sys.exit(main())
