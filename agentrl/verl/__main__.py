"""`python -m agentrl.verl check SCRIPT_OR_COMMAND`: judge launch scripts made for verl."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from agentrl.errors import UserError
from agentrl.system.versions import this_agentrl
from agentrl.system.visible import complain
from agentrl.verl.check import check

USAGE = """\
python -m agentrl.verl check SCRIPT          what of a launch script made for verl is the same here, and what is not
python -m agentrl.verl check COMMAND ...     the same of one command
Nothing of it is run. To train: python -m agentrl.verl.main_ppo with the script's arguments.
"""


def main(argv: Sequence[str]) -> int:
    """Return the exit status: 0 where every command of the script runs here, 1 where one does not, 2 for misuse."""
    if "--version" in argv[:1]:
        print(this_agentrl())
        return 0
    asks = bool({"-h", "--help"} & set(argv[:2]))
    if asks or len(argv) < 2 or argv[0] != "check":
        print(USAGE, end="", file=sys.stdout if asks else sys.stderr)
        return 0 if asks else 2
    try:
        return check(argv[1:])
    except UserError as error:
        return complain(error)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
