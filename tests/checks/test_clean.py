"""A thousand clean steps of many arrangements: no check raises an alarm that a sound run must not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl.train import main
from tests.checks.test_faults import alarms
from tests.e2e.conftest import data_dir, policy_dir, reward_file, small_run  # noqa: F401 - fixtures
from tests.e2e.test_train import lines

Overrides = Callable[..., list[str]]
ROLES, CORRECTION = "actor_rollout_ref", "algorithm.rollout_correction"
STEPS = 50
ARRANGEMENTS: dict[str, tuple[str, ...]] = {
    "grpo": (),
    "kl in the loss": (f"{ROLES}.actor.use_kl_loss=true",),
    "kl in the reward, two epochs": ("algorithm.use_kl_in_reward=true", f"{ROLES}.actor.ppo_epochs=2"),
    "only what teaches": ("algorithm.filter_groups.enable=true",),
    "refilled": ("algorithm.filter_groups.enable=true", "algorithm.filter_groups.refill=true", "data.gen_batch_size=3"),
    "gae": ("algorithm.adv_estimator=gae",),
    "rloo, cooler": ("algorithm.adv_estimator=rloo", f"{ROLES}.rollout.temperature=0.7"),
    "remax": ("algorithm.adv_estimator=remax",),
    "reinforce++": ("algorithm.adv_estimator=reinforce_plus_plus",),
    "nucleus": (f"{ROLES}.rollout.top_p=0.9", f"{ROLES}.rollout.top_k=50"),
    "token weights": (f"{CORRECTION}.rollout_is=token",),
    "sequence weights": (f"{CORRECTION}.rollout_is=sequence", f"{CORRECTION}.rollout_is_batch_normalize=true"),
    "the engine is proximal": (f"{CORRECTION}.proximal=rollout",),
    "half precision": (f"{ROLES}.model.dtype=bfloat16",),
    "adapters": (f"{ROLES}.model.lora_rank=4", f"{ROLES}.actor.use_kl_loss=true"),
    "a constant length": (f"{ROLES}.actor.loss_agg_mode=seq-mean-token-sum-norm",),
    "sequence means": (f"{ROLES}.actor.loss_agg_mode=seq-mean-token-mean",),
    "malformed answers are left out": ("algorithm.masked_statuses=[malformed]",),
    "short answers": ("data.max_response_length=24", f"{ROLES}.rollout.multi_turn.max_tokens_per_turn=8"),
    "ahead, refilled": (
        *("async_training.max_staleness=1", "trainer.save_freq=1000", f"{CORRECTION}.gap_alarm=1.0"),
        *("algorithm.filter_groups.enable=true", "algorithm.filter_groups.refill=true", "data.gen_batch_size=3"),
    ),
    "ahead": ("async_training.max_staleness=1", "trainer.save_freq=1000", f"{CORRECTION}.gap_alarm=1.0"),
}


@pytest.mark.slice(1, "soak")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_a_clean_run_raises_no_alarm(arrangement: str, small_run: Overrides, tmp_path: Path) -> None:  # noqa: F811
    words = small_run(
        "data.val_files=null",
        "data.train_batch_size=2",
        f"{ROLES}.rollout.n=3",
        f"{ROLES}.actor.ppo_mini_batch_size=1",
        f"{ROLES}.actor.optim.lr=1e-4",
        f"trainer.total_training_steps={STEPS}",
        "trainer.show_trajectory_freq=-1",
        *([] if "trainer.save_freq=1000" in ARRANGEMENTS[arrangement] else ["trainer.save_freq=-1"]),
        *ARRANGEMENTS[arrangement],
    )
    if any("adv_estimator" in word for word in ARRANGEMENTS[arrangement]):
        words = [word for word in words if not word.startswith("algorithm.filter_groups")]
    assert main(words) == 0
    assert alarms(tmp_path / "run") == []
    steps = lines(tmp_path / "run")
    assert len(steps) == STEPS and all(step["checks/alarms"] == 0 for step in steps)
