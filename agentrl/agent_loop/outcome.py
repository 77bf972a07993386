"""Status of a trajectory whose assistant turn did not end by itself."""

from __future__ import annotations

from agentrl.agent_loop.base import Reply
from agentrl.trajectory import Status

CUT = {"stop": None, "length": Status.LENGTH, "abort": Status.ABORTED}
"""Statuses by the kind of the finish reason."""


def status_of(reply: Reply) -> Status | None:
    """Return the status that a cut turn ends its trajectory with; None when the policy ended the turn itself.

    LENGTH or ABORTED when the turn was cut short, MALFORMED where the policy made up an image.
    """
    if reply.forged:
        return Status.MALFORMED
    return CUT[reply.finish_reason.kind]
