"""A rank's watch over an update: sequences, the gradient of log-probs or values, the clip, the optimizer's steps."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from agentrl.algorithms.ragged import segment_ids
from agentrl.checks.loss_gradient import LossKeys, Slopes, Term, slopes
from agentrl.checks.optimizer_step import StepWatch
from agentrl.checks.value_gradient import value_slopes
from agentrl.config.sections.sft import TuningConfig
from agentrl.observe.report import Finding, Report
from agentrl.observe.watch import Counts, Learning, Seal, Stepped, UpdateChecked
from agentrl.trajectory.batch import RaggedBatch

TOLERANCE = 1e-4
"""Largest relative difference of a derivative from its closed form."""
NOISE = 1e-6
"""Relative rounding of derivatives of which one term is measured."""
SAME = {"float32": 1e-3, "bfloat16": 0.25}
"""Largest mean distance of log-probs of the same weights by two passes of the trainer, nats a token, by dtype; of
values as a part of their mean size."""

SEALED = (
    *("ids", "advantages", "old_logprobs", "ref_logprobs", "rollout_logprobs", "correction", "staleness", "success"),
    *("values", "returns"),
)
"""Columns whose values an update must not change."""
_MULTIPLIERS = (0x7FB5D329728EA185, 0x2545F4914F6CDD1D, 0x369DEA0F31A53F85)
NAMED = 5
"""Sequences that are named at most."""

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Learnt:
    """The loss of a role in closed form, and the column of its scores."""

    role: str
    score: str
    """Name of a score in messages."""
    slopes: Callable[[RaggedBatch, Tensor, Counts], Slopes | None]
    """Differentiates the loss by the scores [T]; None: it has no closed form."""
    before: str | None = None
    """Column of the same scores before the update; None: it is of other weights."""
    relative: bool = False
    """Distances count as a part of the scores' size."""


def learnt_of(learning: Learning[Found]) -> Learnt:
    """Describe what a role learns."""
    config, section = learning.config, learning.section
    if isinstance(config, TuningConfig):
        # The losses of preferences have no closed form here.
        return Learnt("policy", "log-prob", of_transcript) if learning.kind == "transcripts" else OF_PREFERENCES
    norm_length = config.data.max_response_length
    if learning.kind == "critic":
        derive = partial(value_slopes, config=config.critic, unit=section.loss_unit, norm_length=norm_length)
        return Learnt("critic", "value", derive, "values", relative=True)
    correction, distillation = config.algorithm.rollout_correction, config.distillation
    keys = LossKeys(
        actor=section,
        correction=correction,
        distillation=distillation if distillation.in_loss else None,
        norm_length=norm_length,
    )
    before = "old_logprobs" if correction.proximal == "recomputed" else None
    return Learnt("policy", "log-prob", partial(slopes, keys=keys), before)


def of_transcript(micro: RaggedBatch, logprobs: Tensor, counts: Counts) -> Slopes:
    """Differentiate the loss of supervised training: the weighted mean negative log-likelihood of its tokens."""
    share = torch.where(micro.mask, 1.0 / max(int(counts.policy_tokens.sum()), 1), 0.0).double()
    if micro.loss_weight is not None:
        share = share * micro.loss_weight[segment_ids(micro.offsets, len(share))]
    return Slopes({"policy": Term(1.0, -share, share)}, torch.zeros_like(share), torch.zeros_like(micro.mask))


OF_PREFERENCES = Learnt("policy", "score", lambda micro, scores, counts: None)


class _Pass(NamedTuple):
    """One micro-batch between its forward and its backward pass."""

    micro: RaggedBatch
    scores: Tensor  # [T]
    factor: float
    counts: Counts
    first: bool
    grads: dict[str, Tensor]


