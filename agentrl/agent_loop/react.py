"""ReAct (arXiv:2210.03629): thought, action and observation as plain text, for models without a tool-call template.

The policy is stopped at `Observation:`, and the tool's answer follows.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

import jinja2

from agentrl.agent_loop.base import Episode, Reply
from agentrl.agent_loop.inline import InlineLoop, with_system
from agentrl.agent_loop.tool_calls import FINAL_ANSWER_REQUEST
from agentrl.chat import ParsedCall
from agentrl.chat.message import parse_json
from agentrl.tool import ToolSchema
from agentrl.trajectory import Message, ToolCallRecord
from agentrl.trajectory.sample import Sample

STOP = "Observation:"
_ACTION = re.compile(r"^Action:[ \t]*(.*?)[ \t]*$", re.MULTILINE)
_INPUT = "Action Input:"


class ReactLoop(InlineLoop):
    """ReAct loop. The prompts are Jinja2 files; a subclass may name others in `prompts`."""

    offers_tools = True
    stops = (STOP,)
    calls = re.compile(rf"^Action:.*?(?=^{STOP}|\Z)", re.DOTALL | re.MULTILINE)
    prompts: Path = Path(__file__).parent / "prompts"

    def first_prompt(self, sample: Sample, tools: list[ToolSchema]) -> tuple[list[Message], list[ToolSchema]]:
        functions = [schema["function"] for schema in tools]
        return with_system(sample.prompt, _template(self.prompts, "system").render(tools=functions)), []

    def action(self, episode: Episode, reply: Reply) -> ParsedCall | None:
        return parse_action(episode.trajectory.turns[-1].text) if reply.finish_reason.matched == STOP else None

    async def respond(self, episode: Episode, reply: Reply, record: ToolCallRecord, last: bool) -> bool:
        if last:
            return await episode.observe_text(f" {record.response}\nThought: {FINAL_ANSWER_REQUEST}\nFinal Answer:")
        return await episode.observe_text(_template(self.prompts, "observation").render(text=record.response))


@functools.cache
def _template(folder: Path, name: str) -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder), undefined=jinja2.StrictUndefined, autoescape=False
    )
    return environment.get_template(f"react_{name}.jinja2")


def parse_action(text: str) -> ParsedCall:
    """Read the last `Action:` and `Action Input:` of a turn that stopped at `Observation:`."""
    if STOP in text:
        text = text[: text.rindex(STOP)]  # the token that completed it may spell more, such as a line's end
    actions = list(_ACTION.finditer(text))
    name = actions[-1].group(1) if actions else ""
    if not name:
        return ParsedCall(id="call_0", name="", arguments=None, raw=text, error="no line `Action: <tool>` was found")
    raw = text[actions[-1].end() :].partition(_INPUT)[2].strip()
    try:
        arguments = parse_json(raw or "{}")
    except ValueError as error:
        return ParsedCall("call_0", name, None, raw, f"`Action Input:` is not a JSON object: {error}")
    if not isinstance(arguments, dict):
        return ParsedCall(
            "call_0", name, None, raw, f"`Action Input:` is {type(arguments).__name__}, not a JSON object"
        )
    return ParsedCall("call_0", name, arguments, raw, None)
