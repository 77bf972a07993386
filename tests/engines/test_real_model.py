"""The embedded engine's log-probs of a real model."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.engines.embedded.engine import EmbeddedEngine
from agentrl.model.packed import load_model
from tests.real_model import assert_log_probs_are_transformers, find_model, problems_of_gsm8k


@pytest.mark.slice(0, "long run")
@pytest.mark.timeout(900)
async def test_log_probs_of_real_prompts_are_transformers(
    pytestconfig: pytest.Config, shared_data: Path, tmp_path: Path
) -> None:
    folder = find_model(pytestconfig, tmp_path)
    prompts = problems_of_gsm8k(folder, shared_data, 12)
    engine = EmbeddedEngine(load_model(str(folder)), max_num_seqs=len(prompts), max_model_len=1024)
    try:
        await assert_log_probs_are_transformers(engine, folder, prompts)
    finally:
        await engine.close()
