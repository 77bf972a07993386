"""`python -m agentrl.evaluate data.path=...`: scores of responses in a parquet file, by data source."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from agentrl.config import load_config
from agentrl.config.sections.offline import EvaluateConfig
from agentrl.system.command import exit_status


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate, and return the process's exit status (see `agentrl.system.command`)."""

    def work() -> None:
        config = load_config(list(sys.argv[1:] if argv is None else argv), "evaluate", EvaluateConfig)
        # Imported late, so that --help and config errors wait for nothing.
        from agentrl.observe.open import open_display
        from agentrl.offline.evaluate import evaluate, print_table

        with open_display("evaluate") as display:
            summaries = evaluate(config, display)
        print_table(summaries)

    return exit_status(work)


if __name__ == "__main__":
    sys.exit(main())
