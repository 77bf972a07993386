"""Engines by name, and what those over servers may know of one another."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

import agentrl.engines.servers
from agentrl.config.load import load_config
from agentrl.config.registries import ENGINES
from agentrl.engines.builder import EngineSetting, open_engine
from agentrl.engines.contract import RENAMED, InFlightEngine
from agentrl.engines.embedded.engine import EmbeddedEngine
from agentrl.engines.weights import SyncReport, Weights
from agentrl.errors import CodeError
from agentrl.observe.plain import PlainDisplay
from agentrl.system.loop_thread import LoopThread
from agentrl.system.plugin import with_present_names
from agentrl.workers.backend import Backend
from agentrl.workers.trainable import TrainableWorker
from tests.naming import naming


def test_every_named_engine_has_a_builder() -> None:
    assert {"embedded", "sglang"} <= set(ENGINES.names())
    assert all(callable(ENGINES.get(name)) for name in ENGINES.names())


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("return {}['x']", "KeyError: 'x'"),
        ("return None", "NoneType without generate, abort"),
        ("return engine", "Half without abort, release"),
    ],
    ids=["raises", "none", "half"],
)
def test_the_code_of_a_builder_is_blamed_by_its_place(policy_dir: Path, tmp_path: Path, body: str, says: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        f"class Half:\n    def generate(self): ...\nengine = Half()\ndef make(setting, loop):\n    {body}\n"
    )
    config = load_config([f"actor_rollout_ref.rollout.name={file}:make", f"actor_rollout_ref.model.path={policy_dir}"])
    setting = EngineSetting(config, "cpu", 64, tmp_path, str, PlainDisplay("run"))
    with LoopThread("engine") as loop, naming(CodeError, f"engine {file}:make", says, f"{file}"):
        open_engine(setting, loop)


def test_what_all_servers_share_knows_no_server_software() -> None:
    files = list(Path(agentrl.engines.servers.__path__[0]).rglob("*.py"))
    assert files and not [file for file in files if "engines.sglang" in file.read_text(encoding="utf-8")]


def test_an_engine_and_a_backend_with_the_names_of_before_are_taken() -> None:
    class Written(EmbeddedEngine):
        """Written before `lock_weights` and `unlock_weights` had these names."""

        def __init__(self) -> None: ...

        async def update_in_flight(self, weights: Weights, version: int) -> SyncReport:
            return SyncReport(0, 0.0)

        async def release_weights(self) -> None: ...

        async def offer_weights(self, weights: Weights, version: int) -> None: ...

    engine = Written()
    assert not isinstance(engine, InFlightEngine)
    assert isinstance(found := with_present_names(engine, RENAMED), InFlightEngine)
    assert found.lock_weights == engine.release_weights and found.unlock_weights == engine.offer_weights

    backend = SimpleNamespace(at_work=nullcontext)
    TrainableWorker(cast(Backend[object], backend))
    assert backend.on_device is nullcontext
