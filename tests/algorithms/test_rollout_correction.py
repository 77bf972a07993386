"""The correction for what the engine sampled, in cases small enough to work out by hand."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from agentrl.algorithms.aggregate import LossScale, aggregate
from agentrl.algorithms.estimate import Settings, estimate
from agentrl.algorithms.policy_loss import MicroLoss, PolicyLoss
from agentrl.algorithms.rollout_correction import AGES, ages, correct, correction_metrics, tally
from agentrl.config.registries import POLICY_LOSSES
from agentrl.config.sections.actor import ActorConfig
from agentrl.config.sections.algorithm import PolicyLossConfig, RolloutCorrectionConfig
from agentrl.observe.gap_alarm import GapAlarm
from agentrl.trajectory.batch import RaggedBatch, split_by_tokens
from tests.algorithms.batches import LOSS_OPTIONS, algorithm, batches
from tests.naming import Names, naming

# Two sequences: ratios 2, tool, 1/4 and 1.1, 1.2, 1, tool. Tool tokens hold what must not count.
RATIOS = [2.0, math.nan, 0.25, 1.1, 1.2, 1.0, math.inf]
MASK = torch.tensor([True, False, True, True, True, True, False])
OFFSETS = torch.tensor([0, 3, 7])
FIRST, SECOND = 0.5, 1.32
"""Products of the ratios."""


def keys(**given: Any) -> RolloutCorrectionConfig:
    return RolloutCorrectionConfig.model_validate(given)


def weights(**given: Any) -> list[float]:
    log_ratio = torch.tensor(RATIOS, dtype=torch.float64).log()
    return correct(log_ratio, MASK, OFFSETS, keys(**given)).weight.tolist()


def by_token(first: float, second: float) -> list[float]:
    """The same weight for all policy tokens of a sequence."""
    return [first, 0, first, second, second, second, 0]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, by_token(1, 1)),
        ({"rollout_is": "token"}, [2, 0, 0.25, 1.1, 1.2, 1, 0]),
        ({"rollout_is": "token", "rollout_is_threshold": 1.15}, [1.15, 0, 0.25, 1.1, 1.15, 1, 0]),
        (
            {"rollout_is": "token", "rollout_is_threshold": 1.15, "rollout_is_lower": 0.5},
            [1.15, 0, 0.5, 1.1, 1.15, 1, 0],
        ),
        (
            {
                "rollout_is": "token",
                "rollout_is_threshold": 1.15,
                "rollout_is_lower": 0.5,
                "rollout_is_outside": "mask",
            },
            [0, 0, 0, 1.1, 0, 1, 0],
        ),
        ({"rollout_is": "sequence"}, by_token(FIRST, SECOND)),
        ({"rollout_is": "sequence", "rollout_is_threshold": 1.2}, by_token(FIRST, 1.2)),
        ({"rollout_is": "geometric"}, by_token(FIRST ** (1 / 2), SECOND ** (1 / 3))),
        # Mean of the truncated weights over tokens; over sequences.
        (
            {"rollout_is": "token", "rollout_is_threshold": 1.5, "rollout_is_batch_normalize": True},
            [weight * 5 / 5.05 for weight in (1.5, 0, 0.25, 1.1, 1.2, 1, 0)],
        ),
        ({"rollout_is": "sequence", "rollout_is_batch_normalize": True}, by_token(FIRST / 0.91, SECOND / 0.91)),
        # By the token alone the effective sample size is 0.8, less than 0.9: so it is by the token, over the mean.
        ({"rollout_is": "tempered"}, [weight * 5 / 5.55 for weight in (2, 0, 0.25, 1.1, 1.2, 1, 0)]),
        ({"reject": {"token": [0.5, 1.1000001]}}, [0, 0, 0, 1, 0, 1, 0]),
        ({"reject": {"sequence": [0.6, 2]}}, by_token(0, 1)),
        ({"reject": {"sequence": [0.4, 1.3]}}, by_token(1, 0)),
        ({"reject": {"geometric": [0.9, 1.11]}}, by_token(0, 1)),
        ({"reject": {"veto": 0.3}}, by_token(0, 1)),
        ({"reject": {"veto": 0.2}}, by_token(1, 1)),
        # k2 of 2 is 0.240, of 1/4 0.961, of 1.2 0.0166; k3 of 2 is 0.307, of 1/4 0.636, of 1.2 0.0177.
        ({"reject": {"token_k2": 0.5}}, [1, 0, 0, 1, 1, 1, 0]),
        ({"reject": {"token_k3": 0.01}}, [0, 0, 0, 1, 0, 1, 0]),
        ({"reject": {"seq_sum_k2": 1.2}}, by_token(0, 1)),
        ({"reject": {"seq_sum_k2": 1.21}}, by_token(1, 1)),
        ({"reject": {"seq_mean_k3": 0.47}}, by_token(0, 1)),
        ({"reject": {"seq_mean_k3": 0.48}}, by_token(1, 1)),
        ({"reject": {"seq_max_k3": 0.0176}}, by_token(0, 0)),
        ({"reject": {"seq_max_k2": 0.02}}, by_token(0, 1)),
        ({"rollout_is": "token", "reject": {"token": [0.5, 2.0001], "seq_max_k3": 0.7}}, [2, 0, 0, 1.1, 1.2, 1, 0]),
    ],
)
def test_weights_and_rejection_by_hand(given: dict[str, Any], expected: list[float]) -> None:
    assert weights(**given) == pytest.approx(expected, rel=1e-9)


ALL = {
    "rollout_is": "sequence",
    "rollout_is_lower": 0.5,
    "rollout_is_batch_normalize": True,
    "reject": {
        **dict.fromkeys(("token", "sequence", "geometric"), (1.0, 1.0)),
        **{f"{level}_{kind}": 1e-9 for level in ("token", "seq_sum", "seq_mean", "seq_max") for kind in ("k2", "k3")},
        "veto": 1.0,
    },
}


TEMPERED = {key: value for key, value in ALL.items() if key != "rollout_is_batch_normalize"} | {
    "rollout_is": "tempered"
}


@settings(max_examples=30, deadline=None)
@given(batch=batches(), correction=st.sampled_from([ALL, TEMPERED]))
def test_equal_log_probs_are_weighed_by_exactly_1(batch: RaggedBatch, correction: dict[str, Any]) -> None:
    """In float32, where sums would show a rounding that is not there."""
    batch = batch.with_fields(rollout_logprobs=batch.old_logprobs)
    columns, metrics = estimate(batch, algorithm("reinforce_plus_plus", rollout_correction=correction), Settings(4))
    assert torch.equal(columns["correction"], batch.mask.float())
    assert metrics["correction/ess"] == 1.0
    assert metrics["correction/masked_frac"] == metrics["rollout/logprob_gap_kl"] == 0.0


def test_a_ratio_beyond_all_bounds_is_finite() -> None:
    log_ratio = torch.tensor([1e4, -1e4, 0.0])
    mask, offsets = torch.ones(3, dtype=torch.bool), torch.tensor([0, 1, 2, 3])
    found = correct(log_ratio, mask, offsets, keys(rollout_is="sequence", rollout_is_threshold=1e9))
    assert found.weight.tolist() == pytest.approx([math.exp(20), math.exp(-20), 1])


def test_metrics_by_staleness() -> None:
    """Version 5 is trained: the first sequence's tokens are of versions 5 and 3, the second one's of 3."""
    log_ratio = torch.tensor(RATIOS, dtype=torch.float64).log()
    config = keys(rollout_is="token", rollout_is_threshold=1.5, reject={"token": [0.5, 3]})
    staleness = ages(torch.tensor([5, -1, 3, 3, 3, 3, -1]), 5)
    assert staleness.tolist() == [0, 0, 2, 2, 2, 2, 0]
    sums = tally(log_ratio, correct(log_ratio, MASK, OFFSETS, config), MASK, staleness)
    found = correction_metrics({name: value.item() for name, value in sums.items()}, config)
    old, new = [0.0, 1.1, 1.2, 1.0], [1.5]
    for suffix, part in (("", old + new), ("/staleness_2", old), ("/staleness_0", new)):
        assert found[f"correction/weight_mean{suffix}"] == pytest.approx(sum(part) / len(part))
        ess = sum(part) ** 2 / (len(part) * sum(weight**2 for weight in part))
        assert found[f"correction/ess{suffix}"] == pytest.approx(ess)
        assert found[f"correction/masked_frac{suffix}"] == pytest.approx(part.count(0.0) / len(part))
        assert found[f"correction/clipped_frac{suffix}"] == pytest.approx(part.count(1.5) / len(part))
    assert found["rollout/logprob_gap_mean_abs/staleness_0"] == pytest.approx(math.log(2))
    assert found["rollout/logprob_gap_kl/staleness_0"] == pytest.approx(1 - math.log(2))
    assert "correction/ess/staleness_1" not in found
    assert not any(name.startswith("correction/") for name in correction_metrics(dict.fromkeys(sums, 1.0), keys()))
    assert ages(torch.tensor([0]), 40).clamp(max=AGES - 1).tolist() == [7], "old ones count together"


def test_the_gap_is_the_divergence_of_the_engine_that_sampled() -> None:
    """7, 2 and 1 tokens of ten, as the engine's distribution has it."""
    engine, trainer = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.3, 0.3, 0.4])
    drawn, mask = torch.tensor([0] * 7 + [1] * 2 + [2]), torch.ones(10, dtype=torch.bool)
    gap = (trainer / engine).log()[drawn]
    found = tally(gap, correct(gap, mask, torch.tensor([0, 10]), keys()), mask, torch.zeros(10, dtype=torch.int64))
    divergence = (engine * (engine / trainer).log()).sum().item()
    assert found["0/gap_k3"].item() / 10 == pytest.approx(divergence, rel=1e-5)


