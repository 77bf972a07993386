"""The transcript that a template's own renders give, and which of its characters an assistant wrote.

Nothing of `agentrl.chat` is used. Prompts are renders of the messages before an assistant turn; a turn is the text
that a render with it has after its prompt; the text between two turns is the end of the next prompt. Places in texts
are found by the words at the end of each message.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from agentrl.tool import ToolSchema
from agentrl.trajectory import Message
from benchmarks.templates.kinds import GO_ON

WORD = re.compile(r"W[a-z]+[0-9]?Q?")
FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Names that templates have for reasoning."""


class Unwritten(Exception):
    """The template itself refuses the conversation, or does not write a turn of it. The message says why."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One assistant turn: the text before it, and the text that is sampled."""

    before: str
    """The first prompt, or the text after the end of the turn before."""
    sampled: str
    ends: tuple[str, ...]
    """Tokens of which a policy may sample any to end this turn: a template may write another one in history."""
    opened: str
    """The end of the prompt that begins reasoning, or that the render of the turn has not."""
    rewritten: bool
    """The render of the next prompt has other text before this turn than the transcript."""


class Renders:
    """Renders of one template by transformers."""

    def __init__(self, tokenizer: Any, tools: Sequence[ToolSchema] | None, tokens: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._tools = tools
        self._token = re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))))

    def text(self, messages: Sequence[Message], generation: bool) -> str:
        source = str(self._tokenizer.chat_template)
        renamed = [
            {
                **dict.fromkeys(FIELDS if "reasoning_content" not in source else (), message["reasoning_content"]),
                **message,
            }
            if "reasoning_content" in message
            else message
            for message in messages
        ]
        fault: Exception | None = None
        choices: list[Sequence[ToolSchema] | None] = [self._tools] if self._tools else [None, []]
        # Some templates join arguments to text, and so take them as JSON text alone.
        for given, tools in itertools.product((renamed, list(map(with_texts, renamed))), choices):
            try:
                return str(
                    self._tokenizer.apply_chat_template(
                        given, tools=tools, tokenize=False, add_generation_prompt=generation
                    )
                )
            except Exception as caught:  # A template may raise anything.
                fault = fault or caught
        raise Unwritten(f"{type(fault).__name__}: {fault}")

    def transcript(self, messages: Sequence[Message]) -> list[Turn]:
        """Cut the conversation into turns. Raises Unwritten."""
        asked = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
        turns: list[Turn] = []
        before = self.text(messages[: asked[0]], True)
        so_far = ""
        for at, following in zip(asked, [*asked[1:], None], strict=True):
            prompt, whole = self.text(messages[:at], True), self.text(messages[: at + 1], False)
            further = [*messages[: at + 1], GO_ON] if following is None else messages[:following]
            try:
                after = self.text(further, True)
            except Unwritten:
                if following is not None:
                    raise
                after = whole
            begin, opened = self._beginning(prompt, whole)
            opened = opened.strip() or self._unclosed(prompt)
            word = self._last_word(whole, begin, messages[at])
            if word not in after:
                raise Unwritten("the template writes a turn otherwise before another turn")
            told = WORD.findall(str(messages[at + 1 : following])) if following is not None else []
            if told and after.rindex(word) > max(map(after.rfind, told)):
                raise Unwritten("the template writes text of a turn after the answers to its calls")
            said = whole[begin : whole.rindex(word) + len(word)]
            last, next_ = whole[whole.rindex(word) + len(word) :], after[after.rindex(word) + len(word) :]
            end, ends, gap = self._end(said, last, next_)
            sampled = said + end
            if all(end in sampled for end in ends):
                raise Unwritten("the template writes a turn as two")
            so_far += before + sampled
            rewritten = after[: len(after) - len(gap)] != so_far + ends[0] and bool(gap)
            turns.append(Turn(before, sampled, ends, opened, rewritten))
            so_far += ends[0]
            before = gap
        return turns

    def _beginning(self, prompt: str, whole: str) -> tuple[int, str]:
        """Find the place in `whole` that the end of `prompt` stands before, and text of the prompt that it has not.

        Both are compared from the last word that they share, for a template may write the text before it otherwise.
        """
        word = WORD.findall(prompt)[-1]
        asked, start = prompt[prompt.rindex(word) + len(word) :], whole.rindex(word) + len(word)
        told = whole[start:]
        if told.startswith(asked):
            start += len(asked)
            # A header that only the render of the turn has is written by the template.
            return start + (len(self._header) if whole.startswith(self._header, start) else 0), ""
        places = [match.start() for match in self._token.finditer(asked)]
        spoken = WORD.search(told)
        head = told[: spoken.start()] if spoken else told
        for end in (len(asked), len(asked.rstrip()), *reversed(places)):
            for begin in (0, *places):
                if begin < end and (at := head.find(asked[begin:end])) >= 0:
                    at += end - begin
                    further = self._shared(asked[end:], head[at:])
                    return start + at + further, asked[end + further :]
        size = self._shared(asked, told)
        return start + size, asked[size:]

    def _unclosed(self, prompt: str) -> str:
        """Return the token by which a prompt begins reasoning, if that is its last one."""
        token = self._token.findall(prompt)[-1:]
        is_open = token and re.search("think|channel", token[0], re.IGNORECASE) and not _partners(token[0])
        return str(token[0]) if is_open else ""

    @cached_property
    def _openers(self) -> set[str]:
        """Tokens of the header that the template writes at the end of every conversation, if it does."""
        user: Message = {"role": "user", "content": "Wuser"}
        without, with_prompt = (self.text([user], generation).rpartition("Wuser")[2] for generation in (False, True))
        tokens = self._token.findall(without[: _common(without, with_prompt)])
        return {token for token in tokens[1:] if not re.search("end|eo[tm]|close", token, re.IGNORECASE)}

    @cached_property
    def _header(self) -> str:
        """Text that a generation prompt adds after a user's message."""
        user: Message = {"role": "user", "content": "Wuser"}
        without, with_prompt = (self.text([user], generation) for generation in (False, True))
        return with_prompt.removeprefix(without) if with_prompt.startswith(without) else ""

    def _last_word(self, whole: str, begin: int, message: Message) -> str:
        """Find the assistant's word that stands last in its turn. Raises Unwritten where none is written."""
        written = str(message.get("content") or "") + str(message.get("tool_calls") or "")
        found = [(whole.rindex(word), word) for word in WORD.findall(written) if word in whole[begin:]]
        if not found:
            raise Unwritten("the template writes nothing of an assistant turn")
        return max(found)[1]

    def _end(self, said: str, last: str, after: str) -> tuple[str, tuple[str, ...], str]:
        """Split the text after a turn's last word.

        Returns what the turn has before its stop token, the possible stop tokens, and the text after the stop token
        where another turn follows.
        """
        pieces = self._pieces(last)
        shared = "".join(pieces[: _common(pieces, self._pieces(after))])
        tokens = [match for match in self._token.finditer(shared) if not _closes(match[0], said)]
        # A render that always ends with a header has the beginning of it in common with the next header.
        while len(tokens) > 1 and tokens[-1][0] in self._openers:
            tokens.pop()
        if tokens:
            stop = next(token for token in tokens if token[0] == tokens[-1][0])
            return shared[: stop.start()], (stop[0],), after[stop.end() :]
        shared = shared.rstrip()
        stops = [self._token.match(text[len(shared) :].lstrip()) for text in (after, last)]
        if stops[0] is not None:
            other = () if stops[1] is None else (stops[1][0],)
            return shared, (stops[0][0], *other), after[len(shared) :].lstrip()[stops[0].end() :]
        eos = str(self._tokenizer.eos_token)
        return shared, (eos,), after[len(shared) :]

    def _shared(self, one: str, other: str) -> int:
        """Length of the beginning that both have, in whole tokens."""
        pieces = self._pieces(one)
        return len("".join(pieces[: _common(pieces, self._pieces(other))]))

    def _pieces(self, text: str) -> list[str]:
        """Split a text into tokens and single characters."""
        return re.findall(f"{self._token.pattern}|.", text, re.DOTALL)


