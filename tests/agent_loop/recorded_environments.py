"""What environments of other packages answered, recorded: `python -m tests.agent_loop.recorded_environments`.

The recordings replay in `make test`; `make test-all` plays them again with the real packages.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agentrl.environments.interpreter import find_python, virtual_environment
from agentrl.environments.sidecar import EnvironmentOptions, Fields, Play, Sidecar
from data_prep.environment import entry

FILE = Path(__file__).absolute().with_suffix(".json")
SAID = {
    "openenv": ["Hello!", ""],
    "reasoning_gym": ["I count <answer>310</answer>"],
    "textarena": ["[10]", "no move", "[15]", "[18]"],
    "verifiers": ["<answer>1</answer>"],
    "verifiers_v1": ["It is 2."],
}
"""Turns of the policy, by family; the last one of a game that goes on is cut by the turn limit."""

GAME = {"games": ["TicTacToe-v0"], "players": 2}
"""`task_options` of TextArena's game for two."""
MOVES = ["[0]", "[3]", "[1]", "[4]", "[2]"]
"""Moves of both players in turn; the first one wins."""

COUNTING: list[list[tuple[str, Fields]]] = [
    [("increment_counter", {"count": 7})],
    [("increment_counter", {"count": 8}), ("get_counter_value", {})],
    [],
]
"""Calls of each turn in NeMo Gym's example of a counter; the turn without calls is the answer."""
NEMO_GYM = (
    *("openai<=2.7.2", "tqdm", "pydantic", "devtools", "fastapi", "mcp<2,>=1.27", "itsdangerous", "uvicorn", "uvloop"),
    *("hydra-core", "omegaconf", "rich", "aiohttp>=3.14.1", "yappi", "ray>=2.55.1", "psutil", "orjson", "requests"),
    *("python-multipart", "gprof2dot", "pydot", "wandb", "pandas"),
)
"""Packages that a resources server of NeMo Gym 0.4.0 needs; mlflow and datasets, which it names too, are left out."""
NEMO_SERVER = """
import importlib, socket, sys

import uvicorn
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.server_utils import ServerClient
from omegaconf import OmegaConf

module, _, name = sys.argv[1].partition(":")
kind = getattr(importlib.import_module(module), name)
listening = socket.create_server(("127.0.0.1", 0))
port = listening.getsockname()[1]
config = kind.model_fields["config"].annotation(name="tested", host="127.0.0.1", port=port, entrypoint="app.py")
head = BaseServerConfig(host="127.0.0.1", port=port)
client = ServerClient(head_server_config=head, global_config_dict=OmegaConf.create({}))
app = kind(config=config, server_client=client).setup_webserver()
print(port, flush=True)
uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listening])
"""
"""Program that serves a resources server of the package on a free port, which it prints."""

TASKSET = """
import verifiers.v1 as vf

__all__ = ["Sums"]


class Numbers(vf.TaskData):
    number: int


class Sum(vf.Task[Numbers]):
    @vf.reward()
    async def right(self, trace):
        return float(str(self.data.number + 1) in trace.last_reply)

    @vf.metric()
    async def letters(self, trace):
        return len(trace.last_reply)


class Sums(vf.Taskset[Sum, vf.TasksetConfig]):
    def load(self):
        for number in range(40):
            yield Sum(Numbers(prompt=f"What is {number} + 1?", system_prompt="Be brief.", number=number))
"""
"""Task set of verifiers 0.4, as `my_taskset.py` of the entry in environments/."""

REPLAY = """
def tasks(split, seed, count):
    return []

def start(task, seed):
    return {"steps": list(task["steps"]), "score": task["score"]}, task["opening"]

def step(episode, action):
    return episode["steps"].pop(0)

def score(episode):
    return episode["score"]
"""
"""Environment whose tasks are recordings."""


def openenv_template(options: EnvironmentOptions) -> None:
    """Make OpenEnv's template `echo_env` in the working directory, by the package's own command, for 64 sessions."""
    python = virtual_environment("openenv", find_python(options.python, "python"), options.packages, "packages")
    making = [str(Path(python).with_name("openenv")), "init", "echo_env"]
    subprocess.run(making, check=True, stdout=subprocess.DEVNULL, env={"PATH": "", "HOME": str(Path.cwd())})
    app = Path("echo_env/server/app.py")
    app.write_text(app.read_text().replace("max_concurrent_envs=1,", "max_concurrent_envs=64,"))