def loss_of(
    batch: RaggedBatch, logprobs: Tensor, correction: RolloutCorrectionConfig, mode: str = "vanilla"
) -> MicroLoss:
    config = ActorConfig(policy_loss=PolicyLossConfig(loss_mode=mode, options=LOSS_OPTIONS.get(mode, {})))
    return PolicyLoss.from_config(config, correction)(batch, logprobs)


def one_sequence(**columns: Any) -> RaggedBatch:
    """Three policy tokens of staleness 0, 1 and 3; log-probs are those of the engine, -1."""
    mask = torch.ones(3, dtype=torch.bool)
    batch = RaggedBatch.from_columns(
        offsets=torch.tensor([0, 3]),
        ids=torch.zeros(3, dtype=torch.int64),
        mask=mask,
        rollout_logprobs=torch.full((3,), -1.0),
        version=torch.tensor([3, 2, 0], dtype=torch.int32),
        turn=torch.zeros(3, dtype=torch.int32),
        rewards=torch.zeros(3),
        group=torch.zeros(1, dtype=torch.int64),
        trajectory=torch.zeros(1, dtype=torch.int64),
        policy=torch.zeros(1, dtype=torch.int32),
        policies=("policy",),
        advantages=torch.ones(3),
    )
    return batch.with_fields(**columns)


