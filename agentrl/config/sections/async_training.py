"""Keys of `async_training.*`: rollouts that go on while the policy is updated."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from agentrl.config.rules import OnlyWith
from agentrl.config.section import Section

OVERLAPS = OnlyWith("max_staleness above 0", because="with 0 rollouts and updates take turns")

IN_FLIGHT = OnlyWith(
    "actor_rollout_ref.rollout.name=sglang or vllm or mixed",
    because="an embedded engine computes keys and values anew with each update",
)


class AsyncTrainingConfig(Section):
    """`async_training.*`"""

    max_staleness: int = Field(0, ge=0)
    """Versions of the policy that may have been made between the one that sampled a token and the one whose update uses
    it: a bound for every token that is trained on. 0: rollouts and updates take turns. Above 0 trajectories that a step
    does not wait for go on under the next weights, and none is thrown away. SGLang servers, and rollout workers with
    devices of their own, sample during the update; an embedded engine that shares the policy's processor, and servers
    whose memory is freed for it (free_cache_engine), stand still meanwhile. See docs/async.md.
    algorithm.rollout_correction corrects for the difference: rollout_is is tempered then, unless it, proximal or reject
    is given."""
    depth: Annotated[int, OVERLAPS] = Field(1, gt=0)
    """Batches that may be begun beside the one that is waited for, at most max_staleness. More of them leave more
    slow trajectories time, and make the typical token older."""
    publish_every: Annotated[int, OVERLAPS] = Field(1, gt=0)
    """The engine is sent every so many-th version of the weights; at most max_staleness + 1. Validation is always by
    its own step's."""
    keep_kv_cache: Annotated[bool, OVERLAPS, IN_FLIGHT] = False
    """Requests that a server runs while it is sent weights keep the keys and values of older ones, and go on by
    the new ones at once. Without it they are computed anew, which takes as long as reading the context and what was
    sampled of the turn. With it tokens behind a change of weights are sampled in a context that is not quite theirs.
    Nothing is shared with a request that begins later. See docs/async.md."""
    journal_fsync: Annotated[bool, OVERLAPS] = False
    """Flush ledger and journal to the disk at each record, so that a loss of power costs none of what had ended.
    Without it they survive the process only: what the machine had not yet written by itself begins anew."""
