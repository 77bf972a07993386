"""Drives a template as a rollout and supervised training do, and compares with transformers' own renders."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, tzinfo
from typing import Any, cast
from unittest.mock import patch

from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from agentrl.chat import Chat
from agentrl.chat.check import start_up_check
from agentrl.chat.codec import Codec
from agentrl.chat.coverage import MOVED
from agentrl.chat.formats.template import TemplateFormat
from agentrl.chat.load import make_format
from agentrl.chat.message import normalise, with_named_ids
from agentrl.chat.read_back import check_read_back, turns_of
from agentrl.errors import DataError, UserError
from agentrl.tool import ToolSchema
from agentrl.trajectory import Message
from benchmarks.templates.kinds import ASKED, KINDS, SYSTEM, TOOLS
from benchmarks.templates.reference import Renders, Turn, Unwritten, closing, with_calls_in_text
from tests.chat.vocabularies import trained_model

EXACT, LEFT_OUT, UNWRITTEN, REFUSED, WRONG = "exact", "left out", "unwritten", "refused", "wrong"
TOOLLESS = "without tools"
"""Outcomes of a kind: driven exactly; exactly, but the template leaves out an assistant's text or reasoning; the
template itself refuses it; agentrl refuses it; other ids, another mask or another reading without an error."""
TOKEN = re.compile(
    r"<\|[^<>|\s{}'\"]{1,40}\|>|<｜[^<>\s{}]{1,40}｜>|<\|[a-z_\"]{1,24}>|<[a-z_]{1,24}\|>|<\|\"\|>|｜DSML｜"
    r"|\[/?[A-Z][A-Z_]{2,24}\]|\]~!?b\[|\]~b\]|\[e~\[|\[gMASK\]|<sop>"
    r"|</?(?:s|bos|eos|pad|unk|start_of_turn|end_of_turn|think|tool_call|tool_response|arg_key|arg_value|image|seed:[a-z_]+)>"
    r"|</?[a-z_]+:opensource>|〈\|[A-Z]+\|〉|</?assistant>|<SPECIAL_[0-9]+>|<[a-z]+_of_[a-z]+>|<sep>|\[\|[a-z]+\|\]"
)
"""Spellings that are single tokens in the vocabularies of the models."""
ENDS = (
    *("<|im_end|>", "<|eot_id|>", "<|eot|>", "<end_of_turn>", "<turn|>", "<|END_OF_TURN_TOKEN|>", "<|return|>", "[e~["),
    *("<｜end▁of▁sentence｜>", "<|end_of_text|>", "<|endoftext|>", "<|end|>", "[|endofturn|]", "</s>"),
)
"""Tokens that models have as the end of a sequence, the first one that a template writes; without any, `</s>`."""


@dataclass(frozen=True, slots=True)
class Driven:
    """Result of one template."""

    format: str = ""
    """The format that `auto` chose; empty where it refuses the template as a whole."""
    refused: str = ""
    """Why conversations with tools are refused."""
    kinds: dict[str, tuple[str, str]] = field(default_factory=dict)
    """By kind of conversation: the outcome, and the reason."""
    remarks: list[str] = field(default_factory=list)
    names_tools: bool = True
    """The template's source has the word `tools`, without which no tool gets into a prompt."""

    @property
    def result(self) -> str:
        """`wrong`, `refused`, `without tools`, `exact` or `exact, but` (some kinds are named)."""
        outcomes = {outcome for outcome, _ in self.kinds.values()}
        if WRONG in outcomes:
            return WRONG
        if self.refused or not {EXACT, LEFT_OUT} & {self.kinds["calls"][0], self.kinds["no system"][0]}:
            return REFUSED if self.names_tools else TOOLLESS
        untrained = any(remark.startswith("supervised training") for remark in self.remarks)
        return EXACT if outcomes == {EXACT} and not untrained else "exact, but"


class _Partly(Exception):
    """The template leaves out a call, or writes it in a form that a rollout does not read as one."""


class Differs(Exception):
    """Something differs from the reference without an error."""


def tokens_of(template: str) -> tuple[str, ...]:
    """Find the tokens that a template writes, and the end of a sequence as the last one."""
    found = dict.fromkeys(TOKEN.findall(template))
    eos = next((end for end in ENDS if end in found), "</s>")
    return (*(token for token in ("<s>", *found) if token != eos), eos)


def make_tokenizer(template: str) -> Any:
    """Make a small vocabulary that has the tokens of a template and of what it writes."""
    written = ""
    with suppress(Unwritten):
        first = _tokenizer(template, tokens_of(template))
        written = Renders(first, TOOLS, [first.eos_token]).text(KINDS["calls"][0], True)
    return _tokenizer(template, tokens_of(template + written))


