"""OpenAI-compatible endpoint in front of a rollout engine that records what it serves as transcripts."""

from agentrl.openai_api.endpoint import Endpoint
from agentrl.openai_api.session import Session

__all__ = ["Endpoint", "Session"]
