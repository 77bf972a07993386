"""Keys of `async_training.*`: rollouts that continue while the policy is updated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from agentrl.config.rules import ConflictsWith, OnlyWith
from agentrl.config.section import Finding, Section

FREED = "actor_rollout_ref.rollout.free_cache_engine=true"
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
    publish_every: Annotated[
        int,
        OVERLAPS,
        ConflictsWith(
            FREED,
            of="above 1",
            why="weights that were freed for an update have to be sent after it. Set publish_every=1, or "
            "free_cache_engine=false",
        ),
    ] = Field(1, gt=0)
    """The engine is sent every so many-th version of the weights; at most max_staleness + 1. Validation is always by
    its own step's."""
    keep_kv_cache: Annotated[
        bool,
        OVERLAPS,
        IN_FLIGHT,
        ConflictsWith(FREED, why="keys and values are freed for the update. Set one of them to false"),
    ] = False
    """Requests that a server runs while it is sent weights keep the keys and values of older ones, and go on by
    the new ones at once. Without it they are computed anew, which takes as long as reading the context and what was
    sampled of the turn. With it tokens behind a change of weights are sampled in a context that is not quite theirs.
    Nothing is shared with a request that begins later. See docs/async.md."""
    journal_fsync: Annotated[bool, OVERLAPS] = False
    """Flush ledger and journal to the disk at each record, so that a loss of power costs none of what had ended.
    Without it they survive the process only: what the machine had not yet written by itself begins anew."""

    def findings(self) -> Iterator[Finding]:
        bound = self.max_staleness
        if bound and self.depth > bound:
            yield Finding(
                f"async_training.depth={self.depth} is above async_training.max_staleness={bound}: what is begun so "
                "far ahead would be too old when its turn comes. Lower depth, or raise max_staleness"
            )
        if bound and self.publish_every > bound + 1:
            yield Finding(
                f"async_training.publish_every={self.publish_every} is above async_training.max_staleness={bound} + 1: "
                "by the time of the next publication nothing that the engine samples may be trained on. Lower "
                "publish_every, or raise max_staleness"
            )
