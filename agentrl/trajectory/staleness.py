"""Versions of the policy and staleness: the definitions that rollouts, losses, metrics and documents share.

- **Version** v counts the training steps that changed the policy, however many mini-batches each had. A step that
  changes nothing (the critic's warm-up, an empty batch) keeps v.
- A sampled token has the version of the weights that sampled it. In the update that starts from weights v it is v -
  version **stale**. A trajectory is as stale as its oldest sampled token, a group as its oldest trajectory.
- A group's **deadline** is the last v whose update may use it.
- **Publish lag** is how many versions have been made and not sent to the engine: versions made - version served.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from agentrl.trajectory.trajectory import Trajectory


def staleness(version: int, current: int) -> int:
    """Return how stale a token of `version` is in the update that starts from weights `current`."""
    return current - version


def deadline(oldest: int, max_staleness: int) -> int:
    """Return the last version whose update may use tokens of version `oldest`."""
    return oldest + max_staleness


def publish_lag(made: int, served: int) -> int:
    """Return the number of versions made since the version that the engine serves."""
    return made - served


def oldest_version(trajectories: Iterable[Trajectory]) -> int | None:
    """Return the version of the oldest sampled token; None where no token was sampled."""
    return min(_versions(trajectories), default=None)


def newest_version(trajectories: Iterable[Trajectory]) -> int | None:
    """Return the version of the newest sampled token; None where no token was sampled."""
    return max(_versions(trajectories), default=None)


def _versions(trajectories: Iterable[Trajectory]) -> Iterator[int]:
    return (span.version for one in trajectories for transcript in one.transcripts for span in transcript.versions)
