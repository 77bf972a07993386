"""Checks of trajectories against their origin: the row, the engine's answers, the tools' and the scorer's.

Tools and scorers say what they answered at the place where they answer. The record is compared when the trajectories of
a prompt have ended.
"""

from __future__ import annotations

import itertools
import json
import re
import time
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from agentrl.agent_loop import AgentLoop, Request, Scheduler
from agentrl.agent_loop.limits import seed_of
from agentrl.chat.chat import write_again
from agentrl.data.messages import digest_of
from agentrl.observe.report import Finding, Report
from agentrl.reward.manager import response_text, turns_text
from agentrl.system.user_code import is_agentrl_code
from agentrl.tool import ToolSchema
from agentrl.trajectory import Message, Status, Trajectory, Transcript, Turn
from agentrl.trajectory.picture import pictures_in, text_of
from agentrl.trajectory.sample import Sample

ENDED = (Status.COMPLETED, Status.LENGTH, Status.TURN_LIMIT, Status.MALFORMED)
"""Trajectories whose calls and scores are whole."""
UNCERTAIN = -0.01
"""Log-prob below which the bits of a float32 differ from context to context."""
LEAST_UNCERTAIN = 4
"""Different log-probs below UNCERTAIN that no two contexts have in common."""
COMPARED = 64
"""First log-probs of a turn that are compared with other turns."""
WORD = re.compile(r"[A-Za-z0-9]+")
Sampled = tuple[str, Transcript, Turn]
"""A sampled turn, with its trajectory's name."""


