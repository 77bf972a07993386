"""A rank's watch over the policy's update: the gradient of its log-probs, the clip, and the optimizer's steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from agentrl.checks.columns import Seal, seal
from agentrl.checks.finding import Finding
from agentrl.checks.loss_gradient import Counts, LossKeys, Slopes, slopes
from agentrl.checks.optimizer_step import Stepped, StepWatch
from agentrl.checks.report import Report
from agentrl.model.scores import TokenScores
from agentrl.trajectory.batch import RaggedBatch

TOLERANCE = 1e-4
"""Largest relative difference of a derivative from its closed form."""
NOISE = 1e-6
"""Relative rounding of derivatives of which one term is measured."""
SAME = {"float32": 1e-3, "bfloat16": 0.25}
"""Largest mean distance of log-probs of the same weights by two passes of the trainer, nats a token, by dtype."""
GRADIENT, CLIP, OPTIMIZER = "update/gradient", "update/clip", "update/optimizer"
"""Names under which comparisons are counted."""


@dataclass(frozen=True, slots=True)
class UpdateChecked:
    """One rank's findings, and the sequences that its losses were computed of."""

    report: Report
    seals: Sequence[Seal]
    """One for each time; empty on all ranks but one of those that see the same tokens."""
    watched: bool
    """The backend called the watch."""


class _Pass(NamedTuple):
    """One micro-batch between its forward and its backward pass."""

    micro: RaggedBatch
    logprobs: Tensor  # [T]
    factor: float
    counts: Counts
    first: bool
    grads: dict[str, Tensor]


@dataclass(slots=True)
class UpdateWatch:
    """Compares each update with the config, the columns of its batch and its gradients."""

    keys: LossKeys
    steps: StepWatch
    dtype: str
    _report: Report = field(default_factory=Report)
    _passes: list[_Pass] = field(default_factory=list)
    _rows: list[Tensor] = field(default_factory=list)
    _seals: list[Tensor] = field(default_factory=list)
    _speaks: bool = True
    _begun: bool = False
    """The optimizer took a step in this update."""
    _step: int = 0

    def mini(self, counts: Counts) -> MiniWatch:
        """Watch a mini-batch with these counts."""
        return MiniWatch(self, counts)

    def scored(self, found: TokenScores, micro: RaggedBatch, factor: float, counts: Counts) -> None:
        """Note a micro-batch and the scores that its loss is computed of. factor: of the loss before backward."""
        begun = time.thread_time()
        grads: dict[str, Tensor] = {}
        for name in ("logprobs", "entropy"):
            scores: Tensor | None = getattr(found, name)
            if scores is not None and scores.requires_grad:
                scores.register_hook(_keeper(grads, name))
        self._passes.append(_Pass(micro, found.logprobs.detach(), factor, counts, not self._begun, grads))
        self._report.seconds += time.thread_time() - begun

    def stepping(self, model: Stepped, norm: float, step: int) -> None:
        """Look at the gradients before a step of the optimizer."""
        begun = time.thread_time()
        if not self._begun and step <= self._step:
            self.steps.forget()  # an older checkpoint was loaded
        self._begun, self._step = True, step
        self._speaks = model.mesh.first
        self._compare()
        self._report.findings += self.steps.before(model, norm)
        self._report.seconds += time.thread_time() - begun

    def stepped(self, model: Stepped, step: int) -> None:
        """Compare the weights after a step of the optimizer."""
        begun = time.thread_time()
        self._report.findings += self.steps.after(model, step)
        self._report.seconds += time.thread_time() - begun

    def result(self) -> UpdateChecked:
        """Return the findings of the update, and begin the next one."""
        begun = time.thread_time()
        self._passes.clear()
        report = self._report
        watched = bool(self._seals) or self._begun
        report.findings += _differences(self._rows, self.dtype)
        seals = [one for batch in self._seals for one in map(tuple, batch.tolist())] if self._speaks else []
        for name, count in ((CLIP, self.steps.clips), (OPTIMIZER, self.steps.compared)):
            report.evaluated[name] += count
        self.steps.clips = self.steps.compared = 0
        self._rows, self._seals, self._report, self._begun = [], [], Report(), False
        report.seconds += time.thread_time() - begun
        return UpdateChecked(report, seals, watched)

    def _compare(self) -> None:
        for one in self._passes:
            self._seals.append(seal(one.micro))
            wanted = slopes(one.micro, one.logprobs, self.keys, one.counts)
            if wanted is not None and one.micro.num_tokens:
                self._report.evaluated[GRADIENT] += 1
                self._rows.append(_measure(one, wanted, recomputed=self.keys.correction.proximal == "recomputed"))
        self._passes.clear()


