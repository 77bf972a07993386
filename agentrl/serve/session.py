"""One live session: a recorder of calls that is written down after each answer, and continues in a later process.

Its record is a trajectory as the journal writes it. Its state has the parts of transcripts that the record leaves out:
their messages and tools, their seeds, and the places from which they can be continued.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from agentrl.agent_loop.base import Episode
from agentrl.errors import DataError
from agentrl.openai_api.asked import Asked
from agentrl.openai_api.branches import Branch
from agentrl.openai_api.completion import Completion
from agentrl.openai_api.errors import ApiError
from agentrl.openai_api.history import Checkpoint, Digest
from agentrl.openai_api.session import Call, Session
from agentrl.rollouts.journal import record_of, trajectories_in
from agentrl.rollouts.staleness_scheduler import GroupStatus
from agentrl.system.delivery import Delivery
from agentrl.system.json_value import JSON, as_list, as_object
from agentrl.system.threads import OwnThread
from agentrl.tool import ToolSchema
from agentrl.trajectory import Message, Status, Trajectory, Turn
from agentrl.trajectory.picture import pictures_in
from agentrl.trajectory.staleness import newest_version, oldest_version

ROOM = (
    "The server's operator gives sessions more room by actor_rollout_ref.rollout.max_model_len, or by "
    "data.max_prompt_length and data.max_response_length."
)
"""Keys for a request that fits in no session."""


@dataclass(frozen=True, slots=True)
class Written:
    """A session as the store has it."""

    versions: tuple[int | None, int | None]
    """Versions of the oldest and the newest sampled token."""
    record: bytes
    state: str


class LiveSession(Session):
    """Recorder of one client's calls."""

    def __init__(
        self,
        id: str,
        episode: Episode,
        tool_lists: dict[Digest, list[ToolSchema]],
        thread: OwnThread,
        *,
        on_answer: Callable[[LiveSession, Call], None],
    ) -> None:
        """`on_answer`: called when an answer is recorded, before all of it is sent."""
        super().__init__(episode, tool_lists, thread)
        self.id = id
        self._on_answer = on_answer
        self.held: list[Asked] = []
        """Requests that have found the session; their answers, if they are streams, may take longer."""
        self.dropped: list[Digest] = []
        """Digests of histories that ended with an answer which was removed."""
        self._untaken: dict[Digest, list[tuple[Checkpoint[Branch], Turn]]] = {}
        """By prompt: its place and its answer, which nobody was known to have taken when the process ended."""

    @property
    def is_busy(self) -> bool:
        """A request is being answered, or an answer is on its way."""
        return bool(self.held or self._tasks or any(call.delivery.is_under_way for call in self._answered.values()))

    @property
    def is_lost(self) -> bool:
        """The engine failed, or was stopped: a later request continues the stored session."""
        return self.over.is_set()

    def is_continued(self, digest: Digest) -> bool:
        """Say whether a request that is not answered yet continues the history of this digest."""
        running = (*self.held, *(call.asked for call in self._tasks.values()))
        return any(digest in continued(asked) for asked in running)

    async def _answer(self, call: Call) -> Completion:
        completion = await super()._answer(call)
        self._on_answer(self, call)
        return completion

    def _end_left(self, call: Call, start: int) -> ApiError:
        gone = super()._end_left(call, start)
        if not call.sampling:  # The part that its client was delivered is recorded.
            self._on_answer(self, call)
        return gone

    def _take_back(self, branches: Sequence[Branch], keep: int = 0) -> None:
        super()._take_back(branches, keep)
        self.dropped += [branch.digest for branch in branches]

    async def _placed(self, asked: Asked, delivery: Delivery) -> Call:
        for place, turn in self._untaken.pop(asked.digest, ()):
            branch = place.owner
            if branch.busy or turn.end != len(branch.episode.transcript):
                continue
            # Its client asks again, so it did not get the answer.
            if branch.tip is not None:
                self.branches.history.remove(branch.digest, branch.tip)
            self._take_back([branch])
            self.turns -= 1
            branch.tip, branch.digest = place, asked.digest
        return await super()._placed(asked, delivery)

    def check_asked(self, asked: Asked) -> None:
        super().check_asked(asked)
        if any(pictures_in(asked.messages)):
            message = "A message has an image, and live sessions are recorded without images."
            raise ApiError(400, message, param="messages", code="unsupported_value")

    def refuse(self, status: Status, message: str) -> ApiError:
        ending, error = self.ending, super().refuse(status, message)
        self.ending = ending  # The record ends as its last answer left it: the request goes to another session.
        error.message += f" {ROOM}"
        return error

    async def end(self) -> Written:
        """End the session in this process, without answers that no client took; return its form for the store."""
        await self._end_calls()
        written = self.written()
        await self.close()
        return written

    def written(self) -> Written:
        """Return the session as it is now. Raises DataError for parts that the journal cannot hold."""
        trajectory = self.episode.trajectory
        self.episode.finish(self.ending)
        sample = self.episode.sample
        record = record_of(0, sample, GroupStatus.SCORED, oldest_version([trajectory]), [trajectory])
        if record is None:
            raise DataError("a live session has images, experts of tokens or a teacher's prompt, which no record holds")
        running = [call for call in self._answered.values() if not call.delivery.whole]
        untaken = {branch for call in running for branch in call.branches}
        state = {
            "ending": self.ending.value,
            "requests": self._requests,
            "replies": self._replies,
            "prompts": dict(self.branches.prompts),
            "sampled": sorted(self.episode.sampled_texts),
            "stopped": self.stopped,
            "branches": [
                _state_of(branch, self._places_of(branch), is_untaken=branch in untaken) for branch in self.branches.all
            ],
        }
        versions = oldest_version([trajectory]), newest_version([trajectory])
        # The policy's arguments may hold half a surrogate pair, or be nested deeply.
        return Written(versions, record, json.dumps(state))

    def _places_of(self, branch: Branch) -> list[tuple[Digest, Checkpoint[Branch]]]:
        """List the places of a branch's own conversation from which it can be continued."""
        episode = branch.episode
        return [
            (digest, one)
            for digest, places in self.branches.history.items()
            for one in places
            if one.owner is branch
            and one.tokens <= len(episode.transcript)
            and list(one.messages) == episode.messages[: len(one.messages)]
        ]

    def resume(self, record: bytes, state: str) -> None:
        """Continue as `written` has left the session. Raises DataError for another form."""
        own = self.episode.trajectory
        try:
            (trajectory,) = trajectories_in(record)
            own.transcripts, own.turns, own.messages = trajectory.transcripts, trajectory.turns, trajectory.messages
            own.metrics = trajectory.metrics
            self.turns = sum(turn.role == "assistant" for turn in own.turns)
            self._resume(as_object(json.loads(state)))
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise DataError(f"expected the state of a live session, found {state[:100]!r} ({error})") from error

    def _resume(self, told: Mapping[str, JSON]) -> None:
        self.ending = Status(str(told["ending"]))
        self.stopped = None if told["stopped"] is None else Status(str(told["stopped"]))
        self._requests, self._replies = cast(int, told["requests"]), cast(int, told["replies"])
        self.branches.prompts.update(cast(dict[str, int], told["prompts"]))
        self.episode.sampled_texts.update(map(str, as_list(told["sampled"])))
        for value in as_list(told["branches"]):
            one = as_object(value)
            episode = self.episode.branch(str(one["role"]), cast(int, one["seed"]))
            episode.index = cast(int, one["index"])
            episode.messages = cast(list[Message], list(as_list(one["messages"])))
            episode.tools = cast(Sequence[ToolSchema] | None, one["tools"])
            episode.assistant_turns = cast(int, one["turns"])
            branch = Branch(episode, bytes.fromhex(str(one["digest"])), opened=str(one["opened"]))
            for digest, messages, tokens, replied in cast(list[tuple[str, int, int, bool]], one["places"]):
                place = Checkpoint(branch, tuple(episode.messages[:messages]), tokens, replied)
                self.branches.history.add(bytes.fromhex(digest), place)
                if tokens == len(episode.transcript):
                    branch.tip = place
            self.branches.all.append(branch)
            self._resume_answer(branch, is_untaken=bool(one["untaken"]))

    def _resume_answer(self, branch: Branch, *, is_untaken: bool) -> None:
        """Restore what is known of the answer that a transcript ends with, if it ends with one."""
        episode, own = branch.episode, self.episode.trajectory
        turn = next((one for one in reversed(own.turns) if one.transcript == episode.index), None)
        if turn is None or turn.role != "assistant" or turn.end != len(episode.transcript):
            return
        message = episode.messages[-1]
        called = [str(call.get("id", "")) for call in message.get("tool_calls", ())]
        branch.calls = dict(zip(called, turn.calls, strict=False))
        if not is_untaken:
            return
        episode.last_turn = turn
        episode.last_message = next((one for one in reversed(own.messages) if one == message), None)
        for digest, places in list(self.branches.history.items()):
            for place in places:
                if place.owner is branch and place.tokens == turn.start and not place.replied:
                    self._untaken.setdefault(digest, []).append((place, turn))


