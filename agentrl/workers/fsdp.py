"""Policies and critics that learn under FSDP2, with tensor and sequence parallelism (see `agentrl.parallel`)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from pydantic import BaseModel, Field
from transformers import PreTrainedTokenizerBase

from agentrl.algorithms.router_losses import expert_counts, router_losses
from agentrl.config.adapters import check_served
from agentrl.config.sections.model import PolicyModelConfig
from agentrl.engines.weights import Adapter
from agentrl.errors import ConfigError
from agentrl.model.export import export_model, export_score_model
from agentrl.model.heads import ValueModel, freeze_vision, load_policy, make_score_model
from agentrl.model.packed import chunk_size, predicted
from agentrl.model.plain import PlainModel, Twice
from agentrl.model.scores import Compare, Needs, TokenScores
from agentrl.model.sharded_load import open_model
from agentrl.parallel.collectives import full, rank, world_size
from agentrl.parallel.mesh import Mesh
from agentrl.parallel.offload import give_back
from agentrl.runtime.ranks import RankWeights
from agentrl.system.json_value import JSON
from agentrl.trajectory.batch import RaggedBatch, Sequences
from agentrl.workers.backend import (
    AUX_LOSS,
    Z_LOSS,
    CriticBackend,
    MiniBatch,
    PolicyBackend,
    PolicySettings,
    Settings,
    StepReport,
)
from agentrl.workers.forward import forward_columns, forward_tokens, to_device
from agentrl.workers.learner import Learner
from agentrl.workers.passes import Part, Pass, States
from agentrl.workers.plan import head_parts, learns_by_parts


class FSDPOptions(BaseModel):
    """Options of fsdp2: losses of a mixture's routers that are added to the policy's loss."""

    moe_aux_loss_coeff: float = Field(0.0, ge=0)
    """Weight of the load-balancing loss (see `agentrl.algorithms.router_losses`)."""
    moe_z_loss_coeff: float = Field(0.0, ge=0)
    """Weight of the mean square of the logsumexp of a router's logits."""


NO_OPTIONS = FSDPOptions()


