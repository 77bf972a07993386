"""What is known of the model without its weights: what a request or an update must fit, before a server sees it.

An id outside the vocabulary and a tensor of a wrong shape kill an SGLang server; an unknown name it accepts silently.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from transformers import AutoConfig

from agentrl.engines.weights import Weights
from agentrl.model.checkpoint_names import CheckpointNames
from agentrl.model.vision import auto_class


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Vocabulary and parameters. `shapes`: by their names in checkpoints, tied weights under each of theirs."""

    vocab_size: int
    shapes: Mapping[str, tuple[int, ...]]
    architecture: str | None = None
    """The class that its config names."""
    max_positions: int | None = None
    """The longest context that it was made for, in tokens."""

    @staticmethod
    def of(path: str, *, trust_remote_code: bool = False) -> ModelFacts:
        """From the model's config; no weights are read."""
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            model = auto_class(config).from_config(config, trust_remote_code=trust_remote_code)
        shapes = {name: tuple(param.shape) for name, param in model.named_parameters(remove_duplicate=False)}
        text = config.get_text_config()
        return ModelFacts(
            model.get_output_embeddings().weight.shape[0],
            CheckpointNames(model, shapes).shapes(shapes),
            (config.architectures or [None])[0],
            getattr(text, "max_position_embeddings", None),
        )

    def check(self, weights: Weights) -> None:
        """Raises ValueError for a name that the model does not have, or another shape than its own."""
        for name, shape in weights.shapes.items():
            expected = self.shapes.get(name)
            if expected is None:
                raise ValueError(f"update_weights: the model has no parameter {name!r}; nothing was changed")
            if tuple(shape) != tuple(expected):
                raise ValueError(
                    f"update_weights: {name} has shape {tuple(expected)} in the engine but {tuple(shape)} was given; "
                    "nothing was changed"
                )
