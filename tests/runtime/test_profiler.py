"""Profiles of real worker calls."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from agentrl.config.sections.trainer import TrainerConfig
from agentrl.errors import ConfigError
from agentrl.runtime.profiler import Profile, check_profile_steps, nvtx_range, profile_of, profiled
from tests.naming import naming
from tests.workers.conftest import BatchMaker, WorkerMaker


def test_a_profile_shows_the_update_and_appears_whole(
    make_worker: WorkerMaker, make_batch: BatchMaker, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    trainer = TrainerConfig(profile_steps=[3])
    assert profile_of(trainer, tmp_path, 2, "update_actor") is None
    assert profile_of(trainer, tmp_path, 3, "rollout") is None
    profile = profile_of(trainer, tmp_path, 3, "update_actor")
    assert profile is not None
    batch, worker = make_batch(prompts=2), make_worker()
    batch = batch.with_fields(old_logprobs=torch.zeros(batch.num_tokens))
    with profiled(profile, 0):
        worker.update(batch, step=3)

    folder = tmp_path / "profile" / "step_000003"
    assert sorted(path.name for path in folder.iterdir()) == ["rank0_update_actor.json.gz", "rank0_update_actor.txt"]
    with gzip.open(folder / "rank0_update_actor.json.gz", "rt") as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert {"aten::mm", "autograd::engine::evaluate_function: MmBackward0"} <= names
    assert "aten::mm" in (folder / "rank0_update_actor.txt").read_text()
    assert capfd.readouterr() == ("", "")


def test_ranges_do_nothing_without_cuda_and_are_closed_with_it_fake_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    with nvtx_range("quiet"):
        pass
    seen: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", seen.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: seen.append("end"))
    with pytest.raises(KeyError), nvtx_range("rollout"):
        raise KeyError
    assert seen == ["rollout", "end"]


def test_a_step_after_the_last_is_refused() -> None:
    check_profile_steps(TrainerConfig(profile_steps=[3]), 3)
    with naming(ConfigError, "profile_steps", "step 4", "step 3"):
        check_profile_steps(TrainerConfig(profile_steps=[3, 4]), 3)


def test_nothing_is_written_of_what_failed(tmp_path: Path) -> None:
    with profiled(None, 1):
        pass
    with pytest.raises(KeyError), profiled(Profile(tmp_path, "values"), 1):
        raise KeyError
    assert list(tmp_path.iterdir()) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpus_kernels_and_memory_are_in_it(tmp_path: Path) -> None:
    with profiled(Profile(tmp_path, "values"), 0):
        torch.randn(64, 64, device="cuda") @ torch.randn(64, 64, device="cuda")
    assert (tmp_path / "rank0_values_memory.pickle").stat().st_size > 0
    assert "gemm" in (tmp_path / "rank0_values.txt").read_text().lower()
