"""`python -m agentrl.evaluate data.path=...`: scores of responses in a file or of a run, by data source.

`python -m agentrl.evaluate --suite NAME --out FOLDER model.path=...`: responses to a published benchmark, and its
scores. `--compare FOLDER FOLDER`: two such runs in one table.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import cast

from agentrl.config import load_config
from agentrl.config.sections.offline import EvaluateConfig
from agentrl.system.command import exit_status
from agentrl.system.parts import parts
from agentrl.system.targets import load_target


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate, and return the process's exit status (see `agentrl.system.command`)."""

    words = list(sys.argv[1:] if argv is None else argv)

    def work() -> None:
        for flag, part in parts("evaluate").items():
            if any(word.partition("=")[0] == flag for word in words):
                cast(Callable[[Sequence[str]], None], load_target(part, flag))(words)
                return
        config = load_config(words, "evaluate", EvaluateConfig)
        # Imported late, so that --help and config errors wait for nothing.
        from agentrl.observe.open import open_display
        from agentrl.offline.evaluate import evaluate, print_tables

        with open_display("evaluate") as display:
            found = evaluate(config, display)
        print_tables(found)

    return exit_status(work)


if __name__ == "__main__":
    sys.exit(main())
