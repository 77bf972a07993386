"""Tensor parallelism: each layer's matrices split over ranks, by the plan that transformers has for the model.

Embeddings and head are not split. Ranks that share the tokens compute the same activations between the layers' parts.
"""

from __future__ import annotations

import logging

from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from agentrl.errors import ConfigError

_PARTIAL = "replicated_with_grad_allreduce"
_SPLIT = ("colwise", "rowwise", "colwise_gather_output", "rowwise_split_input")
"""Styles in which each rank holds one block of a matrix. Others (of experts, and latent attention) are refused."""


def split_layers(model: PreTrainedModel, mesh: DeviceMesh) -> set[str]:
    """Split `model` in place over the one-dimensional `mesh`, before it is sharded.

    Returns the parameters that every rank has whole but uses for its own heads only, as norms of queries and keys are.
    Their gradients must be added up over `mesh`. (transformers' own hook would add up the accumulated gradients.)

    Raises ConfigError when there is no plan for the model, or its sizes cannot be split so.
    """
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism, replace_layer_number_by_wildcard

    plan = {pattern: style for pattern, style in model.tp_plan.items() if "*" in pattern}  # of layers, not of the head
    refused = sorted(set(plan.values()) - {*_SPLIT, _PARTIAL})
    if not plan or refused:
        why = f"splits layers as {', '.join(refused)}" if refused else "is empty"
        raise ConfigError(
            f"fsdp_config.tensor_parallel_size={mesh.size()}: transformers' plan for {type(model).__name__} {why}; use "
            "fsdp_size and ulysses_sequence_parallel_size"
        )
    partial = {
        name
        for name, _ in model.named_parameters()
        if plan.get(replace_layer_number_by_wildcard(name.rpartition(".")[0])) == _PARTIAL
    }
    try:
        apply_tensor_parallelism(model, mesh, {key: style for key, style in plan.items() if style != _PARTIAL})
    except ValueError as error:
        raise ConfigError(f"fsdp_config.tensor_parallel_size={mesh.size()}: {error}") from error
    # Gathering a tensor that is sharded twice takes two steps, which torch warns of each time.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    return partial
