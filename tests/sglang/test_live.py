"""`python -m agentrl.serve --learn` with SGLang's servers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.serve.by_servers import learn_through_a_kill


@pytest.mark.timeout(400)
async def test_live_clients_are_served_and_a_kill_loses_none(model_dir: Path, tmp_path: Path) -> None:
    await learn_through_a_kill("sglang", model_dir, tmp_path / "run", 170)
