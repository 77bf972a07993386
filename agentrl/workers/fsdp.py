"""Policies and critics that learn under FSDP2, with tensor and sequence parallelism (see `agentrl.parallel`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedTokenizerBase

from agentrl.model.export import export_model, export_score_model
from agentrl.model.heads import ValueModel, freeze_vision, load_policy, make_score_model
from agentrl.model.scores import Compare, TokenScores
from agentrl.model.sharded_load import open_model
from agentrl.parallel.collectives import rank
from agentrl.parallel.mesh import Mesh
from agentrl.parallel.offload import give_back
from agentrl.runtime.ranks import RankWeights
from agentrl.system.json_value import JSON
from agentrl.trajectory.batch import RaggedBatch
from agentrl.workers.backend import CriticBackend, Needs, PolicyBackend, PolicySettings, Settings
from agentrl.workers.forward import forward_tokens
from agentrl.workers.learner import Learner


class FSDPPolicy(Learner[TokenScores]):
    """Implements `PolicyBackend`: a causal language model of transformers, with adapters if the config has them."""

    def __init__(self, settings: PolicySettings) -> None:
        mesh = Mesh(settings.parallel, settings.device)
        self.model = load_policy(
            settings.model,
            device=settings.device,
            seed=settings.seed,
            freeze_vision_tower=settings.freeze_vision_tower,
            replays_experts=settings.replays_experts,
            group=mesh.sequence,
        )
        super().__init__(self.model, settings, mesh)
        self._temperature = settings.temperature
        self._replays_experts = settings.replays_experts
        self._dtype: torch.dtype = getattr(torch, settings.model.dtype)
        self.log_prob_max_tokens = (settings.log_prob_max_tokens or settings.max_tokens) * mesh.parallel.sequence
        """Tokens of a micro-batch without gradient, at most."""

    def forward(
        self, micro: RaggedBatch, needs: Needs, compare: Compare | None = None, needed: torch.Tensor | None = None
    ) -> TokenScores:
        scores: TokenScores = self.model(
            micro.ids,
            micro.offsets,
            needed=micro.mask if needed is None else needed,
            temperature=self._temperature,
            with_entropy="entropy" in needs,
            with_squared_probs="squared_probs" in needs,
            compare=compare,
            images=micro.images,
            experts=micro.experts if self._replays_experts else None,
        )
        return scores

    def log_probs(self, batch: RaggedBatch, needs: Needs) -> TokenScores:
        def scores(micro: RaggedBatch) -> torch.Tensor:
            """Stack the K scores that are needed: [T, K] float32."""
            return torch.stack([score for score in self.forward(micro, needs) if score is not None], dim=1)

        with self.offload:
            found = forward_tokens(scores, batch, self.log_prob_max_tokens, self.device)
        columns = iter([column.contiguous() for column in found.unbind(1)])
        return TokenScores(
            next(columns),
            next(columns) if "entropy" in needs else None,
            next(columns) if "squared_probs" in needs else None,
        )

    def reference_log_probs(self, batch: RaggedBatch) -> torch.Tensor:
        """Return [T] float32 on the CPU; see `PolicyBackend`."""
        assert self.model.lora is not None
        with self.model.lora.off():
            return self.log_probs(batch.with_fields(experts=None), frozenset()).logprobs

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every weight [S] once, by its name in checkpoints, whole in its shape S and in the engine's dtype.

        Tied weights have one name. Adapters are merged into the weights that they stand beside. In float32 other
        tensors may be the live weights themselves, which the next update changes: copy them. Every rank must read
        together, and has every tensor.
        """
        with self.offload:
            for name, tensor in self.model.named_tensors(self.tensors):
                yield name, tensor.to(self._dtype)

    def weights(self) -> RankWeights:
        give_back(self.device)
        return RankWeights(self.model.shapes(self.tensors), self._of_first_rank)

    def _of_first_rank(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        for name, tensor in self.named_tensors():
            yield name, tensor if rank() == 0 else None

    def export(self, dir: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        with self.offload:
            export_model(self.model, self.tensors, self._dtype, dir, tokenizer)

    def mark(self) -> Mapping[str, JSON]:
        return self.model.mark(self.tensors)


class FSDPCritic(Learner[torch.Tensor]):
    """Implements `CriticBackend`: the backbone of a causal language model and a value head."""

    def __init__(self, settings: Settings) -> None:
        config = settings.model
        base = open_model(
            config.path,
            dtype="float32",
            device=settings.device,
            trust_remote_code=config.trust_remote_code,
            override=config.override_config,
        )
        if settings.freeze_vision_tower:
            freeze_vision(base)
        mesh = Mesh(settings.parallel, settings.device)
        self.model = ValueModel(base, autocast=config.dtype == "bfloat16", group=mesh.sequence)
        super().__init__(self.model, settings, mesh)

    def forward(
        self, micro: RaggedBatch, needs: Needs, compare: Compare | None = None, needed: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return values [T] float32 with gradient."""
        values: torch.Tensor = self.model(micro.ids, micro.offsets, micro.images)
        return values

    def values(self, batch: RaggedBatch) -> torch.Tensor:
        """Return [T] float32 on the CPU; see `CriticBackend`."""
        with self.offload:
            return forward_tokens(lambda micro: self.forward(micro, frozenset()), batch, self.max_tokens, self.device)


class FSDPScores(Learner[torch.Tensor]):
    """A reward model that learns: the backbone of a causal language model and a head that scores conversations."""

    def __init__(self, settings: Settings) -> None:
        config = settings.model
        mesh = Mesh(settings.parallel, settings.device)
        base = open_model(
            config.path,
            dtype="float32",
            device=settings.device,
            trust_remote_code=config.trust_remote_code,
            override=config.override_config,
        )
        self.model = make_score_model(base, autocast=config.dtype == "bfloat16", group=mesh.sequence)
        super().__init__(self.model, settings, mesh)
        self._dtype: torch.dtype = getattr(torch, config.dtype)

    def forward(
        self, micro: RaggedBatch, needs: Needs, compare: Compare | None = None, needed: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return scores [T] float32 with gradient; see `ScoreModel.forward`."""
        scores: torch.Tensor = self.model(micro.ids, micro.offsets)
        return scores

    def scores(self, batch: RaggedBatch) -> torch.Tensor:
        """Return [T] float32 on the CPU, without gradient: each sequence's score at its last token, 0 elsewhere."""
        with self.offload:
            return forward_tokens(lambda micro: self.forward(micro, frozenset()), batch, self.max_tokens, self.device)

    def export(self, dir: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        """Write the model as a sequence classifier with one label; every rank must call it."""
        with self.offload:
            export_score_model(self.model, self.tensors, self._dtype, dir, tokenizer)


# Nothing else compares them with the interfaces: the one is made by its name, the other is used as its own class.
if TYPE_CHECKING:
    _policy: Callable[[PolicySettings], PolicyBackend] = FSDPPolicy
    _critic: Callable[[Settings], CriticBackend] = FSDPCritic
