"""Chat templates that differ in how they end assistant turns, and conversations, written small."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from agentrl.chat import Chat
from tests.chat.vocabularies import trained_model

EOS = "<|endoftext|>"
TOKENS = (
    *(EOS, "<|end|>", "<|call|>", "<|turn|>", "<|open|>", "<|close|>", "<|role|>", "<tool_call>", "</tool_call>"),
    *("<|user|>", "<|assistant|>", "<|system|>", "<|tool|>"),
)
TEMPLATE = """\
{{- PREAMBLE }}
{%- if tools %}{{- 'Call with <tool_call>: ' + tools | tojson }}{%- endif %}
{%- for message in messages %}
    {{- HEADER }}
    {%- if message.role == 'assistant' %}
        {%- if message.reasoning_content %}{{- REASONING }}{%- endif %}
        {{- OPEN + message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson + '}</tool_call>' }}
        {%- endfor %}
        {{- CLOSE }}
        {%- if loop.last and not add_generation_prompt %}{{- LAST }}
        {%- elif message.tool_calls %}{{- CALL_END }}
        {%- else %}{{- END }}
        {%- endif %}
    {%- else %}{{- message.content + OTHER_END }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt or STANDING %}
    {%- set message = {'role': 'assistant'} %}{{- HEADER }}
    {%- if add_generation_prompt %}{{- BEGUN }}{%- endif %}
{%- else %}{{- FINAL }}{%- endif %}
"""


@dataclass(frozen=True)
class Ending:
    """What a template writes around turns, as literals."""

    end: str = "<|end|>"
    last: str | None = None
    """The end of a turn that is the conversation's last; None: `end`."""
    call_end: str | None = None
    other_end: str | None = None
    """The end of turns of other roles; None: `end`."""
    final: str = ""
    header: str = "'<|' + message.role + '|>\\n'"
    preamble: str = ""
    reasoning: str = ""
    open: str = ""
    close: str = ""
    standing: bool = False
    """Whether a generation prompt ends every conversation."""
    begun: str = ""
    """The end of a generation prompt, which does not stand where none is asked for."""

    def template(self) -> str:
        call_end = self.end if self.call_end is None else self.call_end
        last = f"({call_end!r} if message.tool_calls else {self.end!r})" if self.last is None else repr(self.last)
        words = {
            "PREAMBLE": repr(self.preamble),
            "HEADER": self.header,
            "REASONING": f"message.reasoning_content + {self.reasoning!r}",
            "OPEN": repr(self.open),
            "CLOSE": repr(self.close),
            "LAST": last,
            "CALL_END": repr(call_end),
            "OTHER_END": repr(self.end if self.other_end is None else self.other_end),
            "END": repr(self.end),
            "BEGUN": repr(self.begun),
            "STANDING": repr(self.standing).lower(),
            "FINAL": repr(self.final),
        }
        text = TEMPLATE
        for word, value in words.items():
            text = text.replace(f" {word} ", f" {value} ")
        return text


SHARED_HEADER = "'<|turn|><|' + message.role + '|>'"
TEXT_HEADER = "'\\n' + message.role + ': '"
BEFORE_NEXT = Ending("<|end|>\n", last="")
ENDINGS: dict[str, Ending] = {
    "end": Ending(),
    "end_newline": Ending("<|end|>\n"),
    "end_of_conversation": Ending(final=EOS),
    "newline_end_of_conversation": Ending("<|end|>\n", final=EOS),
    "several_tokens": Ending("<|close|><|end|>", other_end="<|end|>", open="<|open|>", header=SHARED_HEADER),
    "standing_prompt": Ending(
        "<|close|><|end|>", other_end="<|end|>", open="<|open|>", header=SHARED_HEADER, standing=True
    ),
    "beginning_of_a_standing_prompt": Ending(
        "<|close|><|end|>",
        other_end="<|end|>",
        header=SHARED_HEADER,
        open="<|open|>",
        standing=True,
        begun="<|open|>",
    ),
    "standing_prompt_after_preamble": Ending(
        header=SHARED_HEADER, preamble=f"{EOS}<|turn|><|system|>You help.<|end|>", standing=True
    ),
    "only_before_the_next": BEFORE_NEXT,
    "newline_only_before_the_next": Ending("\n<|end|>\n", last=""),
    "other_at_the_end": Ending("<|end|>\n", last=EOS),
    "calls_end_otherwise": Ending("<|end|>\n", call_end="<|call|>\n"),
    "calls_end_otherwise_end_of_conversation": Ending(call_end="<|call|>", final=EOS),
    "header": Ending(""),
    "header_end_of_conversation": Ending("", final=EOS),
    "end_is_also_the_beginning": Ending(EOS + "\n", last=EOS, other_end="\n", preamble=EOS),
    "no_mark": Ending("", header=TEXT_HEADER),
    "no_mark_end_of_conversation": Ending("", header=TEXT_HEADER, final=EOS),
}
"""Templates that a policy can be trained with."""
UNMARKED = ("no_mark", "no_mark_end_of_conversation")
"""Between turns these write nothing that ends one: the policy's EOS is not in a full render."""
REFUSED: dict[str, tuple[Ending, str]] = {
    "text": (Ending("###\n"), r"ends an assistant turn with '###\\n', which is not a token"),
    "text_end_of_conversation": (Ending("###\n", header=TEXT_HEADER, final=EOS), r"with '###\\n\w*', which is not a"),
    "also_inside": (
        Ending("<|end|>", last=EOS, header=SHARED_HEADER, reasoning="<|end|><|turn|><|assistant|>"),
        r"with <\|endoftext\|> at the end of a conversation and with <\|end\|> before another turn, and writes "
        r"<\|end\|> inside of turns, too, so the policy could not end its turn .* Set multi_turn.format",
    ),
    "unknown_end_of_conversation": (
        Ending("", header=TEXT_HEADER, final="<|close|>"),
        r"with '<\|close\|>' at the end of a conversation, and with no control token before another turn",
    ),
}


def save_chat(directory: Path, ending: Ending, *, rstrip: bool = False) -> str:
    """A tokenizer with the template; with `rstrip`, its tokens eat the blanks behind them, as Phi's do."""
    tokenizer = Tokenizer.from_str(trained_model())
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=True, rstrip=rstrip) for token in TOKENS])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, chat_template=ending.template())
    fast.save_pretrained(directory)
    return str(directory)


def load_chat(directory: Path, ending: Ending, *, rstrip: bool = False) -> Chat:
    return Chat.from_pretrained(save_chat(directory, ending, rstrip=rstrip), format="hermes")
