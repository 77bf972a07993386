"""Engines by name, and what those over servers may know of one another."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import agentrl.engines.servers
from agentrl.config.registries import ENGINES
from agentrl.engines.contract import RENAMED, InFlightEngine
from agentrl.engines.embedded.engine import EmbeddedEngine
from agentrl.engines.weights import SyncReport, Weights
from agentrl.system.plugin import with_present_names
from agentrl.workers.backend import Backend
from agentrl.workers.trainable import TrainableWorker


def test_every_named_engine_has_a_builder() -> None:
    assert {"embedded", "sglang"} <= set(ENGINES.names())
    assert all(callable(ENGINES.get(name)) for name in ENGINES.names())


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
