"""Images in the packed forward, by the methods that Hugging Face's vision-language models have.

The vision tower runs once over the images of a batch, each image once for all sequences that hold it. Its features
replace the embeddings of the image tokens. `Images` identifies these tokens, never ids: an image token that the policy
sampled is a token like any other. Where a model rotates by position in three dimensions (arXiv:2409.12191), positions
come from its own `get_rope_index`, sequence by sequence.

Supported are models that take patches and a grid of them (`get_image_features(pixel_values, image_grid_thw)`):
Qwen2-VL, Qwen2.5-VL, Qwen3-VL, GLM-4V and alike.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel

from agentrl.trajectory import Image, PlacedImage
from agentrl.trajectory.images import Images, Ints

FIRST_FEATURE = 1 << 31
"""First number that represents an image token in the search for common beginnings: no vocabulary is so large."""


def auto_class(config: PretrainedConfig) -> type[AutoModelForCausalLM | AutoModelForImageTextToText]:
    """Choose the Auto class of transformers for `config`: one with a vision tower where the model has one."""
    has_vision = getattr(config, "vision_config", None) is not None
    if has_vision and type(config) in AutoModelForImageTextToText._model_mapping:
        return AutoModelForImageTextToText
    return AutoModelForCausalLM


def takes_images(model: PreTrainedModel) -> bool:
    """True when the packed forward pass of the model can take images."""
    features = getattr(model.base_model, "get_image_features", None)
    wanted = {"pixel_values", "image_grid_thw"}
    if features is None or not wanted <= set(inspect.signature(features).parameters):
        return False
    return hasattr(model.config.vision_config, "spatial_merge_size")  # Muse-Glimmer's patches are cut otherwise


class _ImageFeatures(Protocol):
    pooler_output: torch.Tensor | Sequence[torch.Tensor]
    """[F, H], or one tensor for each image."""


class _VisionLanguageModel(Protocol):
    """Members that vision-language models have, and their common class in transformers does not declare."""

    language_model: nn.Module

    def get_image_features(
        self, pixel_values: torch.Tensor, image_grid_thw: torch.Tensor, *, return_dict: bool
    ) -> _ImageFeatures:
        """Compute features of images.

        pixel_values [P, V], V values a patch; image_grid_thw [I, 3] int64, each image's patches by time, row, column.
        """
        ...

    def get_rope_index(
        self, input_ids: torch.Tensor, *, mm_token_type_ids: torch.Tensor, image_grid_thw: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """input_ids and mm_token_type_ids [1, T], image_grid_thw [images, 3] -> positions [3, 1, T], offset [1, 1]."""
        ...


def _base(model: PreTrainedModel) -> _VisionLanguageModel:
    """Return the model without its head."""
    return cast(_VisionLanguageModel, model.base_model)


def vision_tower(model: PreTrainedModel) -> nn.Module | None:
    """Find the module that makes features of images; None without one."""
    return model.get_encoder(modality="image") if takes_images(model) else None


@dataclass(frozen=True, slots=True)
class Features:
    """The vision tower's output for some images: one row for each of their F tokens."""

    rows: torch.Tensor
    """[F, H]; these take the place of embeddings."""
    deep: list[torch.Tensor] = field(default_factory=list)
    """[F, H] each; they are added after the first decoder layers (Qwen3-VL's deepstack)."""


@dataclass(frozen=True, slots=True)
class PlacedFeatures:
    """Features for K of the tokens of a forward pass."""

    features: Features
    places: torch.Tensor
    """[K] int64, ascending: tokens of the forward pass."""
    which: torch.Tensor
    """[K] int64: row of the features for each of these tokens."""


def features_of(model: PreTrainedModel, patches: npt.NDArray[np.float32], grid: Ints) -> Features:
    """Run the vision tower over I images: patches [P, D] float32, grid [I, 3] int64. Differentiable in its weights."""
    pixels = torch.tensor(patches, device=model.device)
    output = _base(model).get_image_features(pixels, torch.tensor(grid, device=model.device), return_dict=True)
    deep = getattr(output, "deepstack_features", None) or ()
    return Features(_concatenated(output.pooler_output), [_concatenated(one) for one in deep])