class Origins:
    """Answers of the tools and scorers of this process, and the comparison of records with them."""

    def __init__(self, scheduler: Scheduler, every: int = 1) -> None:
        """Have the scheduler's tools and scorers report their answers. Renders about one of `every` prompts again."""
        context = scheduler.context
        self._chat, self._tools, self._limits = context.chat, context.tools, context.limits
        self._ours = {
            name: type(loop).__module__.startswith("agentrl.agent_loop.") and is_agentrl_code(loop.code)
            for name, loop in scheduler.loops.items()
        }
        """True for the names of agentrl's loops: a loop of a user's may show and record anything."""
        self._loops, self._every = scheduler.loops, every
        context.tools.on_answer = self.answered
        self._whole = False
        """Scorers are given all text after the prompt."""
        # A manager of a user's may give scorers another text, and pay something else than they return.
        if scheduler.reward is not None and type(scheduler.reward).__module__.startswith("agentrl.reward."):
            scheduler.reward.on_verdict = self.scored
            self._whole = scheduler.reward.config.solution_str == "response"
        self._answers: defaultdict[str, list[tuple[str, str, str | None]]] = defaultdict(list)
        """By the session of a try: tool, arguments, and the text that it answered; None: it answered images, too."""
        self._verdicts: defaultdict[str, list[tuple[object, object, float]]] = defaultdict(list)
        """By trajectory: the text that was scored, the ground truth that it was compared with, and the score."""
        self.sampled: dict[bytes, Sampled] = {}
        """By its first log-probs, each turn of the step: to be cleared at its end."""

    def answered(self, session: str, tool: str, arguments: Mapping[str, object], text: str | None) -> None:
        """Note the answer of a tool, as the tool gave it."""
        self._answers[session].append((tool, json.dumps(arguments, sort_keys=True, default=str), text))

    def scored(self, arguments: Mapping[str, object], score: float) -> None:
        """Note the score of a scorer, and what it was given."""
        if isinstance(one := arguments.get("trajectory"), Trajectory):
            self._verdicts[one.uid].append((arguments["solution_str"], arguments["ground_truth"], score))

    def forget(self) -> None:
        """Drop the answers to trajectories that are cancelled, and may run again."""
        self._answers.clear()
        self._verdicts.clear()

    def check(
        self, asked: Sequence[tuple[Request, Sample]], trajectories: Sequence[Trajectory], *, trained: bool = True
    ) -> Report:
        """Compare trajectories with the requests, and each with the row that was drawn for it.

        trained: they are not run for a validation.
        """
        begun, report = time.thread_time(), Report()
        sampled = self.sampled if trained else {}  # nobody clears it for validations
        if trained:
            samples = {one.uid.rpartition("/")[0]: sample for one, sample in asked}
            report.rows = {name: digest_of(sample.prompt) for name, sample in samples.items()}
        for (request, sample), one in zip(asked, trajectories, strict=False):  # `fates` counts them
            loop, is_ours = self._loops[sample.agent_name], self._ours[sample.agent_name]
            report.add_check("requests", self._requests(request, one, sampled, is_ours=is_ours))
            verdicts = self._verdicts.pop(one.uid, [])
            calls = [self._answers.pop(f"{one.uid}.{attempt}", []) for attempt in range(one.attempt + 1)][-1]
            if one.status not in ENDED or (request.journal is not None and request.journal.resumes):
                continue  # answers that are given again come from no tool and no scorer of this process
            if verdicts:
                text = response_text(one, self._chat.tokenizer) if self._whole else turns_text(one)
                wrong = _wrong_score(one, sample, verdicts, text)
                report.add_check("scores", [Finding("scores", what, one.uid) for what in wrong])
            if one.tool_calls and self._tools.cassette is None:
                report.add_check("answers", self._called(one, calls, is_ours=is_ours, by_template=loop.calls is None))
            # Renders cost most, so some prompts are chosen: by a seed, which is as good as drawn.
            if is_ours and request.count_drift and request.seed % self._every == 0 and len(one.transcripts) == 1:
                report.add_check("prompt", self._rendered(one, sample, loop))
        report.seconds = time.thread_time() - begun
        return report

    def _requests(
        self, request: Request, one: Trajectory, sampled: dict[bytes, Sampled], *, is_ours: bool
    ) -> Iterator[Finding]:
        """Compare the seeds of sampled turns with the trajectory's own, and their log-probs with other turns."""
        if (one.uid, one.group) != (request.uid, request.group):
            yield Finding("requests", f"it was returned in the place of {request.uid}", one.uid)
        own = seed_of(request.seed, one.attempt) if is_ours and len(one.transcripts) == 1 else None
        for turn in (turn for turn in one.turns if turn.role == "assistant"):
            if own is not None and turn.seed is not None and turn.seed != seed_of(own, turn.start):
                what = f"the engine's answer at token {turn.start} is the answer to another request"
                yield Finding("requests", what, one.uid)
            transcript = one.transcripts[turn.transcript]
            bits = transcript.logprobs[turn.start : min(turn.end, turn.start + COMPARED)]
            if len({value for value in bits if value < UNCERTAIN}) < LEAST_UNCERTAIN:
                continue
            key = array("d", bits).tobytes()
            uid, other, before = sampled.setdefault(key, (one.uid, transcript, turn))
            if before is not turn and other.ids[: before.start] != transcript.ids[: turn.start]:
                what = (
                    f"the log-probs of its turn at token {turn.start} are those of another text, in {uid}, bit for bit"
                )
                yield Finding("requests", what, one.uid)

    def _called(
        self, one: Trajectory, calls: Sequence[tuple[str, str, str | None]], *, is_ours: bool, by_template: bool
    ) -> Iterator[Finding]:
        """Compare recorded calls and answers with the notes of the tools, and the turns after calls with the record."""
        shown = Counter(
            (name, arguments, self._tools.truncation.text(text, slots[name].limits.max_response_tokens)[0])
            for slots in [self._tools.slots]
            for name, arguments, text in calls
            if text is not None
        )
        recorded = Counter(
            (call.name, json.dumps(call.arguments, sort_keys=True, default=str), call.response)
            for call in one.tool_calls
            if call.error is None and (is_ours or call.name in self._tools.slots)  # an agent may have tools of its own
        )
        if all(text is not None for _, _, text in calls):
            for name, arguments, text in recorded - shown:
                what = f"the tool {name} did not answer {text!r:.60} to a call with {arguments:.60}, as is recorded"
                yield Finding("answers", what, one.uid)
            for name, arguments, text in shown - recorded if is_ours else ():
                what = f"the tool {name} answered {text!r:.60} to a call with {arguments:.60}, which is not recorded"
                yield Finding("answers", what, one.uid)
        if is_ours and by_template:
            yield from (Finding("answers", what, one.uid) for what in _displaced_answers(one.turns))

    def _rendered(self, one: Trajectory, sample: Sample, loop: AgentLoop) -> Iterator[Finding]:
        """Render the prompt and the observed turns again, read the sampled ones again, and compare."""
        prompt, tools = loop.first_prompt(sample, self._tools.schemas)
        opens = sample.interaction_kwargs or "environment" in sample.extra_info
        known = len(prompt) - bool(opens)  # which may add its first message to the last one
        if one.messages[:known] != prompt[:known]:
            yield Finding("prompt", "its first messages are not those of its row", one.uid)
            return
        roles = [message["role"] for message in one.messages]
        prompt = one.messages[: [*roles, "assistant"].index("assistant", len(prompt))]
        if any(pictures_in(one.messages)):
            return
        yield from (Finding("prompt", what, one.uid) for what in self._other_prompt(one, prompt, tools, loop))
        begins = [at for at, role in enumerate(roles) if role == "assistant" and at >= len(prompt)]
        if begins and loop.calls is None and len(begins) == sum(turn.role == "assistant" for turn in one.turns):
            yield from (Finding("prompt", what, one.uid) for what in self._other_turns(one, begins, tools))

    def _other_prompt(
        self, one: Trajectory, prompt: Sequence[Message], tools: Sequence[ToolSchema], loop: AgentLoop
    ) -> Iterator[str]:
        """Say where the first tokens differ from the prompt's."""
        chat, ids, length = self._chat, one.transcripts[0].ids, one.transcripts[0].prompt_length
        whole = write_again(chat, prompt, tools)
        if (again := self._limits.cut_prompt(whole)) != ids[:length]:
            place = next((at for at, pair in enumerate(zip(again, ids, strict=False)) if pair[0] != pair[1]), length)
            yield f"token {place} of the prompt is not what the template writes for its row"
        if len(again) < len(whole):
            return
        text = chat.decode(ids[:length])
        own = type(loop).first_prompt is not AgentLoop.first_prompt
        offered = {one["function"]["name"] for one in tools} if own else self._tools.slots
        for name in (name for name in offered if name not in text):
            yield f"the tool {name} is offered, and is not in the prompt's text"
        for message in (message for message in prompt if message["role"] == "user"):
            written = iter(WORD.findall(text))  # which `in` reads up to the word; templates may join the outer ones
            missing = [word for word in WORD.findall(text_of(message["content"]))[1:-1] if word not in written]
            if missing:
                yield f"{missing[0]!r} of its row is not in its place in the prompt's text"

    def _other_turns(self, one: Trajectory, begins: Sequence[int], tools: Sequence[ToolSchema]) -> Iterator[str]:
        """Say where the tokens of turns differ from the messages'. `begins`: of the assistant's messages."""
        chat, ids = self._chat, one.transcripts[0].ids
        ends = [*begins[1:], len(one.messages)]
        messages: list[Message] = []
        after = iter([one.messages[begin + 1 : end] for begin, end in zip(begins, ends, strict=True)])
        for turn in one.turns:
            if turn.role == "assistant":
                messages = next(after)
                if chat.parse(ids[turn.start : turn.end], tools or None).text != turn.text:
                    yield f"the tokens of the turn at {turn.start} have another text"
            elif (messages and turn.end < len(ids)) and (
                write_again(chat, messages, tools, ids[: turn.start]) != ids[turn.start : turn.end]
            ):
                yield f"tokens {turn.start} to {turn.end} are not what the template writes of the {turn.role} turn"


def _wrong_score(
    one: Trajectory, sample: Sample, verdicts: Sequence[tuple[object, object, float]], said: str
) -> Iterator[str]:
    """Say how the score is not the scorer's last verdict on the text that was said and the row's ground truth."""
    text, truth, score = verdicts[-1]
    if len(verdicts) > 1:
        yield f"its answer was scored {len(verdicts)} times"
    if one.turns and text != said:
        yield f"the scored text, {text!r:.60}, is not the policy's"
    if truth is not sample.ground_truth and repr(truth) != repr(sample.ground_truth):
        yield f"the ground truth was {truth!r:.60}, and its row has {sample.ground_truth!r:.60}"
    if score != one.score:
        yield f"its score is {one.score}, and its scorer returned {score:.6g}"


def _displaced_answers(turns: Sequence[Turn]) -> Iterator[str]:
    """Say which turn after calls does not hold their answers in their order."""
    for turn, after in itertools.pairwise(turns):
        place = 0
        for call in turn.calls if after.role != "assistant" and after.transcript == turn.transcript else ():
            place = after.text.find(call.response, place)
            if place < 0:
                yield f"the answer of {call.name}, {call.response!r:.60}, is not in its place in the turn after it"
                break
            place += len(call.response)