@dataclass(frozen=True, slots=True)
class MiniWatch:
    """Watches one mini-batch and its optimizer step. Its methods are called in this order, by every rank."""

    watch: UpdateWatch
    counts: Counts

    def scored(self, found: TokenScores, micro: RaggedBatch, factor: float) -> None:
        """Note the scores of a micro-batch, before its loss; `factor`: of the loss before its backward pass."""
        self.watch.scored(found, micro, factor, self.counts)

    def stepping(self, model: Stepped, norm: float, step: int) -> None:
        """Look at clipped gradients, whose norm was `norm`, before the optimizer's step of training step `step`."""
        self.watch.stepping(model, norm, step)

    def stepped(self, model: Stepped, step: int) -> None:
        """Look at the weights after the optimizer's step of training step `step`."""
        self.watch.stepped(model, step)


def _keeper(grads: dict[str, Tensor], name: str) -> Callable[[Tensor], None]:
    def keep(grad: Tensor) -> None:
        grads[name] = grad.detach()

    return keep


HEAD = ("wrong", "place", "found", "wanted", "trajectory", "token", "entropy", "moved", "tokens", "engine")
TERMS = ("policy", "kl", "teacher", "success", "observation")


def _measure(one: _Pass, wanted: Slopes, *, recomputed: bool) -> Tensor:
    """Return HEAD, then three numbers for each of TERMS: [F] float64, without a wait for the device."""
    micro, zero = one.micro, torch.zeros_like(wanted.entropy)
    grad = one.grads["logprobs"].double() / one.factor if "logprobs" in one.grads else zero
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
    compared = one.first and recomputed and micro.old_logprobs is not None
    gap = (one.logprobs - micro.old_logprobs).abs() if compared and micro.old_logprobs is not None else zero
    head = [wrong.sum(), place, grad[place], expected[place], micro.trajectory[row], place - micro.offsets[row]]
    head += [off.sum(), torch.where(micro.mask, gap, 0.0).sum(), micro.mask.sum() * compared, micro.mask.sum()]
    rest = torch.where(wanted.unsure, 0.0, rest)
    for name in TERMS:
        slope = wanted.terms[name].slope if name in wanted.terms else zero
        slope = torch.where(wanted.unsure, 0.0, slope)
        others = sum((part.abs() for other, part in parts.items() if other != name), zero)
        head += [(rest * slope).sum(), slope.square().sum(), (others * slope.abs()).sum()]
        head.append(torch.tensor(wanted.terms[name].coef if name in wanted.terms else 0.0, device=zero.device))
    return torch.stack([number.double() for number in head])


def _differences(rows: Sequence[Tensor], dtype: str) -> Iterator[Finding]:
    """Judge the numbers of all micro-batches of an update."""
    if not rows:
        return
    table = torch.stack(list(rows)).cpu()
    columns = {name: table[:, index] for index, name in enumerate(HEAD)}
    measured = dict(_coefficients(table[:, len(HEAD) :]))
    shown = ", ".join(f"{name} {found:.4g} in place of {wanted:.4g}" for name, (found, wanted) in measured.items())
    for index in columns["wrong"].nonzero()[:3, 0].tolist():
        at = {name: float(column[index]) for name, column in columns.items()}
        what = (
            f"the loss's derivative by the log-prob of token {at['token']:.0f} is {at['found']:.6g}, and the config's "
            f"loss has {at['wanted']:.6g} ({at['wrong']:.0f} of {at['engine']:.0f} policy tokens differ"
            f"{'; measured weights of terms: ' + shown if shown else ''})"
        )
        yield Finding("update", what, f"trajectory {at['trajectory']:.0f} of the step")
    if shown and not columns["wrong"].any():
        yield Finding("update", f"weights of the loss's terms: {shown}", "the policy's loss")
    if columns["entropy"].any():
        count = float(columns["entropy"].sum())
        yield Finding("update", f"the entropy bonus of {count:.0f} tokens is not the config's", "the policy's loss")
    tokens = float(columns["tokens"].sum())
    if tokens and not float(columns["moved"].sum()) / tokens <= SAME[dtype]:
        gap = float(columns["moved"].sum()) / tokens
        what = f"before its first step the update's log-probs are {gap:.3g} nats a token from those before the update"
        yield Finding("update", what, "the policy's log-probs")


def _coefficients(table: Tensor) -> Iterable[tuple[str, tuple[float, float]]]:
    """Yield terms whose measured weight differs: (name, (measured, wanted))."""
    for index, name in enumerate(TERMS):
        of_term = table[:, 4 * index : 4 * index + 4]
        product, square, others = (float(one) for one in of_term[:, :3].sum(0))
        coef = float(of_term[0, 3])
        if not square or not coef:
            continue
        off, noise = product / square, NOISE * others / square + TOLERANCE * abs(coef)
        if noise < 0.3 * abs(coef) and abs(off) > 2 * noise + 0.05 * abs(coef):
            yield name, (coef + off, coef)
