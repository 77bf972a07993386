"""A whole run of reinforcement learning: prepare, check, build, train."""

from __future__ import annotations

from agentrl.config import Config
from agentrl.observe.display import Display
from agentrl.quickstart.assets import with_quickstart_data, with_quickstart_policy
from agentrl.trainer.inputs import open_inputs


def train(config: Config, display: Display) -> dict[str, float]:
    """Make what is `quickstart`, check what the user gave, train, validate. Returns the last validation's metrics.

    Raises UserError.
    """
    config = with_quickstart_data(config, display)
    inputs = open_inputs(config)
    config = with_quickstart_policy(config, display)
    # Imported late: torch takes seconds, for which no mistake in tools or rows should wait.
    from agentrl.trainer.build import build

    with build(config, inputs, display) as trainer:
        metrics = trainer.fit()
        display.note(f"done: {trainer.dir} holds metrics.jsonl, reward.png, trajectories/, checkpoints/ and policy/")
    return metrics
