"""One agent's calls, recorded as transcripts of one trajectory.

Invariant: a transcript's sampled ids are those that the engine returned, and what stands before them is exactly what
the engine was given. A call continues a transcript where its messages do; then only what is new is appended. A call
whose history is recorded up to an earlier place, or whose place is being continued by another call, opens a new
transcript that begins with the recorded ids. Where the history is not recorded (the agent rewrote it, or has other
tools), its full render is taken: appended to the transcript whose ids it begins with, else as a new transcript.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from agentrl.agent_loop.base import Episode, Reply
from agentrl.errors import UserError
from agentrl.openai_api.completion import Completion, assistant_message
from agentrl.openai_api.errors import ApiError, budget_used_up, unknown_session
from agentrl.openai_api.history import Checkpoint, Digest, History, digest_after, digests_of
from agentrl.openai_api.request import ChatRequest
from agentrl.tool import ErrorKind, ToolSchema
from agentrl.trajectory import Message, Status, ToolCallRecord

MAX_TOOL_LISTS = 128


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


class Session:
    """Recorder of one agent's calls. `episode` is the trajectory's; its branches write the transcripts."""

    def __init__(self, episode: Episode, tool_lists: dict[Digest, list[ToolSchema]]) -> None:
        """`tool_lists`: shared by sessions, so that chat formats, which cache by list, meet the same ones again."""
        self.episode = episode
        self.ending = Status.COMPLETED
        """Status of the trajectory if no further call comes, as the last call left it."""
        self.fault: Exception | None = None
        """Error for which the engine could not serve a call: the try is lost."""
        self.over = asyncio.Event()
        """Event that is set when no further call can be served: after a fault or an abort."""
        self.turns = 0
        """Assistant turns that were sampled or are being sampled."""
        self.last_error: str | None = None
        """Message of the last call that was refused."""
        self.closed = False
        self._replies = 0
        self._branches: list[Branch] = []
        self._history: History[Branch] = History()
        self._tasks: set[asyncio.Task[Completion]] = set()
        self._tool_lists = tool_lists

    def begin(self, request: ChatRequest) -> asyncio.Task[Completion]:
        """Find the call's place and start generating there. Cancelling the task leaves a sound record.

        Raises ApiError; so may the task.
        """
        branch = self._place(request)
        for name in request.overruled():
            self._count(f"openai_ignored_{name}")
        self._count("openai_calls")
        branch.busy = True
        self.turns += 1
        task = asyncio.create_task(self._answer(branch, request))
        self._tasks.add(task)
        task.add_done_callback(partial(self._ended, branch))
        return task

    async def close(self) -> None:
        """End the running calls; later ones get "unknown session"."""
        self.closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for branch in self._branches:
            await self.episode.context.engine.release(branch.episode.session)

    # Where a call goes on

    def _place(self, request: ChatRequest) -> Branch:
        """Return the branch with the call's prompt at the end of its transcript, ready to be sampled from."""
        self._check_open()
        messages = _with_names([message.to_message() for message in request.messages])
        declared = request.declared_tools
        digests = digests_of(messages, declared)
        if len(self._tool_lists) >= MAX_TOOL_LISTS:
            self._tool_lists.clear()
        tools = self._tool_lists.setdefault(digests[0], declared)
        # Found by messages, not by re-rendering: sampled tokens stay as they were sampled, even where the template
        # would write them otherwise.
        found = self._history.find(messages, digests)
        try:
            for checkpoint in found:
                if checkpoint.owner.tip is checkpoint and not checkpoint.owner.busy:
                    return self._continue(checkpoint, messages, digests[-1])
            if found:
                return self._fork(found[-1], messages, digests[-1])
            return self._rendered(messages, tools, digests[-1])
        except (UserError, ValueError) as error:
            raise ApiError(400, f"The chat template cannot write these messages: {error}", param="messages") from error

    def _check_open(self) -> None:
        if self.closed:
            raise unknown_session()
        if self.over.is_set():
            raise ApiError(503, f"The engine failed: {self.fault or 'it was told to stop'}.")
        limit = self.episode.context.limits.max_assistant_turns
        if self.turns >= limit:
            raise self._refuse(Status.TURN_LIMIT, f"All {limit} assistant turns of this session are used up.")

    def _continue(self, checkpoint: Checkpoint[Branch], messages: list[Message], digest: Digest) -> Branch:
        branch = checkpoint.owner
        rest = _new_messages(checkpoint, messages)
        if not rest:  # A call whose generation was cancelled, again.
            self._check_room(branch.episode, 0)
            return branch
        ids = self._bridge(checkpoint, rest)
        self._check_room(branch.episode, len(ids))
        branch.episode.observe_ids(ids, rest)
        self._record_answers(branch, rest)
        return self._ready(branch, digest)

    def _fork(self, checkpoint: Checkpoint[Branch], messages: list[Message], digest: Digest) -> Branch:
        source, rest = checkpoint.owner.episode, _new_messages(checkpoint, messages)
        ids = source.transcript.ids[: checkpoint.tokens] + (self._bridge(checkpoint, rest) if rest else [])
        return self._open([*checkpoint.messages, *rest], source.tools, ids, digest)

    def _rendered(self, messages: list[Message], tools: list[ToolSchema], digest: Digest) -> Branch:
        ids = self.episode.context.chat.render(messages, tools or None)
        branch = self._beginning_of(ids, tools)
        if branch is None:
            return self._open(messages, tools, ids, digest)
        known, recorded = len(branch.episode.transcript), len(branch.episode.messages)
        self._check_room(branch.episode, len(ids) - known)
        branch.episode.observe_ids(ids[known:], messages[recorded:] or messages[-1:])
        branch.episode.messages = list(messages)
        return self._ready(branch, digest)

    def _beginning_of(self, ids: list[int], tools: list[ToolSchema]) -> Branch | None:
        """Find the free branch with the longest transcript that `ids` begin with."""
        found = [
            branch
            for branch in self._branches
            if not branch.busy
            and branch.episode.tools == (tools or None)
            and len(branch.episode.transcript) < len(ids)
            and branch.episode.transcript.ids == ids[: len(branch.episode.transcript)]
        ]
        return max(found, key=lambda branch: len(branch.episode.transcript), default=None)

    def _open(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema] | None, ids: list[int], digest: Digest
    ) -> Branch:
        limit = self.episode.context.limits.max_model_len
        if len(ids) >= limit:
            raise self._refuse(Status.LENGTH, f"The prompt has {len(ids)} tokens, and the context length is {limit}.")
        branch = Branch(self.episode.branch(), digest)
        branch.episode.start(messages, tools, ids)
        self._branches.append(branch)
        return self._ready(branch, digest)

    def _bridge(self, checkpoint: Checkpoint[Branch], rest: list[Message]) -> list[int]:
        episode = checkpoint.owner.episode
        before = episode.transcript.ids
        if checkpoint.tokens < len(before):
            before = before[: checkpoint.tokens]
        return self.episode.context.chat.bridge(before, rest, episode.tools)

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
        self._count("openai_refused")
        return budget_used_up(message)

    # The answer

    async def _answer(self, branch: Branch, request: ChatRequest) -> Completion:
        episode = branch.episode
        prompt_tokens, cached = len(episode.transcript), episode.cached_tokens
        whole = episode.room()
        asked = request.token_limit
        self.episode.waiting_for = "the engine"
        try:
            reply = await episode.generate(stop=request.stops, max_tokens=asked)
        except Exception as error:
            self.fault = error
            self.over.set()
            raise ApiError(503, f"The engine failed: {error}") from error
        if reply.finish_reason.kind == "abort":
            self.ending = Status.ABORTED
            self.over.set()
            raise ApiError(503, "The engine was told to stop.")
        cut = reply.finish_reason.kind == "length" and (asked is None or asked >= whole)
        self.ending = Status.LENGTH if cut else Status.COMPLETED
        message = self._record_reply(branch, request, reply, prompt_tokens)
        transcript = episode.transcript
        ids = transcript.ids[prompt_tokens:]
        decode = self.episode.context.chat.decode
        return Completion(
            request=request,
            message=message,
            finish_reason="tool_calls" if reply.stopped and "tool_calls" in message else reply.finish_reason.kind,
            prompt_ids=transcript.ids[:prompt_tokens],
            ids=ids,
            logprobs=transcript.logprobs[prompt_tokens:],
            tokens=[decode([id]) for id in ids] if request.logprobs else [],
            cached_tokens=episode.cached_tokens - cached,
        )

    def _record_reply(self, branch: Branch, request: ChatRequest, reply: Reply, start: int) -> Message:
        """Set a checkpoint at the transcript's new end; return the message as it is sent."""
        message, chat, ids = reply.message, self.episode.context.chat, branch.episode.transcript.ids[start:]
        if not request.may_call and message.calls:
            text = chat.decode(ids[:-1] if ids[-1] in chat.stop_token_ids else ids)
            message = replace(message, text=text, reasoning=None, calls=())
            branch.episode.messages[-1] = message.to_message()
        if isinstance(matched := reply.finish_reason.matched, str):
            message = replace(message, text=message.text.partition(matched)[0])
        self._replies += 1
        sent = assistant_message(message, [f"c{self._replies:04d}{index:04d}" for index in range(len(message.calls))])
        branch.digest = digest_after(branch.digest, {**sent, "content": sent["content"] or ""})
        self._set_checkpoint(branch, replied=True)
        records = [
            ToolCallRecord(call.name, call.arguments, "", ErrorKind.PARSE if call.error else None)
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
                record.response, record.seconds = message["content"], seconds

    def _count(self, name: str) -> None:
        metrics = self.episode.trajectory.metrics
        metrics[name] = metrics.get(name, 0.0) + 1.0

    def _ended(self, branch: Branch, task: asyncio.Task[Completion]) -> None:
        """Clean up after a call.

        A callback, because a task that is cancelled before its first step runs none of its own code.
        """
        self._tasks.discard(task)
        branch.busy = False
        self.episode.waiting_for = "the engine" if self._tasks else "the agent"
        if task.cancelled() or task.exception() is not None:
            self.turns -= 1


def _with_names(messages: list[Message]) -> list[Message]:
    """Add to tool answers the name of the function they answer, which some templates write."""
    names: dict[str, str] = {}
    for message in messages:
        for call in message.get("tool_calls", ()):
            names[call["id"]] = call["function"]["name"]
        if message["role"] == "tool" and "name" not in message and message.get("tool_call_id") in names:
            message["name"] = names[message["tool_call_id"]]
    return messages


def _new_messages(checkpoint: Checkpoint[Branch], messages: list[Message]) -> list[Message]:
    """Return the messages after the checkpoint, with the policy's own call ids in place of those that the client was
    given."""
    end = len(checkpoint.messages)
    if end == len(messages):
        return []
    recorded, given = checkpoint.messages[-1], messages[end - 1]
    own = {
        theirs["id"]: ours["id"]
        for theirs, ours in zip(given.get("tool_calls", ()), recorded.get("tool_calls", ()), strict=True)
    }
    return [
        {**message, "tool_call_id": own[message["tool_call_id"]]} if message.get("tool_call_id") in own else message
        for message in messages[end:]
    ]
