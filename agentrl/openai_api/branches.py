"""Transcripts of a session, and the place in them at which each call continues.

A call continues a transcript where its messages do; then only new messages are appended. A call opens a new transcript,
which begins with the recorded ids, where its history is recorded up to an earlier place, or another call is already
continuing its place. Where the history is not recorded (the agent rewrote it, or has other tools), its full render is
used. The render is appended to the transcript whose ids it begins with, else it becomes a new transcript.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from typing import ParamSpec, Protocol, TypeVar

from agentrl.agent_loop.base import Episode
from agentrl.agent_loop.limits import seed_of
from agentrl.chat.message import content_text
from agentrl.openai_api.asked import Asked
from agentrl.openai_api.errors import ApiError
from agentrl.openai_api.history import Checkpoint, Digest, History, cause_of
from agentrl.openai_api.selection import Answer, Given
from agentrl.tool import ToolSchema
from agentrl.trajectory import Message, PlacedImage, Status, ToolCallRecord, Transcript

P = ParamSpec("P")
T = TypeVar("T")
Written = tuple[list[int], list[PlacedImage]]
"""Token ids of messages, and the images in them."""

MAX_TOOL_LISTS = 128
COMPARED = 16
"""Newest transcripts with which a call is compared that continues none."""


@dataclass(slots=True, eq=False)
class Branch:
    """One transcript and the place from which it can be continued."""

    episode: Episode
    digest: Digest
    tip: Checkpoint[Branch] | None = None
    busy: bool = False
    calls: dict[str, ToolCallRecord] = field(default_factory=dict)
    """Last turn's tool calls by id."""
    replied_at: float = 0.0
    opened: str = "first"
    """Why its first call continued no transcript."""
    given: list[Given] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    source: Branch | None = None
    """Branch whose first `shared` tokens it begins with."""
    shared: int = 0
    asked_again: bool = False
    """True: `source` ends with an answer that broke the promise of its first call."""
    score: float | None = None
    """Score that was posted for it alone."""

    @property
    def broken(self) -> bool:
        """True: its last answer broke the promise of its call, and was sent to nobody."""
        return bool(self.answers) and not self.answers[-1].id

    def record_answers(self, messages: Sequence[Message]) -> None:
        """Complete the records of calls by the tool answers. The time is the agent's, from reply to answer."""
        seconds = time.monotonic() - self.replied_at
        for message in messages:
            record = self.calls.pop(message.get("tool_call_id", ""), None)
            if record is not None and message["role"] == "tool":
                record.answer = replace(record.answer, text=content_text(message["content"]), seconds=seconds)


