"""agentrl: reinforcement learning for language-model agents that use tools over many turns."""

__version__ = "0.1.0"
