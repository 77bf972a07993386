"""A frozen teacher: its scores of tokens that another model sampled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from agentrl.model.head_product import linear_products, scale_of
from agentrl.model.heads import step_of_vision
from agentrl.model.packed import check_packed_attention, chunk_size, predicting_states, token_logits
from agentrl.model.sharded_load import open_model, read_weights
from agentrl.parallel.collectives import full
from agentrl.parallel.mesh import Mesh
from agentrl.parallel.shard import shard
from agentrl.trajectory.images import Images

Scope = Literal["sampled", "top_k", "full"]


class TeacherModel(nn.Module):
    """A causal language model `base` that gives a teacher's scores, as listed in `agentrl.algorithms.distillation`.

    temperature: of the softmax. vocab: ids of the policy's vocabulary; the teacher's other ids count as impossible.
    group: the ranks that split the tokens of each forward pass; all must be given the same tokens.
    """

    def __init__(
        self,
        base: PreTrainedModel,
        *,
        scope: Scope,
        top_k: int,
        temperature: float,
        vocab: int,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.base = base
        self.scope, self.vocab = scope, min(vocab, base.config.get_text_config().vocab_size)
        self.top_k, self.temperature, self._group = min(top_k, self.vocab), temperature, group

    @property
    def width(self) -> int:
        """Numbers by token: 1 + X."""
        hidden: int = self.base.config.get_text_config().hidden_size
        return 1 + {"sampled": 0, "top_k": 2 * self.top_k, "full": hidden}[self.scope]

    def forward(
        self, ids: torch.Tensor, offsets: torch.Tensor, needed: torch.Tensor, images: Images | None
    ) -> torch.Tensor:
        """Score tokens: ids [T] int64, offsets [N + 1] int64, needed [T] bool -> [T, 1 + X] float32, else 0."""
        step_of_vision(self.base, images)
        states, places, part = predicting_states(self.base, ids, offsets, needed, images, self._group)
        size = chunk_size(self.base)
        chunks = zip(states.split(size), ids[places].split(size), strict=True)
        scores = torch.cat([self._score(some, targets) for some, targets in chunks])
        spread = torch.zeros(len(ids), self.width, device=ids.device).index_copy(0, places, scores)
        return part.sum_over_ranks(spread)

    def _score(self, states: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logprobs = (token_logits(self.base, states)[:, : self.vocab] / self.temperature).log_softmax(-1)
        of_targets = logprobs.gather(1, targets[:, None])
        if self.scope == "sampled":
            return of_targets
        if self.scope == "full":
            return torch.cat([of_targets, states.float()], dim=1)
        best = logprobs.topk(self.top_k)
        return torch.cat([of_targets, best.indices.float(), best.values], dim=1)

    def check_attention(self) -> None:
        """Raise ConfigError when the packed forward pass differs from the model's own."""
        check_packed_attention(self.base)


def open_teacher(
    path: str,
    mesh: Mesh,
    *,
    scope: Scope,
    top_k: int,
    temperature: float,
    vocab: int,
    dtype: str,
    device: str | torch.device,
    trust_remote_code: bool,
) -> TeacherModel:
    """Load a teacher, sharded over `mesh`. Raises ConfigError."""
    base = open_model(path, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
    teacher = TeacherModel(
        base.requires_grad_(False), scope=scope, top_k=top_k, temperature=temperature, vocab=vocab, group=mesh.sequence
    )
    shard(teacher, base, mesh)
    read_weights(teacher, base)
    return teacher


def read_head(
    path: str,
    *,
    temperature: float,
    vocab: int,
    dtype: str,
    device: str | torch.device,
    mesh: Mesh,
    trust_remote_code: bool,
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Load a teacher's head alone, whole on every rank.

    It maps hidden states [M, H] to logits [M, V] float32 of the ids below `vocab`, divided by the temperature. The rest
    of the model is in memory, sharded, while it is read. Raises ConfigError.
    """
    loaded_on = "cpu" if torch.device(device).type == "cpu" or mesh.fsdp is None else device
    base = open_model(path, dtype=dtype, device=loaded_on, trust_remote_code=trust_remote_code)
    root = TeacherModel(
        base.requires_grad_(False), scope="full", top_k=1, temperature=temperature, vocab=vocab, group=mesh.sequence
    )
    shard(root, base, mesh)
    read_weights(root, base)
    head = base.get_output_embeddings()
    assert head is not None, "a causal language model"
    weight = full(head.weight.detach())[:vocab].clone().to(device)
    bias = None if getattr(head, "bias", None) is None else full(head.bias.detach())[:vocab].clone().to(device)
    scaled = scale_of(base)

    def logits(states: torch.Tensor) -> torch.Tensor:
        """Compute the logits [N, V], over the temperature, of hidden states [N, H]."""
        products = linear_products(states[:, : weight.shape[1]].to(weight.dtype), weight, bias)
        return scaled(products) / temperature

    return logits