class UpdateChecks(Generic[Found]):
    """Compares each update of a role with the config, the columns of its batch and its gradients."""

    def __init__(self, learning: Learning[Found]) -> None:
        section = learning.section
        self.learnt, self.scores, self.dtype = learnt_of(learning), learning.scores, learning.dtype
        self.steps = StepWatch(section.optim, section.grad_clip, learning.total_steps)
        self._report = Report()
        self._passes: list[_Pass] = []
        self._measured: list[tuple[Tensor, Tensor | None]] = []
        """Seals of the sequences, and numbers, of each pass whose backward pass is done."""
        self._rows: list[Tensor] = []
        self._seals: list[Tensor] = []
        self._speaks, self._begun = True, False
        """_begun: the optimizer took a step in this update."""
        self._step = 0.0
        self._counts: Counts

    def begin(self, counts: Counts) -> None:
        self._counts = counts
        self._passes.clear()  # of a mini-batch that was skipped: no step of the optimizer is to be compared with it
        self._measured.clear()
        self.steps.begin()

    def scored(self, found: Found, micro: RaggedBatch, factor: float) -> None:
        """Note a micro-batch and the scores that its loss is computed of. factor: of the loss before backward."""
        begun = time.thread_time()
        grads: dict[str, Tensor] = {}
        scores = self.scores(found)
        for name, values in scores.items():
            if values.requires_grad:
                values.register_hook(partial(grads.__setitem__, name))
        self._measure_passes()  # its micro-batch need not stay on the device until the step
        self._passes.append(_Pass(micro, scores["score"].detach(), factor, self._counts, not self._begun, grads))
        self._report.seconds += time.thread_time() - begun

    def stepping(self, model: Stepped, norm: float, step: float) -> None:
        """Look at the gradients before a step of the optimizer."""
        begun = time.thread_time()
        if not self._begun and step <= self._step:
            self.steps.forget()  # an older checkpoint was loaded
        self._begun, self._step = True, step
        self._speaks = model.mesh.first
        self._compare()
        self._report.findings += self.steps.before(model, norm)
        self._report.seconds += time.thread_time() - begun

    def stepped(self, model: Stepped, step: float) -> None:
        """Compare the weights after a step of the optimizer."""
        begun = time.thread_time()
        self._report.findings += self.steps.after(model, step)
        self._report.seconds += time.thread_time() - begun

    def result(self) -> UpdateChecked:
        begun = time.thread_time()
        self._passes.clear()
        self._measured.clear()
        report = self._report
        watched = bool(self._seals) or self._begun
        report.findings += _differences(self._rows, self.learnt, self.dtype)
        role = self.learnt.role
        if role != "policy":
            report.findings = [replace(one, where=f"{role}: {one.where}") for one in report.findings]
        seals = [one for batch in self._seals for one in map(tuple, batch.tolist())] if self._speaks else []
        compared = {"gradient": len(self._rows), "clip": self.steps.clips, "optimizer": self.steps.compared}
        report.evaluated.update({f"{COUNTED[role]}/{name}": count for name, count in compared.items()})
        self.steps.clips = self.steps.compared = 0
        self._rows, self._seals, self._report, self._begun = [], [], Report(), False
        report.seconds += time.thread_time() - begun
        return UpdateChecked(report, seals, watched)

    def _compare(self) -> None:
        self._measure_passes()
        self._seals += [seals for seals, _ in self._measured]
        self._rows += [row for _, row in self._measured if row is not None]
        self._measured.clear()

    def _measure_passes(self) -> None:
        for one in self._passes:
            wanted = self.learnt.slopes(one.micro, one.scores, one.counts)
            row = None if wanted is None or not one.micro.num_tokens else _measure(one, wanted, self.learnt)
            self._measured.append((seal(one.micro), row))
        self._passes.clear()


COUNTED = {"policy": "update", "critic": "critic"}
"""By role, the first part of the names under which its comparisons are counted."""
HEAD = ("wrong", "place", "found", "wanted", "trajectory", "token", "entropy", "moved", "size", "trained")
TERMS = ("policy", "kl", "teacher", "success", "observation", "value")


def _measure(one: _Pass, wanted: Slopes, learnt: Learnt) -> Tensor:
    """Return HEAD, then three numbers for each of TERMS: [F] float64, without a wait for the device."""
    micro, zero = one.micro, torch.zeros_like(wanted.entropy)
    grad = one.grads["score"].double() / one.factor if "score" in one.grads else zero
    expected, room, parts = zero, zero, {}
    for name, term in wanted.terms.items():
        parts[name] = term.coef * term.slope
        expected = expected + parts[name]
        room = room + TOLERANCE * abs(term.coef) * term.scale
    rest = grad - expected
    wrong = (~(rest.abs() <= room + 1e-30)) & ~wanted.unsure
    place = wrong.long().argmax()
    row = torch.searchsorted(micro.offsets, place, right=True) - 1
    by_entropy = one.grads["entropy"].double() / one.factor if "entropy" in one.grads else zero
    off = ((by_entropy - wanted.entropy).abs() > TOLERANCE * wanted.entropy.abs() + 1e-30) & micro.mask
    column: Tensor | None = getattr(micro, learnt.before) if one.first and learnt.before else None
    gap, size = zero, zero
    if column is not None:
        gap, size = (one.scores - column).abs(), column.abs() if learnt.relative else torch.ones_like(column)
    head = [wrong.sum(), place, grad[place], expected[place], micro.trajectory[row], place - micro.offsets[row]]
    head += [off.sum(), *(torch.where(micro.mask, one, 0.0).sum() for one in (gap, size)), micro.mask.sum()]
    rest = torch.where(wanted.unsure, 0.0, rest)
    for name in TERMS:
        slope = wanted.terms[name].slope if name in wanted.terms else zero
        slope = torch.where(wanted.unsure, 0.0, slope)
        others = sum((part.abs() for other, part in parts.items() if other != name), zero)
        head += [(rest * slope).sum(), slope.square().sum(), (others * slope.abs()).sum()]
        head.append(torch.tensor(wanted.terms[name].coef if name in wanted.terms else 0.0, device=zero.device))
    return torch.stack([number.double() for number in head])