class Host(Protocol):
    """The session, as its transcripts know it."""

    episode: Episode

    def check_open(self) -> None:
        """Raise ApiError where no further call can be served."""

    def refuse(self, status: Status, message: str) -> ApiError:
        """Make the error for a call for which the record has no room; `status` is then the trajectory's."""

    def count(self, name: str, number: int = 1) -> None:
        """Add to a number of the trajectory's metrics."""

    def continued(self, place: Checkpoint[Branch]) -> None:
        """Note that a call continues a place, so the answer before it has reached its client."""

    async def work(self, long: bool, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function without state of the session, off the event loop where that may take long."""


class Branches:
    """All transcripts of a session."""

    def __init__(self, host: Host, tool_lists: dict[Digest, list[ToolSchema]]) -> None:
        """`tool_lists`: shared by sessions, so that chat formats, which cache by list, meet the same ones again."""
        self._host, self._episode, self._tool_lists = host, host.episode, tool_lists
        self.all: list[Branch] = []
        """In the order in which they were opened."""
        self.history: History[Branch] = History()
        self.prompts: Counter[str] = Counter()
        """Transcripts by a hash of the prompt that they begin with."""

    async def prompt_tokens(self, asked: Asked) -> int:
        """Count the tokens of the prompt that a call would have. Nothing is recorded. Raises ApiError."""
        if found := self._found(asked):
            checkpoint = next((one for one in found if _is_free(one)), found[-1])
            rest = _new_messages(checkpoint, asked.messages)
            more = (await self._bridge(checkpoint, rest, asked))[0] if rest else []
            return checkpoint.tokens + len(more)
        return len((await self._render(asked, self._tool_lists.get(asked.digests[0], asked.tools)))[0])

    def _found(self, asked: Asked) -> list[Checkpoint[Branch]]:
        """Find the places that a call continues."""
        # By messages, not by re-rendering: sampled tokens stay as they were sampled, even where the template would
        # write them otherwise.
        found = self.history.find(asked.messages, [*asked.digests[:-1], asked.digest])
        if self._episode.context.roles:
            found = [one for one in found if one.owner.episode.role == asked.request.model]
        if asked.request.carries_reasoning:
            # The policy shall see what it would see from a server that renders what it is sent.
            found = [one for one in found if not _lacks_reasoning(one, asked.messages)]
        return found

    async def place(self, asked: Asked) -> Branch:
        """Find or open the transcript that a call continues, write its prompt there, and keep it for the call.

        Raises ApiError.
        """
        found, opened = self._found(asked), len(self.all)
        cause = "branched" if found else self._cause(asked)
        if cause == "reasoning":
            self._host.count("openai_reasoning_left_out")
        free = [one for one in found if _is_free(one)]
        for checkpoint in free[:1] or found[-1:]:
            self._host.continued(checkpoint)
        if free:
            with _kept(free[0].owner):
                return await self._continue(free[0], asked)
        branch = await (self._fork(found[-1], asked) if found else self._rendered(asked))
        branch.busy = True
        if len(self.all) > opened > 0:
            self._host.count(f"openai_opened_{cause}")
            branch.opened = cause
        return branch

    def _cause(self, asked: Asked) -> str:
        """Name why a call continues no transcript, for a metric."""
        if not self.all:
            return "first"
        if self.history.find(asked.messages, asked.digests):
            return "reasoning" if asked.request.carries_reasoning else "role"
        recorded = ((one.episode.messages, one.episode.tools or ()) for one in self.all[-COMPARED:])
        return cause_of(asked.messages, asked.tools, recorded)

    async def _continue(self, checkpoint: Checkpoint[Branch], asked: Asked) -> Branch:
        branch = checkpoint.owner
        if _lacks_reasoning(checkpoint, asked.messages, first=len(checkpoint.messages) - 1):
            self._host.count("openai_reasoning_left_out")
        rest = _new_messages(checkpoint, asked.messages)
        if not rest:  # A call whose generation was cancelled, again.
            self._check_room(branch.episode, 0)
            return branch
        ids, images = await self._bridge(checkpoint, rest, asked)
        self._check_room(branch.episode, len(ids))
        branch.given += [Given(message, len(branch.episode.transcript), asked.number) for message in rest]
        branch.episode.observe_ids(ids, rest, images)
        branch.record_answers(rest)
        return self._ready(branch, asked.digest)

    async def _fork(self, checkpoint: Checkpoint[Branch], asked: Asked) -> Branch:
        source, rest = checkpoint.owner.episode, _new_messages(checkpoint, asked.messages)
        written = beginning(source.transcript, checkpoint.tokens)
        if rest:
            ids, images = await self._bridge(checkpoint, rest, asked)
            moved = [replace(one, start=one.start + checkpoint.tokens) for one in images]
            written = written[0] + ids, written[1] + moved
        messages, owner = [*map(copy.copy, checkpoint.messages), *rest], checkpoint.owner
        branch = await self.open(messages, source.tools, written, asked.digest, source.role, asked.begun)
        branch.given = [Given(message, 0, asked.number) for message in messages]
        # An answer that broke a promise, with no later try, belongs to what comes after it.
        branch.source, branch.shared = owner, checkpoint.tokens
        if owner.broken and owner.answers[-1].start == checkpoint.tokens:
            branch.shared = owner.answers[-1].end
        return branch

    async def _rendered(self, asked: Asked) -> Branch:
        if len(self._tool_lists) >= MAX_TOOL_LISTS:
            self._tool_lists.clear()
        tools, messages = self._tool_lists.setdefault(asked.digests[0], asked.tools), asked.messages
        ids, images = written = await self._render(asked, tools)
        role = asked.request.model if self._episode.context.roles else ""
        branch = self._beginning_of(ids, images, tools, role)
        if branch is None:
            branch = await self.open(messages, tools, written, asked.digest, role, asked.begun)
            branch.given = [Given(message, 0, asked.number) for message in messages]
            return branch
        if branch.tip is not None:
            self._host.continued(branch.tip)
        known, recorded = len(branch.episode.transcript), len(branch.episode.messages)
        self._check_room(branch.episode, len(ids) - known)
        new = [replace(one, start=one.start - known) for one in images if one.start >= known]
        branch.given += [Given(message, known, asked.number) for message in messages[recorded:] or messages[-1:]]
        branch.episode.observe_ids(ids[known:], messages[recorded:] or messages[-1:], new)
        branch.episode.messages = list(messages)
        return self._ready(branch, asked.digest)

    async def _render(self, asked: Asked, tools: list[ToolSchema]) -> Written:
        sampled = self._episode.sampled_texts
        render = partial(self._episode.context.chat.render, asked.messages, tools or None, sampled=sampled)
        return await self._written(asked.long, self._going_on(render, asked.begun, tools), asked.messages)

    async def _written(self, long: bool, write: Callable[[], list[int]], messages: Sequence[Message]) -> Written:
        """Write messages as ids, and prepare their images.

        Raises ApiError for any error: templates are foreign code, and so are the messages.
        """

        def work() -> Written:
            ids = write()
            return ids, self._episode.context.chat.images(ids, messages)

        try:
            return await self._host.work(long, work)
        except ApiError:
            raise
        except Exception as error:
            message = f"The chat template cannot write these messages: {error or type(error).__name__}"
            raise ApiError(400, message, param="messages", code="invalid_value") from error

    def _beginning_of(
        self, ids: list[int], images: Sequence[PlacedImage], tools: list[ToolSchema], role: str
    ) -> Branch | None:
        """Find the free branch of the role with the longest transcript that `ids` begin with, with the same images."""
        found = [
            branch
            for branch in self.all
            if not branch.busy
            and branch.episode.role == role
            and branch.episode.tools == (tools or None)
            and len(branch.episode.transcript) < len(ids)
            and branch.episode.transcript.ids == ids[: len(branch.episode.transcript)]
            and _places(branch.episode.transcript.images) == _places(images, len(branch.episode.transcript))
        ]
        return max(found, key=lambda branch: len(branch.episode.transcript), default=None)

    async def open(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] | None,
        written: Written,
        digest: Digest,
        role: str,
        begun: str,
    ) -> Branch:
        """Open a transcript that begins with `written`, which stands for the messages. Raises ApiError."""
        ids, images = written
        limit = self._episode.context.limits.max_model_len
        if len(ids) >= limit:
            raise self._host.refuse(
                Status.LENGTH, f"The prompt has {len(ids)} tokens, and the context length is {limit}."
            )
        told = await self._episode.teacher_prompt(messages, tools)
        if told and begun:
            told += self._episode.context.chat.begin_turn(begun, tools)
        self._host.check_open()  # See `Host.work`.
        branch = Branch(self._episode.branch(role, self._seed_of(written)), digest)
        branch.episode.start_ids(ids, messages, tools, teacher_prompt=told, images=images)
        self.all.append(branch)
        return self._ready(branch, digest)

    def _seed_of(self, prompt: Written) -> int:
        """Return the seed of a transcript: by its prompt, and by the number of transcripts before with the same prompt.

        So the samples of a conversation do not depend on the order of calls, or on other calls between them.
        """
        ids, images = prompt
        key = blake2b(array("q", ids).tobytes(), digest_size=8)
        for place, digest in _places(images):
            key.update(place.to_bytes(8, "little") + digest)
        number = self.prompts[key.hexdigest()]
        self.prompts[key.hexdigest()] += 1
        return seed_of(self._episode.seed, "prompt", key.hexdigest(), number)

    def _going_on(
        self, write: Callable[[], list[int]], begun: str, tools: Sequence[ToolSchema] | None
    ) -> Callable[[], list[int]]:
        """Make a function that writes the beginning of the answer, too."""
        chat = self._episode.context.chat
        return (lambda: [*write(), *chat.begin_turn(begun, tools)]) if begun else write

    async def _bridge(self, checkpoint: Checkpoint[Branch], rest: list[Message], asked: Asked) -> Written:
        episode = checkpoint.owner.episode
        before = episode.transcript.ids
        if checkpoint.tokens < len(before):
            before = before[: checkpoint.tokens]
        bridge = partial(self._episode.context.chat.bridge, first=len(checkpoint.messages))
        write = self._going_on(partial(bridge, list(before), rest, episode.tools), asked.begun, episode.tools)
        return await self._written(asked.long, write, rest)

    def _ready(self, branch: Branch, digest: Digest) -> Branch:
        """Set a checkpoint at the generation prompt that the transcript now ends with."""
        branch.digest = digest
        self.set_checkpoint(branch, replied=False)
        return branch

    def set_checkpoint(self, branch: Branch, *, replied: bool) -> None:
        """Make the end of a transcript a place from which it can be continued."""
        episode = branch.episode
        branch.tip = Checkpoint(branch, tuple(episode.messages), len(episode.transcript), replied)
        self.history.add(branch.digest, branch.tip)

    def _check_room(self, episode: Episode, new: int) -> None:
        left = episode.budget_left
        if new >= left:
            raise self._host.refuse(
                Status.LENGTH, f"The new messages have {new} tokens, and {max(left, 0)} are left of the budget."
            )


def _is_free(checkpoint: Checkpoint[Branch]) -> bool:
    """Say whether a call may continue the checkpoint's own transcript."""
    return checkpoint.owner.tip is checkpoint and not checkpoint.owner.busy


def beginning(transcript: Transcript, tokens: int) -> Written:
    """Return a transcript's first tokens, and the images in them."""
    return transcript.ids[:tokens], [one for one in transcript.images if one.start < tokens]


def _places(images: Sequence[PlacedImage], end: int | None = None) -> list[tuple[int, bytes]]:
    """List images before `end` by place and content: equal ids may stand for different images."""
    return [(one.start, one.image.digest) for one in images if end is None or one.start < end]


@contextlib.contextmanager
def _kept(branch: Branch) -> Iterator[None]:
    """Keep the branch for a call, or give it back after an error."""
    branch.busy = True
    try:
        yield
    except BaseException:
        branch.busy = False
        raise


def _lacks_reasoning(checkpoint: Checkpoint[Branch], messages: list[Message], first: int = 0) -> bool:
    """Check whether the client left out reasoning that the transcript keeps, of messages from `first` on."""
    pairs = itertools.islice(zip(checkpoint.messages, messages, strict=False), first, None)
    return any(kept.get("reasoning_content") and not given.get("reasoning_content") for kept, given in pairs)


def _new_messages(checkpoint: Checkpoint[Branch], messages: list[Message]) -> list[Message]:
    """Return the messages after the checkpoint, with the policy's own call ids in place of the client's."""
    end = len(checkpoint.messages)
    if end == len(messages):
        return []
    recorded, given = checkpoint.messages[-1], messages[end - 1]
    own = {
        theirs.get("id", ""): ours.get("id", "")
        for theirs, ours in zip(given.get("tool_calls", ()), recorded.get("tool_calls", ()), strict=True)
    }
    return [
        {**message, "tool_call_id": own[message["tool_call_id"]]} if message.get("tool_call_id") in own else message
        for message in messages[end:]
    ]
