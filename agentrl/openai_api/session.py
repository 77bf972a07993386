"""One agent's calls, recorded as transcripts of one trajectory.

Invariant: a transcript's sampled ids are exactly the engine's, and the ids before them are exactly the engine's prompt.
A call continues a transcript where its messages do; then only new messages are appended. A call opens a new transcript,
which begins with the recorded ids, where its history is recorded up to an earlier place, or another call is already
continuing its place. Where the history is not recorded (the agent rewrote it, or has other tools), its full render is
used. The render is appended to the transcript whose ids it begins with, else it becomes a new transcript.

An answer that its client did not take from the connection is removed when the session ends, unless a call has continued
it: the agent acted without it.

An answer that breaks the request's promise stays recorded as it was sampled, and the policy is asked again
in a new transcript with the same tokens before it.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import secrets
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from typing import ParamSpec, TypeVar, cast

from agentrl.agent_loop.base import Episode, Reply
from agentrl.agent_loop.limits import seed_of
from agentrl.agent_loop.roles import problem_of
from agentrl.agent_loop.stopping import chosen
from agentrl.chat import AssistantMessage, Chat
from agentrl.chat.message import content_text
from agentrl.engines.contract import FinishReason
from agentrl.openai_api.agent_task import MOST_NUMBERS
from agentrl.openai_api.completion import Begun, Completion, assistant_message
from agentrl.openai_api.dialect import Conversation, Dialect, Kept, Translated
from agentrl.openai_api.errors import ApiError, unknown_session
from agentrl.openai_api.history import Checkpoint, Digest, History, cause_of, defaults_of, digest_after, digests_of
from agentrl.openai_api.live import Live
from agentrl.openai_api.request import ChatMessage, ChatRequest, Promise, as_templates_take
from agentrl.openai_api.selection import Answer, Given, SessionTranscript
from agentrl.openai_api.system_turns import placed_turns
from agentrl.openai_api.wire import Reading
from agentrl.system.delivery import Delivery
from agentrl.system.threads import OwnThread
from agentrl.tool import ErrorKind, ToolSchema
from agentrl.trajectory import Message, PlacedImage, Status, ToolAnswer, ToolCallRecord, Transcript
from agentrl.trajectory.picture import pictures_in

P = ParamSpec("P")
T = TypeVar("T")
Written = tuple[list[int], list[PlacedImage]]
"""Token ids of messages, and the images in them."""

MAX_TOOL_LISTS = 128
COMPARED = 16
"""Newest transcripts with which a call is compared that continues none."""
LONG_BODY = 64 << 10
"""Bytes of a request from which it is read, rendered and encoded off the event loop."""
MAX_TRIES = 4
"""Answers that are sampled until one keeps the request's promise."""


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


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that was read."""

    request: ChatRequest
    messages: list[Message]
    tools: list[ToolSchema]
    digests: list[Digest]
    """Digests by number of messages, as `digests_of` makes them."""
    characters: int
    """Number of characters in texts that every template writes; blanks are left out where there are many."""
    long: bool
    """True: its messages are rendered off the event loop."""
    dropped: Mapping[str, str]
    """Reasons by the name of what was dropped from the request."""
    number: int = 0
    """Number of the session's requests up to it."""
    begun: str = ""
    """Beginning of the answer, which the prompt ends with, and the policy continues."""
    later: Sequence[ToolSchema] = ()
    """Tools that may be called, and are not among `tools`."""

    @property
    def digest(self) -> Digest:
        """Digest of the prompt's messages, and of the beginning of the answer."""
        return _with_beginning(self.digests[-1], self.begun)


@dataclass(slots=True, eq=False)
class Call:
    """A request that is being answered in `branch`."""

    asked: Asked
    branch: Branch
    delivery: Delivery
    number: int
    """Number of the session's requests up to it."""
    begun: Begun
    """The answer."""
    news: asyncio.Event = field(default_factory=asyncio.Event)
    """Event that is set when tokens of a live answer have arrived, and at the answer's end."""
    live: Live | None = None
    """The answer's tokens as they arrive; None: it is sent when all of it is known."""
    left: bool = False
    """True: its client went away while a part of the answer had been delivered."""
    sampling: bool = True
    """True: the last turn that was counted for it is not recorded yet."""
    broken: list[Branch] = field(default_factory=list)
    """Branches of answers that broke the request's promise."""

    @property
    def request(self) -> ChatRequest:
        return self.asked.request

    @property
    def branches(self) -> list[Branch]:
        """Branches that end with an answer to it."""
        return [*self.broken, self.branch]


