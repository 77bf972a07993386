"""One optimizer step on a mini-batch: cut into micro-batches, accumulate, check, clip, step. Or nothing at all.

A mini-batch whose loss or gradient is not finite is skipped: weights and optimizer state stay as they were, and the
training goes on. It ends when every mini-batch of a role was skipped in MAX_SKIPPED training steps in a row; a run that
is continued counts from 0 again.

The parameters that learn are float32. With `dtype=bfloat16` the forward pass runs under autocast, and what leaves the
worker for the engine or for disk in Hugging Face format is cast to bfloat16.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from agentrl.config.sections.optim import OptimConfig
from agentrl.errors import TrainingError
from agentrl.model.compiled import compile_layers, text_layers
from agentrl.model.sharded_load import read_weights
from agentrl.optim.optimizer import Optim
from agentrl.parallel.gradients import add_up, clip, total_norm
from agentrl.parallel.mesh import Mesh
from agentrl.parallel.offload import offloading
from agentrl.parallel.shard import all_max, decoder_layers, rank, shard
from agentrl.runtime.ranks import join_tokens, shares
from agentrl.trajectory.batch import RaggedBatch, Sequences
from agentrl.workers.plan import micro_batches

logger = logging.getLogger(__name__)

MAX_SKIPPED = 5
"""Training steps in a row in which all mini-batches of a role were skipped, after which it is no accident."""

Loss = Callable[[RaggedBatch], tuple[torch.Tensor, dict[str, torch.Tensor]]]
"""A micro-batch's share of the loss (scalar with gradient), and sums to be added up over the mini-batch (scalars).

The share is divided by what was counted over the whole mini-batch, so shares simply add up.
"""


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """What one optimizer step is taken on."""

    where: str
    """Names it in messages."""
    sequences: Sequences
    """The same ones on every rank; there may be none, and the step is then one of gradient 0."""
    loss: Loss
    """Called with each micro-batch of a rank's share."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one optimizer step did."""

    sums: dict[str, float]
    """The loss function's sums over all micro-batches and ranks, and `loss`."""
    grad_norm: float
    """Before clipping."""
    lr: float


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """What the optimizer steps of one training step did."""

    taken: list[StepReport]
    skipped: int
    """Mini-batches whose loss or gradient was not finite."""

    def metrics(self, role: str, terms: Mapping[str, str], by_token: Mapping[str, str]) -> dict[str, float]:
        """<role>/skipped_updates; and of the optimizer steps that were taken, where there are any, the means of
        <role>/grad_norm and <role>/lr, the means of the sums that `terms` names (metric: sum), and the sums that
        `by_token` names divided by the sum `tokens`, where there are any tokens.
        """
        found = {"skipped_updates": float(self.skipped)}
        if self.taken:
            rows = [
                {"grad_norm": report.grad_norm, "lr": report.lr}
                | {name: report.sums[key] for name, key in terms.items()}
                for report in self.taken
            ]
            found |= {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}
        tokens = sum(report.sums["tokens"] for report in self.taken) if by_token else 0.0
        if tokens:
            found |= {name: sum(report.sums[key] for report in self.taken) / tokens for name, key in by_token.items()}
        return {f"{role}/{name}": value for name, value in found.items()}


