"""One agent's calls, recorded as transcripts of one trajectory.

Invariant: a transcript's sampled ids are exactly the engine's, and the ids before them are exactly the engine's prompt.
`agentrl.openai_api.branches` finds the place at which a call continues.

An answer that its client did not take from the connection is removed when the session ends, unless a call has continued
it: the agent acted without it.

An answer that breaks the request's promise stays recorded as it was sampled, and the policy is asked again
in a new transcript with the same tokens before it.
"""

from __future__ import annotations

import asyncio
import copy
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ParamSpec, TypeVar

from agentrl.agent_loop.base import Episode, Reply
from agentrl.agent_loop.roles import problem_of
from agentrl.agent_loop.stopping import chosen
from agentrl.agents.task import MOST_NUMBERS
from agentrl.chat import AssistantMessage
from agentrl.chat.message import content_text
from agentrl.engines.contract import FinishReason
from agentrl.openai_api.asked import LONG_BODY, Asked, Body, read
from agentrl.openai_api.branches import Branch, Branches, beginning
from agentrl.openai_api.completion import Begun, Completion, assistant_message
from agentrl.openai_api.dialect import Conversation, Dialect, Kept, Translated
from agentrl.openai_api.errors import NO_ROOM, ApiError, unknown_session
from agentrl.openai_api.history import Checkpoint, Digest, History, defaults_of, digest_after
from agentrl.openai_api.live import Live
from agentrl.openai_api.request import ChatMessage, ChatRequest, Promise
from agentrl.openai_api.selection import Answer, Given, SessionTranscript
from agentrl.openai_api.wire import Reading, parsed
from agentrl.system.delivery import Delivery
from agentrl.system.threads import OwnThread
from agentrl.tool import ErrorKind, ToolSchema
from agentrl.trajectory import Message, Status, ToolAnswer, ToolCallRecord
from agentrl.trajectory.picture import pictures_in