class Session:
    """Recorder of one agent's calls. `episode` is the trajectory's; its branches write the transcripts."""

    def __init__(
        self, episode: Episode, tool_lists: dict[Digest, list[ToolSchema]], thread: OwnThread, *, strict: bool = False
    ) -> None:
        """`tool_lists`: shared by sessions, so that chat formats, which cache by list, meet the same ones again.

        `thread`: does the work of long requests of all sessions, one after another. `strict`: unknown fields are
        refused, not dropped.
        """
        self.episode = episode
        self.ending = Status.COMPLETED
        """Status of the trajectory if no further call comes, as the last call left it."""
        self.fault: Exception | None = None
        """Error for which the engine could not serve a call: the try is lost."""
        self.over = asyncio.Event()
        """Event that is set when no further call can be served: after a fault or an abort."""
        self.stopped: Status | None = None
        """Status that a stop condition ended the session with."""
        self.undelivered = 0
        """Turns of the policy that were removed, because no client took them."""
        self.turns = 0
        """Assistant turns that were sampled or are being sampled."""
        self.last_error: str | None = None
        """Message of the last call that was refused."""
        self.report_token = secrets.token_urlsafe(24)
        """Name of the session in the address for scores, which calls of the policy do not go to."""
        self.feedback: dict[str, float] = {}
        """Numbers that were posted to the session: `score`, `reward` and others."""
        self.refuses_scores: str | None = None
        """Why no score of a single transcript is taken; None: such scores are taken."""
        self.called = asyncio.Event()
        """Event that is set at the first call."""
        self.scored = asyncio.Event()
        """Event that is set when a score was posted."""
        self.closed = False
        self._requests = self._replies = 0
        self._prompts: Counter[str] = Counter()
        """Transcripts by a hash of the prompt that they begin with."""
        self._kept: dict[str, Conversation] = {}
        """Conversations that a later request may continue by the id of their last answer."""
        self._branches: list[Branch] = []
        self._history: History[Branch] = History()
        self._answered: dict[Checkpoint[Branch], Call] = {}
        """Calls by the end of their answer, which no call has continued yet."""
        self._tasks: dict[asyncio.Task[Completion], Call] = {}
        self._aborts: set[asyncio.Task[None]] = set()
        self._tool_lists = tool_lists
        self._thread = thread
        self._strict = strict
        self._most_characters = episode.context.chat.most_characters(episode.context.limits.max_model_len)

    async def begin(
        self, body: bytes, dialect: Dialect, delivery: Delivery
    ) -> tuple[Asked, Call, asyncio.Task[Completion]]:
        """Read a request, find its place and start generating there. `leave` ends the task before its time.

        `delivery`: of the answer. Raises ApiError; so may the task.
        """
        self.called.set()
        try:
            call = await self._placed(asked := await self._read(body, dialect), delivery)
        except ApiError:
            raise
        except Exception as error:
            self._fail(error)
            raise
        self.count("openai_calls")
        task = asyncio.create_task(self._answer(call))
        self._tasks[task] = call
        task.add_done_callback(partial(self._ended, call))
        return asked, call, task

    def leave(self, call: Call, task: asyncio.Task[Completion]) -> None:
        """End a call whose client went away. The tokens that it was delivered stay."""
        if task.done() or call.left:
            return
        if call.live is None or not call.delivery.tokens:
            task.cancel()
            return
        call.left = True
        if call.sampling:
            aborting = asyncio.create_task(self._abort(call, task))
            self._aborts.add(aborting)
            aborting.add_done_callback(self._aborts.discard)

    async def _abort(self, call: Call, task: asyncio.Task[Completion]) -> None:
        """Have the engine return what it has of an answer; where it cannot, nothing of it stays."""
        try:
            await self.episode.context.engine.abort(call.branch.episode.session)
        except Exception:
            task.cancel()
            raise

    async def count_tokens(self, body: bytes, dialect: Dialect) -> int:
        """Count the tokens of the prompt that a request would have, where it continues a transcript, too.

        Nothing is recorded. Raises ApiError.
        """
        asked = await self._read(body, dialect)
        self._check_open()
        self._check_asked(asked)
        if found := self._found(asked):
            checkpoint = next((one for one in found if _is_free(one)), found[-1])
            rest = _new_messages(checkpoint, asked.messages)
            more = (await self._bridge(checkpoint, rest, asked))[0] if rest else []
            return checkpoint.tokens + len(more)
        return len((await self._render(asked, self._tool_lists.get(asked.digests[0], asked.tools)))[0])

    def tell(self, numbers: Mapping[str, float]) -> None:
        """Take numbers that were posted. Raises ApiError for a name that was posted before: its first number stands;
        ValueError for too many of them.
        """
        self._check_open()
        if twice := sorted(self.feedback.keys() & numbers.keys()):
            self.count("openai_feedback_twice")
            message = (
                f"{', '.join(twice)}: posted before; the first value stands, and nothing of this request is taken."
            )
            raise ApiError(409, message, param=twice[0], code="feedback_twice")
        if len(self.feedback) + len(numbers) > MOST_NUMBERS:
            raise ValueError(f"the posts to this session have more than {MOST_NUMBERS} numbers")
        self.feedback |= numbers
        if "score" in numbers:
            self.scored.set()

    def tell_of(self, response: str, score: float) -> None:
        """Take the score of the transcript that holds an answer, by the id that the client was sent.

        Raises ApiError for an unknown id, for a transcript that has a score, and where the run takes no such scores.
        """
        self._check_open()
        if self.refuses_scores is not None:
            raise ApiError(400, f"response: {self.refuses_scores}", param="response", code="unsupported_value")
        id = response.removeprefix("chatcmpl-").removeprefix("msg_").removeprefix("resp_")
        found = next((one for one in self._branches if any(answer.id == id for answer in one.answers)), None)
        if found is None or not id:
            message = f"response: no answer of this session has the id {response!r:.100}."
            raise ApiError(404, message, param="response", code="unknown_response")
        if found.score is not None:
            self.count("openai_feedback_twice")
            message = f"response: the transcript of {response!r:.100} has a score; the first value stands."
            raise ApiError(409, message, param="response", code="feedback_twice")
        found.score = score

    async def close(self) -> None:
        """End the running calls; later ones get "unknown session"."""
        await self._end_calls()
        for branch in self._branches:
            branch.tip = None  # Without this circle the record ends when its last user does.
            branch.episode.transcript.score = branch.score
            await self.episode.context.engine.release(branch.episode.session)
        self._history = History()

    async def _end_calls(self) -> None:
        """End the running calls, and remove answers that no client took."""
        self.closed = True
        running = dict(self._tasks)
        for task, call in running.items():
            self.leave(call, task)
        await asyncio.gather(*running, *self._aborts, return_exceptions=True)
        for call in self._answered.values():
            if not call.delivery.whole:
                self._take_back(call.branches, call.delivery.tokens)
        self._answered.clear()

    def transcripts(self) -> list[SessionTranscript]:
        """Return the transcripts of the session, which is closed, in the order in which they were opened."""
        return [
            SessionTranscript(
                number=one.episode.index,
                opened=one.opened,
                given=tuple(one.given),
                answers=tuple(one.answers),
                prompt_length=one.episode.transcript.prompt_length,
                tools=tuple(one.episode.tools or ()),
                source=None if one.source is None else one.source.episode.index,
                shared=one.shared,
                asked_again=one.asked_again,
            )
            for one in self._branches
        ]

    def _take_back(self, branches: Sequence[Branch], keep: int = 0) -> None:
        """Remove all but the first `keep` tokens of the turns that end the branches: no client was delivered more."""
        for branch in branches:
            episode = branch.episode
            if tokens := episode.take_back(keep):
                self.undelivered += not keep
                self.count("openai_undelivered_turns", int(not keep))
                self.count("openai_undelivered_tokens", tokens)
                answers, end = branch.answers, len(episode.transcript)
                branch.answers = [one for one in answers if one.end <= end]
                if keep and len(branch.answers) < len(answers):
                    part: Message = {"role": "assistant", "content": episode.messages[-1]["content"]}
                    recorded = episode.last_message
                    branch.answers.append(replace(answers[-1], end=end, message=part, recorded=recorded, is_part=True))

    async def _read(self, body: bytes, dialect: Dialect) -> Asked:
        reading, chat = Reading(dialect.api, self._strict), self.episode.context.chat
        given = (body, dialect, reading, self._kept, chat, self._most_characters)
        return await self._work(len(body) > LONG_BODY, read, *given)

    async def _work(self, long: bool, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function without state of the session, off the event loop where that may take long."""
        if not long:
            return function(*args, **kwargs)

        def work() -> T:
            if self.closed:  # Nobody waits any more.
                raise unknown_session()
            return function(*args, **kwargs)

        result = await self._thread.submit(work)
        self._check_open()  # The trajectory may have ended meanwhile; nothing is recorded any more.
        return result

    # Where a call continues

    async def _placed(self, asked: Asked, delivery: Delivery) -> Call:
        """Return a call whose branch has its prompt at the end of the transcript, and is kept for it."""
        self._check_open()
        self._check_turns()
        self._check_asked(asked)
        self.turns += 1
        self._requests += 1
        asked = replace(asked, number=self._requests)
        try:
            branch = await self._place(asked)
            begun = Begun(request=asked.request, prompt_ids=branch.episode.transcript.ids[:])
            call = Call(asked, branch, delivery, asked.number, begun)
            call.live = self._live(call)
            return call
        except BaseException:
            self.turns -= 1
            raise

    def _live(self, call: Call) -> Live | None:
        """Begin to send an answer while it is sampled; None where that cannot be.

        An answer with a promise may be asked for again, and one whose calls stay text is read as a whole. Log-probs and
        ids of a whole answer come first in its stream; an answer that the client began keeps its first blanks.
        """
        request, episode = call.request, call.branch.episode
        is_whole = request.promise is not None or not request.may_call or request.logprobs or request.return_token_ids
        if not request.stream or is_whole or episode.role or call.asked.begun:
            return None
        turn = episode.context.chat.growing(call.begun.prompt_ids, episode.tools, stop=request.stops)
        return None if turn is None else Live(turn, call.news)

    def _found(self, asked: Asked) -> list[Checkpoint[Branch]]:
        """Find the places that a call continues."""
        # By messages, not by re-rendering: sampled tokens stay as they were sampled, even where the template would
        # write them otherwise.
        found = self._history.find(asked.messages, [*asked.digests[:-1], asked.digest])
        if self.episode.context.roles:
            found = [one for one in found if one.owner.episode.role == asked.request.model]
        if asked.request.carries_reasoning:
            # The policy shall see what it would see from a server that renders what it is sent.
            found = [one for one in found if not _lacks_reasoning(one, asked.messages)]
        return found

    async def _place(self, asked: Asked) -> Branch:
        found, opened = self._found(asked), len(self._branches)
        cause = "branched" if found else self._cause(asked)
        if cause == "reasoning":
            self.count("openai_reasoning_left_out")
        free = [one for one in found if _is_free(one)]
        for checkpoint in free[:1] or found[-1:]:
            self._answered.pop(checkpoint, None)
        if free:
            with _kept(free[0].owner):
                return await self._continue(free[0], asked)
        branch = await (self._fork(found[-1], asked) if found else self._rendered(asked))
        branch.busy = True
        if len(self._branches) > opened > 0:
            self.count(f"openai_opened_{cause}")
            branch.opened = cause
        return branch

    def _cause(self, asked: Asked) -> str:
        """Name why a call continues no transcript, for a metric."""
        if not self._branches:
            return "first"
        if self._history.find(asked.messages, asked.digests):
            return "reasoning" if asked.request.carries_reasoning else "role"
        recorded = ((one.episode.messages, one.episode.tools or ()) for one in self._branches[-COMPARED:])
        return cause_of(asked.messages, asked.tools, recorded)

    def _check_open(self) -> None:
        if self.closed:
            raise unknown_session()
        if self.over.is_set():
            raise ApiError(503, f"The engine failed: {self.fault or 'it was told to stop'}.")

    def _check_turns(self, so_far: str = "") -> None:
        if self.stopped is not None:
            raise self._refuse(self.stopped, f"A stop condition of the run has ended this session{so_far}.")
        limit = self.episode.context.limits.max_assistant_turns
        if self.turns >= limit:
            message = f"All {limit} assistant turns of this session are used up{so_far}."
            raise self._refuse(Status.TURN_LIMIT, message)

    def _check_asked(self, asked: Asked) -> None:
        """Raise ApiError for what can be refused without rendering."""
        if (roles := self.episode.context.roles) and (problem := problem_of([asked.request.model], roles)) is not None:
            raise ApiError(404, f"model: {problem}.", param="model", code="model_not_found")
        most, limit = self._most_characters, self.episode.context.limits.max_model_len
        if most is not None and asked.characters > most:
            message = (
                f"The messages have {asked.characters:,} characters, and the context length of {limit} tokens holds "
                f"{most:,} at most."
            )
            raise self._refuse(Status.LENGTH, message)
        promise, chat = asked.request.promise, self.episode.context.chat
        if chat.vision is None and any(pictures_in(asked.messages)):
            message = f"A message has an image, and the run's model ({chat.tokenizer.name_or_path}) takes text only."
            raise ApiError(400, message, param="messages", code="unsupported_value")
        if promise is not None and promise.functions is not None and not chat.format.parses_tools:
            message = (
                f"tool_choice: the run's chat format {chat.format.name!r} reads no tool calls, so none can be "
                f"required; set multi_turn.format."
            )
            raise ApiError(400, message, param="tool_choice", code="unsupported_value")

    async def _continue(self, checkpoint: Checkpoint[Branch], asked: Asked) -> Branch:
        branch = checkpoint.owner
        if _lacks_reasoning(checkpoint, asked.messages, first=len(checkpoint.messages) - 1):
            self.count("openai_reasoning_left_out")
        rest = _new_messages(checkpoint, asked.messages)
        if not rest:  # A call whose generation was cancelled, again.
            self._check_room(branch.episode, 0)
            return branch
        ids, images = await self._bridge(checkpoint, rest, asked)
        self._check_room(branch.episode, len(ids))
        branch.given += [Given(message, len(branch.episode.transcript), asked.number) for message in rest]
        branch.episode.observe_ids(ids, rest, images)
        self._record_answers(branch, rest)
        return self._ready(branch, asked.digest)

    async def _fork(self, checkpoint: Checkpoint[Branch], asked: Asked) -> Branch:
        source, rest = checkpoint.owner.episode, _new_messages(checkpoint, asked.messages)
        written = _beginning(source.transcript, checkpoint.tokens)
        if rest:
            ids, images = await self._bridge(checkpoint, rest, asked)
            moved = [replace(one, start=one.start + checkpoint.tokens) for one in images]
            written = written[0] + ids, written[1] + moved
        messages, owner = [*map(copy.copy, checkpoint.messages), *rest], checkpoint.owner
        branch = await self._open(messages, source.tools, written, asked.digest, source.role, asked.begun)
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
        role = asked.request.model if self.episode.context.roles else ""
        branch = self._beginning_of(ids, images, tools, role)
        if branch is None:
            branch = await self._open(messages, tools, written, asked.digest, role, asked.begun)
            branch.given = [Given(message, 0, asked.number) for message in messages]
            return branch
        if branch.tip is not None:
            self._answered.pop(branch.tip, None)
        known, recorded = len(branch.episode.transcript), len(branch.episode.messages)
        self._check_room(branch.episode, len(ids) - known)
        new = [replace(one, start=one.start - known) for one in images if one.start >= known]
        branch.given += [Given(message, known, asked.number) for message in messages[recorded:] or messages[-1:]]
        branch.episode.observe_ids(ids[known:], messages[recorded:] or messages[-1:], new)
        branch.episode.messages = list(messages)
        return self._ready(branch, asked.digest)

    async def _render(self, asked: Asked, tools: list[ToolSchema]) -> Written:
        sampled = self.episode.sampled_texts
        render = partial(self.episode.context.chat.render, asked.messages, tools or None, sampled=sampled)
        return await self._written(asked.long, self._going_on(render, asked.begun, tools), asked.messages)

    async def _written(self, long: bool, write: Callable[[], list[int]], messages: Sequence[Message]) -> Written:
        """Write messages as ids, and prepare their images.

        Raises ApiError for any error: templates are foreign code, and so are the messages.
        """

        def work() -> Written:
            ids = write()
            return ids, self.episode.context.chat.images(ids, messages)

        try:
            return await self._work(long, work)
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
            for branch in self._branches
            if not branch.busy
            and branch.episode.role == role
            and branch.episode.tools == (tools or None)
            and len(branch.episode.transcript) < len(ids)
            and branch.episode.transcript.ids == ids[: len(branch.episode.transcript)]
            and _places(branch.episode.transcript.images) == _places(images, len(branch.episode.transcript))
        ]
        return max(found, key=lambda branch: len(branch.episode.transcript), default=None)

    async def _open(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] | None,
        written: Written,
        digest: Digest,
        role: str,
        begun: str,
    ) -> Branch:
        ids, images = written
        limit = self.episode.context.limits.max_model_len
        if len(ids) >= limit:
            raise self._refuse(Status.LENGTH, f"The prompt has {len(ids)} tokens, and the context length is {limit}.")
        told = await self.episode.teacher_prompt(messages, tools)
        if told and begun:
            told += self.episode.context.chat.begin_turn(begun, tools)
        self._check_open()  # See `_work`.
        branch = Branch(self.episode.branch(role, self._seed_of(written)), digest)
        branch.episode.start_ids(ids, messages, tools, teacher_prompt=told, images=images)
        self._branches.append(branch)
        return self._ready(branch, digest)

    def _seed_of(self, prompt: Written) -> int:
        """Return the seed of a transcript: by its prompt, and by the number of transcripts before with the same prompt.

        So the samples of a conversation do not depend on the order of calls, or on other calls between them.
        """
        ids, images = prompt
        key = blake2b(array("q", ids).tobytes(), digest_size=8)
        for place, digest in _places(images):
            key.update(place.to_bytes(8, "little") + digest)
        number = self._prompts[key.hexdigest()]
        self._prompts[key.hexdigest()] += 1
        return seed_of(self.episode.seed, "prompt", key.hexdigest(), number)

    def _going_on(
        self, write: Callable[[], list[int]], begun: str, tools: Sequence[ToolSchema] | None
    ) -> Callable[[], list[int]]:
        """Make a function that writes the beginning of the answer, too."""
        chat = self.episode.context.chat
        return (lambda: [*write(), *chat.begin_turn(begun, tools)]) if begun else write

    async def _bridge(self, checkpoint: Checkpoint[Branch], rest: list[Message], asked: Asked) -> Written:
        episode = checkpoint.owner.episode
        before = episode.transcript.ids
        if checkpoint.tokens < len(before):
            before = before[: checkpoint.tokens]
        bridge = partial(self.episode.context.chat.bridge, first=len(checkpoint.messages))
        write = self._going_on(partial(bridge, list(before), rest, episode.tools), asked.begun, episode.tools)
        return await self._written(asked.long, write, rest)

    def _ready(self, branch: Branch, digest: Digest) -> Branch:
        """Set a checkpoint at the generation prompt that the transcript now ends with."""
        branch.digest = digest
        self._set_checkpoint(branch, replied=False)
        return branch

    def _set_checkpoint(self, branch: Branch, *, replied: bool) -> None:
        episode = branch.episode
        branch.tip = Checkpoint(branch, tuple(episode.messages), len(episode.transcript), replied)
        self._history.add(branch.digest, branch.tip)

    def _check_room(self, episode: Episode, new: int) -> None:
        left = episode.budget_left
        if new >= left:
            raise self._refuse(
                Status.LENGTH, f"The new messages have {new} tokens, and {max(left, 0)} are left of the budget."
            )

    def _refuse(self, status: Status, message: str) -> ApiError:
        self.ending = status
        self.count("openai_refused")
        # In the form of a context that is too long, which clients know.
        return ApiError(400, message, param="messages", code="context_length_exceeded")

    # The answer

    async def _answer(self, call: Call) -> Completion:
        """Sample until an answer keeps the request's promise."""
        promise, broken = call.request.promise, list[str]()
        while True:
            reply, start, cached = await self._sampled(call)
            read, ids, chat = reply.message, call.branch.episode.transcript.ids[start:], self.episode.context.chat
            if call.asked.later and read.calls:  # Some call formats need a schema to read arguments.
                read = await chat.read(ids, [*(call.branch.episode.tools or ()), *call.asked.later])
            if call.live is not None:
                read = call.live.settled(ids, read)
            if not call.request.may_call and read.calls:  # Its calls are text.
                text = chat.decode(ids[:-1] if ids[-1] in chat.stop_token_ids else ids)
                read = replace(read, text=text, reasoning=None, calls=())
            elif call.asked.begun and not read.calls:  # Its first blanks are part of it.
                read = replace(read, text=chat.decode(ids[:-1] if ids[-1] in chat.stop_token_ids else ids))
            problem = None if promise is None else promise.broken_by(_begun_by(call.asked.begun, _cut(read, reply)))
            if promise is None or problem is None:
                tries = None if promise is None else len(broken) + 1
                return self._completion(call, reply, read, start, cached, tries)
            broken.append("was cut before it ended" if reply.finish_reason.kind == "length" else problem)
            await self._ask_again(call, promise, start, broken)

    async def _sampled(self, call: Call) -> tuple[Reply, int, int]:
        """Sample a turn: (the turn, its first place in the transcript, prompt tokens that came from the cache)."""
        episode, asked = call.branch.episode, call.request.token_limit
        start, cached, whole = len(episode.transcript), episode.cached_tokens, episode.room()
        self.episode.waiting_for = "the engine"
        episode.listener = None if call.live is None else call.live.hear
        try:
            if episode.role:
                reply = await episode.context.roles[episode.role](episode, call.request.stops, asked)
            else:
                reply = await episode.generate(stop=call.request.stops, max_tokens=asked)
        except Exception as error:
            self._fail(error)
            raise ApiError(503, f"The engine failed: {error}") from error
        if call.left:
            raise self._end_left(call, start)
        if reply.finish_reason.kind == "abort":
            self.ending = Status.ABORTED
            self.over.set()
            raise ApiError(503, "The engine was told to stop.")
        call.sampling = False
        cut = reply.finish_reason.kind == "length" and (asked is None or asked >= whole)
        self.stopped = self.stopped or (Status.MALFORMED if reply.forged else chosen(episode, reply))
        self.ending = self.stopped or (Status.LENGTH if cut else Status.COMPLETED)
        return reply, start, episode.cached_tokens - cached

    def _end_left(self, call: Call, start: int) -> ApiError:
        """Keep of a turn what its client was delivered before it went away, so that a later call may continue it."""
        branch, tokens = call.branch, call.delivery.tokens
        episode, gone = branch.episode, ApiError(499, "The client closed the request.")
        self._take_back([branch], tokens)
        if not tokens:  # The record is as if the call had not been made.
            return gone
        call.sampling = False
        read = episode.context.chat.parse(episode.transcript.ids[start:], episode.tools)
        sent = self._record_reply(call, Reply(read, FinishReason("abort")), read)
        self._note_answer(call, start, sent, call.begun.id)
        branch.answers[-1] = replace(branch.answers[-1], is_part=True)
        return gone

    async def _ask_again(self, call: Call, promise: Promise, start: int, broken: Sequence[str]) -> None:
        """Move the call to a new transcript with the same tokens before the answer.

        Raises ApiError when no further answer is sampled.
        """
        branch = call.branch
        branch.tip = None  # Its answer was sent to nobody, so no call continues after it.
        self._note_answer(call, start, branch.episode.messages[-1])
        said = ", ".join(f"answer {number} {problem}" for number, problem in enumerate(broken, 1))
        params, kept = branch.episode.params, " and ".join(promise.fields)
        if self.ending is Status.LENGTH:
            raise self._refuse(Status.LENGTH, f"The budget was used up before an answer kept {kept}: {said}.")
        if len(broken) >= MAX_TRIES or params.temperature == 0 or params.top_k == 1:  # Greedy answers are all the same.
            self.ending = Status.MALFORMED
            self.count("openai_promise_broken")
            code = "json_validate_failed" if promise.text is not None else "tool_use_failed"
            raise ApiError(400, f"No answer of the policy kept {kept}: {said}.", param=promise.fields[0], code=code)
        self._check_turns(f" before an answer kept {kept}: {said}")
        episode = branch.episode
        written = _beginning(episode.transcript, start)
        messages = list(map(copy.copy, episode.messages[:-1]))
        call.branch = await self._open(messages, episode.tools, written, branch.digest, episode.role, call.asked.begun)
        branch.busy, call.branch.busy = False, True
        call.branch.opened = "asked_again"
        call.branch.given = [Given(message, 0, call.number) for message in messages]
        call.branch.source, call.branch.shared, call.branch.asked_again = branch, start, True
        call.broken.append(branch)
        self.turns += 1
        call.sampling = True
        self.count("openai_asked_again")

    def _completion(
        self, call: Call, reply: Reply, read: AssistantMessage, start: int, cached: int, tries: int | None
    ) -> Completion:
        request, transcript = call.request, call.branch.episode.transcript
        message = self._record_reply(call, reply, read)
        assert call.branch.tip is not None
        self._answered[call.branch.tip] = call
        ids = transcript.ids[start:]
        decode = self.episode.context.chat.decode
        completion = Completion(
            id=call.begun.id,
            created=call.begun.created,
            request=request,
            message=message,
            finish_reason="tool_calls" if reply.stopped and "tool_calls" in message else reply.finish_reason.kind,
            prompt_ids=transcript.ids[:start],
            ids=ids,
            logprobs=transcript.logprobs[start:],
            tokens=[decode([id]) for id in ids] if request.logprobs else [],
            cached_tokens=cached,
            tries=tries,
            matched=_stop_text(reply),
        )
        self._note_answer(call, start, message, completion.id)
        if isinstance(request, Translated) and request.carried is not None:
            answer = ChatMessage.model_validate(_whole(call.asked.begun, message))
            self._kept[completion.id] = Conversation([*request.carried, answer], request.tools, request.later)
        return completion

    def _note_answer(self, call: Call, start: int, message: Message, id: str = "") -> None:
        """Keep the parts of a recorded answer that the selection of transcripts reads."""
        episode, request = call.branch.episode, call.request
        end, recorded = len(episode.transcript), episode.last_message
        whole = _whole(call.asked.begun, message)
        call.branch.answers.append(Answer(whole, start, end, call.number, request.model, id, recorded))

    def _record_reply(self, call: Call, reply: Reply, read: AssistantMessage) -> Message:
        """Set a checkpoint at the transcript's new end; return the message as it is sent."""
        branch, begun = call.branch, call.asked.begun
        if read is not reply.message:
            branch.episode.messages[-1] = _begun_by(begun, read).to_message()
        message = _cut(read, reply)
        self.episode.sampled_texts.add(message.text)
        self._replies += 1
        sent = assistant_message(message, [f"c{self._replies:04d}{index:04d}" for index in range(len(message.calls))])
        defaults = defaults_of(branch.episode.tools or ())
        whole = _whole(begun, {**sent, "content": sent["content"] or ""})
        branch.digest = digest_after(call.asked.digests[-1], whole, defaults)
        self._set_checkpoint(branch, replied=True)
        records = [
            ToolCallRecord(call.name, call.arguments, ToolAnswer(error=ErrorKind.PARSE if call.error else None))
            for call in message.calls
        ]
        branch.calls = {call.id: record for call, record in zip(message.calls, records, strict=True)}
        branch.episode.trajectory.turns[-1].calls.extend(records)
        branch.replied_at = time.monotonic()
        return sent

    def _record_answers(self, branch: Branch, messages: list[Message]) -> None:
        """Complete the records of calls by the tool answers. The time is the agent's, from reply to answer."""
        seconds = time.monotonic() - branch.replied_at
        for message in messages:
            record = branch.calls.pop(message.get("tool_call_id", ""), None)
            if record is not None and message["role"] == "tool":
                record.answer = replace(record.answer, text=content_text(message["content"]), seconds=seconds)

    def count(self, name: str, number: int = 1) -> None:
        """Add to a number of the trajectory's metrics."""
        metrics = self.episode.trajectory.metrics
        metrics[name] = metrics.get(name, 0.0) + number

    def refused(self, error: ApiError) -> None:
        """Keep why a request was refused, for messages about the agent, and count it."""
        self.last_error = error.message
        if error.status < 500 and error.code != "context_length_exceeded":  # which is counted as openai_refused
            self.count("openai_bad_requests")
            if error.code is not None:
                self.count(f"openai_bad_requests_{error.code}")

    def _fail(self, error: Exception) -> None:
        """End the session: the try is lost."""
        self.fault = error
        self.over.set()

    def _ended(self, call: Call, task: asyncio.Task[Completion]) -> None:
        """Clean up after a call.

        A callback, because a task that is cancelled before its first step does not run its own code.
        """
        self._tasks.pop(task, None)
        call.news.set()
        call.branch.busy = False
        self.episode.waiting_for = "the engine" if self._tasks else "the agent"
        if call.sampling:
            self.turns -= 1
        if task.cancelled():
            self._take_back(call.broken)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception) and not isinstance(error, ApiError):
            self._fail(error)


