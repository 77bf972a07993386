"""Metrics under verl's names."""

from __future__ import annotations

from agentrl.observe.verl_names import verl_names


def test_numbers_that_verl_has_too_have_its_names_beside_ours() -> None:
    metrics = {
        "reward/mean": 0.5,
        "actor/pg_loss": 1.0,
        "actor/clip_frac": 0.1,
        "rollout/logprob_gap_kl": 0.02,
        "time/rollout": 3.0,
        "val/openai/gsm8k/mean@4": 0.25,
        "val/openai/gsm8k/greedy": 0.75,
        "tool/calls_mean": 2.0,
    }
    assert verl_names(metrics) == {
        "critic/rewards/mean": 0.5,
        "actor/pg_clipfrac": 0.1,
        "rollout_corr/k3_kl": 0.02,
        "timing_s/gen": 3.0,
        "val-core/openai/gsm8k/reward/mean@4": 0.25,
        "val-core/openai/gsm8k/reward/mean@1": 0.75,
    }


def test_numbers_of_all_that_was_drawn_have_no_name_of_verls_which_means_the_batch() -> None:
    metrics = {"reward/mean": 0.5, "score/mean": 0.5, "response/max": 9.0, "refill/gen_batches": 2.0, "time/step": 1.0}
    assert verl_names(metrics) == {"train/num_gen_batches": 2.0, "timing_s/step": 1.0}
