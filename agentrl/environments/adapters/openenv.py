"""OpenEnv: an environment that a server plays over WebSocket.

Options of `tasks`: `server`, its URL, or a folder with `openenv.yaml`, which this process serves; `prompt`; `shown`,
the field of an observation to show (all as JSON); `resets`, arguments of `reset` in turn, or splits of its task list.
"""

import contextlib
import importlib
import json
import socket
import sys
import threading
from pathlib import Path

import requests
import uvicorn
import yaml
from websockets.sync.client import connect

LOADING, SERVED = threading.Lock(), {}


def tasks(split, seed, count, server, prompt=None, resets=({},), shown=None):
    """Yield listed tasks, or seeds. An action of one text is the policy's text; others are calls."""
    schema, tools = requests.get(f"http{_address(server)}/schema", timeout=60).json()["action"], []
    field, *others = schema.get("required") or [None]
    if mcp := schema["title"] in ("Action", "CallToolAction", "ListToolsAction"):
        with connect(f"ws{_address(server)}/ws") as session:
            listed = _ask(session, "step", {"type": "list_tools"})["observation"]["tools"]
        tools = [{"parameters": tool.pop("input_schema"), **tool} for tool in listed]
    elif others or schema["properties"].get(field, {}).get("type") != "string":
        tools = [{"name": "act", "description": schema.get("description", "Act."), "parameters": schema}]
    tools = [{"type": "function", "function": tool} for tool in tools]
    task = {"prompt": prompt or schema.get("description", "Act."), "tools": tools}
    if isinstance(resets, dict):
        name = requests.get(f"http{_address(server)}/list_environments", timeout=60).json()[0]
        found = requests.post(f"http{_address(server)}/{name}/num_tasks", json={"split": resets[split]}, timeout=60)
        found.raise_for_status()
        resets = [{"split": resets[split], "index": index} for index in range(found.json()["num_tasks"])]
    else:
        first = (2 * seed + (split != "train")) * 1_000_003  # so that two runs have no seed in common
        resets = [{"seed": first + number, **resets[number % len(resets)]} for number in range(count)]
    for reset in resets[:count]:
        yield {**task, "id": json.dumps(reset), "reset": reset, "mcp": mcp, "field": None if tools else field}


def configured(task, server, prompt=None, resets=({},), shown=None):
    """Return the entry's server. The row's `reset` must be one of the entry's, with any seed or index."""
    asked = {key: value for key, value in task["reset"].items() if key != "seed"}
    if isinstance(resets, dict):
        resets = [{"split": name, "index": int(asked["index"])} for name in resets.values()]
    if asked not in [{key: value for key, value in one.items() if key != "seed"} for one in resets]:
        raise ValueError(f"the entry has no reset {asked!r:.80}")
    return {"server": server, "shown": shown}


def start(task, seed):
    """Open a session, and reset its environment."""
    session = connect(f"ws{_address(task['server'])}/ws", open_timeout=60, ping_interval=None, max_size=None)
    seen = _ask(session, "reset", {"seed": seed, **task["reset"]}, task["shown"])
    return {"session": session, "task": task, "rewards": [], "done": bool(seen.get("done"))}, seen["said"]


def step(episode, action):
    """Act by the turn's text or by its calls; where an action is a call, a turn without one ends the episode."""
    task, calls, rewards, said = episode["task"], action["calls"], [], []
    acts = [{task["field"]: action["text"]}] if task["field"] else [call["arguments"] for call in calls]
    if task["mcp"]:
        acts = [{"type": "call_tool", "tool_name": one["name"], "arguments": one["arguments"]} for one in calls]
    done = episode["done"] or not acts
    for act in acts:
        seen = {"said": "Error: the episode is over"} if done else _ask(episode["session"], "step", act, task["shown"])
        rewards += [float(seen["reward"])] if seen.get("reward") is not None else []
        done = done or bool(seen.get("done"))
        said.append(seen["said"])
    episode["rewards"] += rewards
    reward = sum(rewards) if rewards else None
    return {"reward": reward, "done": done, **({"observation": said[0]} if task["field"] else {"answers": said})}


def score(episode):
    """Return the sum of the rewards; None where the server gave none, as NaN arrives as null, too."""
    return sum(episode["rewards"]) if episode["rewards"] else None


def close(episode):
    """End the session."""
    episode["session"].close()


def _ask(session, kind, data, field=None):
    with contextlib.suppress(Exception):  # a server without a place says so and hangs up: `recv` reads it, or raises
        session.send(json.dumps({"type": kind, "data": data}))
    if (answer := json.loads(session.recv()))["type"] == "error":
        if answer["data"]["code"] == "VALIDATION_ERROR":  # the policy's mistake
            return {"said": "Error: " + "; ".join(one["msg"] for one in answer["data"]["errors"])}
        session.close()  # of an episode that could not begin, too
        if answer["data"]["code"] == "CAPACITY_REACHED":
            raise BlockingIOError(answer["data"]["message"])
        raise RuntimeError("OpenEnv server: {message} ({code})".format(**answer["data"]))
    shown = (seen := answer["data"]["observation"]).get(field, seen)
    if "tool_name" in seen:
        shown = seen["error"] or "\n".join(part.get("text", "") for part in seen["result"]["content"])
    return {**answer["data"], "said": shown if isinstance(shown, str) else json.dumps(shown, ensure_ascii=False)}


def _address(server):
    with LOADING:
        if not server.startswith("http") and server not in SERVED:
            sys.path.insert(0, str(Path(server).resolve()))
            module, _, name = yaml.safe_load(Path(server, "openenv.yaml").read_text())["app"].partition(":")
            app, listening = getattr(importlib.import_module(module), name), socket.create_server(("127.0.0.1", 0))
            serving = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
            threading.Thread(target=serving.run, args=([listening],), daemon=True).start()
            SERVED[server] = f"://127.0.0.1:{listening.getsockname()[1]}"
        return SERVED[server] if server in SERVED else server.rstrip("/")[4:]
