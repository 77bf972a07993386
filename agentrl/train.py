"""`python -m agentrl.train [key=value ...]`: reinforcement learning of a tool-using policy, the main job."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from agentrl.config import load_config
from agentrl.system.command import exit_status


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the process's exit status (see `agentrl.system.command`)."""

    def work() -> None:
        config = load_config(list(sys.argv[1:] if argv is None else argv))
        # Imported late, so that --help and config errors wait for nothing.
        from agentrl.observe.open import open_display
        from agentrl.trainer.run import train

        with open_display(f"{config.trainer.project_name} · {config.trainer.experiment_name}") as display:
            train(config, display)

    return exit_status(work)


if __name__ == "__main__":
    sys.exit(main())
