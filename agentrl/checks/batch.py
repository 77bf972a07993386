"""Checks of a step's batch, after its advantages: each column compared with the others and the outlines."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.algorithms.advantages import compute_advantages
from agentrl.algorithms.kl import kl_penalty
from agentrl.algorithms.ragged import segment_sum
from agentrl.algorithms.rollout_correction import ages, correct
from agentrl.config.sections.algorithm import AlgorithmConfig
from agentrl.observe.invariants import LOGPROB_SLACK
from agentrl.observe.report import Finding, Report
from agentrl.system.metrics import Numbers
from agentrl.trajectory.batch import RaggedBatch

TILTS = tuple(sign / 2**power for power in range(5) for sign in (1, -1))
"""Weights of surprise in `surprise_evidence`: small ones see a little bias of many tokens, large ones rare tokens."""
LEAST_VISIBLE = 64
"""With fewer tokens that are less than certain, equal log-probs of two models say nothing."""
CERTAIN = -0.01
"""Log-prob above which float32 may hide a change of the weights."""
LEAST_CERTAIN = -1.0
"""Sum of the trainer's log-probs above which an answer may have been certain to its engine."""
ZERO = (
    *("rollout_logprobs", "old_logprobs", "ref_logprobs", "entropy", "varentropy"),
    *("rewards", "advantages", "correction"),
)
"""Columns that are 0 where nothing was sampled."""
SLACK = 1e-3
"""Largest difference between two float32 sums of a trajectory's rewards, in addition to a relative one."""
IMPROBABLE = 30.0
"""Surprise in nats of a sequence that nobody draws twice."""
BY_REWARD = ("grpo", "rloo", "opo", "gpg", "maxrl")
"""Estimators whose advantages are by the trajectory's reward alone, relative to its prompt."""
NAMED = 5
"""Trajectories of one check that are named at most."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """One trajectory that can be trained on, as its outline says."""

    uid: str
    group: int
    reward: float
    sampled: int
    """Tokens that the policy sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """Values that a batch is held against."""

    drawn: Mapping[int, Drawn]
    """By their numbers, all trajectories of the step that can be trained on."""
    version: int
    """Version of the policy before the update."""
    max_staleness: int | None
    """Versions that a token may be older; None: any number."""
    algorithm: AlgorithmConfig
    n: int
    """Trajectories that were asked for of each prompt."""
    pool: int
    """Prompts from which the batch's prompts were chosen by the results of their trajectories."""
    kl_coef: float | None
    """Coefficient of the KL in the reward; None: it is not there."""
    taught: bool
    """A teacher's advantages are added to the estimator's."""
    gap: float
    """See `trainer.checks.gap`."""
    plain: bool
    """Tokens are drawn from the whole distribution, without a cut by top_p or top_k."""
    reference: str
    """`same`: the reference is the model that the policy began as; `other`; or `none`."""
    keeps: bool = False
    """After a change of weights an answer continues from the KV cache of the older ones."""


def check_batch(batch: RaggedBatch, expected: Expected) -> Report:
    """Return the faults of the batch, and the numbers computed on the way."""
    report = Report()
    report.add_check("coverage", _coverage(batch, expected))
    report.add_check("columns", _columns(batch, expected))
    if not len(batch):
        return report
    report.add_check("versions", _versions(batch, expected))
    report.add_check("rewards", _rewards(batch, expected))
    if not expected.taught and batch.advantages is not None:
        report.add_check("advantages", _advantages(batch, expected))
    if batch.correction is not None and batch.old_logprobs is not None:
        report.add_check("correction", _correction(batch, expected))
    # Sampled by the weights that the trainer has, from keys and values of no others.
    fresh = batch.mask & (batch.version == expected.version)
    if expected.keeps:
        fresh &= ~behind_a_change(batch)
    report.add_check("gap", _certain(batch, expected))
    if batch.old_logprobs is not None and fresh.any():
        report.add_check("gap", _gap(batch, expected, fresh, report.numbers))
    if expected.plain:
        report.findings += _copies(batch, expected)
        if batch.entropy is not None and fresh.any():
            _surprise(batch, expected, fresh, report)
    if expected.reference == "same" and batch.ref_logprobs is not None and batch.old_logprobs is not None:
        report.add_check("reference", _reference(batch, expected))
    return report


