"""`python -m agentrl.sft data.train_files=... model.path=...`: supervised training on multi-turn transcripts.

Only the assistant's tokens are learnt.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from agentrl.config import SFTConfig
from agentrl.config.sweep import load_jobs
from agentrl.system.command import exit_status
from agentrl.trainer.sweep import run_jobs


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the process's exit status (see `agentrl.system.command`)."""

    def work() -> None:
        run_jobs(load_jobs(list(sys.argv[1:] if argv is None else argv), "sft", SFTConfig), train)

    def train(config: SFTConfig) -> dict[str, float]:
        # Imported late, so that --help and config errors wait for nothing.
        from agentrl.observe.open import open_display
        from agentrl.trainer.run_sft import train_sft

        with open_display(f"{config.trainer.project_name} · {config.trainer.experiment_name}") as display:
            return train_sft(config, display)

    return exit_status(work)


if __name__ == "__main__":
    sys.exit(main())
