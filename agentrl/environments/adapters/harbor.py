"""Harbor's task folders that need no image: the policy's commands and the tests run in agentrl's sandbox.

Options of `tasks`: `folder` of task folders, of which each tenth is for validation; `sandbox`, a server's URL;
`command_timeout` in seconds. WORKDIR, /tests and /logs lie in HOME, and the task's texts are changed accordingly.
"""

import base64
import json
import random
import re
import tomllib
import urllib.request
import uuid
from pathlib import Path

HOME = "/home/sandbox"
COMMAND = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
BASH = {"name": "bash", "description": "Run a command in the working directory.", "parameters": COMMAND}
CELL = """import subprocess
done = subprocess.run(["bash", "-c", %r], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
print(done.stdout.decode(errors="replace") + f"\\n[exit status {done.returncode}]" * (done.returncode != 0))"""


def tasks(split, seed, count, folder, sandbox, command_timeout=60):
    """Yield the tasks, shuffled; a task that needs an image is an error."""
    found = enumerate(sorted(Path(folder).glob("*/task.toml")))
    found = [one.parent for number, one in found if (number % 10 == 0) == (split != "train")]
    random.Random(seed).shuffle(found)
    for one in found[:count]:
        tools = [{"type": "function", "function": BASH}]
        yield {"id": one.name, "name": one.name, "prompt": _read(one)["instruction"], "tools": tools}


def configured(task, folder, sandbox, command_timeout=60):
    """Return the entry's sandbox, and the folder of the task, which must be one of the entry's."""
    name = task.get("name", task["id"])  # earlier rows have the id alone
    if (found := Path(folder) / name) not in [one.parent for one in Path(folder).glob("*/task.toml")]:
        raise ValueError(f"{folder} has no task {name!r:.80}")
    return {"folder": str(found), "sandbox": sandbox, "command_timeout": command_timeout}


def start(task, seed):
    """Begin without a session: the first command opens it."""
    return {"task": task, "made": _read(Path(task["folder"])), "name": uuid.uuid4().hex, "alive": False}, None


def step(episode, action):
    """Run the turn's commands; a turn without one ends the episode."""
    cells = [_cell(episode, call["arguments"]["command"]) for call in action["calls"]]
    said = [(cell.get("run_result") or {}).get("stdout", "") + cell["message"] for cell in cells]
    return {"answers": [one.strip() or "(no output)" for one in said], "done": not cells}


def score(episode):
    """Test the policy's files in a sandbox of their own, without its processes. Tests without a reward give no score.
    A policy that ended its session gets 0: no files are left of it.
    """
    made, box, packed = episode["made"], uuid.uuid4().hex, "/tmp/state.tgz"
    # Status 1: a file changed while it was read. The files' names do not reach stdout, which ends with our word.
    ended = _cell(episode, f"tar czf {packed} -C {HOME} . 2>/dev/null; [ $? -lt 2 ] && echo whole", [packed])
    if not (state := ended["files"].get(packed)):
        return {"score": 0.0, "state_lost": 1.0, "state_cut": 0.0}
    whole, place = ended["run_result"]["stdout"].rstrip().endswith("whole"), f"{box}/state.tgz"
    program = (
        f"tar xzf {place} && touch {box}/whole; rm -rf {place} tests logs; mv {box}/tests .; mkdir -p logs/verifier"
    )
    files = {f"{box}/{name}": content for name, content in {"state.tgz": state, **made["tests"]}.items()}
    rewards = [f"logs/verifier/reward.{kind}" for kind in ("json", "txt")]
    code = f"{program}; {made['enter']}; bash {HOME}/tests/test.sh"
    asked = {"language": "bash", "code": code, "run_timeout": made["seconds"], "files": files}
    found = _post(episode, "run_code", {**asked, "fetch_files": [*rewards, f"{box}/whole"]})["files"]
    cut = not whole or f"{box}/whole" not in found
    value = next((json.loads(base64.b64decode(found[name])) for name in rewards if found.get(name)), None)
    numbers = value if isinstance(value, dict) else {"reward": value}
    reward = numbers.pop("reward", None)
    return {**numbers, "score": reward, "state_lost": 0.0, "state_cut": float(cut)}


def close(episode):
    """End the session."""
    if episode["alive"]:
        _post(episode, f"sessions/{episode['name']}", None, "DELETE")


def _cell(episode, command, fetch=()):
    asked = {"session_id": episode["name"], "code": CELL % f"{episode['made']['enter']}; {command}"}
    asked |= {"run_timeout": episode["task"]["command_timeout"], "fetch_files": list(fetch)}
    ended = _post(episode, "run_session", asked)
    if ended["created"] and episode["alive"]:
        raise ConnectionError("the sandbox was started again, and the session is gone")
    episode["alive"] = ended["alive"]
    return ended


def _post(episode, path, body, method="POST"):
    url, data = f"{episode['task']['sandbox'].rstrip('/')}/{path}", json.dumps(body).encode() if body else None
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    ended = json.load(urllib.request.urlopen(request, timeout=3600))
    if ended.get("status") == "SandboxError":
        raise ConnectionError(ended["message"])
    return ended


def _read(folder):
    if link := next((one for one in (folder, *folder.rglob("*")) if one.is_symlink()), None):
        raise ValueError(f"{link}: a link, which may lead to files of this machine; copy what it leads to")
    config, docker = tomllib.loads((folder / "task.toml").read_text()), folder / "environment" / "Dockerfile"
    place, tester = config.get("environment", {}), config.get("verifier", {})
    orders = [line.strip() for line in (docker.read_text() if docker.exists() else "").splitlines()]
    needs = [key for key in ("docker_image", "env", "gpus", "mcp_servers") if place.get(key)]
    needs += [one for one in orders if not re.match(r"$|#|FROM (ubuntu|debian|python)\b|WORKDIR /", one)]
    needs += [one.name for one in folder.glob("environment/*") if one != docker] + ["steps"] * ("steps" in config)
    if needs or tester.get("environment_mode", "shared") != "shared":
        needed = "; ".join(needs) or tester
        raise ValueError(
            f"{folder}: the task needs an image, which the sandbox has not ({needed}). For a shell, or an agent, in a "
            "container: python -m data_prep.tasks"
        )
    workdir = place.get("workdir") or next((one.split()[1] for one in orders if one.startswith("WORKDIR")), "/app")
    paths = re.compile(rf"(?<![\w./}})-])/(tests|logs|{re.escape(workdir[1:])})(?![\w-])".encode())
    texts = [folder / "instruction.md", folder / "tests/test.sh", *filter(Path.is_file, folder.glob("tests/**/*"))]
    moved = {str(one.relative_to(folder)): paths.sub(rf"{HOME}/\1".encode(), one.read_bytes()) for one in texts}
    made = {"instruction": moved.pop("instruction.md").decode(), "seconds": tester.get("timeout_sec", 600)}
    made["tests"] = {name: base64.b64encode(content).decode() for name, content in moved.items()}
    return {**made, "enter": f"mkdir -p {HOME}{workdir}; cd {HOME}{workdir}"}
