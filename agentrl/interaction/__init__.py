"""Interactions: the other side of a dialogue, which user code implements."""

from agentrl.interaction.contract import Interaction, InteractionResponse, ask
from agentrl.interaction.loading import load_interactions
from agentrl.system.metrics import Metrics

__all__ = ["Interaction", "InteractionResponse", "Metrics", "ask", "load_interactions"]
