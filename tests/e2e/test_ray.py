"""The main job on two ranks under real Ray: the numbers of one process, through a worker's death, and nothing left."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file

from tests.e2e.conftest import PROJECT, forked_command
from tests.e2e.test_docs import commands
from tests.e2e.test_resume import THIRDS, numbers
from tests.reward.tiny_reward_model import make_reward_model
from tests.runs import Overrides

pytest.importorskip("ray")


@pytest.fixture
def two_ranks(small_run: Overrides, tmp_path: Path) -> Overrides:
    (line,) = commands("docs/scale.md")
    several = line.split()[3:]
    assert several == ["trainer.n_gpus_per_node=8"]

    def overrides(run: str, *more: str) -> list[str]:
        on_cpu = ["trainer.device=cpu", "trainer.n_gpus_per_node=2", "data.val_files=null"]
        return [*small_run(run_dir=tmp_path / run), *on_cpu, *more]

    return overrides


def actors_of(process: subprocess.Popen[str], kind: str) -> list[psutil.Process]:
    """The Ray actors of a class that a run has started."""
    found = []
    for child in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # Ray's idle workers come and go.
            if f"ray::{kind}" in " ".join(child.cmdline()):
                found.append(child)
    return found


def wait_for(process: subprocess.Popen[str], path: Path) -> None:
    while process.poll() is None and not path.exists():
        time.sleep(0.05)


def start(overrides: list[str], cwd: Path, program: str | None = None) -> subprocess.Popen[str]:
    """Start the command, or a program that calls it."""
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    words = [sys.executable, *(("-m", "agentrl.train") if program is None else ("-c", program)), *overrides]
    return subprocess.Popen(
        words, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.mark.slice(0, "kill")
@pytest.mark.timeout(900)
def test_two_ranks_and_two_rollout_workers_equal_one_process_also_when_some_are_killed(
    two_ranks: Overrides, small_run: Overrides, tmp_path: Path
) -> None:
    """With a reward model, which has a third rank to itself, and the profile that docs/profiling.md asks for."""
    (line,) = commands("docs/profiling.md")
    profiled = line.split()[3:]
    path = make_reward_model(tmp_path / "reward-model", template=None)
    scored = ["reward_model.enable=true", f"reward_model.model.path={path}"]
    alone = [*scored, *profiled, "trainer.device=cpu", "data.val_files=null"]
    one = forked_command([*small_run(run_dir=tmp_path / "one"), *alone], tmp_path)
    assert one.returncode == 0, one.stderr
    apart = [*scored, "reward_model.enable_resource_pool=true", "actor_rollout_ref.rollout.nnodes=2"]
    process = start(two_ranks("two", "trainer.max_worker_restarts=3", *apart, *profiled), tmp_path)
    try:
        checkpoints = tmp_path / "two" / "checkpoints"
        for step, (kind, count) in enumerate((("Rank", 3), ("RolloutWorker", 2)), 1):
            wait_for(process, checkpoints / f"step_{step:06d}")
            found = actors_of(process, kind)
            assert len(found) == count
            found[1].kill()
        said, _ = process.communicate(timeout=800)
    finally:
        process.kill()
    assert process.returncode == 0, said
    assert re.search(r"rank \d of \d died in .*; new workers go on after step", said)
    assert re.search(r"rollout worker \d died in .*; a new one takes its place", said), said
    folders = (tmp_path / "two" / name for name in ("trajectories", "updates"))
    files = [sorted(path.name for path in folder.glob("train_000001*")) for folder in folders]
    assert files == [[f"train_000001.{one}of2.parquet" for one in (1, 2)]] * 2
    for logged in [line for line in numbers(tmp_path / "two") if "reward/mean" in line]:
        of_step = (tmp_path / "two" / "trajectories").glob(f"train_{int(logged['step']):06d}.?of2.parquet")
        rewards = pq.read_table(sorted(of_step), columns=["reward"])["reward"]
        assert not rewards.null_count and pc.mean(rewards).as_py() == pytest.approx(logged["reward/mean"], abs=1e-9)
    for mine, theirs in zip(numbers(tmp_path / "two"), numbers(tmp_path / "one"), strict=True):
        if "sync/bytes" in theirs:
            theirs["sync/bytes"] *= 2  # two engines
        assert mine == pytest.approx(theirs, rel=1e-3, abs=1e-5)
    weights = [load_file(tmp_path / run / "policy" / "model.safetensors") for run in ("one", "two")]
    for name, tensor in weights[0].items():
        assert (tensor - weights[1][name]).abs().max() < 1e-4, name
    for run, ranks in (("one", 1), ("two", 2)):
        profiles = sorted(path.name for path in (tmp_path / run / "profile" / "step_000002").iterdir())
        each = ("rollout", "old_log_prob", "update_actor")
        stages = [f"rank{rank}_{stage}" for rank in range(ranks) for stage in each]
        expected = [f"{stage}.{kind}" for stage in ["rank0_reward_model", *stages] for kind in ("json.gz", "txt")]
        assert profiles == sorted(expected)


@pytest.mark.slice(1, "cluster")
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "more",
    [
        [
            "algorithm.filter_groups.refill=true",
            "algorithm.filter_groups.max_num_gen_batches=40",
            "data.gen_batch_size=3",
            "algorithm.masked_statuses=[malformed]",
            "actor_rollout_ref.actor.success_nll_coef=0.1",
            "algorithm.adv_estimator=gdpo",
            "algorithm.adv_options.reward_keys=[score,form]",
        ],
        ["algorithm.adv_estimator=bi_level_gae", "algorithm.adv_options.turn_gamma=0.9", "critic.optim.lr=1e-3"],
        ["algorithm.adv_estimator=decoupled_gae", "algorithm.adv_options.length_alpha=0.2", "critic.optim.lr=1e-3"],
    ],
    ids=["refill_gdpo", "bi_level_gae", "decoupled_gae"],
)
def test_two_ranks_and_two_rollout_workers_equal_one_process(
    two_ranks: Overrides, small_run: Overrides, tmp_path: Path, more: list[str]
) -> None:
    (tmp_path / "thirds.py").write_text(
        THIRDS.replace("return ", "score = ") + "    return {'score': score, 'form': len(solution_str) % 5 / 5}\n"
    )
    more = [*more, f"custom_reward_function.path={tmp_path}/thirds.py", "trainer.total_training_steps=2"]
    refills = any("refill" in override for override in more)
    alone = small_run(*more, "trainer.device=cpu", "data.val_files=null", run_dir=tmp_path / "one")
    apart = two_ranks("two", *more, "actor_rollout_ref.rollout.nnodes=2")
    for command in (alone, apart):
        done = forked_command([one for one in command if "filter_groups.enable" not in one], tmp_path)
        assert done.returncode == 0, done.stderr
    logged = [numbers(tmp_path / run) for run in ("two", "one")]
    for mine, theirs in zip(*logged, strict=True):
        theirs["sync/bytes"] *= 2  # two engines
        assert mine == pytest.approx(theirs, rel=1e-3, abs=1e-5)
        assert ("refill/gen_batches" in mine) == refills
    assert logged[0][-1]["actor/grad_norm"] > 0
    weights = [load_file(tmp_path / run / "policy" / "model.safetensors") for run in ("one", "two")]
    for name, tensor in weights[0].items():
        assert (tensor - weights[1][name]).abs().max() < 1e-4, name


@pytest.mark.slice(0, "kill")
@pytest.mark.timeout(900)
def test_a_run_that_is_killed_takes_its_ray_with_it(two_ranks: Overrides, tmp_path: Path) -> None:
    """Nor does a rollout worker beside the ranks need a CPU that they leave over."""
    process = start(two_ranks("run", "trainer.total_training_steps=1000", "ray_init.num_cpus=2"), tmp_path)
    try:
        while process.poll() is None and not (tmp_path / "run" / "metrics.jsonl").exists():
            time.sleep(0.05)
        # Ray's agents, which look for their parent now and then, may take a minute more.
        works = ("raylet", "gcs_server", "ray::Rank")
        family = [
            child
            for child in psutil.Process(process.pid).children(recursive=True)
            if any(part in " ".join(child.cmdline()) for part in works)
        ]
        assert len(family) >= 4
        process.send_signal(signal.SIGKILL)
        _, left = psutil.wait_procs(family, timeout=60)
    finally:
        process.kill()
    assert [child for child in left if child.status() != psutil.STATUS_ZOMBIE] == []
