"""Names and shapes of a model's weights in checkpoints, and so in the engines that load them.

A model of transformers may hold a weight otherwise: the matrices of all experts as one tensor where a checkpoint has
one for each, or under another name. How it came from there transformers knows (`from_pretrained`), and the way back is
the one of `save_pretrained`, here for a few weights at a time.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
)


class CheckpointNames:
    """Translates the weights `names` of a model to the names and shapes that checkpoints have."""

    def __init__(self, model: PreTrainedModel, names: Iterable[str]) -> None:
        self._model = model
        # Reversed, and in reversed order; as transformers.core_model_loading.revert_weight_conversion.
        reverse = [transform.reverse_transform() for transform in _conversions(model)[::-1]]
        renamings = [one for one in reverse if isinstance(one, WeightRenaming)]
        converters = [one for one in reverse if isinstance(one, WeightConverter)]
        self._converter_of = {pattern: one for one in converters for pattern in one.source_patterns}
        self._places: dict[str, tuple[str, str | None]] = {
            name: rename_source_key(name, renamings, converters, reverse=True)
            for name in sorted(names, key=dot_natural_key)
        }
        self._members: dict[str, list[str]] = {}
        for name, (place, pattern) in self._places.items():
            if pattern is not None:
                self._members.setdefault(place, []).append(name)

    def named(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the given weights [S] under the names, and in the shapes S, that they have in checkpoints.

        At most one tensor is held at a time, or all tensors that a checkpoint joins in one.
        """
        waiting: dict[str, dict[str, torch.Tensor]] = {}
        for name, tensor in tensors:
            place, pattern = self._places[name]
            if pattern is None:
                yield place, tensor
                continue
            group = waiting.setdefault(place, {})
            group[name] = tensor
            del tensor
            if len(group) == len(self._members[place]):
                yield from self._converted(place, waiting.pop(place)).items()

    def views(self, params: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Map a checkpoint's weights to views of `params`, contiguous weights of the model, to be written into.

        A view [S] has the weight's shape S in the checkpoint and the dtype of its parameter.

        Raises ValueError where a checkpoint has several of them as one tensor, or in an order that no view has.
        """
        found: dict[str, torch.Tensor] = {}
        for name, param in params.items():
            place, pattern = self._places[name]
            if pattern is None:
                found[place] = param
                continue
            if len(self._members[place]) > 1:
                raise ValueError(f"{name} and {len(self._members[place]) - 1} more are one tensor in a checkpoint")
            index = torch.arange(param.numel()).view(param.shape)
            for key, part in self._converted(place, {name: index}).items():
                corner = part[(0,) * part.ndim]
                steps = [int(part.select(d, int(size > 1)).flatten()[0] - corner) for d, size in enumerate(part.shape)]
                if not torch.equal(index.as_strided(part.shape, steps, int(corner)), part):
                    raise ValueError(f"{key} is no view of {name}")
                found[key] = param.detach().as_strided(part.shape, steps, param.storage_offset() + int(corner))
        return found

    def shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Find the names and shapes that `named` would yield for weights of these shapes, without any data."""
        empty = ((name, torch.empty(shape, device="meta")) for name, shape in shapes.items())
        return {name: tuple(tensor.shape) for name, tensor in self.named(empty)}

    @torch.no_grad()
    def _converted(self, place: str, group: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        pattern = self._places[self._members[place][0]][1]
        assert pattern is not None
        converter = copy.deepcopy(self._converter_of[pattern])
        for name in self._members[place]:
            source = self._places[name][1]
            assert source is not None
            converter.add_tensor(place, name, source, group[name])  # type: ignore[arg-type]  # as when it saves
        made = converter.convert(place, model=self._model, config=self._model.config)
        tensors = ((name, tensor[0] if isinstance(tensor, list) else tensor) for name, tensor in made.items())
        return {name: tensor.contiguous() for name, tensor in tensors}


def _conversions(model: PreTrainedModel) -> list[WeightTransform]:
    """Conversions from checkpoint to model: as the model was loaded, or else as its class defines them."""
    loaded = getattr(model, "_weight_conversions", None)
    if loaded is not None:
        return list(loaded)
    # Only a loaded model shows whether its checkpoint had a prefix.
    known = get_model_conversion_mapping(model, add_legacy=False)
    return [transform for transform in known if not isinstance(transform, PrefixChange)]