def test_the_recomputed_policy_is_between_two_ratios() -> None:
    """The loss's ratio is to the proximal policy, the weight of that one to the engine: 1.1 * 0.5, 1 * 1, 0.9 * 2."""
    proximal = -1 + torch.tensor([0.5, 1.0, 4.0]).log()
    batch = one_sequence(old_logprobs=proximal)
    config = algorithm("reinforce_plus_plus", rollout_correction={"rollout_is": "token"})
    columns, _ = estimate(batch, config, Settings(1, version=3))
    logprobs = (proximal + torch.tensor([1.1, 1.0, 0.9]).log()).requires_grad_()
    batch = batch.with_fields(correction=columns["correction"])
    loss_of(batch, logprobs, config.rollout_correction).by_token.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-1.1 * 0.5, -1.0, -0.9 * 2])


def test_the_engine_as_proximal_policy() -> None:
    """gpg is weighed by the ratio to the engine; vanilla has it as its own."""
    config = algorithm("reinforce_plus_plus", rollout_correction={"proximal": "rollout", "rollout_is": "token"})
    batch = one_sequence()
    columns, _ = estimate(batch, config, Settings(1, version=3))
    assert columns["staleness"].tolist() == [0, 1, 3] and "correction" not in columns
    batch = batch.with_fields(staleness=columns["staleness"])
    ratios = torch.tensor([1.1, 3.0, 0.5])
    for mode, correction, slopes in (
        ("gpg", config.rollout_correction, [-1.1, -2.0, -0.5]),
        ("vanilla", keys(proximal="rollout"), [-1.1, 0.0, -0.5]),  # 3 is clipped
        ("vanilla", keys(proximal="rollout", reject={"veto": 0.6}), [0.0, 0.0, 0.0]),
        ("gpg", keys(proximal="rollout", reject={"token": [0.6, 2]}), [-1.0, 0.0, 0.0]),
    ):
        logprobs = (batch.rollout_logprobs + ratios.log()).requires_grad_()
        lost = loss_of(batch, logprobs, correction, mode)
        lost.by_token.sum().backward()
        assert logprobs.grad is not None
        assert logprobs.grad.tolist() == pytest.approx(slopes), mode
        assert lost.correction["3/gap_abs"].item() == pytest.approx(math.log(2))
        assert lost.correction["0/tokens"].item() == 1


