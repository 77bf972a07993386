"""Messages to token ids and back: first render, bridge to the next turn, parsing of tool calls."""

from agentrl.chat.chat import Chat, Drift
from agentrl.chat.message import AssistantMessage, ParsedCall

__all__ = ["AssistantMessage", "Chat", "Drift", "ParsedCall"]
