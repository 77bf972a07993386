"""A model's size as its own code makes it: on the device `meta`, where parameters have shapes and no numbers."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from agentrl.model.vision import auto_class
from agentrl.plan.sizing import Counts, ModelShape

logger = logging.getLogger(__name__)


def counted(config: PretrainedConfig) -> ModelShape:
    """Take the shape from a config and the parameters from its model; where this cannot be made, formulas count.

    Raises ValueError for a model that is not counted.
    """
    shape = ModelShape.from_config(config.to_dict())
    try:
        with torch.device("meta"):
            model: PreTrainedModel = auto_class(config).from_config(config)
    except (AssertionError, AttributeError, ImportError, LookupError, RuntimeError, TypeError, ValueError) as error:
        logger.info("%s is counted by formulas, since it could not be made: %s", type(config).__name__, error)
        return shape
    stacks = [one for one in model.modules() if isinstance(one, nn.ModuleList) and len(one) == shape.layers]
    if not stacks:
        return shape
    layers = max(stacks, key=_matrices)
    routed = sum(
        weight.numel() for weight in layers.parameters() if weight.ndim == 3 and len(weight) == shape.experts > 1
    )
    inside = _matrices(layers)
    counts = Counts(
        layers=inside,
        active=inside - routed + routed * shape.experts_per_token // shape.experts,
        outer=_matrices(model) - inside,
        linear=sum(sum(one.weight.shape) for one in layers.modules() if type(one) is nn.Linear),
    )
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    tied = head is None or head.weight is embedding.weight
    return replace(shape, counts=counts, tied=tied, gated=_is_gated(layers, shape))


def _is_gated(layers: nn.Module, shape: ModelShape) -> bool:
    """Check whether MLPs have a gate: three matrices of their two widths, and not two."""
    found = {_inner_matrices(module, shape) for module in layers.modules()}
    return 3 in found or 2 not in found


def _inner_matrices(module: nn.Module, shape: ModelShape) -> int:
    """Count a module's own matrices between the hidden size and the MLP's width; one may hold gate and up."""
    own = [one for part in (module, *module.children()) for one in part.parameters(recurse=False)]
    inner, size = {(shape.hidden, shape.intermediate), (shape.hidden, 2 * shape.intermediate)}, 0
    for weight in own:
        one = weight[0] if weight.ndim == 3 and len(weight) == shape.experts else weight
        size += one.numel() if inner & {tuple(one.shape), tuple(one.shape[::-1])} else 0
    return size // (shape.hidden * shape.intermediate)


def _matrices(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters() if weight.ndim > 1)