class FSDPPolicy(Learner[TokenScores]):
    """Implements `PolicyBackend`: a causal language model of transformers, with adapters if the config has them."""

    def __init__(self, settings: PolicySettings, options: FSDPOptions = NO_OPTIONS) -> None:
        mesh = Mesh(settings.parallel, settings.device)
        self._options = options
        self._has_router_losses = options.moe_aux_loss_coeff > 0 or options.moe_z_loss_coeff > 0
        if self._has_router_losses and settings.use_torch_compile:
            raise ConfigError(
                "moe_aux_loss_coeff, moe_z_loss_coeff: they conflict with use_torch_compile=true, as the logits of "
                "compiled routers cannot be read. Set one of both to 0, or false"
            )
        self.model = load_policy(
            settings.model,
            device=settings.device,
            seed=settings.seed,
            freeze_vision_tower=settings.freeze_vision_tower,
            follows_routes=settings.replays_experts or self._has_router_losses,
            group=mesh.sequence,
        )
        super().__init__(self.model, settings, mesh)
        allowed = learns_by_parts(self.device.type, world_size(), has_router_losses=self._has_router_losses)
        self.by_parts = allowed and type(self).forward is FSDPPolicy.forward
        """Updates take micro-batches through the head in parts (see `make_pass`), not past a subclass's own forward."""
        self._temperature = settings.temperature
        self._plain: PlainModel | None = None
        self._replays_experts = settings.replays_experts
        self._dtype: torch.dtype = getattr(torch, settings.model.dtype)
        self._adapter_served = isinstance(settings.model, PolicyModelConfig) and not settings.model.lora_merge
        if self._adapter_served and self.model.lora is not None:
            check_served(self.model.lora.config.target_modules or ())
        self.log_prob_max_tokens = (settings.log_prob_max_tokens or settings.max_tokens) * mesh.parallel.sequence
        """Tokens of a micro-batch without gradient, at most."""

    def forward(
        self, micro: RaggedBatch, needs: Needs, compare: Compare | None = None, needed: torch.Tensor | None = None
    ) -> TokenScores:
        """Return the needed scores of each token, each [T] float32 with gradient."""
        scores: TokenScores = self.model(
            micro.ids,
            micro.offsets,
            needed=micro.mask if needed is None else needed,
            temperature=self._temperature,
            needs=needs,
            compare=compare,
            images=micro.images,
            experts=self._replayed(micro) if "experts" not in needs else None,
        )
        return scores

    def make_pass(self, micro: RaggedBatch, mini: MiniBatch[TokenScores]) -> Pass[TokenScores]:
        """Plan the way of a micro-batch: through the layers at once, and through the head in parts.

        Head, loss and their backward pass run for one part at a time, whose logits fit into a chunk. So no logits are
        made again in the backward pass, as they are where all scores come before the loss.
        """
        parts = self._parts(micro, mini) if self.by_parts else []
        if len(parts) < 2:
            return super().make_pass(micro, mini)
        micro = micro.select([row for part in parts for row in part])
        counts, reads = [len(part) for part in parts], mini.reads or (lambda batch: batch.mask)
        places = [predicted(reads(part), part.offsets).to(self.device) for part in micro.cut(counts)]
        micro = to_device(micro, self.device)
        states = States(partial(self._states, micro, reads(micro), [len(each) for each in places]))
        found = [
            Part(part, partial(self._score, states, place, part, places[place], mini))
            for place, part in enumerate(micro.cut(counts))
        ]
        return Pass(micro, found, states)

    def _parts(self, micro: RaggedBatch, mini: MiniBatch[TokenScores]) -> list[list[int]]:
        """Plan the parts of a micro-batch: indices of its sequences."""
        needed = micro.mask if mini.reads is None else mini.reads(micro)
        owners = micro.sequence_ids()[predicted(needed, micro.offsets)]
        return head_parts(owners.bincount(minlength=len(micro)).tolist(), chunk_size(self.model.base))

    def _states(self, micro: RaggedBatch, needed: torch.Tensor, sizes: list[int]) -> Sequence[torch.Tensor]:
        """Compute the states of a micro-batch on its device, so many for each part."""
        states = self.model.states(
            micro.ids, micro.offsets, needed=needed, images=micro.images, experts=self._replayed(micro)
        )
        return states.split(sizes)

    def _score(
        self, states: States, place: int, part: RaggedBatch, places: torch.Tensor, mini: MiniBatch[TokenScores]
    ) -> TokenScores:
        """Score the part at `place` of a pass by its states; places [M] int64 of its scored tokens."""
        compare = None if mini.compare is None else mini.compare(part)
        return self.model.score(
            states.copies[place],
            part.ids,
            places,
            temperature=self._temperature,
            needs=mini.needs,
            compare=compare,
        )

    def log_probs(self, batch: RaggedBatch, needs: Needs) -> TokenScores:
        def scores(micro: RaggedBatch) -> list[torch.Tensor]:
            return [score for score in self.forward(micro, needs) if score is not None]

        with self.offload:
            found = forward_columns(
                scores, batch, self.log_prob_max_tokens, self.device, shares=self.shared_on is not None
            )
        named = ["logprobs", *(name for name in TokenScores._fields if name in needs)]
        return TokenScores(**dict(zip(named, found, strict=True)))

    def step(self, mini: MiniBatch[TokenScores], step: float) -> StepReport:
        if not self._has_router_losses:
            return super().step(mini, step)
        with self.offload:
            return super().step(self._with_router_losses(mini), step)

    def _with_router_losses(self, mini: MiniBatch[TokenScores]) -> MiniBatch[TokenScores]:
        """Add the routers' losses to a mini-batch's losses, over all its tokens."""
        shares, tokens, options = self._shares(mini.sequences), int(mini.sequences.num_tokens), self._options

        def loss(found: TokenScores, micro: RaggedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            """Compute (loss, a scalar; sums for metrics, scalars) from the scores of a micro-batch."""
            total, seen = mini.loss(found, micro)
            assert found.router is not None
            balance, z = router_losses(found.router, shares, tokens)
            total = total + options.moe_aux_loss_coeff * balance + options.moe_z_loss_coeff * z
            return total, {**seen, AUX_LOSS: balance.detach(), Z_LOSS: z.detach()}

        return replace(mini, loss=loss, needs=mini.needs | {"router"})

    def _shares(self, sequences: Sequences) -> torch.Tensor:
        """Find the share of the choices that falls on each expert, [L, E] float32, over all ranks.

        Experts that are replayed are known; else the model goes over the sequences once more, without gradient.
        """
        assert self.model.experts is not None
        mine = self.share_of(sequences)
        experts = mine.experts if self._replays_experts else None
        if experts is None:
            unread = mine.with_fields(mask=torch.zeros_like(mine.mask))  # no vocabulary projection
            experts = self.log_probs(unread, frozenset({"experts"})).experts
        assert experts is not None
        counts = expert_counts(experts, *self.model.experts)
        total = torch.tensor(self.sum(counts.flatten().double())).view_as(counts)
        return (total / total.sum(1, keepdim=True).clamp(min=1)).to(self.device, torch.float32)

    def _replayed(self, micro: RaggedBatch) -> torch.Tensor | None:
        """Return the experts [T, L, k] that tokens are to be sent to; None: as the routers choose."""
        experts = micro.experts if self._replays_experts else None
        return None if experts is None or experts.ndim == 1 else experts  # of no sequence, L and k may be unknown

    def reference_log_probs(self, batch: RaggedBatch) -> torch.Tensor:
        """Return [T] float32 on the CPU; see `PolicyBackend`."""
        assert self.model.lora is not None
        with self.model.lora.off():
            return self.log_probs(batch.with_fields(experts=None), frozenset()).logprobs

    def second(self, temperature: float, *, adapted: bool = True) -> Twice | None:
        """Describe a second computation of log-probs, at this temperature; None where it is not possible.

        adapted: with the adapters, and with gradients; else as the reference that has none.
        """
        if not self.is_whole or self._replays_experts:
            return None
        plain = self._plain = self._plain or PlainModel(self.model.base, self.model.lora)
        if not plain.names <= self.tensors.keys():
            return None

        def logprobs(weights: Mapping[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
            if not adapted:
                weights = {name: one * 0 if ".lora_B." in name else one for name, one in weights.items()}
            return plain.logprobs(weights, ids, temperature)

        exact = not self.model.autocast and all(one.dtype == torch.float32 for one in self.tensors.values())
        if not adapted:
            return Twice("reference", "ref_logprobs", logprobs, self.tensors, exact)
        trained = partial(self.forward, needs=frozenset())
        return Twice("policy", "old_logprobs", logprobs, self.tensors, exact, lambda micro: trained(micro).logprobs)

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every weight [S] once, by its name in checkpoints, whole in its shape S and in the engine's dtype.

        Tied weights have one name. Adapters are merged into their base weights. In float32 other tensors may be the
        live weights themselves, which the next update changes: copy them. Every rank must read together, and has every
        tensor.
        """
        return self._named(merged=True)

    def _named(self, *, merged: bool) -> Iterator[tuple[str, torch.Tensor]]:
        with self.offload:
            for name, tensor in self.model.named_tensors(self.tensors, merged=merged):
                yield name, tensor.to(self._dtype)

    def weights(self) -> RankWeights:
        give_back(self.device)
        shapes = self.model.shapes(self.tensors)
        if self._adapter_served:
            return RankWeights(shapes, partial(self._of_first_rank, merged=False), self._adapter())
        return RankWeights(shapes, self._of_first_rank)

    def _adapter(self) -> Adapter:
        """Return the adapters as an engine serves them."""
        assert self.model.lora is not None
        named = self.model.lora.adapters(self.tensors)

        def read() -> Iterator[tuple[str, torch.Tensor]]:
            with self.offload:
                for name, param in named.items():
                    yield name, full(param.detach())

        config = json.loads(json.dumps(self.model.lora.config.to_dict(), default=sorted))
        return Adapter(config, {name: tuple(param.shape) for name, param in named.items()}, read)

    def _of_first_rank(self, *, merged: bool = True) -> Iterator[tuple[str, torch.Tensor | None]]:
        for name, tensor in self._named(merged=merged):
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
        self._plain: PlainModel | None = None

    def forward(
        self, micro: RaggedBatch, needs: Needs, compare: Compare | None = None, needed: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return values [T] float32 with gradient."""
        values: torch.Tensor = self.model(micro.ids, micro.offsets, micro.images)
        return values

    def values(self, batch: RaggedBatch) -> torch.Tensor:
        """Return [T] float32 on the CPU; see `CriticBackend`."""
        with self.offload:
            forward = partial(self.forward, needs=frozenset())
            return forward_tokens(forward, batch, self.max_tokens, self.device, shares=self.shared_on is not None)

    def second(self) -> Twice | None:
        """Describe a second computation of the values; None where it is not possible."""
        if not self.is_whole:
            return None
        plain = self._plain = self._plain or PlainModel(self.model.base)
        if not plain.names <= self.tensors.keys():
            return None

        def values(weights: Mapping[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
            after = plain.states(weights, ids) @ weights["value_head.weight"][0]
            return torch.cat([after.new_zeros(1), after[:-1]])

        exact = not self.model.autocast
        return Twice(
            "critic", "values", values, self.tensors, exact, partial(self.forward, needs=frozenset()), relative=True
        )


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
            forward = partial(self.forward, needs=frozenset())
            return forward_tokens(forward, batch, self.max_tokens, self.device, shares=self.shared_on is not None)

    def export(self, dir: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        """Write the model as a sequence classifier with one label; every rank must call it."""
        with self.offload:
            export_score_model(self.model, self.tensors, self._dtype, dir, tokenizer)


# Nothing else compares them with the interfaces: the one is made by its name, the other is used as its own class.
if TYPE_CHECKING:
    _policy: Callable[[PolicySettings], PolicyBackend] = FSDPPolicy
    _critic: Callable[[Settings], CriticBackend] = FSDPCritic