def _uid(batch: RaggedBatch, row: int, expected: Expected) -> str:
    number = int(batch.trajectory[row])
    return expected.drawn[number].uid if number in expected.drawn else f"trajectory {number} of the step"


def _at(batch: RaggedBatch, wrong: Tensor, expected: Expected) -> Iterator[tuple[str, int, int]]:
    """Yield (uid, place in its sequence, place in the batch) of the first wrong token of each sequence.

    wrong: [T] bool.
    """
    places = wrong.nonzero()[:, 0]
    rows = batch.sequence_ids()[places]
    seen: set[int] = set()
    for place, row in zip(places.tolist(), rows.tolist(), strict=True):
        if row not in seen and len(seen) < NAMED:
            seen.add(row)
            yield _uid(batch, row, expected), place - int(batch.offsets[row]), place


def _coverage(batch: RaggedBatch, expected: Expected) -> Iterator[Finding]:
    """Compare the batch's trajectories, and their tokens, with the outlines."""
    tokens: dict[int, int] = {}
    for number, count in zip(batch.trajectory.tolist(), batch.policy_tokens.tolist(), strict=True):
        tokens[number] = tokens.get(number, 0) + count
    groups = set(batch.group.tolist())
    for number, group in set(zip(batch.trajectory.tolist(), batch.group.tolist(), strict=True)):
        if number in expected.drawn and expected.drawn[number].group != group:
            what = f"it is compared with the trajectories of prompt {group}, and is of {expected.drawn[number].group}"
            yield Finding("coverage", what, expected.drawn[number].uid)
    for number, drawn in expected.drawn.items():
        if number not in tokens and drawn.group in groups:
            yield Finding("coverage", "a trajectory can be trained on, and is not in the batch", drawn.uid)
    for number, count in tokens.items():
        if number not in expected.drawn:
            yield Finding("coverage", "it is in the batch, and cannot be trained on", f"trajectory {number}")
        elif count != expected.drawn[number].sampled:
            wanted = expected.drawn[number].sampled
            what = f"{count} of its tokens are trained on, and {wanted} were sampled"
            yield Finding("coverage", what, expected.drawn[number].uid)


def _columns(batch: RaggedBatch, expected: Expected) -> Iterator[Finding]:
    """Check each column against the mask: finite on policy tokens, and nothing elsewhere."""
    mask = batch.mask
    if len(batch) and mask[batch.offsets[:-1]].any():
        row = int(mask[batch.offsets[:-1]].nonzero()[0, 0])
        yield Finding(
            "columns", "mask: the first token of a sequence is said to be sampled", _uid(batch, row, expected)
        )
    faults = {f"{name} and mask disagree": (getattr(batch, name) >= 0) != mask for name in ("version", "turn")}
    columns: dict[str, Tensor] = {name: one for name in ZERO if (one := getattr(batch, name)) is not None}
    values = torch.stack(list(columns.values()))  # all at once: most columns have no fault
    limit = torch.tensor([[LOGPROB_SLACK if name.endswith("_logprobs") else math.inf] for name in columns])
    kinds = {"not finite": ~torch.isfinite(values), "not 0 where nothing was sampled": (values != 0) & ~mask}
    kinds["above 0"] = values > limit
    for what, wrong in kinds.items():
        if wrong.any():
            faults |= {f"{name} is {what}": row for name, row in zip(columns, wrong, strict=True)}
    if batch.entropy is not None:
        faults["entropy is below 0"] = batch.entropy < -LOGPROB_SLACK
    for what, wrong in faults.items():
        for uid, place, _ in _at(batch, wrong, expected) if wrong.any() else ():
            yield Finding("columns", f"{what} (token {place})", uid)


