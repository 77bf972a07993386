"""ReAct (arXiv:2210.03629): thought, action and observation as plain text, for models without a tool-call template.

The whole loop is one assistant turn of the template: the policy is stopped at `Observation:`, the tool's answer is
appended as plain-text tokens with mask 0, and it goes on from there. So no template stands between its turns.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import jinja2

from agentrl.agent_loop.base import AgentLoop, Episode, Reply
from agentrl.agent_loop.outcome import status_of
from agentrl.agent_loop.registry import register
from agentrl.agent_loop.tool_calls import FINAL_ANSWER_REQUEST, answer_calls, open_tools
from agentrl.chat import ParsedCall
from agentrl.chat.message import parse_json
from agentrl.data.sample import Sample
from agentrl.tool import MALFORMED, ToolSchema
from agentrl.toolset import ToolSession
from agentrl.trajectory import Message, Status

STOP = "Observation:"
_ACTION = re.compile(r"^Action:[ \t]*(.*?)[ \t]*$", re.MULTILINE)
_INPUT = "Action Input:"


@register("react")
class ReactLoop(AgentLoop):
    """See the module. The prompts are Jinja2 files; a subclass may name others in `prompts`."""

    prompts: Path = Path(__file__).parent / "prompts"

    def first_prompt(self, sample: Sample, tools: list[ToolSchema]) -> tuple[list[Message], list[ToolSchema]]:
        functions = [schema["function"] for schema in tools]
        return with_system(sample.prompt, self._render("system", tools=functions)), []

    async def run(self, episode: Episode) -> None:
        async with open_tools(episode) as session:
            episode.start(*self.first_prompt(episode.sample, episode.context.tools.schemas))
            status = await self._converse(episode, session)
        episode.finish(status)

    async def _converse(self, episode: Episode, session: ToolSession) -> Status:
        limits = episode.context.limits
        malformed = 0
        if episode.budget_left <= 0:
            return Status.LENGTH
        while True:
            reply = await episode.generate(stop=(STOP,))
            if (cut := status_of(reply)) is not None:
                return cut
            if reply.finish_reason.matched != STOP:
                return Status.COMPLETED
            records, _ = await answer_calls(episode, session, (parse_action(reply),))
            malformed += sum(record.error in MALFORMED for record in records)
            observation = self._render("observation", text=records[0].response)
            at_limit = episode.assistant_turns >= limits.max_assistant_turns
            if at_limit and limits.force_final_answer:
                observation = f" {records[0].response}\nThought: {FINAL_ANSWER_REQUEST}\nFinal Answer:"
            room = episode.observe_text(observation)
            if malformed > limits.max_malformed:
                return Status.MALFORMED
            if not room:
                return Status.LENGTH
            if at_limit:
                return await self._last_answer(episode) if limits.force_final_answer else Status.TURN_LIMIT

    async def _last_answer(self, episode: Episode) -> Status:
        reply = await episode.generate(stop=(STOP,))
        return status_of(reply) or (Status.TURN_LIMIT if reply.finish_reason.matched == STOP else Status.COMPLETED)

    def _render(self, name: str, **variables: Any) -> str:
        return _template(self.prompts, name).render(**variables)


@functools.cache
def _template(folder: Path, name: str) -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder), undefined=jinja2.StrictUndefined, autoescape=False
    )
    return environment.get_template(f"react_{name}.jinja2")


def with_system(prompt: list[Message], system: str) -> list[Message]:
    """The prompt with `system` as, or in front of, its system message."""
    if prompt and prompt[0]["role"] == "system":
        return [{**prompt[0], "content": f"{system}\n\n{prompt[0]['content']}"}, *prompt[1:]]
    return [{"role": "system", "content": system}, *prompt]


def parse_action(reply: Reply) -> ParsedCall:
    """The last `Action:` and `Action Input:` of a turn that stopped at `Observation:`."""
    text = reply.message.text
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