def _is_free(checkpoint: Checkpoint[Branch]) -> bool:
    """Say whether a call may continue the checkpoint's own transcript."""
    return checkpoint.owner.tip is checkpoint and not checkpoint.owner.busy


def _beginning(transcript: Transcript, tokens: int) -> Written:
    """Return a transcript's first tokens, and the images in them."""
    return transcript.ids[:tokens], [one for one in transcript.images if one.start < tokens]


def _places(images: Sequence[PlacedImage], end: int | None = None) -> list[tuple[int, bytes]]:
    """List images before `end` by place and content: equal ids may stand for different images."""
    return [(one.start, one.image.digest) for one in images if end is None or one.start < end]


def _stop_text(reply: Reply) -> str | None:
    """Return the stop text of the request that ended a turn."""
    matched = reply.finish_reason.matched
    return matched if isinstance(matched, str) else None


def _cut(message: AssistantMessage, reply: Reply) -> AssistantMessage:
    """Cut the text where a stop text of the request begins."""
    stop = _stop_text(reply)
    return message if stop is None else replace(message, text=message.text.partition(stop)[0])


def _begun_by(text: str, message: AssistantMessage) -> AssistantMessage:
    """Put the beginning of an answer before the text that the policy added."""
    return replace(message, text=text + message.text) if text else message