def _versions(batch: RaggedBatch, expected: Expected) -> Iterator[Finding]:
    oldest = -1 if expected.max_staleness is None else expected.version - expected.max_staleness
    mine = batch.mask & (batch.policy[batch.sequence_ids()] == 0) if len(batch.policies) > 1 else batch.mask
    wrong = mine & ((batch.version > expected.version) | (batch.version < oldest))
    for uid, place, token in _at(batch, wrong, expected) if wrong.any() else ():
        what = (
            f"token {place} is said to be of version {int(batch.version[token])}, and the policy is version "
            f"{expected.version}, of which tokens may be {expected.max_staleness} older"
        )
        yield Finding("versions", what, uid)
    if batch.staleness is not None and not torch.equal(batch.staleness, ages(batch.version, expected.version)):
        yield Finding("versions", "the column staleness is not that of the versions", "batch")


def _rewards(batch: RaggedBatch, expected: Expected) -> Iterator[Finding]:
    """Compare the sum of each trajectory's token rewards with `Outline.reward`."""
    rewards = batch.rewards.double()
    if expected.kl_coef is not None and batch.ref_logprobs is not None:
        # As `estimate`, also where the loss or the estimator asked for the policy's own log-probs.
        by_trainer = batch.old_logprobs if expected.algorithm.rollout_correction.needs_pass else None
        before = batch.rollout_logprobs if by_trainer is None else by_trainer
        kl = kl_penalty(before, batch.ref_logprobs, expected.algorithm.kl_penalty)
        rewards = rewards + expected.kl_coef * torch.where(batch.mask, kl, 0.0).double()
    sums: dict[int, float] = {}
    for number, value in zip(batch.trajectory.tolist(), segment_sum(rewards, batch.offsets).tolist(), strict=True):
        sums[number] = sums.get(number, 0.0) + value
    for number, value in sums.items():
        drawn = expected.drawn.get(number)
        if drawn is not None and not math.isclose(value, drawn.reward, rel_tol=1e-4, abs_tol=SLACK):
            what = f"its tokens are paid {value:.6g} in the batch, and its reward is {drawn.reward:.6g}"
            yield Finding("rewards", what, drawn.uid)


def _advantages(batch: RaggedBatch, expected: Expected) -> Iterator[Finding]:
    """Compute the advantages again, by the registered estimator from the batch's own columns.

    By reward alone, they are at least 0 for the best of a prompt, and at most 0 for the worst.
    """
    if not expected.algorithm.rollout_correction.needs_pass:
        batch = batch.with_fields(old_logprobs=batch.rollout_logprobs)
    again = compute_advantages(batch, expected.algorithm, expected.n)
    assert again.advantages is not None and batch.advantages is not None
    wrong = ~torch.isclose(again.advantages, batch.advantages, rtol=1e-3, atol=1e-5, equal_nan=True)
    for uid, place, token in _at(batch, wrong, expected) if wrong.any() else ():
        here, there = float(batch.advantages[token]), float(again.advantages[token])
        what = f"token {place} has the advantage {here:.6g}, and {expected.algorithm.adv_estimator} gives {there:.6g}"
        yield Finding("advantages", what, uid)
    if expected.algorithm.adv_estimator not in BY_REWARD:
        return
    rewards = segment_sum(batch.rewards.double(), batch.offsets).tolist()
    sums = segment_sum(batch.advantages.double(), batch.offsets).tolist()
    owners = batch.trajectory.tolist()
    if len(set(owners)) < len(owners) or batch.score_shift is not None:
        return  # a trajectory of several sequences has its reward on one of them, or by sequence
    groups: dict[int, list[int]] = {}
    for row, group in enumerate(batch.group.tolist()):
        groups.setdefault(group, []).append(row)
    for members in groups.values():
        best, worst = max(members, key=rewards.__getitem__), min(members, key=rewards.__getitem__)
        if rewards[best] - rewards[worst] > SLACK:
            for row, wrong in ((best, sums[best] < -SLACK), (worst, sums[worst] > SLACK)):
                if wrong:
                    what = f"it has the {'best' if row == best else 'worst'} reward of its prompt, and its advantages "
                    yield Finding("advantages", f"{what}add up to {sums[row]:.4g}", _uid(batch, row, expected))


