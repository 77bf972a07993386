"""`python -m agentrl.replay RUN --uid U [--checkpoint DIR] [--turn K --tool-answer FILE|--message TEXT]`: sample
recorded trajectories again, from a turn or whole.

Samples a recorded trajectory again, in this process, by the weights that sampled it, and prints the first difference:
exit status 0 without a difference, 1 with one. With --turn it continues from another tool answer or message.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from agentrl.engines.servers.starter import STARTER, end_with
from agentrl.system.command import exit_status
from agentrl.system.versions import ShowVersion


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; exits with a message for a wrong one."""
    parser = argparse.ArgumentParser(prog="python -m agentrl.replay", description=__doc__)
    parser.add_argument("--version", action=ShowVersion, nargs=0, help="print the version of agentrl")
    parser.add_argument("run", type=Path, help="folder of a run, e.g. runs/quickstart")
    parser.add_argument("--uid", required=True, help="name of a trajectory, e.g. train/12/3/1")
    parser.add_argument("--checkpoint", type=Path, help="weights to sample by; else those that sampled it")
    parser.add_argument("--turn", type=int, help="number of a turn that the policy read, to have another text")
    text = parser.add_mutually_exclusive_group()
    text.add_argument("--tool-answer", type=Path, help="file with the other text")
    text.add_argument("--message", help="the other text")
    parser.add_argument(
        "--call", type=int, help="with --turn: number of the call that is answered, where it is several"
    )
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], help="device to compute on; else the run's")
    parser.add_argument(
        "--trust", action="store_true", help="take code, commands and hosts, too, from the run's config"
    )
    parser.add_argument("--out", metavar="FOLDER", type=Path, help="write the trajectory here, for agentrl.view")
    found = parser.parse_args(argv)
    edited = found.tool_answer is not None or found.message is not None
    if (found.turn is not None) != edited or (found.call is not None and not edited):
        parser.error("--turn (and --call) and one of --tool-answer and --message go together")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Replay, and return the process's exit status (see `agentrl.system.command`), 1 for a difference."""
    arguments = parse(argv)
    differs: list[bool] = []

    def work() -> None:
        # Imported late, so that --help waits for nothing.
        from agentrl.replay.edited import Edit
        from agentrl.replay.recorded import read_edit
        from agentrl.replay.report import Asked, run_replay

        text = read_edit(arguments.tool_answer, arguments.message)
        edit = None if text is None else Edit(arguments.turn, text, arguments.call)
        asked = Asked(
            arguments.run, arguments.uid, arguments.checkpoint, edit, arguments.device, arguments.trust, arguments.out
        )
        differs.append(run_replay(asked))

    if STARTER in os.environ:  # before the imports, which take seconds
        threading.Thread(target=end_with, args=(int(os.environ[STARTER]),), daemon=True).start()
    status = exit_status(work)
    return status or int(any(differs))


if __name__ == "__main__":
    sys.exit(main())
