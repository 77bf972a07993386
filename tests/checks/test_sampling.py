"""Sampled tokens against their distributions, for policies from uniform to nearly certain, drawn by torch alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from agentrl.algorithms.estimate import Settings, estimate
from agentrl.checks.batch import Drawn, Expected, check_batch
from agentrl.checks.step import History
from agentrl.config.sections.algorithm import AlgorithmConfig
from agentrl.config.sections.checks import ChecksConfig
from agentrl.observe.report import Finding
from agentrl.trajectory.batch import RaggedBatch

GROUPS, EACH = 4, 4


@dataclass(frozen=True)
class Policy:
    """Each token: one of probability 1 - e, or one of `rest` tokens of probability e / rest each."""

    least: float
    """Smallest e of a token."""
    most: float
    """Largest, log-uniform between them."""
    rest: int

    def probabilities(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Draw the e of each token."""
        low, high = torch.tensor([self.least, self.most], dtype=torch.float64).log()
        return torch.exp(low + (high - low) * torch.rand(shape, generator=generator, dtype=torch.float64))

    def moments(self, chance: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Log-prob of the likely token, that of each other one, entropy and variance of -log p."""
        likely, other = torch.log1p(-chance), (chance / self.rest).log()
        entropy = -(1 - chance) * likely - chance * other
        return likely, other, entropy, (1 - chance) * likely**2 + chance * other**2 - entropy**2


POLICIES = {
    "uniform over 2": Policy(0.5, 0.5, 1),
    "uniform over 50,000": Policy(1 - 1 / 50000, 1 - 1 / 50000, 49999),
    "a half": Policy(0.5, 0.5, 50),
    "one in 10": Policy(0.1, 0.1, 1000),
    "one in 100": Policy(1e-2, 1e-2, 20),
    "one in 1,000, of 2": Policy(1e-3, 1e-3, 1),
    "one in 10,000, of 50,000": Policy(1e-4, 1e-4, 49999),
    "one in 1,000,000": Policy(1e-6, 1e-6, 49999),
    "as language models are": Policy(1e-7, 0.5, 30),
    "certain": Policy(1e-12, 1e-12, 10),
}


def drawn_by(
    policy: Policy, tokens: int, seed: int, engine_chance: float = 1.0, groups: int = GROUPS
) -> tuple[RaggedBatch, Tensor]:
    """A batch of sequences whose last `tokens` tokens are sampled, and how surprising each sequence is.

    engine_chance: factor of the probability of unlikely tokens that only the engine knows of.
    """
    generator, count = torch.Generator().manual_seed(seed), groups * EACH
    chance = policy.probabilities((count, tokens), generator)
    likely, other, entropy, variance = policy.moments(chance)
    rare = torch.rand((count, tokens), generator=generator, dtype=torch.float64) < chance * engine_chance
    logprobs = torch.where(rare, other, likely)

    def column(values: Tensor) -> Tensor:
        return torch.cat([torch.zeros(count, 1), values.float()], dim=1).flatten()

    sampled = column(torch.ones(count, tokens)) > 0
    batch = RaggedBatch.from_columns(
        offsets=torch.arange(count + 1) * (tokens + 1),
        ids=torch.arange(count * (tokens + 1)),
        mask=sampled,
        rollout_logprobs=column(logprobs),
        version=sampled.int() * 4 - 1,
        turn=sampled.int() - 1,
        rewards=torch.zeros(len(sampled)),
        group=torch.arange(count) // EACH,
        trajectory=torch.arange(count),
        policy=torch.zeros(count, dtype=torch.int32),
        policies=("policy",),
        old_logprobs=column(logprobs),
        entropy=column(entropy),
        varentropy=column(variance.clamp(min=0)),
    )
    return batch, (-logprobs - entropy).sum(1)


def expected(batch: RaggedBatch, pool: int = GROUPS) -> Expected:
    tokens = int(batch.policy_tokens[0])
    return Expected(
        drawn={int(one): Drawn(f"u{one}", int(one) // EACH, 0.0, tokens) for one in batch.trajectory},
        version=3,
        max_staleness=0,
        algorithm=AlgorithmConfig(),
        n=EACH,
        pool=pool,
        kl_coef=None,
        taught=False,
        gap=1e-3,
        plain=True,
        reference="none",
    )


class Run:
    """The checks of a run's steps, as the trainer calls them."""

    def __init__(self) -> None:
        self.history = History(ChecksConfig(low_entropy=0), gap=1e-3)

    def step(self, batch: RaggedBatch, pool: int = GROUPS) -> list[Finding]:
        report = check_batch(batch, expected(batch, pool))
        assert report.evaluated["sampling"] == 1
        return report.findings + self.history.check(report.numbers, [], learnt=True, evidence=report.evidence)


@pytest.mark.parametrize("name", POLICIES)
def test_a_hundred_clean_steps_raise_no_alarm(name: str) -> None:
    """Ten policies: a thousand steps, of 16 to 4,800 tokens."""
    run = Run()
    for step in range(100):
        batch, _ = drawn_by(POLICIES[name], (1, 3, 40, 300)[step % 4], seed=step)
        assert run.step(batch) == [], step


@pytest.mark.parametrize(
    ("name", "engine_chance"),
    [
        ("one in 10", 0.0),
        ("one in 10", 0.5),
        ("one in 10", 2.0),
        ("one in 100", 0.0),
        ("one in 100", 3.0),
        ("as language models are", 0.0),
        ("as language models are", 0.5),
        ("as language models are", 1.7),
        ("one in 10,000, of 50,000", 100.0),
    ],
)
def test_another_distribution_is_named_within_two_steps(name: str, engine_chance: float) -> None:
    run = Run()
    for step in range(20):
        assert run.step(drawn_by(POLICIES[name], 300, step)[0]) == []
    found = [one for step in (20, 21) for one in run.step(drawn_by(POLICIES[name], 300, step, engine_chance)[0])]
    assert found and {one.check for one in found} == {"sampling"}
    assert ("less" if engine_chance < 1 else "more") in found[0].what


def test_weak_evidence_adds_up_over_steps() -> None:
    """A policy so certain that greedy sampling hardly differs: it takes more steps, and is named all the same."""
    run, policy = Run(), Policy(1e-3, 1e-3, 20)
    assert [run.step(drawn_by(policy, 300, step)[0]) for step in range(50)] == [[]] * 50
    found = [bool(run.step(drawn_by(policy, 300, step, engine_chance=0.0)[0])) for step in range(50, 90)]
    assert 2 < found.index(True) < 39


def test_groups_that_were_chosen_by_how_they_went_raise_no_alarm() -> None:
    """The batch has the four most surprising groups of sixteen, as where only those that teach are trained on."""
    chosen, taken_as_all = Run(), Run()
    for step in range(100):
        batch, surprise = drawn_by(POLICIES["as language models are"], 20, step, groups=16)
        best = surprise.reshape(16, EACH).sum(1).argsort(descending=True)[:GROUPS].sort().values
        kept = batch.select([int(group) * EACH + k for group in best for k in range(EACH)])
        assert chosen.step(kept, pool=16) == []
        last = taken_as_all.step(kept)
        if last:
            break
    assert last, "the same batches, had nothing been chosen, are no chance"


def test_equal_sequences_are_told_only_where_chance_cannot_make_them() -> None:
    batch, _ = drawn_by(Policy(0.5, 0.5, 50), 40, seed=1)
    row = batch.offsets[1]
    for column in (batch.ids, batch.rollout_logprobs, batch.old_logprobs):
        assert column is not None
        column[row : 2 * row] = column[:row]
    told = [one.what for one in check_batch(batch, expected(batch)).findings]
    assert len(told) == 1 and "its tokens are those of u0" in told[0]
    filtered = replace(expected(batch), plain=False)  # top_k=1 draws one sequence each time
    assert check_batch(batch, filtered).findings == []


@pytest.mark.parametrize(("chance", "told"), [(1e-9, False), (0.3, True)])
def test_certain_tokens_do_not_tell_the_reference_from_the_policy(chance: float, told: bool) -> None:
    """Log-probs of certain tokens are equal to the last bit whatever the update changed."""
    batch, _ = drawn_by(Policy(chance, chance, 10), 40, seed=2)
    batch = batch.with_fields(ref_logprobs=batch.old_logprobs)
    held = replace(expected(batch), reference="same")
    assert [one.check for one in check_batch(batch, held).findings] == ["reference"] * told


@pytest.mark.parametrize("proximal", ["recomputed", "rollout", "interpolated"])
def test_the_kl_in_the_reward_is_of_the_log_probs_that_it_was_taken_of(proximal: str) -> None:
    """Losses that choose tokens, and some estimators, have the policy's own log-probs computed in any case."""
    batch, _ = drawn_by(next(iter(POLICIES.values())), 40, seed=1)
    batch = batch.with_fields(
        old_logprobs=batch.rollout_logprobs * 1.3, ref_logprobs=batch.rollout_logprobs * 0.5, entropy=None
    )
    keys = {"use_kl_in_reward": True, "rollout_correction": {"proximal": proximal}}
    algorithm = AlgorithmConfig.model_validate(keys)
    columns, _ = estimate(batch, algorithm, Settings(EACH, kl_coef=1.0, version=3))
    report = check_batch(
        batch.with_fields(**columns), replace(expected(batch), algorithm=algorithm, kl_coef=1.0, gap=9.0)
    )
    assert report.evaluated["rewards"] and not [one for one in report.findings if one.check == "rewards"]
