"""A trajectory as its reward model reads it: by that model's own tokenizer and chat template.

No text in it becomes a control token, even where it spells one. This holds for tools and for the policy, which is
rewarded by this model's view of the conversation.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence

import torch
from jinja2 import TemplateError
from transformers import AutoConfig

from agentrl.chat.codec import Codec
from agentrl.chat.coverage import DEVELOPER, SYSTEM, Coverage, knows_developer
from agentrl.chat.load import load_tokenizer
from agentrl.chat.message import content_text, normalise
from agentrl.errors import ConfigError, DataError
from agentrl.trajectory import Cause, Message, ToolCall, Trajectory, exclusion
from agentrl.trajectory.batch import RaggedBatch

CALL, ANSWER = "AgentrlCallMark", "AgentrlAnswerMark"
PROBE: tuple[Message, ...] = (
    {"role": "user", "content": "u"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {"x": CALL}}},
        ],
    },
    {"role": "tool", "tool_call_id": "call00000", "name": "f", "content": ANSWER},
    {"role": "assistant", "content": "a"},
)


class ModelInput:
    """Conversations to token ids for the reward model at `path`. The schemas of tools are not shown to it.

    Where its template knows no tool calls, they are written as JSON after the text of their message, and tool answers
    as user messages. Malformed calls, which no template could write, become JSON, too.
    """

    def __init__(
        self,
        path: str,
        max_length: int | None,
        *,
        chat_template: str | None = None,
        trust_remote_code: bool = False,
        date: str | None = None,
    ) -> None:
        """`max_length` None: the limit of the model's config. `chat_template`: a Jinja file in place of the model's.
        `date`: see `load_tokenizer`.

        Raises ConfigError for a file that cannot be loaded.
        """
        self._codec = Codec(load_tokenizer(path, chat_template, trust_remote_code=trust_remote_code, date=date))
        self._path = path
        if not self._codec.tokenizer.chat_template:
            raise ConfigError(f"reward_model.model.path={path}: its tokenizer has no chat template to read messages by")
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code).get_text_config()
        context = getattr(config, "max_position_embeddings", None)
        if max_length is not None and context is not None and max_length > context:
            raise ConfigError(f"reward_model.max_length={max_length}: {path} reads at most {context} tokens")
        self._max_length: int | None = max_length or context
        self._padding = config.pad_token_id
        self._writes_calls = self._shows_calls()
        self._coverage = Coverage(f"the chat template of the reward model {path}")
        self._knows_developer = knows_developer(self._text)

    def ids(self, messages: Sequence[Message]) -> tuple[list[int], bool]:
        """The conversation, and whether it was too long: then its beginning is cut off.

        It ends where transformers takes the score: at the last token that is no padding. Raises ValueError when the
        template cannot write it, or leaves a message out.
        """
        texts: list[Message] = [
            {**message, "content": content_text(message["content"])} for message in normalise(messages)
        ]
        if not self._knows_developer:
            texts = [{**one, "role": SYSTEM} if one["role"] == DEVELOPER else one for one in texts]
        written = [_with_malformed_as_text(self._codec.guard_values(message)) for message in texts]
        if not self._writes_calls:
            written = _plain(written)
        try:
            ids = self._codec.encode(self._text(written))
            self._coverage.check(written, written, self._text, None)
        except (ConfigError, DataError) as fault:
            raise ValueError(fault) from fault
        end = len(ids)
        while end and ids[end - 1] == self._padding:
            end -= 1
        if not end:
            raise ValueError(f"the chat template of {self._path} writes nothing for it")
        start = 0 if self._max_length is None else max(0, end - self._max_length)
        return ids[start:end], start > 0

    def _text(self, messages: Sequence[Message]) -> str:
        try:
            text: str = self._codec.tokenizer.apply_chat_template(list(messages), tokenize=False)
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError) as fault:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise ConfigError(f"the chat template of {self._path} cannot write messages of {roles}: {fault}") from fault
        return text

    def _shows_calls(self) -> bool:
        try:
            text = self._text(PROBE)
        except ConfigError:
            return False
        return CALL in text and ANSWER in text


def conversations(trajectories: Sequence[Trajectory], reading: ModelInput, first: int = 0) -> RaggedBatch:
    """One sequence for every trajectory that can be trained on; `trajectory` is its position, counted from `first`.

    A trajectory that the template cannot write fails. The metric `reward_model_cut` of each says whether it was cut.
    """
    rows = []
    for position, trajectory in enumerate(trajectories, first):
        if exclusion(trajectory) is not None:
            continue
        try:
            ids, cut = reading.ids(trajectory.messages)
        except ValueError as error:
            trajectory.fail(Cause.REWARD_MODEL, error)
            continue
        trajectory.metrics["reward_model_cut"] = float(cut)
        rows.append((position, trajectory.group, ids))
    tokens = torch.tensor(list(itertools.chain.from_iterable(ids for _, _, ids in rows)), dtype=torch.int64)
    return RaggedBatch.unsampled(
        offsets=torch.tensor([0, *itertools.accumulate(len(ids) for _, _, ids in rows)]),
        ids=tokens,
        mask=torch.zeros(len(tokens), dtype=torch.bool),
        group=torch.tensor([group for _, group, _ in rows], dtype=torch.int64),
        trajectory=torch.tensor([position for position, _, _ in rows], dtype=torch.int64),
    )


def _with_malformed_as_text(message: Message) -> Message:
    calls = message.get("tool_calls", [])
    good = [call for call in calls if isinstance(call["function"].get("arguments"), dict)]
    broken = [call for call in calls if not isinstance(call["function"].get("arguments"), dict)]
    out = message.copy()
    out.pop("tool_calls", None)
    if good:
        out["tool_calls"] = good
    if broken:
        out["content"] = _joined(content_text(message["content"]), *map(_call_text, broken))
    return out


def _plain(messages: Sequence[Message]) -> list[Message]:
    """Without tool calls and the role of tools; messages of one role in a row become one, as some templates want it."""
    said = []
    for message in messages:
        text = _joined(content_text(message["content"]), *map(_call_text, message.get("tool_calls", ())))
        is_answer = message["role"] == "tool"
        said.append(("user", f"Tool answer:\n{text}") if is_answer else (message["role"], text))
    return [
        {"role": role, "content": "\n\n".join(text for _, text in group)}
        for role, group in itertools.groupby(said, key=lambda pair: pair[0])
    ]


def _call_text(call: ToolCall) -> str:
    function = call["function"]
    return json.dumps({"name": function.get("name"), "arguments": function.get("arguments")}, ensure_ascii=False)


def _joined(*texts: str) -> str:
    return "\n".join(text for text in texts if text)
