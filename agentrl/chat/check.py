"""The start-up check that tools, parser and template fit together, made before the first step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from agentrl.chat.chat import Chat
from agentrl.chat.codec import Codec
from agentrl.chat.formats.arguments import NO_VALUE, NoValue
from agentrl.chat.formats.frame import SAID, unread
from agentrl.chat.formats.parsers import THINK, THINK_END
from agentrl.chat.formats.template import TemplateFormat
from agentrl.chat.formats.turn_end import common_length
from agentrl.chat.load import choose_calls
from agentrl.chat.message import content_text
from agentrl.errors import ConfigError, DataError
from agentrl.system.json_value import JSON, as_list, as_object
from agentrl.tool import Schema, ToolSchema
from agentrl.tool.schema import resolved
from agentrl.trajectory import Message, ToolCall

QUESTION: Message = {"role": "user", "content": "AgentrlQuestion"}
GO_ON: Message = {"role": "user", "content": "AgentrlNextQuestion"}
LAST_QUESTION: Message = {"role": "user", "content": "AgentrlLastQuestion"}
REPLY: Message = {"role": "assistant", "content": "AgentrlReply"}
LAST_REPLY: Message = {"role": "assistant", "content": "AgentrlLastReply"}
TOOL_ANSWER: Message = {"role": "tool", "content": "AgentrlToolAnswer"}
ANY_TOOL: ToolSchema = {"type": "function", "function": {"name": "search"}}
OWN_FORMAT = "docs/models.md, Tool calls in a format of your own"
UNREAD = f"No format of agentrl is known to read such calls. Give multi_turn.format one of your own ({OWN_FORMAT})"
NO_CALLS_WRITTEN = "Use a model.chat_template that writes tools and calls, or agent_name react, which needs neither"
SAMPLES: dict[str, tuple[JSON, JSON]] = {
    "string": ("text", "text"),
    "integer": (3, -2),
    "number": (1.5, 2),
    "boolean": (True, False),
    "array": ([1, 2], [True, None, "text"]),
    "object": ({"key": "value"}, {"key": [False, None, {"it's": 1.5}]}),
    "null": (None, None),
}
"""By JSON type, two values that templates write in different ways."""
MAX_DEPTH = 4
ADVICE = (
    "Set multi_turn.format (format in SFT) to the model's own family, or model.chat_template to a template that ends "
    "every assistant turn with a control token and writes each message behind the one before"
)


def start_up_check(chat: Chat, messages: Sequence[Message], tools: Sequence[ToolSchema] | None) -> str:
    """Render one sample's prompt and return it as text, control tokens visible, for printing.

    Raises ConfigError when the policy could not end its turn, or when a user's turn after it is not written as the
    template writes it there. With tools, it is also raised in four cases. The format has no tool parser, or the prompt
    does not name every tool. A call that the template writes is not read back, or its answer is not written.
    """
    where = _where(chat)
    text = chat.shown(chat.render(messages, tools))
    reply = _reply(chat, tools)
    _check_answer(chat, reply, [QUESTION, REPLY, GO_ON], tools, where)
    _check_later(chat, reply, tools, where)
    if not tools:
        return text
    if not chat.format.parses_tools:
        raise ConfigError(f"tools are configured, but {where} has no tool parser: {_without_parser(chat, tools)}")
    missing = [name for tool in tools if (name := tool["function"]["name"]) not in text]
    if missing:
        raise ConfigError(
            f"{where} renders a prompt without the tools {missing}: its template ignores tools. Use another "
            f"multi_turn.format, a model.chat_template that writes tools, or agent_name react"
        )
    if isinstance(chat.format, TemplateFormat) and not chat.format.writes_calls:
        return text
    turns = [_round_trip(chat, tool, arguments, tools, where) for tool in tools for arguments in sample_arguments(tool)]
    sampled, call = turns[0]
    _check_answer(chat, sampled, [QUESTION, call, _answer_to(call)], tools, where)
    _bridge(chat, [*chat.render([QUESTION], tools), *sampled], [_answer_to(call), GO_ON], tools, where)
    return text


def why_no_tools(chat: Chat) -> str | None:
    """Say why a policy cannot call the tools that a client declares; None where nothing speaks against it."""
    try:
        is_ignored = chat.render([QUESTION], [ANY_TOOL]) == chat.render([QUESTION], None)
    except (ConfigError, DataError):
        return None  # The template wants more than a made-up tool has.
    if is_ignored:
        return f"{_where(chat)} renders prompts without them. Set a model.chat_template that writes tools"
    if not chat.format.parses_tools:
        return f"{_where(chat)} has no tool parser: {_without_parser(chat, [ANY_TOOL])}"
    return None


def marks_left(chat: Chat) -> str | None:
    """Say which marks of reasoning or frames stay in the text that scorers and judges are given; None: no mark does."""
    text = unread(lambda turn: chat.parse(chat.format.sampled(chat.prepared([turn])[0], None)))
    if text is None:
        return None
    return (
        f"{_where(chat)} reads a turn that says {SAID!r} as {text[:300]!r}: the marks stay in the text that scorers, "
        f"judges and the display are given. Give multi_turn.format one that knows them ({OWN_FORMAT})"
    )


def _without_parser(chat: Chat, tools: Sequence[ToolSchema]) -> str:
    """Advise where no parser is chosen: by the call format that reads the template's calls, or by these calls."""
    if reader := _reader(chat):
        return f"its template writes the calls of {reader}; set multi_turn.format to that, or to auto"
    call = _sample_call(tools[0])
    try:
        prompt, whole = (
            chat.decode(chat.format.render(messages, tools, False)) for messages in ([QUESTION], [QUESTION, call])
        )
    except ConfigError as fault:
        return f"its template refuses tool calls ({fault}). {NO_CALLS_WRITTEN}"
    written = whole[common_length(prompt, whole) :]
    if call["tool_calls"][0]["function"]["name"] not in written:
        return f"its template writes no tool calls. {NO_CALLS_WRITTEN}"
    return f"its template seems to write a call as {written[:300]!r}. {UNREAD}"


