"""How an assistant turn that did not end by itself ends its trajectory."""

from __future__ import annotations

from agentrl.agent_loop.base import Reply
from agentrl.trajectory import Status


def status_of(reply: Reply) -> Status | None:
    """LENGTH or ABORTED when the turn was cut short, MALFORMED where the policy made up an image; None when it ended
    its turn itself."""
    if reply.forged:
        return Status.MALFORMED
    return {"stop": None, "length": Status.LENGTH, "abort": Status.ABORTED}[reply.finish_reason.kind]
