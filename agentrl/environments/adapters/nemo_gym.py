"""NeMo Gym: a resources server that runs, with its tools, sessions and verifier. Needs no package.

Options of `tasks`: `url` of the resources server, `file`, its tasks as JSON lines (`responses_create_params`, and what
its verifier reads), and `validation`, such a file for validation; without it every tenth task is for validation.
"""

import http.cookiejar
import json
import random
import re
import urllib.error
import urllib.request
from pathlib import Path

NAME = re.compile(r"[A-Za-z0-9_-]+")
ROUTES = ("seed_session", "close_session", "get_state", "verify", "reverify_mode", "aggregate_metrics")
"""Routes of a resources server that are no tools."""


def tasks(split, seed, count, url, file, validation=None):
    """Yield the file's tasks, shuffled."""
    with Path(validation if validation and split != "train" else file).open(encoding="utf-8") as lines:
        rows = [(number, json.loads(line)) for number, line in enumerate(lines) if line.strip()]
    if not validation:
        rows = [row for row in rows if (row[0] % 10 == 0) == (split != "train")]
    random.Random(seed).shuffle(rows)
    for number, row in rows[:count]:
        asked = row["responses_create_params"]
        said = asked["input"] if isinstance(asked["input"], list) else [{"role": "user", "content": asked["input"]}]
        system = [{"role": "system", "content": asked["instructions"]}] if asked.get("instructions") else []
        tools = [{"type": "function", "function": _chosen(tool)} for tool in asked.get("tools") or []]
        yield {
            "id": f"{file}:{number + 1}",
            "prompt": [*system, *map(_message, said)],
            "tools": tools,
            "row": row,
        }


def configured(task, url, file, validation=None):
    """Return the address of the entry's server. Refuses tools that are other routes of it."""
    for name in (tool["function"]["name"] for tool in task.get("tools") or []):
        if name in ROUTES or not NAME.fullmatch(name):
            raise ValueError(f"its tool {name!r} is no tool of a resources server; expected letters, digits, _ and -")
    return {"url": url}


def start(task, seed):
    """Open a session, which the server knows by a cookie."""
    cookies = urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar())
    episode = {"task": task, "output": [], "client": urllib.request.build_opener(cookies)}
    _post(episode, "seed_session", task["row"])
    return episode, None


def step(episode, action):
    """Make the calls of a turn; a turn without calls is the answer."""
    if action["text"] or not action["calls"]:
        part = {"type": "output_text", "text": action["text"], "annotations": []}
        message = {"type": "message", "role": "assistant", "status": "completed", "content": [part]}
        episode["output"].append({"id": f"msg_{len(episode['output'])}", **message})
    answers = []
    for call in action["calls"]:
        given = {"call_id": call["id"], "name": call["name"], "arguments": json.dumps(call["arguments"])}
        answers.append(_post(episode, call["name"], call["arguments"], refused=True))
        answered = {"type": "function_call_output", "call_id": call["id"], "output": answers[-1]}
        episode["output"] += [{"type": "function_call", **given}, answered]
    return {"answers": answers, "done": not answers}


def score(episode):
    """Ask the verifier; its other numbers are metrics."""
    row = episode["task"]["row"]
    rest = {
        "tools": row["responses_create_params"].get("tools") or [],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
    }
    response = {
        "id": "resp",
        "object": "response",
        "created_at": 0,
        "model": "policy",
        "output": episode["output"],
        **rest,
    }
    found = json.loads(_post(episode, "verify", {**row, "response": response}))
    numbers = {name: float(value) for name, value in found.items() if isinstance(value, (bool, float, int))}
    return {**numbers, "score": found["reward"]}


def _post(episode, path, body, refused=False):
    request = urllib.request.Request(f"{episode['task']['url'].rstrip('/')}/{path}", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    try:
        with episode["client"].open(request, timeout=600) as answer:
            return answer.read().decode()
    except urllib.error.HTTPError as error:
        if not refused or error.code >= 500:  # a call that the server refuses is answered with its words
            raise
        return error.read().decode()


def _chosen(tool):
    return {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}


def _message(one):
    content = one["content"]
    text = content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
    return {"role": {"developer": "system"}.get(one["role"], one["role"]), "content": text}
