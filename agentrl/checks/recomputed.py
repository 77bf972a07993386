"""One short trajectory of each step computed again by transformers' own model, unpacked: its scores and gradients."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from agentrl.checks.finding import Finding
from agentrl.checks.report import Report
from agentrl.trajectory.batch import RaggedBatch, Sequences

MOST = 512
"""Tokens of a trajectory that are computed again, at most."""
SAME = 1e-3
"""Largest mean distance in float32: nats a token, or a part of the values' mean size."""
ROUNDED, LEAST = 0.01, 0.2
"""In half precision the same is ROUNDED, and LEAST of the mean distance of the scores from their mean, in addition."""
FEWEST = 8
"""Tokens without which rounding in half precision is not told from a fault."""
PART, FLOOR = {True: 0.02, False: 0.5}, {True: 1e-4, False: 0.02}
"""Largest difference of a tensor's gradient, as a part of its norm, and of the largest norm; True: in float32."""
ELEMENTS = 1 << 12
"""Elements of a tensor whose gradients are compared."""
Weights = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Twice:
    """A model's scores of a sequence by two computations, each [T] float32 of ids [T]."""

    role: str
    column: str
    """Name of the column that has these scores."""
    plain: Callable[[Weights, Tensor], Tensor]
    """Computes them by transformers' own model from weights by name."""
    weights: Mapping[str, nn.Parameter]
    exact: bool
    """All of it is computed in float32."""
    trained: Callable[[RaggedBatch], Tensor] | None = None
    """Computes them as an update does, with gradient; None: the model does not learn."""
    relative: bool = False
    """Distances are a part of the scores' size."""


def pick(batch: Sequences, step: int) -> int | None:
    """Choose a sequence of a step's batch: another in each step of those that are short enough, else the shortest."""
    lengths = batch.lengths.tolist()
    known = [row for row, count in enumerate(batch.policy_tokens.tolist()) if count]
    short = [row for row in known if lengths[row] <= MOST]
    return short[step % len(short)] if short else min(known, key=lengths.__getitem__, default=None)


def cut(batch: RaggedBatch) -> RaggedBatch | None:
    """Return the first MOST tokens of a sequence; None where nothing in them was sampled, or there are images."""
    end = min(MOST, batch.num_tokens)
    if batch.images is not None or not batch.mask[:end].any():
        return None
    tokens = {name: column[:end] for name, column in batch.tokens.items()}
    return RaggedBatch(torch.tensor([0, end]), tokens, batch.sequences, batch.policies)


def compare(one: Twice, micro: RaggedBatch) -> Report:
    """Compare the column, and the gradients of a model that learns, with a second computation of them.

    micro: a sequence of `cut`, on the model's device.
    """
    report = Report()
    column: Tensor | None = getattr(micro, one.column)
    fixed = {name: weight.detach() for name, weight in one.weights.items()}
    silent = micro.num_tokens < 2
    if column is not None and column.ndim > 1:
        column = column[:, 0]
    if column is not None and not silent:
        with torch.no_grad():
            again = one.plain(fixed, micro.ids)
        found = list(_scores(one, column[micro.mask].double(), again[micro.mask].double()))
        silent = not one.exact and int(micro.mask.sum()) < FEWEST
        if not silent:
            report.findings += found
    if one.trained is not None and micro.num_tokens > 1:
        report.findings += _gradients(one, micro)
    report.evaluated.update({"recomputed/silent": 1} if silent else {"recomputed": 1, f"recomputed/{one.role}": 1})
    return report


def recompute(one: Twice | None, sequence: Sequences, device: torch.device) -> Report:
    """Cut a sequence, and compare it. one: None where the model cannot be computed again."""
    begun = time.thread_time()
    micro = None if one is None else cut(sequence.load())
    if one is None or micro is None:
        return Report(evaluated=Counter({"recomputed/silent": 1}))
    report = compare(one, micro.mapped(lambda values: values.to(device)))
    report.seconds = time.thread_time() - begun
    return report


def _scores(one: Twice, column: Tensor, again: Tensor) -> Iterator[Finding]:
    gap = float((column - again).abs().mean())
    size = float(again.abs().mean()) if one.relative else 1.0
    room = SAME * size + 1e-6
    if not one.exact:
        room = ROUNDED * size + LEAST * float((again - again.mean()).abs().mean())
    if not gap <= room:
        unit = "" if one.relative else " nats a token"
        what = f"its {one.column} are {gap:.3g}{unit} from a second computation of them, and {room:.3g} is rounding"
        yield Finding("recomputed", what, f"the {one.role}")


def _gradients(one: Twice, micro: RaggedBatch) -> Iterator[Finding]:
    """Compare the gradients of a weighted sum of scores by each tensor that learns."""
    trained_scores = one.trained
    assert trained_scores is not None
    weight = torch.cos(torch.arange(micro.num_tokens, device=micro.ids.device)) * micro.mask
    weight[0] = 0.0  # nothing predicts the first token
    learns = [name for name, param in one.weights.items() if param.requires_grad]
    live = {name: one.weights[name] for name in learns}
    trained = _backward(lambda: (trained_scores(micro) * weight).sum(), live)
    leaves = {name: param.detach().requires_grad_(param.requires_grad) for name, param in one.weights.items()}
    plain = _backward(lambda: (one.plain(leaves, micro.ids) * weight).sum(), {name: leaves[name] for name in learns})
    wanted = torch.stack([plain[name].norm() for name in learns])
    off = torch.stack([(trained[name] - plain[name]).norm() for name in learns])
    wrong = ~(off <= PART[one.exact] * wanted + FLOOR[one.exact] * wanted.max() + 1e-30)
    for index in wrong.nonzero()[:, 0].tolist():
        what = f"its gradient of one trajectory is {float(off[index]):.3g} from a second computation's, whose norm is "
        yield Finding("recomputed", f"{what}{float(wanted[index]):.3g}", learns[index])


def _backward(loss: Callable[[], Tensor], params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return some elements of each parameter's gradient; whole gradients are dropped as soon as they are there.

    Gradients that parameters have stay as they are.
    """
    found: dict[str, Tensor] = {}
    before = {name: param.grad for name, param in params.items()}
    for param in params.values():
        param.grad = None

    def keep(param: Tensor, name: str) -> None:
        assert param.grad is not None
        flat = param.grad.detach().reshape(-1)
        found[name] = flat[:: max(1, len(flat) // ELEMENTS)].double()
        param.grad = None

    hooks = [param.register_post_accumulate_grad_hook(partial(keep, name=name)) for name, param in params.items()]
    try:
        with torch.enable_grad():
            loss().backward()
    finally:
        for hook in hooks:
            hook.remove()
    for name, param in params.items():
        param.grad = before[name]
        if name not in found:
            flat = param.detach().reshape(-1)
            found[name] = torch.zeros_like(flat[:: max(1, len(flat) // ELEMENTS)], dtype=torch.float64)
    return found
