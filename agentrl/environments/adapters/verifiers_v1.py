"""verifiers 0.4 (`verifiers.v1`): its environment plays an episode and scores it; the policy is its agent's model.

Option of `tasks`: `environment`, the config of an environment, e.g. `{taskset: {id: MODULE}}`. Each tenth task is for
validation. An agent without a harness gets `Turns`, and one without a runtime gets processes of this machine.
"""

import asyncio
import functools
import itertools
import json
import weakref
from contextlib import AsyncExitStack

import aiohttp
import verifiers.v1 as vf
from verifiers.v1.clients.train import serialize_completion, tool_to_wire
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.interception import server

__all__, PLAYED = ["Turns"], weakref.WeakValueDictionary()
POLICY = vf.TrainClientConfig(base_url="http://127.0.0.1:9", api_key_var="NONE")  # stands for `Policy`
server.resolve_client = lambda config: Policy() if config == POLICY else vf.resolve_client(config)


def tasks(split, seed, count, environment):
    """Yield the task set's tasks; their prompts are what their rollouts ask first."""
    for data in (task.data for task in _loaded(json.dumps(environment)).taskset):
        if (data.idx % 10 == 0) == (split != "train"):
            yield {"id": data.id or data.name or str(data.idx), "index": data.idx}


def configured(task, environment):
    """Return the entry's environment."""
    return {"environment": environment}


async def play(task, seed, ask):
    """Run an episode of the environment; return the reward and the metrics of the policy's trace."""
    env, index, mine = _loaded(json.dumps(task["environment"])), task["index"], []
    await env.served()
    env.known += itertools.islice(env.rest, max(0, index + 1 - len(env.known)))

    def begun(trace):
        if trace.agent.config.client == POLICY:
            PLAYED[trace.id] = ask
            mine.append(trace)

    played = await env.run_episode(env.known[index], vf.ModelContext("policy", POLICY), on_trace=begun)
    for error in (error for one in (played, *played.traces) for error in one.errors if not played.ok):
        raise RuntimeError(error.traceback) if error.traceback else ConnectionError(error.message)
    return {**{name: one for name, one in mine[0].metrics.items() if one is not None}, "score": mine[0].reward}


class Policy(vf.Client):
    """Client that asks for turns."""

    async def get_response(self, dialect, body, sampling, session_id=None, turn=None, headers=None):
        prompt, tools = list(map(message_to_wire, turn.prompt)), list(map(tool_to_wire, turn.tools))
        try:
            said = await PLAYED[session_id](prompt, tools)
        except EOFError:
            said = turn.trace.stop("max_turns") or {"text": "", "calls": []}
        calls = [vf.ToolCall(**{**call, "arguments": json.dumps(call["arguments"])}) for call in said["calls"]]
        message = vf.AssistantMessage(content=said["text"], tool_calls=calls or None)
        response = vf.Response(id="policy", created=0, model="policy", message=message, finish_reason="stop")
        return response.model_copy(update={"raw": serialize_completion(response, "policy")})


class Turns(vf.Harness[vf.HarnessConfig]):
    """Harness that asks for turns, and makes their calls by the task's MCP tools."""

    APPENDS_SYSTEM_PROMPT = SUPPORTS_MCP = SUPPORTS_RESUME = True
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        system, prompt = self.resolve_prompt(data)
        said = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(map(message_to_wire, prompt))
        said, calls = [{"role": "system", "content": system}] * bool(system) + said, True
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        options = {"headers": {"Authorization": f"Bearer {secret}"}, "timeout": aiohttp.ClientTimeout()}
        async with AsyncExitStack() as stack, aiohttp.ClientSession(**options, raise_for_status=True) as client:
            tools, names, connections = await connect_mcp({"mcpServers": servers}, stack)
            url, asked = f"{endpoint}/chat/completions", {"model": ctx.model, "messages": said, "tools": tools}
            while calls:
                said.append((await (await client.post(url, json=asked)).json())["choices"][0]["message"])
                for call in (calls := said[-1].get("tool_calls") or []):
                    name, given = call["function"]["name"], json.loads(call["function"]["arguments"])
                    text = await call_mcp(connections, names, name, given)
                    said.append({"role": "tool", "tool_call_id": call["id"], "content": text})
        return vf.ProgramResult(0, "", "")


@functools.cache
def _loaded(text):
    config, ours = json.loads(text), {"runtime": {"type": "subprocess"}, "harness": {"id": __name__}}
    taskset = config["taskset"]["id"]
    for role, field in vf.env_config_type(taskset, config.get("id", "")).model_fields.items():
        if isinstance(field.default, vf.AgentConfig):
            own = field.default.model_fields_set | ({"harness"} if vf.default_harness_id(taskset) != "bash" else set())
            config[role] = {key: one for key, one in ours.items() if key not in own} | config.get(role, {})
    env = vf.load_environment(vf.resolve_env_config(config))
    env.known, env.rest, serving = [], iter(env.taskset), env.serving()
    env.served = functools.cache(lambda: asyncio.ensure_future(serving.__aenter__()))
    return env
