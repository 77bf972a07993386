"""verifiers 0.1.x: its environment drives the dialogue and its rubric scores it; the policy is its model.

Options of `tasks`: `environment`, a module with `load_environment` or `module:Class`, and its `arguments`.
"""

import asyncio
import functools
import importlib
import json
import queue
import signal
import threading

from verifiers.clients import Client
from verifiers.errors import InfraError, OverlongPromptError
from verifiers.types import Response, ResponseMessage, ToolCall

signal.signal = lambda *_: None  # environments set handlers, which only the main thread may do
LOOP = asyncio.new_event_loop()
threading.Thread(target=LOOP.run_forever, daemon=True).start()


def tasks(split, seed, count, environment, arguments=None):
    """Yield the rows of its data set."""
    loaded = _loaded(environment, json.dumps(arguments or {}))
    tools = [{"type": "function", "function": tool.model_dump(exclude={"strict"})} for tool in loaded.tool_defs or []]
    for row in (loaded.get_dataset if split == "train" else loaded.get_eval_dataset)(n=count, seed=seed):
        task = {"environment": environment, "arguments": arguments or {}, "tools": tools}
        task["row"] = {name: value for name, value in row.items() if value is not None}
        yield {"id": f"{environment}/{row['example_id']}", "prompt": row["prompt"], **task}


def start(task, seed):
    """Begin the rollout; its first request is the prompt that the row has."""
    policy = Policy(object())
    policy.asked = queue.Queue()
    running = asyncio.run_coroutine_threadsafe(_rollout(task, policy), LOOP)
    running.add_done_callback(lambda _: policy.asked.put((None, None)))
    return _next({"policy": policy, "running": running}), None


def step(episode, action):
    """Answer the request for a turn, and wait for the next one or the end."""
    seen, answer = len(episode["prompt"]) + 1, episode["answer"]
    calls = [ToolCall(id=c["id"], name=c["name"], arguments=json.dumps(c["arguments"])) for c in action["calls"]]
    LOOP.call_soon_threadsafe(answer.set_result, (action["text"], calls or None))
    if _next(episode)["prompt"] is None:
        return {"answers": [""] * len(calls), "done": True}
    new = [message.model_dump() for message in episode["prompt"][seen:]]
    said = {message["tool_call_id"]: message["content"] for message in new if message["role"] == "tool"}
    user = "\n\n".join(message["content"] for message in new if message["role"] == "user")
    return {"answers": [said.get(call.id, "") for call in calls], "observation": user or None}


def score(episode):
    """Return the rubric's reward and metrics; a dialogue that was cut short is scored as it is."""
    if episode["answer"] is not None:
        LOOP.call_soon_threadsafe(episode["answer"].set_exception, OverlongPromptError("no room for another turn"))
    state = episode["running"].result()
    return {**(state["metrics"] or {}), "score": state["reward"]}


def close(episode):
    """End a rollout that nobody scored."""
    episode["running"].cancel()


class Policy(Client):
    """Client that hands each request to `step`."""

    async def get_response(self, prompt, model, sampling_args, tools=None, **kwargs):
        self.asked.put((list(prompt), answer := asyncio.get_running_loop().create_future()))
        text, calls = await answer
        said = ResponseMessage(content=text, tool_calls=calls, finish_reason="stop", is_truncated=False)
        return Response(id="policy", created=0, model=model, message=said)


Policy.__abstractmethods__ = frozenset()  # all else of a client is for the `get_response` of servers


async def _rollout(task, policy):
    loaded = _loaded(task["environment"], json.dumps(task["arguments"]))
    state = await loaded.rollout(dict(task["row"]), policy, "policy", {})
    if (error := state.get("error")) is not None:
        raise ConnectionError(str(error)) if isinstance(error, InfraError) else error
    await loaded.rubric.score_rollout(state)
    return state


def _next(episode):
    episode["prompt"], episode["answer"] = episode["policy"].asked.get()
    if episode["prompt"] is None:
        episode["running"].result()  # raises its error
    return episode


@functools.cache
def _loaded(environment, arguments):
    module, _, name = environment.replace("-", "_").partition(":")
    return getattr(importlib.import_module(module), name or "load_environment")(**json.loads(arguments))
