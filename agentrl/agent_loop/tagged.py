"""Tools called by tags in the text, as Search-R1 (arXiv:2503.09516) and ReTool (arXiv:2504.11536) train them.

The policy writes `<search>query</search>`, is stopped there, reads `<information>...</information>`, and continues
until `</answer>`. A tool's answer is data: a tag in it is shown as `&lt;tag>`, and the reward reads the policy's own
text only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from agentrl.agent_loop.base import Episode, Reply
from agentrl.agent_loop.inline import InlineLoop, as_written, with_system
from agentrl.agent_loop.tool_calls import FINAL_ANSWER_REQUEST
from agentrl.chat import ParsedCall
from agentrl.errors import ConfigError
from agentrl.tool import ToolSchema, parameters_of
from agentrl.trajectory import Message, ToolCallRecord
from agentrl.trajectory.sample import Sample

_FINAL = "answer"
_THOUGHTS = "think"


@dataclass(frozen=True, slots=True)
class Tag:
    """Tag `<name>text</name>` that calls `tool` with the text as `argument`; the answer stands in `<result>`."""

    name: str
    tool: str
    argument: str
    result: str
    layout: str = "\n\n<{result}>{text}</{result}>\n\n"


class TaggedLoop(InlineLoop):
    """Base class of loops with tags: subclass it with `tags` and `instructions`, and `register` it."""

    tags: ClassVar[tuple[Tag, ...]]
    instructions: ClassVar[str]
    """System message of rows whose prompt does not name the tags itself."""
    must_answer: ClassVar[bool] = True
    """True: a turn that ends without a call and without `</answer>` is malformed; False: it is the answer."""

    def __init__(self) -> None:
        self._by_stop = {f"</{tag.name}>": tag for tag in self.tags}
        self.stops = (*self._by_stop, f"</{_FINAL}>")
        written = (re.escape(tag.name) for tag in self.tags)
        self.calls = re.compile("|".join(rf"<{name}>.*?(?:</{name}>|\Z)" for name in written), re.DOTALL)
        names = {_FINAL, _THOUGHTS, *(name for tag in self.tags for name in (tag.name, tag.result))}
        self._forged = re.compile(rf"<(?=/?(?:{'|'.join(map(re.escape, names))})\s*>)", re.IGNORECASE)

    def first_prompt(self, sample: Sample, tools: list[ToolSchema]) -> tuple[list[Message], list[ToolSchema]]:
        """Return the row's prompt as it is where it names every tag, else with `instructions`.

        Raises ConfigError for a tag whose tool or argument is not configured.
        """
        self._check_tools(tools)
        text = "\n".join(str(message.get("content")) for message in sample.prompt)
        explained = all(f"<{name}>" in text for name in (_FINAL, *(tag.name for tag in self.tags)))
        return (sample.prompt if explained else with_system(sample.prompt, self.instructions)), []

    def _check_tools(self, tools: list[ToolSchema]) -> None:
        arguments = {tool["function"]["name"]: parameters_of(tool) for tool in tools}
        for tag in self.tags:
            if tag.argument not in arguments.get(tag.tool, ()):
                raise ConfigError(
                    f"the agent loop {type(self).__name__} calls a tool {tag.tool!r} with the argument "
                    f"{tag.argument!r}; configured are {', '.join(arguments) or 'no tools'}: add it to the file of "
                    "actor_rollout_ref.rollout.multi_turn.tool_config_path"
                )

    def said(self, episode: Episode, reply: Reply) -> str:
        """Return what was written: no part is a message's reasoning or call, to which the chat format may assign it."""
        return as_written(episode)

    def action(self, episode: Episode, reply: Reply) -> ParsedCall | None:
        said = episode.trajectory.turns[-1].text
        stop = str(reply.finish_reason.matched)
        if stop == f"</{_FINAL}>":
            return None
        if stop in self._by_stop:
            tag = self._by_stop[stop]
            before = said.rpartition(stop)[0]  # the token that completed it may spell more
            _, opening, text = before.rpartition(f"<{tag.name}>")
            if opening:
                return ParsedCall("call_0", tag.tool, {tag.argument: text.strip()}, text)
            return self._malformed(said, f"{stop} without <{tag.name}>")
        if self.must_answer:
            return self._malformed(said, "the turn ended without a call and without an answer")
        begun = [tag.name for tag in self.tags if f"<{tag.name}>" in said]
        return self._malformed(said, f"<{begun[0]}> without </{begun[0]}>") if begun else None

    def _malformed(self, said: str, problem: str) -> ParsedCall:
        ways = [
            f"to call {tag.tool}, write the {tag.argument} between <{tag.name}> and </{tag.name}>" for tag in self.tags
        ]
        ways.append(f"to answer, write the answer between <{_FINAL}> and </{_FINAL}>")
        return ParsedCall("call_0", "", None, said, f"{problem}. Try again: {'; '.join(ways)}.")

    async def respond(self, episode: Episode, reply: Reply, record: ToolCallRecord, last: bool) -> bool:
        request = FINAL_ANSWER_REQUEST if last else ""
        stop = reply.finish_reason.matched
        if not isinstance(stop, str):  # the policy has ended its turn
            return await episode.observe([{"role": "user", "content": f"{record.response} {request}".rstrip()}])
        if record.name:
            tag = self._by_stop[stop]
            shown = tag.layout.format(result=tag.result, text=self._forged.sub("&lt;", record.response))
        else:
            shown = f"\n\n{record.response}\n\n"
        return await episode.observe_text(f"{shown}{request}\n\n" if last else shown)


class SearchR1Loop(TaggedLoop):
    """Search-R1's tags, with any tool `search(query)`."""

    tags = (Tag("search", tool="search", argument="query", result="information"),)
    instructions = (
        "Answer the question. Think between <think> and </think> before every step, and whenever you have read "
        "something new. Where you do not know enough, write what to look for between <search> and </search>: what is "
        "found will stand between <information> and </information>. Search as often as it helps. As soon as you know "
        "the answer, write it, and nothing else, between <answer> and </answer>, as in <answer>Lisbon</answer>."
    )


class ReToolLoop(TaggedLoop):
    """ReTool's tags, with any tool `code_interpreter(code)`."""

    tags = (
        Tag("code", "code_interpreter", "code", result="interpreter", layout="\n<{result}>\n{text}\n</{result}>\n"),
    )
    must_answer = False
    instructions = (
        "Solve the problem step by step. Where a computation helps, write a whole Python program, with its imports, "
        "between <code> and </code>:\n<code>\n```python\nprint(2**10)\n```\n</code>\n"
        "It is run, and what it prints will stand between <interpreter> and </interpreter>; then go on. "
        "End with the answer in a box:\n<answer>\n\\boxed{1024}\n</answer>"
    )