def _reader(chat: Chat) -> str:
    """Name the format that reads the calls which the tokenizer's own template writes; empty without any."""
    try:
        format, reads = choose_calls(Codec(chat.tokenizer), {})
    except ConfigError:
        return ""
    return format.name if reads else ""


def training_check(chat: Chat, tools: Sequence[ToolSchema] | None, *, calls: bool) -> None:
    """Raise ConfigError when supervised training would learn other text than the template writes.

    `tools`: the tools of one of the transcripts. `calls`: True when it has tool calls, too.
    """
    where = _where(chat)
    _check_transcript(chat, [QUESTION, REPLY, GO_ON, LAST_REPLY], tools, where)
    _check_later(chat, _reply(chat, tools), tools, where)
    if calls:
        call = _sample_call(tools[0] if tools else ANY_TOOL)
        _check_transcript(chat, [QUESTION, call, _answer_to(call), LAST_REPLY], tools, where)


def _where(chat: Chat) -> str:
    where = f"the tokenizer at {chat.tokenizer.name_or_path} with the chat format {chat.format.name!r}"
    if not chat.stop_token_ids:
        raise ConfigError(f"{where} has no stop token: set eos_token in its tokenizer_config.json")
    return where


def _check_transcript(chat: Chat, messages: list[Message], tools: Sequence[ToolSchema] | None, where: str) -> None:
    """Check that exactly the assistant's text and its turn ends are learnt in four messages."""
    try:
        ids, mask = _training(chat, messages, tools)
    except DataError as fault:
        raise ConfigError(f"{where} loses text: {fault}. {ADVICE}") from fault
    runs = [list(run) for _, run in groupby(range(len(ids)), key=lambda at: mask[at])]
    texts = [chat.decode([ids[at] for at in run]) for run in runs]
    said = [content_text(message["content"]) for message in messages]
    if len(texts) != len(said) or any(content not in text for content, text in zip(said, texts, strict=True)):
        ends = [text[-200:] for text in texts]
        raise ConfigError(
            f"{where} loses text: a conversation of {said} becomes parts that end with {ends}, of which every second "
            f"one is learnt. {ADVICE}"
        )
    for message, text in zip(messages, texts, strict=True):
        names = [call["function"]["name"] for call in message.get("tool_calls", ())]
        if any(name not in text for name in names):
            raise ConfigError(
                f"{where} loses tool calls: a turn that calls {', '.join(names)} is {text[-200:]!r}, which would be "
                "learnt. Set model.chat_template to a template that writes tools and calls, or format (in SFT) to the "
                "model's own family"
            )
    if ids[-1] not in chat.stop_token_ids:
        raise ConfigError(f"{where} writes an assistant turn without a stop token at its end: {texts[-1]!r}. {ADVICE}")
    begin, end = runs[2][0], runs[3][0]
    _check_bridge(chat, ids[:begin], ids[begin:end], messages[:3], tools, where)


