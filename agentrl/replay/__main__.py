"""Entry point: `python -m agentrl.replay RUN --uid U [--checkpoint DIR] [--turn K --tool-answer FILE|--message TEXT]`.

Samples a recorded trajectory again, in this process, by the weights that sampled it, and tells the first difference:
exit status 0 where there is none, 1 where there is one. With --turn it goes on from another tool answer or message.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from agentrl.system.command import exit_status


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; exits with a message where it is none."""
    parser = argparse.ArgumentParser(prog="python -m agentrl.replay", description=__doc__)
    parser.add_argument("run", type=Path, help="folder of a run, e.g. runs/quickstart")
    parser.add_argument("--uid", required=True, help="name of a trajectory, e.g. train/12/3/1")
    parser.add_argument("--checkpoint", type=Path, help="weights to sample by; else those that sampled it")
    parser.add_argument("--turn", type=int, help="number of a turn that the policy read, to have another text")
    text = parser.add_mutually_exclusive_group()
    text.add_argument("--tool-answer", type=Path, help="file with the other text")
    text.add_argument("--message", help="the other text")
    found = parser.parse_args(argv)
    edited = found.tool_answer is not None or found.message is not None
    if (found.turn is not None) != edited:
        parser.error("--turn and one of --tool-answer and --message go together")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Replay, and return the process's exit status (see `agentrl.system.command`), 1 for a difference."""
    arguments = parse(argv)
    differs: list[bool] = []

    def work() -> None:
        # Imported late, so that --help waits for nothing.
        from agentrl.replay.report import run_replay

        differs.append(
            run_replay(
                arguments.run,
                arguments.uid,
                arguments.checkpoint,
                arguments.turn,
                arguments.tool_answer,
                arguments.message,
            )
        )

    status = exit_status(work)
    return status or int(any(differs))


if __name__ == "__main__":
    sys.exit(main())