class Learner:
    """Owns the optimizer of `root`, a module whose attribute `base` is the Hugging Face model; shards it in place."""

    def __init__(
        self,
        root: nn.Module,
        config: OptimConfig,
        mesh: Mesh,
        *,
        grad_clip: float,
        max_tokens: int,
        total_steps: int,
        gradient_checkpointing: bool = False,
        activation_offload: bool = False,
        optimizer_offload: bool = False,
        compiled: bool = False,
    ) -> None:
        base = root.base
        assert isinstance(base, PreTrainedModel)
        matrices = {id(p) for layer in decoder_layers(base) for p in layer.parameters() if p.ndim == 2}
        # The biases of all experts are one parameter of two dimensions.
        names = {name for name, p in root.named_parameters() if id(p) in matrices and not name.endswith("bias")}
        if gradient_checkpointing:
            checkpoint_layers(base, offload=activation_offload)
        layers = text_layers(base)
        partial = shard(root, base, mesh, autocast=bool(root.autocast))
        read_weights(root, base)
        if compiled:
            compile_layers(layers, base.device)
        self.mesh = mesh
        self.root = root
        self.tensors = {_hugging_face_name(name): p for name, p in root.named_parameters()}
        """All parameters; `params` are those that learn."""
        self.params = {name: p for name, p in self.tensors.items() if p.requires_grad}
        home = torch.device("cpu") if optimizer_offload else None
        self.optim = Optim(self.params, {_hugging_face_name(name) for name in names}, config, total_steps, home)
        self._partial = [param for name, param in self.params.items() if name in partial]
        self._grad_clip = grad_clip
        self._barren = 0
        """Training steps in a row, up to the last one, in which every mini-batch was skipped."""
        self.max_tokens = max_tokens * mesh.parallel.sequence
        """Tokens of a micro-batch, at most."""
        self._device = next(iter(self.params.values())).device

    def update(self, minis: Iterable[MiniBatch], *, step: int) -> UpdateReport:
        """One optimizer step for each mini-batch, of which every rank loads its share; see the module on those that
        are skipped.

        step: training steps in which this role has learnt, this one included, for the learning rate.

        Raises TrainingError, with the weights untouched, when nothing could be learnt for too long.
        """
        taken: list[StepReport] = []
        skipped, cause = 0, ""
        for mini in minis:
            report = self._step(mini, step)
            if isinstance(report, StepReport):
                taken.append(report)
                continue
            skipped, cause = skipped + 1, f"{mini.where}: {report}"
        if skipped and rank() == 0:
            logger.warning("%s mini-batches skipped of %s; the last: %s", skipped, skipped + len(taken), cause)
        self._barren = self._barren + 1 if skipped and not taken else 0
        if self._barren >= MAX_SKIPPED:
            raise TrainingError(f"{cause} It is the {MAX_SKIPPED}th training step in a row in which nothing was learnt")
        return UpdateReport(taken, skipped)

    def share_of(self, sequences: Sequences) -> RaggedBatch:
        """Load this rank's share of sequences that all ranks are given."""
        return sequences.select(shares(sequences.lengths.tolist(), self.mesh.data)[self.mesh.data_rank]).load()

    def _step(self, mini: MiniBatch, step: int) -> StepReport | str:
        """An optimizer step; or, when the loss or the gradient is not finite, nothing, and the cause."""
        self.optim.zero_grad()
        mine = self.share_of(mini.sequences)
        sums = self._accumulate(mine, mini.loss)
        if self.mesh.tensor is not None:
            add_up(self._partial, self.mesh.tensor.get_group())
        norm = total_norm(self.params.values())
        grad_norm = norm.item()
        if not (math.isfinite(grad_norm) and math.isfinite(sums["loss"])):
            self.optim.zero_grad()
            return _not_finite(mine, sums["loss"], grad_norm, self.mesh, self._device)
        clip(self.params.values(), self._grad_clip, norm)
        lr = self.optim.step(step)
        self.optim.zero_grad()
        return StepReport(sums, grad_norm, lr)

    def _accumulate(self, mine: RaggedBatch, loss: Loss) -> dict[str, float]:
        """Backward over this rank's micro-batches; returns the sums over all ranks, the loss among them.

        Every parameter has a gradient then, 0 where no token led to it: what a step does to it, by momentum and weight
        decay, does not depend on which sequences were left out because their gradient is 0.
        """
        plan = micro_batches(mine, self.max_tokens)
        sums: dict[str, torch.Tensor] = {}
        for index in range(max(1, all_max(len(plan), self._device))):
            # FSDP gathers weights on all ranks at once: a rank with fewer micro-batches runs one without effect, and
            # so does each of them where there is no sequence at all.
            counts = index < len(plan)
            micro = to_device(mine.select(plan[index]) if counts else filler(mine), self._device)
            share_of_loss, seen = loss(micro)
            weight = self.mesh.averaged if counts else 0  # FSDP averages gradients over ranks; they have to add up
            (share_of_loss * weight).backward()
            for name, value in (seen | {"loss": share_of_loss.detach()}).items():
                addend = value.double() if counts else torch.zeros((), dtype=torch.float64, device=self._device)
                sums[name] = sums[name] + addend if name in sums else addend
        for param in self.params.values():
            if param.grad is None:
                param.grad = torch.zeros_like(param)
        totals = self.mesh.sum(torch.stack([sums[name] for name in sorted(sums)])).tolist()
        return dict(zip(sorted(sums), totals, strict=True))


