"""AReaL's names of asynchronous training are read as ours, or refused with what to write."""

from __future__ import annotations

import logging

import pytest

from agentrl.config import load_config
from agentrl.errors import ConfigError

BASE = ["trainer.save_freq=1"]


def corrected(*keys: str) -> tuple[str, str | None, float, float | None, str]:
    own = load_config([*BASE, "rollout.max_head_offpolicyness=2", *keys]).algorithm.rollout_correction
    return own.proximal, own.rollout_is, own.rollout_is_threshold, own.rollout_is_lower, own.rollout_is_outside


def test_the_bound_of_staleness_begins_as_many_batches_ahead(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        config = load_config([*BASE, "rollout.max_head_offpolicyness=4", "rollout.consumer_batch_size=16"])
    assert (config.async_training.max_staleness, config.async_training.depth) == (4, 4)
    assert config.data.train_batch_size == 16
    assert config.algorithm.rollout_correction.rollout_is == "tempered"
    said = "rollout.max_head_offpolicyness=4, in AReaL's names, is read as async_training.max_staleness=4"
    assert said in caplog.text
    assert load_config(["rollout.max_head_offpolicyness=0"]).async_training.max_staleness == 0


REJECTION = "actor.rejection_sampling"
DECOUPLED = "actor.use_decoupled_loss=true"


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ([DECOUPLED], ("recomputed", "token", 1e9, None, "truncate")),
        ([DECOUPLED, "actor.prox_logp_method=loglinear"], ("interpolated", "token", 1e9, None, "truncate")),
        ([DECOUPLED, f"{REJECTION}.upper=3"], ("recomputed", "token", 3, None, "mask")),
        ([DECOUPLED, "actor.behave_imp_weight_cap=5"], ("recomputed", "token", 5, None, "mask")),
        (
            [DECOUPLED, "actor.behave_imp_weight_mode=token_truncate", "actor.behave_imp_weight_cap=4"],
            ("recomputed", "token", 4, None, "truncate"),
        ),
        (
            [DECOUPLED, "actor.behave_imp_weight_mode=sequence_mask"],
            ("recomputed", "geometric", 5, None, "mask"),
        ),
        ([DECOUPLED, "actor.behave_imp_weight_mode=disabled"], ("recomputed", "token", 1e9, None, "truncate")),
        (
            [DECOUPLED, f"{REJECTION}.level=sequence", f"{REJECTION}.agg=sum", f"{REJECTION}.action=clamp"],
            ("recomputed", "sequence", 5, None, "truncate"),
        ),
        (["actor.use_decoupled_loss=false"], ("rollout", None, 2, None, "truncate")),
        (["actor.recompute_logprob=true"], ("recomputed", None, 2, None, "truncate")),
    ],
)
def test_corrections(keys: list[str], expected: tuple[object, ...]) -> None:
    assert corrected(*keys) == expected


def test_rejection_by_divergence(caplog: pytest.LogCaptureFixture) -> None:
    keys = [DECOUPLED, f"{REJECTION}.level=sequence", f"{REJECTION}.metric=kl_k3", f"{REJECTION}.upper=0.5"]
    own = load_config([*BASE, "rollout.max_head_offpolicyness=1", *keys]).algorithm.rollout_correction
    assert (own.rollout_is, own.reject) == ("token", {"seq_mean_k3": 0.5})
    assert "that of the inverted ratio" in caplog.text


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (["rollout.max_concurrent_rollouts=8"], "counts trajectories"),
        (["rollout.max_head_offpolicyness=2", "async_training.max_staleness=2"], "keep one of them"),
        ([DECOUPLED, "actor.prox_logp_method=metrics"], "expected recompute or loglinear"),
        ([DECOUPLED, f"{REJECTION}.metric=kl_k1"], "metric=kl_k1, agg=mean, action=mask is not here"),
        (["actor.use_decoupled_los=true"], "unknown key actor.use_decoupled_los"),
    ],
)
def test_what_has_no_equal_is_refused(keys: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config([*BASE, *keys])
