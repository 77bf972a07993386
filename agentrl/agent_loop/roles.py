"""Roles of an episode: who takes their turns, and how the turns are recorded.

Each role has transcripts of its own, by branches of the episode. Turns of a trained role are sampled as in any other
episode. The tokens of all other turns have the mask 0, in every transcript.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from agentrl.agent_loop.base import Episode, Reply, TakeTurn
from agentrl.agent_loop.limits import seed_of
from agentrl.config.sections.roles import RoleConfig
from agentrl.engines.contract import FinishReason
from agentrl.remote import RemoteOptions
from agentrl.remote.chat_endpoint import ChatEndpoint
from agentrl.system.call_journal import Codec, answered, as_json
from agentrl.system.deadline import within
from agentrl.system.json_value import JSON
from agentrl.system.plugin import nearest
from agentrl.trajectory import POLICY, ROLE, Trajectory

KEYS = "actor_rollout_ref.rollout.roles"
TEXTS: Codec[str] = Codec(as_json, json.loads)


class Roles:
    """The roles of a run, and the endpoints of frozen models."""

    def __init__(self, keys: Mapping[str, RoleConfig]) -> None:
        """Raises ConfigError for a text that is no URL."""
        self.trained = frozenset(name for name, one in keys.items() if one.trained)
        self.turns: dict[str, TakeTurn] = {}
        """By role, who takes its turns."""
        self._endpoints: list[ChatEndpoint] = []
        for name, one in keys.items():
            if one.base_url is not None:
                endpoint = ChatEndpoint(
                    *(f"role {name}", f"{KEYS}.{name}"),
                    base_url=one.base_url,
                    model=one.policy,
                    api_key_env=one.api_key_env,
                    options=RemoteOptions(attempt_timeout=one.timeout),
                )
                self._endpoints.append(endpoint)
                self.turns[name] = partial(frozen_turn, endpoint, one)
            elif one.adapter is not None:
                self.turns[name] = partial(untrained_turn, adapter=one.policy)
            else:
                self.turns[name] = trained_turn if one.trained else untrained_turn

    async def start(self, run: str) -> None:
        """Ask the endpoints for their models. Raises ConfigError: no key, no answer, other models."""
        for endpoint in self._endpoints:
            await endpoint.start(run)

    async def close(self) -> None:
        """Close the connections."""
        for endpoint in self._endpoints:
            await endpoint.close()


def problem_of(roles: Iterable[str], known: Mapping[str, object]) -> str | None:
    """Name the first of `roles` without a player, and the remedy; None where each has a player."""
    for role in roles:
        if role not in known:
            return (
                f"nobody plays the role {role!r}{nearest(role, list(known))}. Set {KEYS}.{role}, e.g. to {{}} for the "
                f"run's policy; it has {', '.join(known) or 'no roles'}"
            )
    return None


async def trained_turn(episode: Episode, stop: Sequence[str], max_tokens: int | None) -> Reply:
    """Sample a turn that is trained on."""
    return await episode.generate(stop=stop, max_tokens=max_tokens)


async def untrained_turn(
    episode: Episode, stop: Sequence[str], max_tokens: int | None, adapter: str | None = None
) -> Reply:
    """Sample a turn of the run's policy, or of a frozen adapter, that is not trained on."""
    params = episode.turn_params(stop, max_tokens, adapter)
    before = episode.generate_seconds
    made = await episode.sample_ids(episode.transcript.ids, params, episode.session, episode.transcript.images)
    return await episode.record_frozen(
        made.ids, adapter or POLICY, made.finish_reason, episode.generate_seconds - before
    )


async def frozen_turn(
    endpoint: ChatEndpoint, keys: RoleConfig, episode: Episode, stop: Sequence[str], max_tokens: int | None
) -> Reply:
    """Have a frozen model take a turn; it is sent the role's messages as text.

    Raises RemoteUnavailable, RemoteRefused, TimeoutError.
    """
    chat, room = episode.context.chat, episode.room()
    episode.waiting_for = f"role {episode.role}"
    asked: dict[str, JSON] = {
        "temperature": keys.temperature,
        "max_tokens": min(room, keys.max_tokens, max_tokens or room),
        "seed": seed_of(episode.seed, len(episode.transcript)) % 2**31,
        **({"stop": list(stop)} if stop else {}),
    }
    begun = time.monotonic()
    async with within(keys.timeout):
        text = await answered(
            *(episode.journal, episode.waiting_for, "complete", [episode.messages, asked]),
            lambda: endpoint.complete(episode.messages, **asked),
            TEXTS,
        )
    seconds = time.monotonic() - begun
    episode.tool_seconds += seconds
    end = chat.stop_token_ids[0]
    ids, fits = [*chat.encode(text), end], FinishReason("stop", end)
    return await episode.record_frozen(
        ids[:room], keys.policy, fits if len(ids) <= room else FinishReason("length"), seconds
    )


def add_role_scores(trajectory: Trajectory, scores: Mapping[str, float]) -> float:
    """Add the scores of roles to the trajectory's numbers; return the sum over the roles that are trained on.

    Raises ValueError for a score of a role that did not play, and for a trained role without a score.
    """
    played = {one.role for one in trajectory.transcripts if one.role}
    trained = {one.role for one in trajectory.transcripts if one.role and one.trained_length}
    if strange := sorted(scores.keys() - played):
        raise ValueError(
            f"{strange[0]!r} has a score and did not play; the roles that played are {', '.join(sorted(played))}"
        )
    if missing := sorted(trained - scores.keys()):
        raise ValueError(f"the role {missing[0]!r} played and has no score; scores were given to {sorted(scores)}")
    trajectory.score_extra |= {ROLE + role: score for role, score in scores.items()}
    return sum(trajectory.role_scores.values())