def _correction(batch: RaggedBatch, expected: Expected) -> Iterator[Finding]:
    keys = expected.algorithm.rollout_correction
    assert batch.correction is not None and batch.old_logprobs is not None
    gap = torch.where(batch.mask, batch.old_logprobs - batch.rollout_logprobs, 0.0)
    weight = correct(gap, batch.mask, batch.offsets, keys).weight.float()
    wrong = ~torch.isclose(weight, batch.correction, rtol=1e-4, atol=1e-6, equal_nan=True)
    for uid, place, token in _at(batch, wrong, expected) if wrong.any() else ():
        here, there = float(batch.correction[token]), float(weight[token])
        yield Finding("correction", f"token {place} weighs {here:.6g}, and its log-probs give {there:.6g}", uid)


def behind_a_change(batch: RaggedBatch) -> Tensor:
    """[T] bool: sampled in a turn whose first token other weights sampled."""
    places = batch.mask.nonzero()[:, 0]
    row, turn, version = batch.sequence_ids()[places], batch.turn[places], batch.version[places]
    begins = torch.ones_like(places, dtype=torch.bool)
    begins[1:] = (row[1:] != row[:-1]) | (turn[1:] != turn[:-1])
    found = torch.zeros_like(batch.mask)
    found[places] = version != version[begins][begins.cumsum(0) - 1]
    return found


def _gap(batch: RaggedBatch, expected: Expected, fresh: Tensor, numbers: Numbers) -> Iterator[Finding]:
    """Compare the engine's log-probs with the trainer's forward pass, which has no cache, by sequence."""
    assert batch.old_logprobs is not None
    gap = torch.where(fresh, (batch.old_logprobs - batch.rollout_logprobs).abs(), 0.0)
    counts = segment_sum(fresh.float(), batch.offsets)
    means = segment_sum(gap, batch.offsets) / counts.clamp(min=1)
    numbers["checks/gap_mean"] = float(gap.sum() / fresh.sum())
    numbers["checks/gap_worst"] = float(means.max())
    for row in means.argsort(descending=True)[:NAMED].tolist():
        if not means[row] > expected.gap:
            return
        span = slice(int(batch.offsets[row]), int(batch.offsets[row + 1]))
        first = int((gap[span] > expected.gap).nonzero()[0, 0])
        before = int(batch.mask[span][:first].sum())
        what = (
            f"log-probs of the same weights are {float(means[row]):.3g} nats a token from the trainer's, from its "
            f"sampled token {before} on (turn {int(batch.turn[span][first])})"
        )
        yield Finding("gap", what, _uid(batch, row, expected))


def _certain(batch: RaggedBatch, expected: Expected) -> Iterator[Finding]:
    """Report answers that the engine says to be certain throughout, by log-probs of exactly 0, and nobody else does.

    An engine that gives no log-probs is seen here also where the trainer's bound of the gap is wide. Without the
    trainer's log-probs only a whole step of such answers tells.
    """
    counts = batch.policy_tokens
    silent = (counts > 1) & (segment_sum((batch.mask & (batch.rollout_logprobs != 0)).float(), batch.offsets) == 0)
    if batch.old_logprobs is None:
        if silent.any() and not batch.rollout_logprobs.any() and int(counts.sum()) >= LEAST_VISIBLE:
            what = (
                f"the engine's log-probs of all {int(counts.sum())} sampled tokens are 0, as if each had been certain"
            )
            yield Finding("gap", what, "all trajectories of the step", "sign")
        return
    visible = batch.mask & (batch.old_logprobs < CERTAIN)
    theirs = segment_sum(torch.where(visible, batch.old_logprobs, 0.0), batch.offsets)
    for row in (silent & (theirs < LEAST_CERTAIN)).nonzero()[:NAMED, 0].tolist():
        what = (
            f"the engine's log-probs of all {int(counts[row])} sampled tokens are 0, as if each had been certain, and "
            f"the trainer's add up to {float(theirs[row]):.3g} nats"
        )
        yield Finding("gap", what, _uid(batch, row, expected), "sign")