P = ParamSpec("P")
T = TypeVar("T")
MAX_TRIES = 4
"""Answers that are sampled until one keeps the request's promise."""


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
        self.kept: dict[str, Conversation] = {}
        """Conversations that a later request may continue by the id of their last answer."""
        self.branches = Branches(self, tool_lists)
        self._answered: dict[Checkpoint[Branch], Call] = {}
        """Calls by the end of their answer, which no call has continued yet."""
        self._tasks: dict[asyncio.Task[Completion], Call] = {}
        self._aborts: set[asyncio.Task[None]] = set()
        self._thread = thread
        self._strict = strict
        self._most_characters = episode.context.chat.most_characters(episode.context.limits.max_model_len)

    async def begin(
        self, body: bytes, dialect: Dialect, delivery: Delivery, asked: Asked | None = None, /
    ) -> tuple[Asked, Call, asyncio.Task[Completion]]:
        """Read a request, find its place and start generating there. `leave` ends the task before its time.

        `delivery`: of the answer. `asked`: the request, where it was read before. Raises ApiError; so may the task.
        """
        self.called.set()
        try:
            asked = asked or await self.read(await self.parse(body), dialect, self.kept)
            call = await self._placed(asked, delivery)
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
        asked = await self.read(await self.parse(body), dialect, self.kept)
        self.check_open()
        self.check_asked(asked)
        return await self.branches.prompt_tokens(asked)

    def tell(self, numbers: Mapping[str, float]) -> None:
        """Take numbers that were posted. Raises ApiError for a name that was posted before: its first number stands;
        ValueError for too many of them.
        """
        self.check_open()
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
        self.check_open()
        if self.refuses_scores is not None:
            raise ApiError(400, f"response: {self.refuses_scores}", param="response", code="unsupported_value")
        id = response.removeprefix("chatcmpl-").removeprefix("msg_").removeprefix("resp_")
        found = next((one for one in self.branches.all if any(answer.id == id for answer in one.answers)), None)
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
        for branch in self.branches.all:
            branch.tip = None  # Without this circle the record ends when its last user does.
            branch.episode.transcript.score = branch.score
            await self.episode.context.engine.release(branch.episode.session)
        self.branches.history = History()

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
            for one in self.branches.all
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

    async def parse(self, body: bytes) -> Body:
        """Parse the body of a request. Raises ApiError."""
        long = len(body) > LONG_BODY
        return Body(await self.work(long, parsed, body), long)

    async def read(self, body: Body, dialect: Dialect, kept: Kept) -> Asked:
        """Read a request that may continue the conversations in `kept`. Raises ApiError."""
        reading, chat = Reading(dialect.api, self._strict), self.episode.context.chat
        return await self.work(body.long, read, body, dialect, reading, kept, chat, self._most_characters)

    async def work(self, long: bool, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function without state of the session, off the event loop where that may take long."""
        if not long:
            return function(*args, **kwargs)

        def work() -> T:
            if self.closed:  # Nobody waits any more.
                raise unknown_session()
            return function(*args, **kwargs)

        result = await self._thread.submit(work)
        self.check_open()  # The trajectory may have ended meanwhile; nothing is recorded any more.
        return result

    # Where a call continues

    async def _placed(self, asked: Asked, delivery: Delivery) -> Call:
        """Return a call whose branch has its prompt at the end of the transcript, and is kept for it."""
        self.check_open()
        self._check_turns()
        self.check_asked(asked)
        self.turns += 1
        self._requests += 1
        asked = replace(asked, number=self._requests)
        try:
            branch = await self.branches.place(asked)
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

    def continued(self, place: Checkpoint[Branch]) -> None:
        self._answered.pop(place, None)

    def check_open(self) -> None:
        if self.closed:
            raise unknown_session()
        if self.over.is_set():
            raise ApiError(503, f"The engine failed: {self.fault or 'it was told to stop'}.")

    def _check_turns(self, so_far: str = "") -> None:
        if self.stopped is not None:
            raise self.refuse(self.stopped, f"A stop condition of the run has ended this session{so_far}.")
        limit = self.episode.context.limits.max_assistant_turns
        if self.turns >= limit:
            message = f"All {limit} assistant turns of this session are used up{so_far}."
            raise self.refuse(Status.TURN_LIMIT, message)

    def check_asked(self, asked: Asked) -> None:
        """Raise ApiError for what can be refused without rendering."""
        if (roles := self.episode.context.roles) and (problem := problem_of([asked.request.model], roles)) is not None:
            raise ApiError(404, f"model: {problem}.", param="model", code="model_not_found")
        most, limit = self._most_characters, self.episode.context.limits.max_model_len
        if most is not None and asked.characters > most:
            message = (
                f"The messages have {asked.characters:,} characters, and the context length of {limit} tokens holds "
                f"{most:,} at most."
            )
            raise self.refuse(Status.LENGTH, message)
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

    def refuse(self, status: Status, message: str) -> ApiError:
        self.ending = status
        self.count("openai_refused")
        # In the form of a context that is too long, which clients know.
        return ApiError(400, message, param="messages", code=NO_ROOM)

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
            raise self.refuse(Status.LENGTH, f"The budget was used up before an answer kept {kept}: {said}.")
        if len(broken) >= MAX_TRIES or params.temperature == 0 or params.top_k == 1:  # Greedy answers are all the same.
            self.ending = Status.MALFORMED
            self.count("openai_promise_broken")
            code = "json_validate_failed" if promise.text is not None else "tool_use_failed"
            raise ApiError(400, f"No answer of the policy kept {kept}: {said}.", param=promise.fields[0], code=code)
        self._check_turns(f" before an answer kept {kept}: {said}")
        episode = branch.episode
        written = beginning(episode.transcript, start)
        messages = list(map(copy.copy, episode.messages[:-1]))
        call.branch = await self.branches.open(
            messages, episode.tools, written, branch.digest, episode.role, call.asked.begun
        )
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
            self.kept[completion.id] = Conversation(
                [*request.carried, answer], request.tools, request.later, request.offered
            )
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
        if (turn := branch.episode.last_turn) is not None:
            ids = branch.episode.transcript.ids[turn.start : turn.end]
            self.episode.sampled_texts |= branch.episode.context.chat.spelled_by_tokens([message.text], ids)
        self._replies += 1
        sent = assistant_message(message, [f"c{self._replies:04d}{index:04d}" for index in range(len(message.calls))])
        defaults = defaults_of(branch.episode.tools or ())
        whole = _whole(begun, {**sent, "content": sent["content"] or ""})
        branch.digest = digest_after(call.asked.digests[-1], whole, defaults)
        self.branches.set_checkpoint(branch, replied=True)
        records = [
            ToolCallRecord(call.name, call.arguments, ToolAnswer(error=ErrorKind.PARSE if call.error else None))
            for call in message.calls
        ]
        branch.calls = {call.id: record for call, record in zip(message.calls, records, strict=True)}
        branch.episode.trajectory.turns[-1].calls.extend(records)
        branch.replied_at = time.monotonic()
        return sent

    def count(self, name: str, number: int = 1) -> None:
        """Add to a number of the trajectory's metrics."""
        metrics = self.episode.trajectory.metrics
        metrics[name] = metrics.get(name, 0.0) + number

    def refused(self, error: ApiError) -> None:
        """Keep why a request was refused, for messages about the agent, and count it."""
        self.last_error = error.message
        if error.status < 500 and error.code != NO_ROOM:  # which is counted as openai_refused
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