def _check_answer(
    chat: Chat, sampled: list[int], messages: list[Message], tools: Sequence[ToolSchema] | None, where: str
) -> None:
    """Check a rollout: question, sampled turn, and the bridge that a loop appends after it."""
    ids = [*chat.render(messages[:1], tools), *sampled]
    _check_bridge(chat, ids, _bridge(chat, ids, messages[2:], tools, where), messages, tools, where)


def _check_later(chat: Chat, sampled: list[int], tools: Sequence[ToolSchema] | None, where: str) -> None:
    """Check that a later turn is written as the template writes it there: some number turns, or count messages."""
    messages = [QUESTION]
    ids = chat.render(messages, tools)
    for asked in (GO_ON, LAST_QUESTION):
        ids += sampled
        messages += [REPLY, asked]
        bridge = _bridge(chat, ids, [asked], tools, where)
        _check_bridge(chat, ids, bridge, messages, tools, where)
        ids += bridge


def _bridge(
    chat: Chat, ids: list[int], messages: list[Message], tools: Sequence[ToolSchema] | None, where: str
) -> list[int]:
    try:
        return chat.bridge(ids, messages, tools)
    except DataError as fault:
        roles = " and a ".join(message["role"] for message in messages)
        raise ConfigError(
            f"{where} cannot go on from an assistant turn to a {roles} message: {fault}. {ADVICE}"
        ) from fault


def _check_bridge(
    chat: Chat,
    ids: list[int],
    bridge: list[int],
    messages: list[Message],
    tools: Sequence[ToolSchema] | None,
    where: str,
) -> None:
    """Check that `bridge` writes the last of `messages` after `ids`, a closed turn, as a full render does."""
    rendered, before = chat.decode(chat.render(messages, tools)), chat.decode(ids)
    added, stop = chat.decode([*ids, *bridge])[len(before) :], chat.decode(ids[-1:])
    ended = rendered.removesuffix(added)
    history_ends = chat.format.history_ends if isinstance(chat.format, TemplateFormat) else {}
    # Some templates leave it to EOS to end a turn, and write no end.
    unwritten = ids[-1] == chat.tokenizer.eos_token_id and ended.endswith(chat.decode(ids[-2:-1]))
    goes_on = added and ended != rendered and (ended.endswith(history_ends.get(ids[-1], stop)) or unwritten)
    if ids[-1] not in chat.stop_token_ids or content_text(messages[-1]["content"]) not in added or not goes_on:
        raise ConfigError(
            f"{where} cannot go on from an assistant turn to a {messages[-1]['role']} message: behind {stop!r} would "
            f"stand {added!r}, but a render of the conversation is {rendered[-1000:]!r}. {ADVICE}"
        )


def _training(chat: Chat, messages: list[Message], tools: Sequence[ToolSchema] | None) -> tuple[list[int], list[int]]:
    """Render for training; with reasoning in the messages where the generation prompt has begun some."""
    try:
        return chat.render_training(messages, tools)
    except ConfigError:
        reasoned: list[Message] = [{**m, "reasoning_content": "r"} if m["role"] == "assistant" else m for m in messages]
        return chat.render_training(reasoned, tools)


def _sampled(chat: Chat, turn: Message, tools: Sequence[ToolSchema] | None) -> list[int]:
    """Ids of the turn as the policy would sample it."""
    ids, mask = _training(chat, [QUESTION, turn], tools)
    return [id for id, learnt in zip(ids, mask, strict=True) if learnt]


def _behind_reasoning(chat: Chat, turn: Message, tools: Sequence[ToolSchema] | None, fault: ConfigError) -> list[int]:
    """Ids of the turn after reasoning that the generation prompt begins, or shows to be empty, and the history omits.

    Raises `fault` where that is not how the template differs from its generation prompt.
    """
    prompt = chat.format.render([QUESTION], tools, True)
    answer = _answer_to(turn)
    whole = chat.format.render([QUESTION, turn, answer], tools, False)
    shared = common_length(prompt, whole)
    stop = next((index for index, id in enumerate(whole[shared:], shared) if id in chat.stop_token_ids), None)
    think, think_end = chat.format.reasoning if isinstance(chat.format, TemplateFormat) else (THINK, THINK_END)
    opened, closed, behind = chat.decode(prompt[shared:]).partition(think_end)
    if opened.strip() != think.strip() or behind.strip():
        raise fault
    reasoning = [] if closed else chat.encode_markup(f"r\n{think_end}\n\n")
    if stop is not None and str(answer["content"]) not in chat.decode(whole[shared:stop]):
        return [*reasoning, *whole[shared : stop + 1]]
    # Nothing that is written ends the turn: EOS does, where the template writes on.
    eos = chat.tokenizer.eos_token_id
    eos = chat.stop_token_ids[-1] if eos is None else eos
    goes_on = chat.decode(chat.bridge([*prompt, eos], [answer], tools))
    text = chat.decode(chat.format.render([QUESTION, turn, answer], tools, True)[shared:])
    return [*reasoning, *chat.encode_markup(text.removesuffix(goes_on)), eos]


