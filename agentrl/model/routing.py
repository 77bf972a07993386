"""The experts of a mixture that tokens are sent to: recorded in one forward pass, replayed in another.

A tiny difference of two kernels, or of two versions of the weights, can swap two experts that a router finds about
equally good, and the token's log-prob then is that of another network. With replay (R3, arXiv:2510.11370) the trainer
sends each token to the experts that it was sent to when it was sampled; how much each counts, the gate value, is still
the router's own, and has a gradient.
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
from agentrl.parallel.shard import decoder_layers

ROUTES = "agentrl_routes"
"""Name of the forward's keyword argument that carries the routes."""


class Routes:
    """The experts of P tokens in each of L layers with experts, k each.

    Made without `replayed` it records what routers choose; else they choose what it says.
    """

    def __init__(self, replayed: torch.Tensor | None = None) -> None:
        """replayed: [P, L, k] of an integer type, on the model's device."""
        self.replayed = replayed
        self._chosen: dict[int, torch.Tensor] = {}
        self._experts = 0

    def of(self, layer: int) -> torch.Tensor | None:
        """Return the experts [P, k] int64 that are to be chosen in a layer; None: the router's own choice."""
        return None if self.replayed is None else self.replayed[:, layer].long()

    def note(self, layer: int, chosen: torch.Tensor, experts: int) -> None:
        """Record the experts [P, k] int64 that were chosen of so many."""
        self._chosen[layer] = chosen
        self._experts = max(self._experts, experts)

    def recorded(self) -> torch.Tensor:
        """Return what was chosen, [P, L, k] on the CPU: uint8 where that can number the experts, else int16."""
        chosen = torch.stack([self._chosen[layer] for layer in sorted(self._chosen)], dim=1)
        return chosen.to(torch.uint8 if self._experts <= 256 else torch.int16).cpu()


def follow_routes(model: PreTrainedModel) -> None:
    """Have the routers of a model follow the `Routes` of each forward pass that has some; before `shard`.

    Raises ConfigError for a model without routers that this can be done with.
    """
    index = 0
    for layer in decoder_layers(model):
        routers = [module for module in layer.modules() if _is_router(module)]
        if len(routers) > 1:
            raise ConfigError(_unfit(model, f"a layer has {len(routers)} routers"))
        for router in routers:
            steered = _Router(router, index)
            layer.register_forward_pre_hook(steered.take, with_kwargs=True)
            index += 1
    if not index:
        raise ConfigError(_unfit(model, "no layer has a router with `top_k` of `num_experts` experts"))


def _is_router(module: nn.Module) -> bool:
    numbers = (getattr(module, "top_k", None), getattr(module, "num_experts", None))
    return all(isinstance(number, int) for number in numbers) and isinstance(
        getattr(module, "weight", None), nn.Parameter
    )


def _unfit(model: nn.Module, why: str) -> str:
    return (
        f"actor_rollout_ref.actor.router_replay.mode=R3: {type(model).__name__} cannot be told which experts to take: "
        f"{why}. It is for mixtures of experts whose routers choose by torch.topk (Qwen3-MoE, Mixtral, OLMoE, gpt-oss, "
        "DeepSeek-V3 and alike); set mode=disabled"
    )


class _Sizes(Protocol):
    """Attributes that every router has (see `_is_router`)."""

    num_experts: int
    top_k: int


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
        sizes = cast(_Sizes, router)
        experts, k = sizes.num_experts, sizes.top_k
        with _Choice(experts, k, routes.of(self._layer)) as choice:
            result = own(*args, **kwargs)
        if choice.chosen is None:
            raise ConfigError(_unfit(router, "its router does not choose by torch.topk"))
        routes.note(self._layer, choice.chosen, experts)
        return result


class _Choice(TorchFunctionMode):
    """Within the block, the k largest of scores [P, experts] are those of `given` [P, k] int64, if that is there."""

    def __init__(self, experts: int, k: int, given: torch.Tensor | None) -> None:
        super().__init__()
        self._experts, self._k, self._given = experts, k, given
        self.chosen: torch.Tensor | None = None

    def __torch_function__(
        self,
        func: _Function,
        types: Iterable[type[object]],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
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