CALLS_IN_TEXT = {
    "hermes": lambda calls: "\n".join(
        f"<tool_call>\n{json.dumps(one, ensure_ascii=False)}\n</tool_call>" for one in calls
    ),
    "granite": lambda calls: f"<|tool_call|>{json.dumps(calls, ensure_ascii=False)}",
    "lfm2": lambda calls: f"<|tool_call_start|>[{', '.join(map(_as_python, calls))}]<|tool_call_end|>",
    "pythonic": lambda calls: f"[{', '.join(map(_as_python, calls))}]",
}
"""By format: calls as the models write them, for templates that cannot write calls."""


def with_calls_in_text(messages: Sequence[Message], format: str) -> list[Message]:
    """Copy messages with the calls in the text of their turns, for a template that cannot write calls."""
    written: list[Message] = []
    for message in messages:
        calls = [one["function"] for one in message.get("tool_calls") or ()]
        text = str(message["content"] or "")
        if calls:
            text += "\n" * bool(text) + CALLS_IN_TEXT[format](
                [{"name": one["name"], "arguments": one["arguments"]} for one in calls]
            )
        written.append({**{key: value for key, value in message.items() if key != "tool_calls"}, "content": text})  # type: ignore[typeddict-item]
    return written


def _as_python(call: Mapping[str, Any]) -> str:
    return f"{call['name']}({', '.join(f'{key}={value!r}' for key, value in call['arguments'].items())})"


def with_texts(message: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a message with the arguments of its calls as JSON text."""
    calls = [
        {
            **call,
            "function": {
                **call["function"],
                "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
            },
        }
        for call in message.get("tool_calls") or ()
    ]
    return {**message, "tool_calls": calls} if calls else dict(message)


def _common(one: Sequence[str], other: Sequence[str]) -> int:
    """Length of the beginning that both have."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def _closes(token: str, said: str) -> bool:
    """Say whether a token closes what one before it has opened, and so ends no turn."""
    return any(open in said for open in _partners(token))


def _partners(token: str) -> set[str]:
    """Tokens that `token` may close."""
    forms = (("/", ""), ("end", "begin"), ("end", "start"), ("suffix", "prefix"), ("END", "START"))
    opens = {token.replace(close, open, 1) for close, open in forms if close in token}
    if token.endswith("|>") and not token.startswith("<|"):  # <tool_call|>
        opens.add(f"<|{token[1:-2]}>")
    return opens


def closing(opened: str, tokens: Sequence[str]) -> str | None:
    """Find the token that closes reasoning begun in `opened`; empty where it is closed, None where none does."""
    found = [token for token in tokens if token in opened]
    if not opened.strip() or any(_partners(token) & set(found) for token in found):
        return ""
    return next((token for token in tokens if found and _partners(token) & set(found)), None)
