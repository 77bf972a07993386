"""`python -m agentrl.generate data.path=... data.output_path=... model.path=...`: responses without training."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from agentrl.config import load_config
from agentrl.config.sections.offline import GenerateConfig
from agentrl.system.command import exit_status


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the process's exit status (see `agentrl.system.command`)."""

    def work() -> None:
        config = load_config(list(sys.argv[1:] if argv is None else argv), "generate", GenerateConfig)
        # Imported late, so that --help and config errors wait for nothing.
        from agentrl.observe.open import open_display
        from agentrl.offline.generate import generate

        with open_display(f"generate · {config.data.output_path}") as display:
            generate(config, display)

    return exit_status(work)


if __name__ == "__main__":
    sys.exit(main())
