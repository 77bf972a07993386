"""The half of delta weights in an SGLang server, which SGLang (0.5.23) loads by `--custom-weight-loader`.

It runs in the server's own processes, one for each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import torch

from agentrl.engines.servers.delta import DeltaReceiver, Named

LOADER = "agentrl.engines.sglang.delta_loader.install"
"""Name of `install` on a server's command line."""
HELD = "agentrl-delta-held"
"""Name by which a server is asked for the name of its weights, as if it were a parameter."""
CANNOT = [-1.0]
"""The answer of a model whose own loader takes no changed elements; else it is the name's characters."""


class _Model(Protocol):
    """A model of SGLang's."""

    load_weights: Callable[[Iterable[Named]], object]
    get_weights_by_name: Callable[[str, int, int], object]

    def parameters(self) -> Iterable[torch.Tensor]: ...


def install(model: _Model, named_tensors: object) -> None:
    """Have the model's own functions take changed elements, and answer which weights it holds. Does nothing twice.

    `named_tensors`: empty; SGLang hands a loader some.
    """
    if isinstance(model.load_weights, DeltaReceiver):
        return
    receiver = DeltaReceiver(model.load_weights, model.parameters)
    others = getattr(model, "get_weights_by_name", None)

    def get_weights_by_name(name: str, truncate_size: int = 100, tp_size: int = 1) -> object:
        if name != HELD:
            return None if others is None else others(name, truncate_size, tp_size)
        return CANNOT if receiver.works is False else [float(ord(one)) for one in receiver.held]

    model.load_weights, model.get_weights_by_name = receiver, get_weights_by_name
