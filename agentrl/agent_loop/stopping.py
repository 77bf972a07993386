"""Stop conditions: what ends a trajectory before the policy ends it.

A condition is a function of the episode and of the policy's last turn. It returns the status that the trajectory ends
with, or None. Every loop asks `after_turn` about each turn, and those with tools ask `after_calls` when the turn's
calls are answered.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import cast

from agentrl.agent_loop.base import Episode, Reply, StopCondition
from agentrl.config.registries import STOP_CONDITIONS
from agentrl.system.user_code import contract_error, user_code
from agentrl.tool import MALFORMED
from agentrl.trajectory import Status

CUT = {"stop": None, "length": Status.LENGTH, "abort": Status.ABORTED}
"""Statuses by the kind of the finish reason."""


def answer_tag(episode: Episode, reply: Reply) -> Status | None:
    """End as COMPLETED at a turn with `</answer>`: its calls are not run, and no interaction is asked."""
    return Status.COMPLETED if "</answer>" in reply.message.text else None


def after_turn(episode: Episode, reply: Reply) -> Status | None:
    """End where the turn was cut short, as MALFORMED where the policy made up an image, or by a chosen condition."""
    ended = Status.MALFORMED if reply.forged else CUT[reply.finish_reason.kind]
    return chosen(episode, reply) if ended is None and episode.context.stop_conditions else ended


def after_calls(episode: Episode, reply: Reply) -> Status | None:
    """End after more than `max_malformed` malformed calls, or by a chosen condition; the turn's calls are answered."""
    count = sum(call.error in MALFORMED for call in episode.trajectory.tool_calls)
    if count > episode.context.limits.max_malformed:
        return Status.MALFORMED
    return chosen(episode, reply) if episode.context.stop_conditions else None


def chosen(episode: Episode, reply: Reply) -> Status | None:
    """Ask the conditions of `multi_turn.stop_conditions` in their order; the first that ends the trajectory counts."""
    for condition in episode.context.stop_conditions:
        if (status := condition(episode, reply)) is not None:
            return status
    return None


def load_stop_conditions(names: Sequence[str]) -> tuple[StopCondition, ...]:
    """Load the conditions of these names. Raises ConfigError."""
    found = ((f"stop condition {name}", cast(StopCondition, STOP_CONDITIONS.get(name))) for name in names)
    return tuple(partial(_asked, what, condition) for what, condition in found)


def _asked(what: str, condition: StopCondition, episode: Episode, reply: Reply) -> Status | None:
    with user_code(what, condition):
        status: object = condition(episode, reply)
    if status is None or isinstance(status, Status):
        return status
    raise contract_error(what, condition, f"it must give a Status or None, found {status!r:.100}")