def _tokenizer(template: str, tokens: Sequence[str]) -> Any:
    tokenizer = Tokenizer.from_str(trained_model())
    tokenizer.add_tokens([AddedToken(token, normalized=False, special="tool" not in token) for token in tokens])
    bos = "<bos>" if "<bos>" in tokens else "<s>"
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=bos, eos_token=tokens[-1], chat_template=template
    )


class _StandingClock(datetime):
    """A clock that stands still: some templates write the time, and two renders may see another second."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> _StandingClock:
        return cls(2026, 1, 2, 3, 4, 5, tzinfo=tz)


def _refusal(chat: Chat, messages: list[Message]) -> str:
    """Say why a run with tools and such a prompt would not start; empty where it would."""
    try:
        start_up_check(chat, messages, TOOLS)
    except UserError as fault:
        return str(fault)
    return ""


@patch.object(chat_template_utils, "datetime", _StandingClock)
def drive(template: str) -> Driven:
    """Drive all kinds of conversation.

    Where a template writes tools into a system message alone, kinds with tools begin with one; `no system` is refused.
    """
    try:
        codec = Codec(make_tokenizer(template))
        chat = Chat(codec, make_format(codec, "auto", {}, own_template=True))
    except UserError as fault:
        return Driven(refused=str(fault), names_tools="tools" in template)
    refused, first = _refusal(chat, [ASKED]), list[Message]()
    without_system = ""
    if refused and not _refusal(chat, [SYSTEM, ASKED]):
        refused, without_system, first = "", refused, [SYSTEM]
    kinds: dict[str, tuple[str, str]] = {}
    remarks: list[str] = []
    for name, (messages, with_tools) in KINDS.items():
        if with_tools and (refused or (without_system and name == "no system")):
            kinds[name] = REFUSED, "tools" if refused else without_system
            continue
        if with_tools and messages[0]["role"] != "system":
            messages = [*first, *messages]
        try:
            kinds[name] = _drive_kind(chat, codec, messages, TOOLS if with_tools else None, remarks)
        except _Partly as fault:
            kinds[name] = _left_out_calls(chat, messages, TOOLS, str(fault))
        except Unwritten as fault:
            kinds[name] = UNWRITTEN, str(fault)
        except UserError as fault:
            kinds[name] = REFUSED, str(fault)
        except Differs as fault:
            kinds[name] = WRONG, str(fault)
    return Driven(chat.format.name, refused, kinds, list(dict.fromkeys(remarks)), "tools" in template)


def _drive_kind(
    chat: Chat, codec: Codec, messages: list[Message], tools: list[ToolSchema] | None, remarks: list[str]
) -> tuple[str, str]:
    """Drive one conversation: prompt, turns, text between turns, and training. Raises Differs, Unwritten, UserError."""
    given = normalise(messages)
    if chat.format.names_in_call_ids:
        given = with_named_ids(given, by_turn=chat.format.ids_by_turn)
    if isinstance(chat.format, TemplateFormat) and chat.format.calls_in_text:
        given = with_calls_in_text(given, chat.format.name.removeprefix("template:"))
    turns = Renders(chat.tokenizer, tools, list(codec.added)).transcript(given)
    asked = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    left_out: list[str] = []
    ids: list[int] = []
    mask: list[int] = []
    ids_of: dict[str, str] = {}
    unlearnt = False
    begin = 0
    for turn, at in zip(turns, asked, strict=True):
        between = [_answering(message, ids_of) for message in messages[begin:at]]
        context = chat.bridge(ids, between, tools) if ids else chat.render(between, tools)
        if ids and chat.remarks[MOVED]:
            left_out.append(MOVED)
            turn = replace(turn, before=codec.decode(context))
        _same("prompt" if not ids else f"text before message {at}", codec, context, codec.encode(turn.before))
        close = closing(turn.opened, [token for token, id in codec.added.items() if id not in chat.stop_token_ids])
        thinks = close is not None and close not in turn.sampled
        said = f"I think.\n{close}\n\n{turn.sampled.lstrip()}" if thinks else turn.sampled
        unlearnt |= thinks or bool(turn.opened and not close)
        sampled = [*codec.encode(said), codec.added[_stop(chat, codec, turn, at)]]
        if close is None:
            left_out.append(f"the prompt begins reasoning by {turn.opened!r}")
        else:
            left_out += _reading(chat, sampled, messages[at], turn, tools, at, thinks=thinks)
        parsed = chat.parse(sampled, tools).calls
        for one, read in zip(messages[at].get("tool_calls") or (), parsed, strict=False):
            ids_of[one["id"]] = read.id
        ids += [*context, *sampled]
        mask += [0] * len(context) + [1] * len(sampled)
        if turn.rewritten:
            remarks.append("the template writes history in another way")
        begin = at + 1
    if unlearnt:
        remarks.append("supervised training needs reasoning")
    else:
        _training(chat, codec, messages, tools, ids, mask, remarks)
    for message in messages:
        word = str(message["content"]).split()[-1:] if message["role"] != "assistant" else []
        if word and word[0] not in chat.decode(ids):
            raise Differs(f"{word[0]} is not in the transcript")
    return (LEFT_OUT, "; ".join(dict.fromkeys(left_out))) if left_out else (EXACT, "")


def _answering(message: Message, ids: dict[str, str]) -> Message:
    """Return a tool's answer with the id of the call as the policy wrote it."""
    if message["role"] != "tool":
        return message
    return {**message, "tool_call_id": ids.get(message["tool_call_id"], message["tool_call_id"])}


