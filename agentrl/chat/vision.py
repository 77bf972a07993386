"""Pictures in the form that a vision-language model takes: patches by its own image processor, and image tokens."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError, DataError
from agentrl.trajectory import Image, PlacedImage
from agentrl.trajectory.picture import Picture

CACHED_BYTES = 1 << 29
"""Bytes of patches that are remembered: the trajectories of a group begin with the same images."""


class Vision:
    """Prepares pictures for the model at `path`. Its image processor is loaded with the first picture."""

    def __init__(self, path: str, image_token_id: int, media_token_ids: Sequence[int]) -> None:
        """`media_token_ids`: tokens that only stand for media, never for text; the image token is one of them."""
        self.image_token_id = image_token_id
        self.media_token_ids = tuple(media_token_ids)
        self._path = path
        self._made: OrderedDict[bytes, Image] = OrderedDict()
        self._bytes = 0
        self._changing = threading.Lock()

    @staticmethod
    def from_path(path: str, *, trust_remote_code: bool = False) -> Vision | None:
        """Read the model's config. None for a model without images, or a folder with a tokenizer only."""
        from transformers import AutoConfig, PretrainedConfig

        try:
            written, _ = PretrainedConfig.get_config_dict(path)
            if "vision_config" not in written:
                return None
            config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        except (OSError, ValueError, KeyError):
            return None
        ids = [getattr(config, f"{kind}_token_id", None) for kind in ("image", "video", "audio")]
        return None if ids[0] is None else Vision(path, ids[0], [id for id in ids if id is not None])

    @cached_property
    def processor(self) -> Any:
        """Image processor of the model. Any: processors share no type. Raises ConfigError where no processor fits."""
        from transformers import AutoImageProcessor

        try:
            processor = AutoImageProcessor.from_pretrained(self._path)
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise ConfigError(f"the image processor of {self._path} cannot be loaded: {error}") from error
        if "image_grid_thw" not in processor.model_input_names or not hasattr(processor, "merge_size"):
            raise ConfigError(
                f"{type(processor).__name__} of {self._path} makes no grid of patches: images are supported for "
                "Qwen2-VL, Qwen2.5-VL, Qwen3-VL, GLM-4V and alike"
            )
        return processor

    def save(self, directory: Path) -> None:
        """Write the image processor to a model's folder, if there is one."""
        with contextlib.suppress(ConfigError):
            self.processor.save_pretrained(directory)

    def tokens_of(self, picture: Picture) -> int:
        """Count a picture's image tokens by its size, without decoding it. Raises DataError for extreme sizes."""
        width, height = picture.size
        try:
            patches: int = self.processor.get_number_of_image_patches(height, width, {})
        except ValueError as error:
            raise DataError(f"an image of {width} x {height} pixels: {error}") from error
        return int(patches) // self.processor.merge_size**2

    def image(self, picture: Picture) -> Image:
        """Prepare a picture for the model. Raises DataError for a damaged file."""
        if (made := self._made.get(picture.digest)) is None:
            made = self._make(picture)
        with self._changing:  # by threads that prepare large pictures
            if self._made.pop(picture.digest, None) is None:
                self._bytes += made.patches.nbytes
            self._made[picture.digest] = made
            while self._bytes > CACHED_BYTES and len(self._made) > 1:
                self._bytes -= self._made.popitem(last=False)[1].patches.nbytes
        return made

    def _make(self, picture: Picture) -> Image:
        made = self.processor(images=[picture.decode()], return_tensors="np")
        frames, rows, columns = (int(side) for side in made["image_grid_thw"][0])
        tokens = frames * rows * columns // self.processor.merge_size**2
        if tokens != self.tokens_of(picture):
            raise ConfigError(f"the image processor makes {tokens} tokens of {picture}, not {self.tokens_of(picture)}")
        return Image(
            made["pixel_values"].astype("float32"), (frames, rows, columns), tokens, picture.digest, picture.plain()
        )

    def expand(self, ids: list[int], pictures: Sequence[Picture], where: str) -> list[int]:
        """Replace the one token that the template wrote for each picture by as many as the picture needs.

        Raises ConfigError when the template did not write one for each.
        """
        written = ids.count(self.image_token_id)
        if written != len(pictures):
            raise ConfigError(
                f"{where} writes {written} image tokens for {len(pictures)} images: it does not know images in all of "
                "these roles; set actor_rollout_ref.model.chat_template to one that does"
            )
        counts = iter([self.tokens_of(picture) for picture in pictures])
        expanded: list[int] = []
        for id in ids:
            expanded += [id] * next(counts) if id == self.image_token_id else [id]
        return expanded

    def place(self, ids: Sequence[int], pictures: Sequence[Picture]) -> list[PlacedImage]:
        """Find each picture's place in the expanded `ids`, and prepare it for the model."""
        placed, start = [], 0
        for picture in pictures:
            start = ids.index(self.image_token_id, start)
            placed.append(PlacedImage(start, self.image(picture)))
            start += placed[-1].image.tokens
        return placed
