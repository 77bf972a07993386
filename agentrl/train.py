"""`python -m agentrl.train [key=value ...]`: reinforcement learning of a tool-using policy, the main job."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from agentrl.config import Config, load_config
from agentrl.observe.display import Display
from agentrl.system.command import exit_status


def train(config: Config, display: Display) -> dict[str, float]:
    """The whole job: prepare what is `quickstart`, build, train, validate. Returns the last validation's metrics."""
    # Imported late, so that --help and config errors do not wait for torch.
    from agentrl.quickstart.assets import with_quickstart
    from agentrl.trainer.build import build

    config = with_quickstart(config, display)
    with build(config, display) as trainer:
        metrics = trainer.fit()
        display.note(f"done: {trainer.dir} holds metrics.jsonl, reward.png, trajectories/, checkpoints/ and policy/")
    return metrics


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the process's exit status (see `agentrl.system.command`)."""

    def work() -> None:
        config = load_config(list(sys.argv[1:] if argv is None else argv))
        with Display.create(f"{config.trainer.project_name} · {config.trainer.experiment_name}") as display:
            train(config, display)

    return exit_status(work)


if __name__ == "__main__":
    sys.exit(main())
