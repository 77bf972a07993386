"""Adapters that vLLM's servers are sent and serve unmerged, and a whole run with them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl.engines.vllm.client import VLLMClient
from agentrl.engines.vllm.engine import VLLMEngine
from agentrl.engines.vllm.options import VLLMArguments
from agentrl.engines.vllm.process import VLLMProcess
from tests.e2e.test_train import lines
from tests.engines.adapters import RANK, AdapterContract, adapters, check_sent, players
from tests.sglang.training import Run, overrides, write_assets
from tests.vllm.conftest import running

__all__ = ["adapters", "players"]  # fixtures
MODEL = "actor_rollout_ref.model"


@pytest.fixture(scope="module")
def serving(
    server_arguments: VLLMArguments, adapters: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VLLMProcess]:
    """A server that serves adapters."""
    with running(replace(server_arguments, **adapters), tmp_path_factory.mktemp("adapters")) as process:
        yield process


class TestAdapters(AdapterContract):
    client, engine_type = VLLMClient, VLLMEngine
    too_wide = "greater than max_lora_rank 8"
    long = 600  # 3 s and more, by the pace of `tests.vllm.paced`

    @pytest.fixture
    def own_server(
        self, server_arguments: VLLMArguments, adapters: dict[str, Any], tmp_path: Path
    ) -> Iterator[VLLMProcess]:
        with running(replace(server_arguments, **adapters), tmp_path) as process:
            yield process


@pytest.mark.timeout(900)
def test_a_run_sends_the_base_once_and_adapters_after_each_step(model_dir: Path, tmp_path: Path) -> None:
    assets = write_assets(tmp_path)
    words = overrides(assets, model_dir, tmp_path, "actor_rollout_ref.rollout.name=vllm", f"{MODEL}.lora_rank={RANK}")
    run = Run([*words, f"{MODEL}.lora_merge=false"], assets, tmp_path)
    try:
        assert run.end(900) == 0, run.stderr
    finally:
        run.stop()
    check_sent(lines(tmp_path / "run"), 1)
