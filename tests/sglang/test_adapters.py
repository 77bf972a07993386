"""Adapters that SGLang's servers are sent and serve unmerged, and whole runs with them."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from agentrl.config import load_config
from agentrl.engines.sglang.client import SGLangClient
from agentrl.engines.sglang.engine import SGLangEngine
from agentrl.engines.sglang.options import SGLangArguments
from agentrl.engines.sglang.process import SGLangProcess
from agentrl.errors import ConfigError
from agentrl.trajectory.parquet import read_trajectories
from tests.e2e.test_docs import commands, write_files
from tests.e2e.test_self_play import PAGE, guessing
from tests.e2e.test_train import lines
from tests.engines.adapters import RANK, AdapterContract, Policy, adapters, check_sent, players
from tests.sglang.conftest import StartServer, running
from tests.sglang.training import Run, overrides, write_assets

__all__ = ["adapters", "players"]  # fixtures
MODEL = "actor_rollout_ref.model"


@pytest.fixture(scope="module")
def serving(
    server_arguments: SGLangArguments, adapters: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SGLangProcess]:
    """A server that serves adapters."""
    with running(replace(server_arguments, **adapters), tmp_path_factory.mktemp("adapters")) as process:
        yield process


class TestAdapters(AdapterContract):
    client, engine_type = SGLangClient, SGLangEngine
    too_wide = "max-lora-rank"

    @pytest.fixture
    async def own_server(self, start_server: StartServer, adapters: dict[str, Any]) -> SGLangProcess:
        return await start_server(**adapters)


@pytest.mark.slice(1, "matrix")
@pytest.mark.timeout(400)
@pytest.mark.parametrize("keys", [(), ("async_training.max_staleness=1",)], ids=["in turn", "in flight"])
def test_a_run_sends_the_base_once_and_adapters_after_each_step(
    model_dir: Path, tmp_path: Path, keys: tuple[str, ...]
) -> None:
    assets = write_assets(tmp_path)
    run = Run(
        overrides(assets, model_dir, tmp_path, f"{MODEL}.lora_rank={RANK}", f"{MODEL}.lora_merge=false", *keys),
        assets,
        tmp_path,
    )
    try:
        assert run.end() == 0, run.stderr
    finally:
        run.stop()
    check_sent(lines(tmp_path / "run"), 1, in_flight=bool(keys))


@pytest.mark.slice(0, "long run")  # in the slice: TestAdapters, whose policies play
@pytest.mark.timeout(400)
def test_a_frozen_adapter_plays_a_role(model_dir: Path, reference: PreTrainedModel, tmp_path: Path) -> None:
    folder = Policy(reference, model_dir).learn(10).write(tmp_path / "older")
    write_files(PAGE, tmp_path)
    others = ("train_files", ".agent.", "custom_reward")
    words = [word for word in overrides(tmp_path, model_dir, tmp_path) if not any(key in word for key in others)]
    *_, command = commands(PAGE)
    *keys, roles = shlex.split(command)[5:]
    for ours, theirs in (("first", "player-1"), ("second", "player-2"), ("runs/older/policy/adapter", str(folder))):
        assert ours in roles
        roles = roles.replace(ours, theirs)
    run = Run([*words, *guessing(tmp_path), *keys, roles], tmp_path, tmp_path)
    try:
        assert run.end() == 0, run.stderr
    finally:
        run.stop()
    check_sent(lines(tmp_path / "run"), 1)
    for file in sorted((tmp_path / "run" / "trajectories").glob("train_*.parquet")):
        for one in read_trajectories(file):
            assert [transcript.policy for transcript in one.transcripts] == ["policy", "older"]
            assert one.transcripts[1].sampled_length == 0 < one.turns[1].end - one.turns[1].start


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        (["rollout.name=embedded"], "the engine embedded serves none"),
        (["rollout.name=sglang", "model.target_modules=[q_proj,in_proj]"], "servers run none of in_proj"),
        (["rollout.name=vllm", "model.lora_rank=600"], "vLLM serves adapters of rank 512 at most"),
    ],
)
def test_adapters_that_cannot_be_served_are_refused(keys: list[str], why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.config.installed.is_installed", lambda _: True)
    given = ["trainer.device=cpu", *(f"actor_rollout_ref.{key}" for key in ("model.lora_rank=8", *keys))]
    assert load_config(given).served_adapters is None
    with pytest.raises(ConfigError, match=f"lora_merge=false: .*{why}"):
        load_config([*given, f"{MODEL}.lora_merge=false"])