def continued(asked: Asked) -> list[Digest]:
    """List the digests of histories that a request may continue, the longest first; each ends with an answer."""
    messages = asked.messages
    ends = range(len(messages) - 1, 0, -1)
    return [
        asked.digests[end]
        for end in ends
        if messages[end]["role"] != "assistant" and messages[end - 1]["role"] == "assistant"
    ]


def _state_of(
    branch: Branch, places: Sequence[tuple[Digest, Checkpoint[Branch]]], *, is_untaken: bool
) -> dict[str, object]:
    episode = branch.episode
    return {
        "index": episode.index,
        "role": episode.role,
        "seed": episode.seed,
        "digest": branch.digest.hex(),
        "opened": branch.opened,
        "untaken": is_untaken,
        "turns": episode.assistant_turns,
        "messages": episode.messages,
        "tools": episode.tools,
        "places": [[digest.hex(), len(one.messages), one.tokens, one.replied] for digest, one in places],
    }


def fill(trajectory: Trajectory, record: bytes) -> None:
    """Make a trajectory that has just begun the one of a record. Its names, its group and its row stay."""
    (found,) = trajectories_in(record)
    trajectory.transcripts, trajectory.turns, trajectory.messages = found.transcripts, found.turns, found.messages
    trajectory.metrics |= found.metrics
    trajectory.status = found.status
