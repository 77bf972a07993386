"""Vocabulary and parameter shapes of the model, to check requests and updates before a server sees them.

A server may die of an id outside the vocabulary or a tensor of a wrong shape, and accept an unknown name silently.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from agentrl.engines.weights import Weights
from agentrl.model.checkpoint_names import CheckpointNames
from agentrl.model.lora import PEFT_PREFIX
from agentrl.model.read_config import read_config
from agentrl.model.vision import auto_class
from agentrl.system.json_value import JSON


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts about a model. `shapes`: by name in checkpoints; a tied weight is there under each of its names."""

    vocab_size: int
    shapes: Mapping[str, tuple[int, ...]]
    architecture: str | None = None
    """Class name in the model's config."""
    max_positions: int | None = None
    """Longest context in tokens that the model was made for."""

    @staticmethod
    def from_path(path: str, override: Mapping[str, JSON] = {}, *, trust_remote_code: bool = False) -> ModelFacts:
        """Read the facts from the config of the model at `path` (see `read_config`); no weights are read."""
        config = read_config(path, override, trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            model = auto_class(config).from_config(config, trust_remote_code=trust_remote_code)
        shapes = {name: tuple(param.shape) for name, param in model.named_parameters(remove_duplicate=False)}
        text = config.get_text_config()
        return ModelFacts(
            model.get_output_embeddings().weight.shape[0],
            CheckpointNames(model, shapes).shapes(shapes),
            config.architectures[0] if config.architectures else None,
            getattr(text, "max_position_embeddings", None),
        )

    def check(self, weights: Weights) -> None:
        """Raise ValueError for a name that the model does not have, or a shape other than its own."""
        for name, shape in weights.shapes.items():
            expected = self.shapes.get(name)
            if expected is None:
                raise ValueError(f"update_weights: the model has no parameter {name!r}; nothing was changed")
            if tuple(shape) != tuple(expected):
                raise ValueError(
                    f"update_weights: {name} has shape {tuple(expected)} in the engine but {tuple(shape)} was given; "
                    "nothing was changed"
                )
        if weights.adapter is not None and (problem := self.other_base(weights.adapter.shapes)) is not None:
            raise ValueError(f"update_weights: {problem}; nothing was changed")

    def other_base(self, shapes: Mapping[str, Sequence[int]]) -> str | None:
        """Name a weight that an adapter with tensors of these shapes adapts, and that the model does not have."""
        for name, found in adapted(shapes).items():
            if self.shapes.get(name) != found:
                return (
                    f"the adapter is of another base: it adapts {name} of shape {found}, and the model has "
                    f"{self.shapes.get(name, 'no such weight')}"
                )
        return None


def adapted(shapes: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, int]]:
    """Find the weights [O, I] that an adapter's A [R, I] and B [O, R] adapt: their shapes by name."""
    layers = [name.removesuffix(".lora_A.weight") for name in shapes if name.endswith(".lora_A.weight")]
    return {
        f"{layer.removeprefix(PEFT_PREFIX)}.weight": (
            shapes[f"{layer}.lora_B.weight"][0],
            shapes[f"{layer}.lora_A.weight"][1],
        )
        for layer in layers
    }
