"""`python -m agentrl.preferences data.train_files=... model.path=...`: training on preferences.

It trains a policy by DPO and its relatives, or with `trains=reward_model` a reward model, on pairs, one response
preferred. With `loss=kto` it trains a policy on responses that are good or bad by themselves.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from agentrl.config import PreferencesConfig
from agentrl.config.sweep import load_jobs
from agentrl.system.command import exit_status
from agentrl.trainer.sweep import run_jobs


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the process's exit status (see `agentrl.system.command`)."""

    def work() -> None:
        jobs = load_jobs(list(sys.argv[1:] if argv is None else argv), "preferences", PreferencesConfig)
        run_jobs(jobs, train)

    def train(config: PreferencesConfig) -> dict[str, float]:
        # Imported late, so that --help and config errors wait for nothing.
        from agentrl.observe.open import open_display
        from agentrl.trainer.run_sft import train_preferences

        with open_display(f"{config.trainer.project_name} · {config.trainer.experiment_name}") as display:
            return train_preferences(config, display)

    return exit_status(work)


if __name__ == "__main__":
    sys.exit(main())
