"""One optimizer step on a mini-batch: cut into micro-batches, accumulate, check, clip, step. Or nothing at all.

The parameters that learn are float32. With `dtype=bfloat16` the forward pass runs under autocast, and what leaves the
worker for the engine or for disk in Hugging Face format is cast to bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from agentrl.batch import RaggedBatch, Sequences
from agentrl.config.schema import OptimConfig
from agentrl.errors import TrainingError
from agentrl.workers.compiled import compile_layers, text_layers
from agentrl.workers.gradients import add_up, clip, total_norm
from agentrl.workers.group import join_tokens, shares
from agentrl.workers.mesh import Mesh
from agentrl.workers.offload import offloading
from agentrl.workers.optim import Optim
from agentrl.workers.plan import micro_batches
from agentrl.workers.shard import all_max, decoder_layers, shard
from agentrl.workers.sharded_load import read_weights

Loss = Callable[[RaggedBatch], tuple[torch.Tensor, dict[str, torch.Tensor]]]
"""A micro-batch's share of the loss (scalar with gradient), and sums to be added up over the mini-batch (scalars).

The share is divided by what was counted over the whole mini-batch, so shares simply add up.
"""


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one optimizer step did."""

    loss: float
    sums: dict[str, float]
    """The loss function's sums over all micro-batches and ranks."""
    grad_norm: float
    """Before clipping."""
    lr: float


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
        self.max_tokens = max_tokens * mesh.parallel.sequence
        """Of a micro-batch."""
        self._device = next(iter(self.params.values())).device

    def step(self, mini: Sequences, loss: Loss, *, step: int, where: str) -> StepReport:
        """Update the weights with the gradient of `loss` over `mini`, of which every rank loads its share.

        Args:
            mini: the same sequences on every rank.
            loss: called with each micro-batch of this rank's share.
            step: the training step, counted from 1, for the learning rate.
            where: names the mini-batch in the error.

        Raises TrainingError, with the weights untouched, when the loss or the gradient is not finite.
        """
        self.optim.zero_grad()
        mine = mini.select(shares(mini.lengths.tolist(), self.mesh.data)[self.mesh.data_rank]).load()
        sums = self._accumulate(mine, loss)
        if self.mesh.tensor is not None:
            add_up(self._partial, self.mesh.tensor.get_group())
        norm = total_norm(self.params.values())
        grad_norm, total = norm.item(), sums.pop("loss")
        if not (math.isfinite(grad_norm) and math.isfinite(total)):
            self.optim.zero_grad()
            raise TrainingError(_not_finite(mine, where, total, grad_norm, self.mesh, self._device))
        clip(self.params.values(), self._grad_clip, norm)
        lr = self.optim.step(step)
        self.optim.zero_grad()
        return StepReport(total, sums, grad_norm, lr)

    def _accumulate(self, mine: RaggedBatch, loss: Loss) -> dict[str, float]:
        """Backward over this rank's micro-batches; returns the sums over all ranks, the loss among them."""
        plan = micro_batches(mine, self.max_tokens)
        sums: dict[str, torch.Tensor] = {}
        for index in range(all_max(len(plan), self._device)):
            # FSDP gathers weights on all ranks at once: a rank with fewer micro-batches runs one without effect.
            counts = index < len(plan)
            micro = to_device(mine.select(plan[index]) if counts else filler(mine), self._device)
            share_of_loss, seen = loss(micro)
            weight = self.mesh.averaged if counts else 0  # FSDP averages gradients over ranks; they have to add up
            (share_of_loss * weight).backward()
            for name, value in (seen | {"loss": share_of_loss.detach()}).items():
                addend = value.double() if counts else torch.zeros((), dtype=torch.float64, device=self._device)
                sums[name] = sums[name] + addend if name in sums else addend
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
    return replace(like, **(empty | {"offsets": torch.tensor([0, 1]), "images": None}))


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


def _not_finite(mine: RaggedBatch, where: str, loss: float, grad_norm: float, mesh: Mesh, device: torch.device) -> str:
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
        f"{where}: the loss is {loss} and the gradient norm {grad_norm}. The weights stand as they "
        f"were before this mini-batch. {cause}"
    )
