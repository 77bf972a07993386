"""Another policy backend under the same training loop makes the same policy: the seam between algorithm and updater."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from agentrl.config.sections.actor import ActorConfig
from agentrl.config.sections.optim import OptimConfig
from agentrl.train import main
from tests.e2e.conftest import command
from tests.e2e.test_train import lines
from tests.naming import assert_names
from tests.runs import Overrides
from tests.workers.conftest import BatchMaker, WorkerMaker, weights
from tests.workers.plain_backend import PlainPolicy

PLAIN = "tests.workers.plain_backend:PlainPolicy"
STRATEGY = "actor_rollout_ref.actor.strategy"


@pytest.mark.parametrize("loss", [{"entropy_coeff": 0.01}, {"policy_loss": {"loss_mode": "gspo"}}])
def test_one_update_is_the_same(make_worker: WorkerMaker, make_batch: BatchMaker, loss: dict[str, object]) -> None:
    """All log-probs, metrics and weights."""
    tree = {"ppo_mini_batch_size": 2, "ppo_epochs": 2, "optim": OptimConfig(lr=1e-3), **loss}
    ours, plain = (make_worker(ActorConfig.model_validate(tree | {"strategy": name})) for name in ("fsdp", PLAIN))
    batch = make_batch()
    (logprobs, seen), (others, also) = ours.compute_log_probs(batch), plain.compute_log_probs(batch)
    assert torch.allclose(logprobs, others, rtol=0, atol=1e-5) and seen == pytest.approx(also, abs=1e-5)
    batch = batch.with_fields(old_logprobs=logprobs)
    assert ours.update(batch, step=1) == pytest.approx(plain.update(batch, step=1), rel=1e-3, abs=1e-5)
    expected = weights(ours)
    assert isinstance(plain.backend, PlainPolicy)
    found = {name: tensor for name, tensor in plain.weights().read() if tensor is not None}
    assert found.keys() == expected.keys() == plain.weights().shapes.keys()
    for name, tensor in expected.items():
        assert torch.allclose(found[name], tensor, rtol=0, atol=1e-5), name


@pytest.mark.timeout(600)
def test_a_training_makes_the_same_six_updates(small_run: Overrides, tmp_path: Path, policy_dir: Path) -> None:
    """Rollouts, checkpoints and going on from one included: the second run is interrupted after its third step."""
    tail = ["actor_rollout_ref.actor.optim.lr=2e-4", "data.val_files=null", "trainer.save_freq=3"]
    ours, plain = tmp_path / "ours", tmp_path / "plain"
    assert main(small_run(*tail, "trainer.total_training_steps=6", run_dir=ours)) == 0
    for steps in (3, 6):
        run = small_run(*tail, f"trainer.total_training_steps={steps}", f"{STRATEGY}={PLAIN}", run_dir=plain)
        assert main(run) == 0
    same, changed = compare(plain, ours, policy_dir)
    assert same <= 1e-5 and changed > 1e-3
    for mine, theirs in zip(lines(plain), lines(ours), strict=True):
        assert mine["actor/pg_loss"] == pytest.approx(theirs["actor/pg_loss"], abs=1e-4)
        assert mine["rollout/logprob_gap_max_abs"] < 1e-4


@pytest.mark.slice(0, "long run")
@pytest.mark.timeout(2400)
def test_the_quickstart_learns_with_it(tmp_path: Path) -> None:
    done = command([f"{STRATEGY}={PLAIN}"], cwd=tmp_path, timeout=2300)
    assert done.returncode == 0, done.stderr
    metrics = lines(tmp_path / "runs" / "quickstart")
    assert metrics[0]["val/success_greedy"] <= 0.5 and metrics[-1]["val/success_greedy"] >= 0.9


def test_a_strategy_that_there_is_not_is_told(small_run: Overrides, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(small_run(f"{STRATEGY}=megatron")) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert_names(said, STRATEGY, "'megatron'", "fsdp2", "unknown")


def compare(one: Path, other: Path, start: Path) -> tuple[float, float]:
    """The largest difference of two runs' policies, and the largest change of the second since the start."""
    mine, theirs, before = (
        load_file(folder / "model.safetensors") for folder in (one / "policy", other / "policy", start)
    )
    pairs = [(mine[name], theirs[name], before[name]) for name in theirs]
    return (
        max((a - b).abs().max().item() for a, b, _ in pairs),
        max((b - c).abs().max().item() for _, b, c in pairs),
    )
