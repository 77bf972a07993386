"""One short trajectory of each step computed again by transformers' own model, unpacked: its scores and gradients."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from agentrl.model.plain import Twice
from agentrl.observe.report import Finding, Report
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


def pick(batch: Sequences, step: int) -> int | None:
    """Choose a sequence of a step's batch, another one in each step, from the shorter half of sequences up to MOST
    tokens.

    Where all are longer, the shortest. None where nothing was sampled.
    """
    lengths = batch.lengths.tolist()
    known = [row for row, count in enumerate(batch.policy_tokens.tolist()) if count]
    known.sort(key=lengths.__getitem__)
    short = [row for row in known if lengths[row] <= MOST] or known[:1]
    half = short[: (len(short) + 1) // 2]
    return half[step % len(half)] if half else None


def cut(batch: RaggedBatch) -> RaggedBatch | None:
    """Return the first MOST tokens of a sequence; None where nothing in them was sampled, or there are images."""
    end = min(MOST, batch.num_tokens)
    if batch.images is not None or not batch.mask[:end].any():
        return None
    tokens = {name: column[:end] for name, column in batch.tokens.items()}
    return RaggedBatch(torch.tensor([0, end]), tokens, batch.sequences, batch.policies)


def compare(one: Twice, micro: RaggedBatch, *, gradients: bool) -> Report:
    """Compare the column, and perhaps the gradients, with a second computation of them.

    micro: a sequence of `cut`, on the model's device.
    """
    report, learns = Report(), {name: param for name, param in one.weights.items() if param.requires_grad}
    leaves = {name: param.detach() for name, param in one.weights.items()}
    if one.trained is None or not gradients:
        with torch.no_grad():
            again = one.plain(leaves, micro.ids)
    else:
        trained = one.trained
        tried = {name: leaves[name].requires_grad_() for name in learns}
        again, wanted = _backward(lambda: one.plain(leaves, micro.ids), micro.mask, tried)
        _, found = _backward(lambda: trained(micro), micro.mask, learns)
        report.findings += _gradients(one, found, wanted)
    column: Tensor | None = getattr(micro, one.column)
    few = not one.exact and int(micro.mask.sum()) < FEWEST
    if column is not None and not few:
        column = column[:, 0] if column.ndim > 1 else column
        report.findings += _scores(one, column[micro.mask].double(), again[micro.mask].double())
    silent = not gradients and (few or column is None)
    report.evaluated.update({"recomputed/silent": 1} if silent else {"recomputed": 1, f"recomputed/{one.role}": 1})
    return report


def recompute(one: Twice | None, sequence: Sequences, device: torch.device, *, gradients: bool = False) -> Report:
    """Cut a sequence, and compare it. one: None where the model cannot be computed again."""
    begun = time.thread_time()
    micro = None if one is None else cut(sequence.load())
    if one is None or micro is None:
        return Report(evaluated=Counter({"recomputed/silent": 1}))
    report = compare(one, micro.mapped(lambda values: values.to(device)), gradients=gradients)
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


def _gradients(one: Twice, found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> Iterator[Finding]:
    """Compare the gradients of each tensor that learns."""
    norms = torch.stack([gradient.norm() for gradient in wanted.values()])
    off = torch.stack([(found[name] - gradient).norm() for name, gradient in wanted.items()])
    wrong = ~(off <= PART[one.exact] * norms + FLOOR[one.exact] * norms.max() + 1e-30)
    names = list(wanted)
    for index in wrong.nonzero()[:, 0].tolist():
        what = f"its gradient of one trajectory is {float(off[index]):.3g} from a second computation's, whose norm is "
        yield Finding("recomputed", f"{what}{float(norms[index]):.3g}", f"{one.role}: {names[index]}")


def _backward(
    scores: Callable[[], Tensor], mask: Tensor, params: Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute scores [T], and some elements of each parameter's gradient of a weighted sum of them.

    Whole gradients are dropped as soon as they are there; gradients that parameters have already stay as they are.
    """
    found: dict[str, Tensor] = {}
    before = {name: param.grad for name, param in params.items()}
    for param in params.values():
        param.grad = None

    def keep(param: Tensor, name: str) -> None:
        assert param.grad is not None
        found[name] = _some(param.grad).double()
        param.grad = None

    hooks = [param.register_post_accumulate_grad_hook(partial(keep, name=name)) for name, param in params.items()]
    try:
        with torch.enable_grad():
            result = scores()
            weight = torch.cos(torch.arange(len(result), device=result.device)) * mask
            (result * weight).sum().backward()
    finally:
        for hook in hooks:
            hook.remove()
        for name, param in params.items():
            param.grad = before[name]
    return result.detach(), {
        name: found[name] if name in found else torch.zeros_like(_some(param), dtype=torch.float64)
        for name, param in params.items()
    }


def _some(tensor: Tensor) -> Tensor:
    """Take up to about ELEMENTS elements, spread over the tensor."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, len(flat) // ELEMENTS)]