def _whole(begun: str, sent: Message) -> Message:
    """Return an answer as a client that began it sends it back."""
    return {**sent, "content": begun + content_text(sent["content"])} if begun else sent


def _with_beginning(digest: Digest, begun: str) -> Digest:
    """Digest a prompt that ends with the beginning of an answer: no other answer continues it."""
    return digest_after(digest, {"role": "begun", "content": begun}) if begun else digest


@contextlib.contextmanager
def _kept(branch: Branch) -> Iterator[None]:
    """Keep the branch for a call, or give it back after an error."""
    branch.busy = True
    try:
        yield
    except BaseException:
        branch.busy = False
        raise


def read(body: bytes, dialect: Dialect, reading: Reading, kept: Kept, chat: Chat, most_characters: int | None) -> Asked:
    """Read a request; blanks are only told from text where there are more characters than `most_characters`.

    Raises ApiError.
    """
    request = dialect.read(body, reading, kept)
    messages = _with_names([message.to_message() for message in request.messages])
    if not reading.strict:
        messages, is_changed = placed_turns(messages, chat)
        if is_changed:
            reading.drop("system_turns", "the chat template writes none in the middle: a user's text stands for them")
    # Templates may leave out an assistant's text, such as reasoning.
    texts = [content_text(message["content"]) for message in messages if message["role"] != "assistant"]
    characters = sum(map(len, texts))
    if most_characters is not None and characters > most_characters:
        characters = sum(len("".join(text.split())) for text in texts)
    tools = request.declared_tools
    long = len(body) > LONG_BODY or any(pictures_in(messages))  # Small files may hold many pixels.
    begun, later = (request.begun, request.later) if isinstance(request, Translated) else ("", ())
    further = as_templates_take(cast(Sequence[ToolSchema], later))
    return Asked(
        request, messages, tools, digests_of(messages, tools), characters, long, reading.dropped, 0, begun, further
    )


def _with_names(messages: list[Message]) -> list[Message]:
    """Add to tool answers the name of the function they answer, which some templates write."""
    names: dict[str, str] = {}
    for message in messages:
        for call in message.get("tool_calls", ()):
            names[call.get("id", "")] = call["function"]["name"]
        if message["role"] == "tool" and "name" not in message and (answered := message.get("tool_call_id")) in names:
            message["name"] = names[answered]
    return messages


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