def _surprise(batch: RaggedBatch, expected: Expected, fresh: Tensor, report: Report) -> None:
    """Compare the surprise of the sampled tokens with the entropies of their distributions, which are its mean.

    Evidence against chance is added up over steps, by `agentrl.checks.step.History`. A batch whose prompts were chosen
    by their results is one of many possible batches, and the best of so many must not look rare.
    """
    assert batch.entropy is not None and batch.varentropy is not None
    surprise = -batch.rollout_logprobs[fresh].double() - batch.entropy[fresh].double()
    if not surprise.isfinite().all():  # `columns` tells
        return
    chosen = int(batch.group.unique().numel())
    choices = math.log(math.comb(max(expected.pool, chosen), chosen))
    report.evaluated["sampling"] += 1
    report.numbers["checks/surprise"] = float(surprise.mean())
    report.evidence = [one - choices for one in surprise_evidence(surprise, batch.varentropy[fresh].double())]


def surprise_evidence(surprise: Tensor, variance: Tensor) -> list[float]:
    """Return for each of TILTS the logarithm of a number whose mean is at most 1 where tokens are drawn from their
    distributions. It is above c in at most one sound step of c (Markov), for all distributions and however few tokens.

    exp(y) <= 1 + y + (e - 2) y^2 for y <= 1. Hence the mean of exp(min(t x, 1) - (e - 2) t^2 v) is at most 1 for each x
    of mean 0 and variance v. So is the mean of its product over tokens, each drawn given those before it
    (arXiv:1002.4058, theorem 1). A mean below (e - 2) t v of the smallest t is never found, by however many tokens:
    engine and trainer may differ by their precision.

    surprise: [T] -log p of sampled tokens, less the entropy. variance: [T] of it under the distribution.
    """
    slack, spread = LOGPROB_SLACK * len(surprise), (math.e - 2) * float(variance.sum())
    return [float((t * surprise).clamp(max=1.0).sum()) - abs(t) * slack - t * t * spread for t in TILTS]


def _copies(batch: RaggedBatch, expected: Expected) -> Iterator[Finding]:
    """Report sequences of one prompt that are the same, and too improbable to be drawn twice."""
    surprise = segment_sum(-batch.rollout_logprobs.double(), batch.offsets).tolist()
    offsets, ids = batch.offsets.tolist(), batch.ids.numpy()
    seen: dict[tuple[int, bytes], int] = {}
    for row, group in enumerate(batch.group.tolist()):
        key = group, ids[offsets[row] : offsets[row + 1]].tobytes()
        before = seen.setdefault(key, row)
        if before != row and surprise[row] > IMPROBABLE and batch.trajectory[before] != batch.trajectory[row]:
            what = (
                f"its tokens are those of {_uid(batch, before, expected)}, and to draw them twice has a probability of "
                f"exp(-{surprise[row]:.0f})"
            )
            yield Finding("sampling", what, _uid(batch, row, expected))


def _reference(batch: RaggedBatch, expected: Expected) -> Iterator[Finding]:
    """Compare the reference with the policy, where the two must be the same, and where they must not."""
    assert batch.ref_logprobs is not None and batch.old_logprobs is not None
    gap = torch.where(batch.mask, batch.old_logprobs - batch.ref_logprobs, 0.0)
    if expected.version == 0:
        counts = segment_sum(batch.mask.float(), batch.offsets)
        means = segment_sum(gap.abs(), batch.offsets) / counts.clamp(min=1)
        row = int(means.argmax())
        if means[row] > expected.gap:
            what = f"before any update its log-probs are {float(means[row]):.3g} nats a token from the policy's"
            yield Finding("reference", what, _uid(batch, row, expected))
        return
    visible = batch.mask & (batch.old_logprobs < CERTAIN)
    recomputed = expected.algorithm.rollout_correction.proximal == "recomputed"
    if expected.version > 1 and recomputed and int(visible.sum()) >= LEAST_VISIBLE and not gap.any():
        what = f"after {expected.version} updates its log-probs are the policy's own, bit for bit"
        yield Finding("reference", what, "all trajectories of the step")
