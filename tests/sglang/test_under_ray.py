"""Rollout workers under Ray with SGLang servers of their own, which sample on while ranks update."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest
import torch
from transformers import PreTrainedModel

from agentrl.engines.servers.starter import STARTER
from agentrl.trajectory import Trajectory
from agentrl.trajectory.parquet import read_trajectories
from tests.e2e.test_train import lines
from tests.engines.adapters import check_sent
from tests.sglang.test_training import ROLLOUT, logprobs_under, policy_of
from tests.sglang.training import Run, overrides, write_assets

pytest.importorskip("ray")
pytestmark = [pytest.mark.timeout(1800), pytest.mark.slice(0, "cluster")]
STEPS = 6


@pytest.fixture
def run(model_dir: Path, tmp_path: Path) -> Iterator[Run]:
    """One rank and two rollout workers with a server each."""
    assets = tmp_path / "assets"
    assets.mkdir()
    begun = Run(
        overrides(
            write_assets(assets),
            model_dir,
            tmp_path,
            f"{ROLLOUT}.nnodes=2",
            "ray_init.num_cpus=3",
            "async_training.max_staleness=1",
            f"{ROLLOUT}.multi_turn.max_tokens_per_turn=36",
            "data.max_response_length=240",
            f"trainer.total_training_steps={STEPS}",
            f"data.val_files={assets}/rows.parquet",
            "data.val_max_samples=2",
            "trainer.test_freq=3",
            "trainer.max_actor_ckpt_to_keep=null",
        ),
        tmp_path / "assets",
        tmp_path,
    )
    yield begun
    begun.stop()


def servers_of(run: Run) -> dict[int, set[int]]:
    """Process groups of the servers, by the rollout worker that started them."""
    found: dict[int, set[int]] = {}
    for process in psutil.Process(run.pid).children(recursive=True):
        if not process.cmdline() or "ray::RolloutWorker" not in process.cmdline()[0]:
            continue
        for child in process.children(recursive=True):
            if child.environ().get(STARTER) == str(process.pid):
                found.setdefault(process.pid, set()).add(os.getpgid(child.pid))
    return found


def trained(folder: Path, step: int) -> list[Trajectory]:
    files = sorted((folder / "run" / "trajectories").glob(f"train_{step:06}.?of2.parquet"))
    return [row for file in files if pq.read_metadata(file).num_rows for row in read_trajectories(file)]


def versions_that_sampled(rows: Sequence[Trajectory], policies: Sequence[PreTrainedModel]) -> set[int]:
    """Return the versions that are recorded of tokens, of which each was sampled by the policy of its own."""
    used = set()
    for row in rows:
        (transcript,) = row.transcripts
        for span in transcript.versions:
            used.add(span.version)
            expected = logprobs_under(policies[span.version], transcript.ids)[span.start : span.end]
            found = torch.tensor(transcript.logprobs[span.start : span.end])
            sampled = torch.tensor(transcript.mask[span.start : span.end], dtype=torch.bool)
            assert (found - expected)[sampled].abs().max() < 1e-3, (row.uid, span)
    return used


def test_each_token_has_the_version_of_the_weights_that_sampled_it(run: Run, model_dir: Path, tmp_path: Path) -> None:
    run.until(lambda: (tmp_path / "run" / "checkpoints" / "step_000002").exists(), seconds=900)
    servers = servers_of(run)
    assert [len(groups) for groups in servers.values()] == [1, 1]
    logs = [tmp_path / "run" / f"worker_{number}of2" / "servers" / "0.log" for number in (1, 2)]
    assert all(log.exists() for log in logs), "each worker's servers have logs of their own"
    (killed,) = min(servers.values(), key=min)
    os.killpg(killed, signal.SIGKILL)
    assert run.end(900) == 0, run.stderr
    for groups in servers.values():
        for group in groups:
            assert not psutil.pid_exists(group), "a server outlives its worker"
    metrics = lines(tmp_path / "run")
    assert [line["step"] for line in metrics] == list(range(STEPS + 1))
    assert max(line["async/staleness_max"] for line in metrics[1:]) <= 1
    assert f"{2 * STEPS} prompts, each once: {2 * STEPS} trained" in run.stdout
    rows = [row for step in range(1, STEPS + 1) for row in trained(tmp_path, step)]
    assert len({row.uid for row in rows}) == len(rows) == STEPS * 8
    checkpoints = tmp_path / "run" / "checkpoints"
    policies = [policy_of(model_dir)]
    policies += [policy_of(model_dir, checkpoints / f"step_{step:06}" / "policy") for step in range(1, STEPS)]
    used = versions_that_sampled(rows, policies)
    assert used >= set(range(STEPS - 1)), "new weights reached the servers"


def test_workers_are_sent_the_base_once_and_adapters_after_each_step(model_dir: Path, tmp_path: Path) -> None:
    """Two ranks gather the adapters, and two workers read them from the object store."""
    assets = write_assets(tmp_path)
    keys = ("lora_rank=4", "lora_merge=false")
    run = Run(
        overrides(
            assets,
            model_dir,
            tmp_path,
            *(f"actor_rollout_ref.model.{key}" for key in keys),
            f"{ROLLOUT}.nnodes=2",
            "trainer.n_gpus_per_node=2",
            "ray_init.num_cpus=4",
        ),
        assets,
        tmp_path,
    )
    try:
        assert run.end(1200) == 0, run.stderr
    finally:
        run.stop()
    check_sent(lines(tmp_path / "run"), 2)
