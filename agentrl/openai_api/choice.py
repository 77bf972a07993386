"""Requirements of a request on the calls of its answer: OpenAI's `tool_choice` and `parallel_tool_calls`.

No sampler is constrained: an answer that breaks the requirements is kept as it was sampled, and the policy is
asked again (`Session`).
"""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.chat import AssistantMessage


@dataclass(frozen=True, slots=True)
class Promise:
    """Requirements on the calls of every answer. Without `functions`, an answer may hold no call."""

    functions: frozenset[str] | None
    """Functions: at least one is called, and no other; None: no call is needed, and any may be made."""
    at_most: int | None
    """Calls that an answer may make; None: any number."""

    def broken_by(self, message: AssistantMessage) -> str | None:
        """Describe the error of an answer; None when it meets the requirements."""
        calls = message.calls
        if self.at_most is not None and len(calls) > self.at_most:
            return f"made {len(calls)} calls at once"
        if self.functions is None:
            return None
        if not calls:
            return "made no call"
        for call in calls:
            if call.error is not None:
                return f"made a broken call ({call.error})"
            if call.name not in self.functions:
                return f"called {call.name[:64]!r}"
        return None