def _reply(chat: Chat, tools: Sequence[ToolSchema] | None) -> list[int]:
    try:
        return _sampled(chat, REPLY, tools)
    except ConfigError:
        # Some templates never write the reasoning that they begin; nobody but the policy can then.
        return [*chat.encode(content_text(REPLY["content"])), chat.stop_token_ids[0]]


def _round_trip(
    chat: Chat, tool: ToolSchema, arguments: dict[str, JSON], tools: Sequence[ToolSchema], where: str
) -> tuple[list[int], Message]:
    """Write a turn with a call as the policy would sample it, and read it back. Raises ConfigError if that fails."""
    name = tool["function"]["name"]
    call = _call(name, arguments)
    try:
        sampled = _sampled(chat, call, tools)
    except ConfigError as fault:
        sampled = _behind_reasoning(chat, call, tools, fault)
    parsed = chat.parse(sampled, tools)
    if [(found.name, found.arguments) for found in parsed.calls] != [(name, arguments)]:
        calls = [found.error or (found.name, found.arguments) for found in parsed.calls]
        reader = _reader(chat)
        advice = UNREAD if reader in ("", chat.format.name) else f"Set multi_turn.format to {reader}, or to auto"
        raise ConfigError(
            f"{where} writes a call of {name} with {arguments} as {chat.decode(sampled)!r}, and reads it back as "
            f"{calls or 'no call'}: template and parser do not fit together. {advice}"
        )
    return sampled, parsed.to_message()


def _sample_call(tool: ToolSchema) -> Message:
    return _call(tool["function"]["name"], sample_arguments(tool)[0])


def _call(name: str, arguments: dict[str, JSON]) -> Message:
    call: ToolCall = {"id": "call00000", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _answer_to(turn: Message) -> Message:
    call = turn["tool_calls"][0]
    return {**TOOL_ANSWER, "name": call["function"]["name"], "tool_call_id": call.get("id", "")}


def sample_arguments(tool: ToolSchema) -> list[dict[str, JSON]]:
    """Make up two sets of arguments: with the first option of each choice, and with the last (null, where allowed).

    Parameters without a declared type are left out: their values cannot be distinguished from text.
    """
    parameters = tool["function"].get("parameters") or {}
    first, last = (_members(parameters, parameters, last, 0) for last in (False, True))
    return [first] if first == last else [first, last]


def _members(schema: Schema, root: Schema, last: bool, depth: int) -> dict[str, JSON]:
    properties = as_object(schema.get("properties"))
    values = {name: _sample(member, root, last, depth) for name, member in properties.items()}
    return {name: value for name, value in values.items() if not isinstance(value, NoValue)}


def _sample(schema: JSON, root: Schema, last: bool, depth: int) -> JSON | NoValue:
    """Make up a value that `schema` allows, or NO_VALUE. `last`: of each choice the last option, not the first."""
    schema = resolved(schema, root)
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        return NO_VALUE
    at = -1 if last else 0
    if "const" in schema:
        return schema["const"]
    if options := as_list(schema.get("enum")):
        return options[at]
    for key in ("anyOf", "oneOf", "allOf"):
        if options := as_list(schema.get(key)):
            return _sample(options[at], root, last, depth + 1)
    return _sample_of_type(schema, root, last, depth)


def _sample_of_type(schema: Schema, root: Schema, last: bool, depth: int) -> JSON | NoValue:
    kinds = schema.get("type")
    named = [kind for kind in as_list(kinds) if isinstance(kind, str)] if not isinstance(kinds, str) else [kinds]
    kind = "null" if last and "null" in named else named[0] if named else ""
    if kind == "array" and "items" in schema:
        item = _sample(schema["items"], root, last, depth + 1)
        return [] if isinstance(item, NoValue) else [item, item]
    if kind == "object" and schema.get("properties"):
        return _members(schema, root, last, depth + 1)
    return SAMPLES[kind][-1 if last else 0] if kind in SAMPLES else NO_VALUE
