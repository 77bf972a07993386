"""verifiers 0.1.x: its environment drives the dialogue and its rubric scores it; the policy is its model.

Options of `tasks`: `environment`, a module with `load_environment` or `module:Class`, and its `arguments`.
"""

import functools
import importlib
import json
import signal

from verifiers.clients import Client
from verifiers.errors import InfraError, OverlongPromptError
from verifiers.types import Response, ResponseMessage, ToolCall

signal.signal = lambda *_: None  # environments set handlers, which only the main thread may do


def tasks(split, seed, count, environment, arguments=None):
    """Yield the rows of its data set. Refuses a rubric that scores several answers together."""
    loaded = _loaded(environment, json.dumps(arguments or {}))
    if (rubric := loaded.rubric).has_group_rewards:
        names = ", ".join(one.__name__ for one in rubric._get_reward_funcs() if rubric._is_group_func(one))
        raise ValueError(f"{environment}: its rubric has rewards that see a whole group ({names}): not supported")
    tools = [{"type": "function", "function": tool.model_dump(exclude={"strict"})} for tool in loaded.tool_defs or []]
    for row in (loaded.get_dataset if split == "train" else loaded.get_eval_dataset)(n=count, seed=seed):
        task = {"tools": tools, "row": {name: value for name, value in row.items() if value is not None}}
        yield {"id": f"{environment}/{row['example_id']}", "prompt": row["prompt"], **task}


def configured(task, environment, arguments=None):
    """Return the entry's environment."""
    return {"environment": environment, "arguments": arguments or {}}


async def play(task, seed, ask):
    """Run the rollout; return the rubric's reward and metrics. A dialogue that was cut is scored as it is."""
    loaded, policy = _loaded(task["environment"], json.dumps(task["arguments"])), Policy(object())
    policy.ask = ask
    state = await loaded.rollout(dict(task["row"]), policy, "policy", {})
    if (error := state.get("error")) is not None:
        raise ConnectionError(str(error)) if isinstance(error, InfraError) else error
    await loaded.rubric.score_rollout(state)
    return {**(state["metrics"] or {}), "score": state["reward"]}


class Policy(Client):
    """Client that asks for turns."""

    async def get_response(self, prompt, model, sampling_args, tools=None, **kwargs):
        try:
            said = await self.ask([message.model_dump() for message in prompt])
        except EOFError as error:
            raise OverlongPromptError("no room for another turn") from error
        calls = [ToolCall(**{**call, "arguments": json.dumps(call["arguments"])}) for call in said["calls"]]
        message = ResponseMessage(
            content=said["text"], tool_calls=calls or None, finish_reason="stop", is_truncated=False
        )
        return Response(id="policy", created=0, model=model, message=message)


Policy.__abstractmethods__ = frozenset()  # all else of a client is for the `get_response` of servers


@functools.cache
def _loaded(environment, arguments):
    module, _, name = environment.replace("-", "_").partition(":")
    return getattr(importlib.import_module(module), name or "load_environment")(**json.loads(arguments))
