"""Task lists of OpenEnv as rows: of a stand-in for the list's routes, and of a server of the real package."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from agentrl.environments.sidecar import EnvironmentOptions, Fields, Play, Sidecar
from data_prep.environment import entry, list_tasks
from data_prep.environment import main as prepare
from tests.agent_loop.recorded_environments import openenv_template
from tests.naming import Names, assert_names

SPLITS = {"train": "easy", "validation": "held out"}
COUNTS = {"easy": 5, "held out": 2}
LISTING = """
    def num_tasks(self, split):
        return {"easy": 5, "held out": 2}[split]

    def step("""
"""Method that gives the package's template a list of tasks; the next one follows."""
LISTED: dict[str, list[Fields]] = {
    "train": [{"split": "easy", "index": index} for index in range(4)],
    "validation": [{"split": "held out", "index": index} for index in range(2)],
}
"""Arguments of `reset` of the rows, where at most four are wanted."""


class TaskRoutes(BaseHTTPRequestHandler):
    """Stand-in for a server of OpenEnv 0.10.0 with a list of tasks: its answers, without sessions."""

    def do_GET(self) -> None:
        action = {"title": "EchoAction", "required": ["message"], "properties": {"message": {"type": "string"}}}
        self.answer({"/schema": {"action": action}, "/list_environments": ["Echo"]}[self.path])

    def do_POST(self) -> None:
        assert (self.path, self.headers["Content-Type"]) == ("/Echo/num_tasks", "application/json")
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if asked["split"] in COUNTS:
            self.answer({"num_tasks": COUNTS[asked["split"]]})
        else:
            self.answer({"detail": "num_tasks is not supported for this environment"}, 501)

    def answer(self, found: object, status: int = 200) -> None:
        body = json.dumps(found).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def served() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), TaskRoutes) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.fixture
def no_sessions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in for the package of sessions, which is not among the trainer's; no test with it opens one."""
    (tmp_path / "websockets" / "sync").mkdir(parents=True)
    (tmp_path / "websockets" / "sync" / "client.py").write_text("connect = None\n")
    monkeypatch.chdir(tmp_path)


async def resets(options: EnvironmentOptions) -> dict[str, list[object]]:
    listed = await list_tasks(Sidecar(options), 1, {"train": 4, "validation": 4}, 600)
    return {split: [task["reset"] for task in tasks] for split, tasks in listed.items()}


@pytest.mark.usefixtures("no_sessions")
async def test_listed_tasks_are_rows() -> None:
    with served() as url:
        given = {"server": url, "resets": SPLITS}
        assert await resets(EnvironmentOptions(environment="openenv", task_options=given)) == LISTED
        seeds = await resets(EnvironmentOptions(environment="openenv", task_options={"server": url}))
        assert seeds["train"][:2] == [{"seed": 2_000_006}, {"seed": 2_000_007}]


@pytest.mark.usefixtures("no_sessions")
@pytest.mark.parametrize(
    ("splits", "problem"),
    [
        (
            {**SPLITS, "train": "hard"},
            ("tasks:", "requests.exceptions.HTTPError", "501"),
        ),
        ({**SPLITS, "validation": "easy"}, "validation"),
    ],
)
def test_splits_that_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], splits: dict[str, str], problem: Names
) -> None:
    """A split without a list, and tasks for training that would be for validation, too."""
    config = tmp_path / "entry.yaml"
    with served() as url:
        options = {"environment": "openenv", "task_options": {"server": url, "resets": splits}}
        line = {"name": "echo", "_target_": "agentrl.environments.loop.EnvironmentLoop", "options": options}
        config.write_text(json.dumps([line]))
        assert prepare(["--config", str(config), "--out", str(tmp_path / "rows")]) == 2
    assert_names(capsys.readouterr().err, problem)


@pytest.mark.slice(0, "long run")
@pytest.mark.timeout(1800)
async def test_tasks_that_a_real_server_lists_are_played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _, options = entry(Path("environments/openenv.yaml"), None)
    openenv_template(options)
    file = Path("echo_env/server/echo_env_environment.py")
    code = file.read_text().replace("\n    def step(", LISTING, 1)
    file.write_text(code.replace('"Echo Env environment ready!"', "str(kwargs)"))
    options = options.model_copy(update={"task_options": {**options.task_options, "resets": SPLITS}})
    assert await resets(options) == LISTED
    sidecar = Sidecar(options)
    try:
        *_, last = await sidecar.tasks("validation", 1, 4, 600)
        episode = Play(sidecar, await sidecar.ready(), 600, "openenv")
        assert await episode.start(last, 7) == "{'split': 'held out', 'index': 1}"
        assert (await episode.step("Hello!", ()))["observation"] == "Hello!"
        await episode.close()
    finally:
        await sidecar.close()
