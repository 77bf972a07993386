"""The experts of a mixture that tokens are sent to: recorded in one forward pass, replayed in another.

A tiny difference of two kernels, or of two versions of the weights, can swap two experts that a router finds about
equally good. The token's log-prob then comes from another network. With replay, the update sends each token to recorded
experts: from when the policy before the update read it (R2), or from when it was sampled (R3, arXiv:2510.11370). The
weight of each expert, the gate value, is still the router's own, and has a gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Protocol, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from agentrl.errors import ConfigError
from agentrl.model.experts import is_router
from agentrl.model.layout import PackedLayout
from agentrl.model.ulysses import Slice
from agentrl.parallel.shard import decoder_layers

ROUTES = "agentrl_routes"
"""Name of the forward's keyword argument that carries the routes."""


class Routes:
    """The experts of the P tokens of a forward pass in each of L layers with experts, k each.

    Made without `given` it records the routers' choices; else it prescribes them.
    """

    def __init__(self, given: torch.Tensor | None = None, *, with_sums: bool = False) -> None:
        """given: [T, L, k] of an integer type, on the model's device, of the tokens of a batch; see `place`.

        with_sums: keep the inputs of `sums`.
        """
        self.given, self.with_sums = given, with_sums
        self._logits: dict[int, tuple[torch.Tensor, bool]] = {}
        self._replayed: torch.Tensor | None = None
        self._layout: PackedLayout | None = None
        self._part: Slice | None = None
        self._chosen: dict[int, torch.Tensor] = {}
        self._experts = 0

    def place(self, layout: PackedLayout, part: Slice) -> None:
        """Map the T tokens of a batch to the P tokens of the forward pass."""
        self._layout, self._part = layout, part
        if self.given is not None:
            self._replayed = part.cut(self.given[layout.stored].movedim(0, -1)).movedim(-1, 0)

    def for_layer(self, layer: int) -> torch.Tensor | None:
        """Return the experts [P, k] int64 that are to be chosen in a layer; None: the router's own choice."""
        return None if self._replayed is None else self._replayed[:, layer].long()

    def note(self, layer: int, chosen: torch.Tensor, experts: int) -> None:
        """Record the experts [P, k] int64 that were chosen of so many."""
        self._chosen[layer] = chosen
        self._experts = max(self._experts, experts)

    def note_logits(self, layer: int, logits: torch.Tensor, *, independent: bool) -> None:
        """Record a router's logits [P, E]. independent: each expert has a probability of its own, by a sigmoid."""
        self._logits[layer] = logits, independent

    def sums(self) -> torch.Tensor:
        """Sum over the T tokens of the batch that was placed: [L, E + 1] float32 (`TokenScores.router`)."""
        assert self._layout is not None and self._part is not None, "place was called"
        times = torch.bincount(self._layout.expand, minlength=len(self._layout.stored))  # beginnings may be shared
        weight = self._part.cut(times)[:, None]
        rows = []
        for layer in sorted(self._logits):
            logits, independent = self._logits[layer]
            logits = logits.float()
            scores = logits.sigmoid() if independent else logits.softmax(-1)
            probabilities = scores / scores.sum(-1, keepdim=True) if independent else scores
            squares = logits.logsumexp(-1, keepdim=True).square()
            rows.append((weight * torch.cat([probabilities, squares], dim=1)).sum(0))
        return self._part.sum_over_ranks(torch.stack(rows))

    def recorded(self) -> torch.Tensor:
        """Return the chosen experts, [P, L, k] on the CPU: uint8 where that can number the experts, else int16."""
        return self._small(self._all()).cpu()

    def of_tokens(self) -> torch.Tensor:
        """Return the chosen experts for the T tokens of the placed batch, [T, L, k] of these types."""
        assert self._layout is not None and self._part is not None, "place was called"
        return self._small(self._part.spread(self._all().movedim(0, -1))[..., self._layout.expand].movedim(-1, 0))

    def _all(self) -> torch.Tensor:
        """Join the chosen experts of all layers, [P, L, k] int64."""
        return torch.stack([self._chosen[layer] for layer in sorted(self._chosen)], dim=1)

    def _small(self, experts: torch.Tensor) -> torch.Tensor:
        return experts.to(torch.uint8 if self._experts <= 256 else torch.int16)