def test_the_interpolated_policy_moves_with_staleness() -> None:
    """Of the way from the engine to the policy a token that is s versions old has s / (s + 1) before the ratio."""
    batch = one_sequence(staleness=torch.tensor([0, 1, 3]))
    logprobs = (batch.rollout_logprobs + 0.1).requires_grad_()
    lost = loss_of(batch, logprobs, keys(proximal="interpolated"))
    lost.by_token.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-math.exp(0.1), -math.exp(0.05), -math.exp(0.025)], rel=1e-6)
    lost = loss_of(batch, logprobs, keys(proximal="interpolated", rollout_is="token"))
    assert lost.by_token.tolist() == pytest.approx([-math.exp(0.1)] * 3, rel=1e-6), "weight times ratio is the whole"
    assert lost.correction["1/weight"].item() == pytest.approx(math.exp(0.05), rel=1e-6)


IN_LOSS = [
    keys(proximal="rollout", reject={"geometric": [0.5, 2], "seq_mean_k3": 1.0}),
    keys(proximal="interpolated", rollout_is="sequence", reject={"token": [0.2, 5]}),
]


@settings(max_examples=60, deadline=None)
@given(
    chosen=st.sampled_from(list(product(range(3), POLICY_LOSSES.names()))),
    mode=st.sampled_from(["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]),
    batch=batches(),
    max_tokens=st.integers(1, 30),
)
def test_every_loss_is_corrected_alike_however_it_is_cut(
    chosen: tuple[int, str], mode: Any, batch: RaggedBatch, max_tokens: int
) -> None:
    """Micro-batches of whole sequences add up, so ranks do, too; what was not sampled has no gradient."""
    which, loss = chosen
    recomputed = keys(rollout_is="sequence", rollout_is_batch_normalize=True, reject={"token": [0.2, 5], "veto": 0.01})
    correction = [recomputed, *IN_LOSS][which]
    given = {"rollout_correction": correction.model_dump()}
    columns, _ = estimate(batch, algorithm("reinforce_plus_plus", **given), Settings(4, version=2))
    batch = batch.with_fields(**{name: columns[name] for name in ("correction", "staleness") if name in columns})
    scale = LossScale.from_policy_tokens(batch.policy_tokens, mode, norm_length=7)
    start = (batch.rollout_logprobs + 0.3 * batch.values).double()  # type: ignore[operator]
    position = torch.arange(batch.num_tokens)

    def gradient(parts: list[list[int]]) -> tuple[Tensor, dict[str, Tensor]]:
        logprobs = start.clone().requires_grad_()
        sums: dict[str, Tensor] = {}
        for rows in parts:
            part = batch.select(rows)
            where = torch.cat([position[batch.offsets[row] : batch.offsets[row + 1]] for row in rows])
            lost = loss_of(part, logprobs[where], correction, loss)
            aggregate(lost.by_token, part.mask, part.offsets, scale).backward()
            sums = {name: value + sums.get(name, 0) for name, value in lost.correction.items()}
        assert logprobs.grad is not None
        return logprobs.grad, sums

    whole, sums = gradient([list(range(len(batch)))])
    cut, added = gradient(split_by_tokens(batch.lengths.tolist(), max_tokens))
    torch.testing.assert_close(cut, whole)
    assert not whole[~batch.mask].any()
    assert sums.keys() == added.keys() and bool(sums) == (which > 0)
    for name, value in sums.items():
        torch.testing.assert_close(added[name], value)


@pytest.mark.parametrize(
    ("reject", "said"),
    [
        ({"token": 2}, "[lower, upper]"),
        ({"sequence": [2, 0.5]}, "[lower, upper]"),
        ({"geometric": [0, 2]}, "[lower, upper]"),
        ({"veto": [0.1, 2]}, "veto"),
        ({"seq_mean_k3": -1}, "seq_mean_k3"),
        ({"seq_max_k1": 2}, "'token'"),
    ],
)
def test_bounds_that_mean_nothing_are_refused(reject: dict[str, Any], said: Names) -> None:
    with naming(ValidationError, said):
        keys(reject=reject)


def test_the_alarm_names_the_key_and_rings_again_when_the_gap_has_doubled() -> None:
    alarm = GapAlarm(keys())
    gap = "rollout/logprob_gap_kl"
    assert alarm.text({gap: 0.009}) is None and alarm.text({}) is None
    told = alarm.text({gap: 0.012, f"{gap}/staleness_0": 0.012})
    assert told is not None and "0.012 nats a token" in told and "by staleness" not in told
    assert "set algorithm.rollout_correction.rollout_is=token" in told
    assert alarm.text({gap: 0.023}) is None
    told = alarm.text({gap: 0.03, f"{gap}/staleness_0": 0.001, f"{gap}/staleness_2": 0.05})
    assert told is not None and "by staleness: 0.001 at 0, 0.05 at 2" in told
    corrected = GapAlarm(keys(rollout_is="token", gap_alarm=0.1))
    told = corrected.text({gap: 0.2, f"{gap}/staleness_1": 0.2, "correction/ess": 0.5, "correction/masked_frac": 0.25})
    assert told is not None and "25.0% of the tokens weigh 0, the effective sample size is 50.0%" in told
    assert told.endswith(
        "Lower async_training.depth or async_training.max_staleness, or set algorithm.rollout_correction."
        "rollout_is=tempered"
    )
    told = GapAlarm(keys(rollout_is="tempered", gap_alarm=0.1)).text({gap: 0.2, f"{gap}/staleness_1": 0.2})
    assert told is not None and told.endswith("Lower async_training.depth or async_training.max_staleness")
    told = GapAlarm(keys(proximal="rollout")).text({gap: 0.2})
    assert told is not None and "rollout_correction.reject.seq_mean_k3" in told
    assert GapAlarm(keys(gap_alarm=None)).text({gap: 5.0}) is None
    told = GapAlarm(keys()).text({gap: 0.2, f"{gap}/staleness_1": 0.2})
    assert told is not None and "set algorithm.rollout_correction.rollout_is=tempered" in told


def test_a_small_effective_sample_size_is_told_once_and_when_it_has_halved() -> None:
    alarm = GapAlarm(keys(rollout_is="sequence", gap_alarm=None))
    assert alarm.ess_text({}) is None and alarm.ess_text({"correction/ess": 0.5}) is None
    told = alarm.ess_text({"correction/ess": 0.42})
    assert told is not None and "42.0%" in told and "rollout_is=sequence (truncate at 2)" in told
    assert alarm.ess_text({"correction/ess": 0.22}) is None
    assert alarm.ess_text({"correction/ess": 0.2}) is not None


def tempered(strength: float, log_ratio: Tensor, offsets: Tensor) -> Tensor:
    """Weigh by the formula, sequence by sequence, before the mean: [T] float64."""
    parts = log_ratio.double().split(offsets.diff().tolist())
    return torch.cat([(part + strength * (part.sum() - part)).exp().clamp(max=2) for part in parts])


@pytest.mark.parametrize(("deviation", "by"), [(0.001, "sequence"), (0.02, "power"), (0.8, "token")])
def test_tempered_weighs_by_as_much_of_the_sequence_as_leaves_nine_tenths_of_the_tokens(
    deviation: float, by: str
) -> None:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(64, 1025, (96,), generator=generator)
    offsets = torch.tensor([0, *lengths.tolist()]).cumsum(0)
    log_ratio = torch.randn(int(offsets[-1]), generator=generator) * deviation
    mask = torch.ones(len(log_ratio), dtype=torch.bool)
    found = correct(log_ratio, mask, offsets, keys(rollout_is="tempered")).weight.double()
    assert float(found.mean()) == pytest.approx(1, abs=1e-5)

    def ess(weight: Tensor) -> float:
        return float(weight.sum() ** 2 / (len(weight) * weight.square().sum()))

    if by == "power":
        assert 0.9 <= ess(found) < 0.901
        best = max(one / 512 for one in range(513) if ess(tempered(one / 512, log_ratio, offsets)) >= 0.9)
        assert 0.1 < best < 0.9
        expected = tempered(best, log_ratio, offsets)
    else:
        expected = tempered(float(by == "sequence"), log_ratio, offsets)
        assert (ess(expected) >= 0.9) == (by == "sequence")
    torch.testing.assert_close(found, expected / expected.mean(), rtol=0.02, atol=0)
