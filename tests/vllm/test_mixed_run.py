"""A run of the command over servers of both softwares."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from agentrl.engines.servers.process import ServerProcess
from agentrl.engines.sglang.options import SGLangArguments
from agentrl.engines.vllm.client import VLLMClient
from agentrl.engines.vllm.options import VLLMArguments
from agentrl.system.http import http_client
from benchmarks.rollouts.mixed_fleet import SGLangOf, VLLMOf
from tests.e2e.test_train import lines
from tests.engines.contract import MAX_MODEL_LEN, MAX_NUM_SEQS
from tests.sglang.training import Run, overrides, write_assets
from tests.vllm.conftest import STARTUP

MODEL, ROLLOUT = "actor_rollout_ref.model", "actor_rollout_ref.rollout"


async def sampled_tokens(process: ServerProcess) -> float:
    """Count the tokens that a vLLM server has sampled."""
    async with http_client() as http:
        return await VLLMClient(process.url, http, process.key).sampled_tokens(60)


async def all_ready(processes: list[ServerProcess]) -> None:
    await asyncio.gather(*[process.ready(STARTUP) for process in processes])


@pytest.mark.parametrize("lora_rank", [0, 4], ids=["weights", "adapters"])
def test_a_run_over_both_softwares_from_start_to_end(
    model_dir: Path,
    tmp_path: Path,
    sglang_python: Path,
    monkeypatch: pytest.MonkeyPatch,
    lora_rank: int,
) -> None:
    """Each server samples turns for it, also after updates, with log-probs of the trainer's weights."""
    monkeypatch.setattr(SGLangOf, "python", str(sglang_python))
    monkeypatch.setenv("AGENTRL_TEST_SERVER_KEY", "secret")
    folder, device, length, most = str(model_dir), "cpu", MAX_MODEL_LEN, MAX_NUM_SEQS
    sglang = SGLangArguments(folder, device, "float32", context_length=length, max_num_seqs=most, lora_rank=lora_rank)
    vllm = VLLMArguments(folder, device, "float32", context_length=length, max_num_seqs=most, lora_rank=lora_rank)
    processes: list[ServerProcess] = [
        SGLangOf(sglang, None, tmp_path / "sglang.log", key="secret"),
        VLLMOf(vllm, None, tmp_path / "vllm.log", key="secret"),
    ]
    assets = tmp_path / "assets"
    assets.mkdir()
    write_assets(assets)
    run = None
    try:
        for process in processes:
            process.start()
        asyncio.run(all_ready(processes))
        words = overrides(
            assets,
            model_dir,
            tmp_path,
            f"{ROLLOUT}.name=mixed",
            f"{ROLLOUT}.server_urls={json.dumps([process.url for process in processes])}",
            f"{ROLLOUT}.server_api_key_env=AGENTRL_TEST_SERVER_KEY",
            f"{ROLLOUT}.health_check_interval=10000",  # a check samples a token, too
            *((f"{MODEL}.lora_rank={lora_rank}", f"{MODEL}.lora_merge=false") if lora_rank else ()),
        )
        run = Run(words, assets, tmp_path)
        assert run.end(900) == 0, run.stderr
        by_vllm = asyncio.run(sampled_tokens(processes[1]))
    finally:
        if run is not None:
            run.stop()
        for process in processes:
            process.stop()
    steps = [line for line in lines(tmp_path / "run") if "actor/grad_norm" in line]
    assert len(steps) == 3
    assert all(line["actor/grad_norm"] > 0 and line["left_out/failed"] == 0 for line in steps)
    assert all(line["rollout/logprob_gap_max_abs"] < 1e-4 for line in steps)
    assert not lora_rank or steps[-1]["engine/adapter_bases"] == 2, "each is sent the base once"
    turn = 12  # tokens
    assert turn <= by_vllm <= sum(line["train/policy_tokens"] for line in steps) - turn, "the others are SGLang's"