def make_files(family: str, options: EnvironmentOptions) -> None:
    """Make the files that a family's entry names, in the working directory."""
    if family == "openenv":
        openenv_template(options)
    if family == "verifiers_v1":
        Path("my_taskset.py").write_text(TASKSET)


async def play(family: str) -> dict[str, Any]:
    """Play the first task with the real package, in the working directory; return the recording."""
    _, options = entry(Path(f"environments/{family}.yaml"), None)
    make_files(family, options)
    sidecar = Sidecar(options)
    try:
        (task,) = await sidecar.tasks("train", 1, 1, 600.0)
        episode = Play(sidecar, await sidecar.ready(), 600.0, family)
        opening, steps = await episode.start(task, 7), []
        for text in SAID[family]:
            if not episode.done:
                steps.append(await episode.step(text, ()))
        return {"task": task, "opening": opening, "steps": steps, "score": await episode.score()}
    finally:
        await sidecar.close()


async def play_game(**changes: object) -> dict[str, Any]:
    """Play a game of two players with the real package; return the recording. Its steps name the roles."""
    _, options = entry(Path("environments/textarena.yaml"), None)
    sidecar = Sidecar(options.model_copy(update={"task_options": GAME, **changes}))
    try:
        (task,) = await sidecar.tasks("train", 1, 1, 600.0)
        game = Play(sidecar, await sidecar.ready(), 600.0, "textarena")
        opening, steps = {"observation": await game.start(task, 7), "role": game.role}, []
        for text in MOVES:
            step = await game.step(text, ())
            steps.append({**step, "role": game.role})
        scores, numbers = await game.role_scores()
        return {"task": task, "opening": opening, "steps": steps, "score": {"scores": scores, **numbers}}
    finally:
        await sidecar.close()


@contextlib.contextmanager
def nemo_gym_server() -> Iterator[dict[str, str]]:
    """Serve the example of a counter with the real package; yield `task_options` of the adapter."""
    python = virtual_environment("nemo_gym", find_python("3.12", "python"), NEMO_GYM, "packages")
    install = [python, "-m", "pip", "install", "-q", "--no-deps", "nemo-gym==0.4.0"]  # once it is there: offline
    subprocess.run(install, check=True, stdout=subprocess.DEVNULL)
    where = [python, "-c", "import resources_servers as found; print(found.__path__[0])"]
    folder = subprocess.run(where, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    file = Path(folder) / "example_session_state_mgmt" / "data" / "example.jsonl"
    serve = [
        python,
        "-c",
        NEMO_SERVER,
        "resources_servers.example_session_state_mgmt.app:StatefulCounterResourcesServer",
    ]
    with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield {"url": f"http://127.0.0.1:{int(server.stdout.readline())}", "file": str(file)}
        finally:
            server.kill()


async def play_counter() -> dict[str, Any]:
    """Play a task of NeMo Gym's example of a counter with the real package; return the recording, without the URL."""
    with nemo_gym_server() as given:
        sidecar = Sidecar(EnvironmentOptions(environment="nemo_gym", task_options=dict(given)))
        try:
            tasks = await sidecar.tasks("train", 1, 99, 600.0)
            (task,) = (one for one in tasks if one["row"]["initial_count"] == 9)  # type: ignore[call-overload, index]
            episode, steps = Play(sidecar, await sidecar.ready(), 600.0, "nemo_gym"), []
            opening = await episode.start(task, 7)
            for number, calls in enumerate(COUNTING):
                wire: list[Fields] = [
                    {"id": f"c{number}_{at}", "name": name, "arguments": arguments}
                    for at, (name, arguments) in enumerate(calls)
                ]
                steps.append(await episode.step("" if calls else "24", wire))
            score = await episode.score()
        finally:
            await sidecar.close()
    return {"task": {**task, "id": ""}, "opening": opening, "steps": steps, "score": score}


async def main() -> None:
    """Write the recordings of all families."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        found = {
            **{family: await play(family) for family in SAID},
            "game": await play_game(),
            "counter": await play_counter(),
        }
    FILE.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    asyncio.run(main())