def follow_routes(model: PreTrainedModel) -> tuple[int, int]:
    """Have the routers of a model follow the `Routes` of each forward pass that has some; before `shard`.

    Returns the number of layers with routers, and of the experts of each. Raises ConfigError for a model without
    routers that this can be done with.
    """
    index = experts = 0
    for layer in decoder_layers(model):
        routers = [module for module in layer.modules() if is_router(module)]
        if len(routers) > 1:
            raise ConfigError(_unfit(model, f"a layer has {len(routers)} routers"))
        for router in routers:
            steered = _Router(router, index)
            layer.register_forward_pre_hook(steered.take, with_kwargs=True)
            index, experts = index + 1, max(experts, cast(int, router.num_experts))
    if not index:
        raise ConfigError(_unfit(model, "no layer has a router with `top_k` of `num_experts` experts"))
    return index, experts


def _unfit(model: nn.Module, why: str) -> str:
    return (
        f"actor_rollout_ref.actor.router_replay.mode: {type(model).__name__} cannot be told which experts to take: "
        f"{why}. Replay, and losses of routers (strategy_options.moe_aux_loss_coeff, moe_z_loss_coeff), are for "
        "mixtures of experts whose routers choose by torch.topk (Qwen3-MoE, Mixtral, OLMoE, gpt-oss, DeepSeek-V3 and "
        "alike); set mode=disabled, and the coefficients to 0"
    )


class _Function(Protocol):
    """Any function."""

    def __call__(self, *args: object, **kwargs: object) -> object: ...


class _Router:
    """A router whose choice is recorded, or replaced, where its layer was given routes."""

    def __init__(self, router: nn.Module, layer: int) -> None:
        self._layer = layer
        self._routes: Routes | None = None
        router.forward = partial(self._forward, router, router.forward)

    def take(self, module: nn.Module, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
        """Take the routes from the arguments of the layer, which gradient checkpointing gives it again."""
        routes = kwargs.get(ROUTES)
        self._routes = routes if isinstance(routes, Routes) else None

    def _forward(self, router: nn.Module, own: _Function, *args: object, **kwargs: object) -> object:
        routes = self._routes
        if routes is None:
            return own(*args, **kwargs)
        experts, k = cast(int, router.num_experts), cast(int, router.top_k)
        with _Choice(experts, k, routes.for_layer(self._layer)) as choice:
            result = own(*args, **kwargs)
        if choice.chosen is None:
            raise ConfigError(_unfit(router, "its router does not choose by torch.topk"))
        routes.note(self._layer, choice.chosen, experts)
        if routes.with_sums:
            logits = result[0] if isinstance(result, tuple) else result
            if not isinstance(logits, torch.Tensor) or logits.shape != (len(choice.chosen), experts):
                raise ConfigError(_unfit(router, "its router does not give its logits"))
            routes.note_logits(self._layer, logits, independent=choice.independent)
        return result


class _Choice(TorchFunctionMode):
    """Within the block, the k largest of scores [P, experts] are `given` [P, k] int64, if that is there."""

    def __init__(self, experts: int, k: int, given: torch.Tensor | None) -> None:
        super().__init__()
        self._experts, self._k, self._given = experts, k, given
        self.chosen: torch.Tensor | None = None
        self.independent = False
        """Scores are sigmoids of logits, not their softmax."""

    def __torch_function__(
        self,
        func: _Function,
        types: Iterable[type[object]],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        self.independent = self.independent or func in (torch.sigmoid, torch.Tensor.sigmoid)
        if func not in (torch.topk, torch.Tensor.topk):
            return result
        scores = cast(torch.Tensor, args[0])
        values, indices = cast(tuple[torch.Tensor, torch.Tensor], result)
        if scores.shape[1:] != (self._experts,) or indices.shape[1] != self._k:
            return result  # of groups of experts
        if self._given is not None:
            indices = self._given
            values = scores.gather(1, indices)
        self.chosen = indices
        return torch.return_types.topk((values, indices))
