"""Rows from anywhere name nothing: every adapter refuses a row that names another module, server, folder or data set.

The packages of the adapters are stand-ins: what an accepted row would run says so and fails.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agentrl.environments.loop import EnvironmentLoop
from agentrl.environments.sidecar import ADAPTERS, EnvironmentOptions, Play, RefusedRow, Sidecar
from agentrl.errors import CodeError, DataError, InfrastructureError
from agentrl.trajectory import Status
from tests.agent_loop.conftest import Bench, sample
from tests.agent_loop.test_environments import harbor_task, played
from tests.naming import naming

RUNS = "from pathlib import Path\nPath('ran').touch()\n"
REACHED = "def reached(*args, **kwargs):\n    raise ValueError('reached')\n"
MOCKED = """
import sys
from unittest.mock import MagicMock

for name in ("", ".clients", ".clients.train", ".dialects", ".dialects.chat", ".harnesses", ".harnesses.utils",
             ".harnesses.utils.mcp", ".interception"):
    sys.modules["verifiers.v1" + name] = MagicMock()
v1 = sys.modules["verifiers.v1"]
v1.Client, v1.HarnessConfig, v1.Harness = object, "config", {"config": object}
v1.env_config_type.side_effect = ValueError("reached")
for name in (".clients", ".errors", ".types"):
    sys.modules["verifiers" + name] = MagicMock()
sys.modules["verifiers.clients"].Client = object
"""
FILES = {
    "evil.py": RUNS + "def load(**arguments): ...\n",
    "good.py": REACHED,
    "verifiers/__init__.py": MOCKED,
    "textarena.py": REACHED + "make = reached\n",
    "reasoning_gym/__init__.py": REACHED
    + "from types import SimpleNamespace\ncreate_dataset = reached\n"
    + "factory = SimpleNamespace(DATASETS=['chain_sum', 'countdown', 'leg_counting'])\n",
    "reasoning_gym/utils.py": "extract_answer = None\n",
    "websockets/sync/client.py": REACHED + "connect = reached\n",
    "evil_env/openenv.yaml": "app: evil:load\n",
}


@dataclass(frozen=True)
class Case:
    """What rows of an adapter hold."""

    options: dict[str, Any]
    data: dict[str, Any]
    """Of a row of today."""
    named: dict[str, Any]
    """Further keys of a row of versions that wrote what the entry says into it."""
    hostile: list[dict[str, Any]]
    """Changes of either."""


NOWHERE = "http://127.0.0.1:9"
CASES = {
    "harbor": Case(
        {"folder": "tasks", "sandbox": NOWHERE},
        {"id": "t00", "name": "t00"},
        {"folder": "tasks/t00", "sandbox": NOWHERE, "command_timeout": 60},
        [{"folder": "/etc"}, {"name": "../tasks/t00"}, {"name": "/etc"}, {"sandbox": "http://evil"}, {"name": ["t"]}],
    ),
    "nemo_gym": Case(
        {"url": NOWHERE, "file": "tasks.jsonl"},
        {"row": {"responses_create_params": {}}},
        {"url": NOWHERE},
        [{"url": "file:///etc/passwd"}, {"url": "http://evil"}],
    ),
    "openenv": Case(
        {"server": NOWHERE, "resets": [{}, {"level": 2}], "shown": "text"},
        {"reset": {"seed": 3, "level": 2}, "mcp": False, "field": "message"},
        {"server": NOWHERE, "shown": "text"},
        [{"server": "evil_env"}, {"server": "http://evil"}, {"reset": {"path": "/etc"}}, {"shown": "other"}],
    ),
    "reasoning_gym": Case(
        {"datasets": {"leg_counting": {"max_animals": 3}, "chain_sum": None}},
        {"dataset": "leg_counting", "seed": 1, "index": 0},
        {"options": {"max_animals": 3}},
        [{"dataset": "countdown"}, {"options": {"max_animals": 9}}, {"made_with": 1}, {"dataset": {}}],
    ),
    "textarena": Case(
        {"games": ["GuessTheNumber-v0"]},
        {"game": "GuessTheNumber-v0", "seed": 1},
        {"options": {}},
        [{"game": "evil:Env-v0"}, {"options": {"hardcore": True}}, {"roles": ["player-0", "player-1"]}],
    ),
    "verifiers": Case(
        {"environment": "good:reached"},
        {"row": {"prompt": "?"}},
        {"environment": "good:reached", "arguments": {}},
        [{"environment": "evil:load"}, {"arguments": {"command": "touch ran"}}],
    ),
    "verifiers_v1": Case(
        {"environment": {"taskset": {"id": "good"}}},
        {"index": 0},
        {"environment": {"taskset": {"id": "good"}}},
        [{"environment": {"taskset": {"id": "evil"}}}],
    ),
}


def test_every_adapter_has_a_hostile_row() -> None:
    assert set(CASES) == {path.stem for path in ADAPTERS.glob("*.py")}


@pytest.mark.parametrize("adapter", CASES)
async def test_an_adapter_takes_what_its_entry_says_and_nothing_from_rows(
    adapter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of today and of earlier versions alike; nothing that a refused row names is touched."""
    monkeypatch.chdir(tmp_path)
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    harbor_task(tmp_path / "tasks" / "t00")
    case = CASES[adapter]
    sidecar = Sidecar(EnvironmentOptions(environment=adapter, task_options=case.options))

    async def start(data: dict[str, Any]) -> str:
        """Say how a row's episode begins."""
        try:
            await Play(sidecar, await sidecar.ready(), 20.0, "place").start(data, 1)
        except RefusedRow:
            return "refused"
        except (CodeError, InfrastructureError) as error:
            return "reached" if "reached" in str(error) or "Connection refused" in str(error) else str(error)
        return "reached"

    try:
        assert [await start(row) for row in (case.data, {**case.data, **case.named})] == ["reached"] * 2
        for change in case.hostile:
            assert await start({**case.data, **change}) == "refused", change
            assert await start({**case.data, **case.named, **change}) == "refused", change
    finally:
        await sidecar.close()
    assert not (tmp_path / "ran").exists()


CONFIGURED = """
def tasks(split, seed, count, module):
    yield {"prompt": "?"}

def configured(task, module):
    return {"module": module}

def start(task, seed):
    return task["module"], None

def step(episode, action):
    return {"done": True}

def score(episode):
    return float(episode == "mine")
"""


async def test_a_refused_row_is_left_out_with_the_command_that_makes_rows(
    bench: Callable[..., Bench], tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(CONFIGURED)
    options = EnvironmentOptions(environment=str(tmp_path / "mine.py"), task_options={"module": "mine"})

    def row(**content: Any) -> Any:
        return sample("env", data_source="environment/env", extra_info={"environment": json.dumps(content)})

    rows = [
        row(entry="env", index=0, seed=7, data={}),
        row(seed=7, task={"module": "mine"}),
        row(entry="env", index=0, seed=7, data={"module": "evil"}),
        row(seed=7, task={"module": "evil"}),
    ]
    good, old, *refused = await played(bench(["a"]), options, *rows)
    assert [(one.status, one.score) for one in (good, old)] == [(Status.COMPLETED, 1.0)] * 2
    for one in refused:
        assert (one.status, one.score) == (Status.FAILED, None)
        assert "its module is 'evil', and the entry's is 'mine'. Make the rows again: python -m" in str(one.failure)
    other = row(entry="another", index=0, seed=7, data={})
    with naming(DataError, "'another'", "--config", "FILE", "--name", "--out", "DIR"):
        EnvironmentLoop(options).first_prompt(other, [])