def _stop(chat: Chat, codec: Codec, turn: Turn, at: int) -> str:
    for end in turn.ends:
        if codec.added.get(end) in chat.stop_token_ids:
            return end
    stops = [codec.decode([id]) for id in chat.stop_token_ids]
    raise Differs(f"message {at} ends with {turn.ends}, and the stop tokens are {stops}")


def _same(what: str, codec: Codec, found: Sequence[int], expected: Sequence[int]) -> None:
    if list(found) != list(expected):
        raise Differs(f"{what}: expected {codec.decode(expected)[-300:]!r}, found {codec.decode(found)[-300:]!r}")


def _reading(
    chat: Chat,
    sampled: list[int],
    message: Message,
    turn: Turn,
    tools: list[ToolSchema] | None,
    at: int,
    *,
    thinks: bool,
) -> list[str]:
    """Read a turn, and compare with what was written. Returns the kinds of text that the template left out."""
    parsed = chat.parse(sampled, tools)
    asked = [one["function"] for one in message.get("tool_calls") or ()]
    queries = [cast(dict[str, str], one["arguments"])["query"] for one in asked]
    written = [one for one, query in zip(asked, queries, strict=True) if query.split()[-1] in turn.sampled]
    if len(written) < len(asked):
        raise _Partly(f"the template writes {len(written)} of {len(asked)} calls")
    calls = [(one["name"], one["arguments"]) for one in written]
    read = [(call.name, call.arguments) for call in parsed.calls]
    if wrong := next((call.error for call in parsed.calls if call.error is not None), None):
        raise DataError(f"what the template writes is read as an error: {wrong}")
    if len(read) < len(calls):
        raise _Partly(f"{turn.sampled!r} is not read as {len(calls)} calls")
    if read != calls:
        raise Differs(f"message {at}: {turn.sampled!r} is read as the calls {json.dumps(read)}")
    left_out: list[str] = []
    for name, said, found in (
        ("text beside calls", str(message.get("content") or ""), parsed.text),
        ("reasoning", str(message.get("reasoning_content") or ""), parsed.reasoning or ""),
    ):
        as_reasoning = left_out[-1:] == ["text beside calls is written as reasoning"]
        if name == "reasoning" and (thinks or as_reasoning):
            continue
        if said and said.split()[-1] not in turn.sampled:
            left_out.append(f"{name} is left out")
            said = ""
        if calls and said and not found and (parsed.reasoning or "").strip() == said.strip():
            left_out.append(f"{name} is written as reasoning")
            continue
        if found.strip() != said.strip():
            raise Differs(f"message {at}: expected the {name} {said!r}, read {found!r} from {turn.sampled!r}")
    return left_out


def _training(
    chat: Chat,
    codec: Codec,
    messages: list[Message],
    tools: list[ToolSchema] | None,
    ids: list[int],
    mask: list[int],
    remarks: list[str],
) -> None:
    """Compare supervised training's ids and mask with those of the rollout."""
    try:
        learnt, learnt_mask = chat.render_training(messages, tools)
        check_read_back(chat, messages, turns_of(learnt, learnt_mask), tools)
    except UserError as fault:
        remarks.append(f"supervised training is refused: {fault}")
        return
    texts = [codec.decode(one) for one in (learnt, ids)]
    if texts[0] != texts[1] and "".join(texts[0].split()) == "".join(texts[1].split()):
        remarks.append("supervised training leaves out blanks before a turn that follows a tool's answer")
        return
    _same("training", codec, learnt, ids)
    if learnt_mask != mask:
        raise Differs("training: another mask")


def _left_out_calls(chat: Chat, messages: list[Message], tools: list[ToolSchema], why: str) -> tuple[str, str]:
    """Check that supervised training refuses calls that the template leaves out."""
    try:
        check_read_back(chat, messages, turns_of(*chat.render_training(messages, tools)), tools)
    except UserError:
        return UNWRITTEN, why
    return WRONG, f"{why}, and supervised training takes the conversation"