def forward_tokens(
    forward: Callable[[RaggedBatch], torch.Tensor], batch: RaggedBatch, max_tokens: int, device: torch.device
) -> torch.Tensor:
    """[T, ...] on the CPU: `forward` ([tokens, ...] of a micro-batch) over all of `batch`, without gradient."""
    plan = micro_batches(batch, max_tokens)
    rounds = max(1, all_max(len(plan), device))  # asked before, as every forward is a call of all ranks, too
    with torch.no_grad():
        results = [forward(to_device(batch.select(rows), device)).cpu() for rows in plan]
        # A rank with fewer micro-batches keeps step by fillers; one with none gets the result's shape from a filler.
        for _ in range(rounds - len(plan)):
            of_nothing = forward(to_device(filler(batch), device))[:0].cpu()
    return join_tokens(results, plan, batch) if plan else of_nothing


def filler(like: RaggedBatch) -> RaggedBatch:
    """One token that the policy did not sample, with the fields of `like`, for a rank that has no more work than to
    keep step with the others."""
    values = {item.name: getattr(like, item.name) for item in fields(like)}
    empty: dict[str, Any] = {
        name: value.new_zeros(1) for name, value in values.items() if isinstance(value, torch.Tensor)
    }
    unsampled = {name: empty[name] - 1 for name in ("version", "turn")}
    return replace(like, **(empty | unsampled | {"offsets": torch.tensor([0, 1]), "images": None}))


def to_device(batch: RaggedBatch, device: torch.device) -> RaggedBatch:
    """The same batch with every tensor on `device`; images go there when they are looked at."""
    if device.type == "cpu":
        return batch
    values = {item.name: getattr(batch, item.name) for item in fields(batch)}
    tensors: dict[str, Any] = {
        name: value.to(device) for name, value in values.items() if isinstance(value, torch.Tensor)
    }
    return replace(batch, **tensors)


def checkpoint_layers(model: PreTrainedModel, *, offload: bool = False) -> None:
    """Compute each decoder layer again in the backward pass. The rest stays in eval mode: no dropout appears.

    offload: keep the inputs of the layers in host memory for it.
    """
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True  # only this flag, not its children's: the layer recomputes only when training
            if offload:
                layer: Any = module
                layer._gradient_checkpointing_func = offloading(layer._gradient_checkpointing_func)


def _hugging_face_name(name: str) -> str:
    return name.removeprefix("base.")


def _not_finite(mine: RaggedBatch, loss: float, grad_norm: float, mesh: Mesh, device: torch.device) -> str:
    """The message, with what is wrong in the batch of all ranks; every rank must ask."""
    fields_seen = ("rewards", "old_logprobs", "ref_logprobs", "values", "advantages", "returns")
    names = [name for name in fields_seen if mine.has(name)]
    counts = [int((~torch.isfinite(getattr(mine, name)[mine.mask])).sum()) for name in names]
    seen = torch.tensor([*counts, int(mine.mask.sum())], dtype=torch.float64, device=device)
    *counts, tokens = map(int, mesh.sum(seen).tolist())
    bad = [f"{name} ({count} of {tokens} policy tokens)" for name, count in zip(names, counts, strict=True) if count]
    cause = (
        f"Not finite in the batch: {', '.join(bad)}; look at the reward function and the log-probs first."
        if bad
        else "All numbers of the batch are finite, so the model's own are not: lower optim.lr or grad_clip, or use "
        "float32; if it happens at the first step, the model's weights are broken."
    )
    return (
        f"the loss is {loss} and the gradient norm {grad_norm}. The weights stand as they were before this mini-batch. "
        f"{cause}"
    )