def _differences(rows: Sequence[Tensor], learnt: Learnt, dtype: str) -> Iterator[Finding]:
    """Judge the numbers of all micro-batches of an update."""
    if not rows:
        return
    table = torch.stack(list(rows)).cpu()
    columns = {name: table[:, index] for index, name in enumerate(HEAD)}
    measured: dict[str, tuple[float, float]] = {}  # by term, its measured weight and the config's, where they differ
    for index, name in enumerate(TERMS):
        of_term = table[:, len(HEAD) + 4 * index : len(HEAD) + 4 * index + 4]
        product, square, others = (float(one) for one in of_term[:, :3].sum(0))
        if not square or not (coef := float(of_term[0, 3])):
            continue
        off, noise = product / square, NOISE * others / square + TOLERANCE * abs(coef)
        if noise < 0.3 * abs(coef) and abs(off) > 2 * noise + 0.05 * abs(coef):
            measured[name] = coef + off, coef
    shown = ", ".join(f"{name} {found:.4g} in place of {wanted:.4g}" for name, (found, wanted) in measured.items())
    for index in columns["wrong"].nonzero()[:3, 0].tolist():
        at = {name: float(column[index]) for name, column in columns.items()}
        what = (
            f"the loss's derivative by the {learnt.score} of token {at['token']:.0f} is {at['found']:.6g}, and the "
            f"config's loss has {at['wanted']:.6g} ({at['wrong']:.0f} of {at['trained']:.0f} policy tokens differ"
            f"{'; measured weights of terms: ' + shown if shown else ''})"
        )
        yield Finding("update", what, f"trajectory {at['trajectory']:.0f} of the step")
    if shown and not columns["wrong"].any():
        yield Finding("update", f"weights of the loss's terms: {shown}", "the loss")
    if columns["entropy"].any():
        count = float(columns["entropy"].sum())
        yield Finding("update", f"the entropy bonus of {count:.0f} tokens is not the config's", "the loss")
    moved, size = float(columns["moved"].sum()), float(columns["size"].sum())
    if not moved <= SAME[dtype] * size + 1e-30:
        far = f"{moved / size:.3g} nats a token" if not learnt.relative else f"{moved:.3g} in all, of {size:.3g},"
        what = f"before its first step the update's {learnt.score}s are {far} from those before the update"
        yield Finding("update", what, f"the {learnt.score}s")


def seal(batch: RaggedBatch) -> Tensor:
    """Hash the policy tokens of each sequence, their places and their values bit for bit: a `Seal` a row, int64."""
    place = torch.arange(batch.num_tokens, device=batch.ids.device)
    owner = segment_ids(batch.offsets, batch.num_tokens)
    place = place - batch.offsets[:-1][owner]
    values = torch.zeros(len(SEALED), batch.num_tokens, dtype=torch.int64, device=batch.ids.device)
    for row, name in enumerate(SEALED):
        column: Tensor | None = getattr(batch, name)
        if column is not None:
            column = column[owner] if name in batch.sequences else column
            values[row] = column.contiguous().view(torch.int32) if column.is_floating_point() else column
    mixed = (values + place * _MULTIPLIERS[0]) * _MULTIPLIERS[1]
    mixed = (mixed ^ (mixed >> 29)) * _MULTIPLIERS[2]
    known = torch.tensor([[getattr(batch, name) is not None] for name in SEALED], device=values.device)
    mixed = torch.where(batch.mask & known, mixed ^ (mixed >> 32), 0)
    found = mixed.new_zeros(len(SEALED), len(batch)).index_add_(1, owner, mixed)
    return torch.cat([batch.trajectory[None], found]).T


def check_trained(
    estimated: Tensor, trained: Sequence[Seal], epochs: int, optional: Collection[int], name: Callable[[int], str]
) -> Iterator[Finding]:
    """Compare the sequences of the estimate with the sequences that the loss was computed of.

    estimated [N, columns of a Seal] int64. trained: one for each time. optional: indices of sequences that need not be
    computed. name: of a trajectory.
    """
    wanted = [tuple(one) for one in estimated.tolist()]
    known = Counter(wanted)
    seen, told = Counter(trained), 0
    strange = [one for one in seen if one not in known]
    by_ids = {one[:2]: one for one in strange}
    needed = Counter(one for row, one in enumerate(wanted) if row not in optional)
    for one, copies in known.items():
        least, most = needed[one] * epochs, copies * epochs
        if least <= seen[one] <= most or not one[1] or told >= NAMED:
            continue
        told += 1
        other = by_ids.pop(one[:2], None)
        if other is not None:
            changed = [column for column, a, b in zip(SEALED, one[1:], other[1:], strict=True) if a != b]
            what = f"the update's {', '.join(changed)} of a sequence are not those of the estimate"
        else:
            what = f"the update went {seen[one]} times over a sequence in {epochs} epochs"
        yield Finding("update", what, name(one[0]))
    for one in list(by_ids.values())[: NAMED - told]:
        yield Finding(
            "update", "the update went over a sequence with tokens that the estimate does not know", name(one[0])
        )