def _concatenated(features: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
    return features if isinstance(features, torch.Tensor) else torch.cat(tuple(features))


def image_rows(images: Images, offsets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the K tokens of a batch that represent images, and their rows of the features.

    offsets [N + 1] int64. Returns (places in the batch, ascending; rows), both [K] int64 on the CPU.
    """
    starts = offsets.numpy(force=True)[images.sequence] + images.start
    lengths, first = images.tokens[images.image], images.features[images.image]
    # The number of each token within its image: 0, 1, ... for one image after the other.
    inside = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    places, rows = np.repeat(starts, lengths) + inside, np.repeat(first, lengths) + inside
    return torch.from_numpy(places), torch.from_numpy(rows)


def told_apart(ids: torch.Tensor, places: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Replace image tokens by numbers of their own, so that only beginnings with equal images look equal.

    ids [T] int64, places and rows [K] int64 of `image_rows` -> [T] int64.
    """
    apart = ids.clone()
    apart[places.to(ids.device)] = FIRST_FEATURE + rows.to(ids.device)
    return apart


def rope_positions(
    model: PreTrainedModel, ids: torch.Tensor, offsets: torch.Tensor, images: Images
) -> torch.Tensor | None:
    """Positions of each token in time, height and width; None for a model that has one position a token.

    ids [T] int64, offsets [N + 1] int64 -> [3, T] int64 on the CPU.
    """
    if not hasattr(model.base_model, "get_rope_index"):
        return None
    bounds, tokens = offsets.tolist(), ids.cpu()
    positions = torch.cat([torch.arange(end - start) for start, end in itertools.pairwise(bounds)])
    positions = positions.expand(3, -1).clone()
    for number in np.unique(images.sequence).tolist():
        mine = images.sequence == number
        part = slice(bounds[number], bounds[number + 1])
        spans = zip(images.start[mine], images.tokens[images.image[mine]], images.grid[images.image[mine]], strict=True)
        positions[:, part] = rope_of(model, tokens[part], [(int(a), int(n), grid.tolist()) for a, n, grid in spans])
    return positions


def rope_of(model: PreTrainedModel, ids: torch.Tensor, spans: list[tuple[int, int, list[int]]]) -> torch.Tensor:
    """Positions of one sequence: ids [L] int64 on the CPU -> [3, L] int64.

    `spans`: first token, number of tokens and grid of each image.
    """
    kinds = torch.zeros_like(ids)
    for start, count, _ in spans:
        kinds[start : start + count] = 1
    grids = torch.tensor([grid for _, _, grid in spans])
    positions, _ = _base(model).get_rope_index(ids[None], mm_token_type_ids=kinds[None], image_grid_thw=grids)
    return positions[:, 0]


def forward_images(
    model: PreTrainedModel,
    ids: torch.Tensor,
    positions: torch.Tensor,
    images: PlacedFeatures,
    arguments: Mapping[str, object],
) -> torch.Tensor:
    """Compute the last hidden states [P, H] of packed tokens, with features in the places of image tokens.

    ids [P] int64, positions [P] or [3, P] int64. `arguments`: further ones of the decoder's forward.
    """
    embeddings = model.get_input_embeddings()(ids)
    rows = images.features.rows.to(embeddings.dtype).index_select(0, images.which)
    embeddings = embeddings.index_copy(0, images.places, rows)
    further = dict(arguments)
    if images.features.deep:
        mask = torch.zeros_like(ids, dtype=torch.bool)
        mask[images.places] = True
        deep = [one.to(embeddings.dtype).index_select(0, images.which) for one in images.features.deep]
        further |= {"visual_pos_masks": mask[None], "deepstack_visual_embeds": deep}
    output = _base(model).language_model(
        inputs_embeds=embeddings[None], position_ids=positions[..., None, :], use_cache=False, **further
    )
    hidden: torch.Tensor = output.last_hidden_state[0]
    return hidden


def sample_image(model: PreTrainedModel) -> Image:
    """Make a small image with made-up patches, in the shape that the model's vision tower takes."""
    vision = model.config.vision_config
    merge, channels = vision.spatial_merge_size, getattr(vision, "in_channels", None) or vision.in_chans
    width = channels * getattr(vision, "temporal_patch_size", 1) * vision.patch_size**2
    grid = (1, 2 * merge, 4 * merge)
    patches = np.sin(np.arange(8 * merge**2 * width, dtype=np.float32)).reshape(-1, width)
    return Image(patches, grid, tokens=8, digest=b"sample", encoded=b"")


def image_probe(model: PreTrainedModel) -> tuple[torch.Tensor, Images] | None:
    """Make two sequences to try a model with: one of 8 tokens, one of 24 with an image. None where it takes no images.

    Returns ids [32] int64 on the model's device, and the image.
    """
    if not takes_images(model):
        return None
    ids = torch.arange(32, device=model.device) * 7 % model.config.get_text_config().vocab_size
    placed = PlacedImage(4, sample_image(model))
    ids[8 + placed.start : 8 + placed.start + placed.image.tokens] = model.config.image_token_id
    images = Images.from_sequences([[], [placed]])
    assert images is not None
    return ids, images


def own_logits(model: PreTrainedModel, ids: torch.Tensor, images: Images) -> torch.Tensor:
    """Compute the logits [24, V] of a probe's second sequence by the model's own forward pass. ids [32] int64."""
    logits: torch.Tensor = model(
        input_ids=ids[None, 8:],
        pixel_values=torch.tensor(images.patches, device=model.device),
        image_grid_thw=torch.tensor(images.grid, device=model.device),
        mm_token_type_ids=(ids == model.config.image_token_id).int()[None, 8:],
        use_cache=False,
    ).logits[0]
    return logits
