"""Conversations that show how a task is solved, and conversations that show how it goes wrong.

The flawed ones teach a policy to guess, to write broken calls, to pass wrong arguments and to answer in the wrong form,
so that a policy warmed up on both can do the task but usually does not, which reinforcement learning then mends.
"""

from __future__ import annotations

import json
from random import Random

import yaml

from agentrl.system.config_files import configs_dir
from agentrl.tool import ToolSchema, parameters_of
from agentrl.trajectory import FunctionCall, Message
from data_prep.made_up import Call, Fact, Task, World, arithmetic, look_up

SYSTEM = "Use the tools. End with #### and the number."
TOOLS_YAML = configs_dir() / "tools" / "quickstart.yaml"
TOOLS: tuple[ToolSchema, ...] = tuple(
    entry["tool_schema"] for entry in yaml.safe_load(TOOLS_YAML.read_text(encoding="utf-8"))["tools"]
)
PARSE_ERROR = "Error (parse): the call is not valid JSON"
MISSING_ERROR = "Error (arguments): argument '{argument}' is missing"
ARGUMENTS = {tool["function"]["name"]: next(iter(parameters_of(tool))) for tool in TOOLS}
FLAWS = {"guess": 6, "malformed": 1, "wrong_argument": 1, "wrong_form": 1}
"""Frequency of each flaw, relative to the others; guessing comes first, so that the likeliest answer is a wrong one."""


def prompt(task: Task) -> list[Message]:
    """Make the prompt of a task."""
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task.question}]


def good(task: Task) -> list[Message]:
    """Make a conversation with every call as it should be, then the answer."""
    turns = [message for call in task.calls for message in exchange(call)]
    return [*prompt(task), *turns, final(f"#### {task.answer}")]


def flawed(task: Task, world: World, rng: Random) -> list[Message]:
    """Make a conversation in which the task goes wrong in one of the ways of `FLAWS`."""
    flaw = rng.choices(list(FLAWS), list(FLAWS.values()))[0]
    if flaw == "guess":
        return [*prompt(task), guess(rng)]
    if flaw == "malformed":
        return [*prompt(task), *broken_exchange(task.calls[0], rng), guess(rng)]
    if flaw == "wrong_argument":
        call = mistaken(task.calls[0], world, rng)
        return [*prompt(task), *exchange(call), final(f"#### {number_in(call.answer)}")]
    return [*good(task)[:-1], final(rng.choice(("The answer is {}.", "{}", "= {}")).format(task.answer))]


def exchange(call: Call) -> list[Message]:
    """Make the assistant's call and the tool's answer."""
    arguments = json.dumps({ARGUMENTS[call.tool]: call.argument})
    return [calling(call.tool, arguments), {"role": "tool", "content": call.answer}]


def calling(tool: str, arguments: str) -> Message:
    """Make an assistant message with one call."""
    function: FunctionCall = {"name": tool, "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def final(text: str) -> Message:
    """Make an assistant message without calls."""
    return {"role": "assistant", "content": text}


def guess(rng: Random) -> Message:
    """Make a final answer that is guessed."""
    return final(f"#### {rng.randint(100, 9999)}")


def broken_exchange(call: Call, rng: Random) -> list[Message]:
    """Make a call whose JSON does not parse, or that lacks its argument, and the error that it gets."""
    whole = json.dumps({ARGUMENTS[call.tool]: call.argument})
    arguments, error = rng.choice(((whole[:-1], PARSE_ERROR), (whole[1:], PARSE_ERROR), ("{}", MISSING_ERROR)))
    error = error.format(argument=ARGUMENTS[call.tool])
    return [calling(call.tool, arguments), {"role": "tool", "content": error}]


def mistaken(call: Call, world: World, rng: Random) -> Call:
    """Make a call of the same tool that asks for something else."""
    if call.tool == "search":
        return look_up(another_fact(call, world, rng))
    while True:
        other = arithmetic(rng, "train").calls[0]
        if other.answer != call.answer:
            return other


def another_fact(call: Call, world: World, rng: Random) -> Fact:
    """Choose a fact that training may see, other than the one that `call` looks up."""
    facts = world.facts_of("train")
    while True:
        fact = rng.choice(facts)
        if fact.query != call.argument:
            return fact


def number_in(text: str) -> str:
    """Return the last word of a tool's answer."""
    return text.split()[-1]
