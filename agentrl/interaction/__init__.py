"""Interactions: the other side of a dialogue, which user code implements."""

from agentrl.interaction.contract import Interaction, InteractionResponse, ask
from agentrl.interaction.loading import load_interactions

__all__ = ["Interaction", "InteractionResponse", "ask", "load_interactions"]
