"""Images in the embedded engine: told apart in its cache, and put into the steps that compute their tokens.

In the cache each token of an image is a number of its own, beyond any vocabulary, the same for the same image. So
sessions share equal tokens, images included, and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from agentrl.engines.embedded.cache import Prefix, Session
from agentrl.model.vision import FIRST_FEATURE, PlacedFeatures, features_of, rope_of
from agentrl.trajectory import Image, PlacedImage

_REMEMBERED = 1 << 16
"""Images whose numbers are remembered. A forgotten image gets new numbers at its return and is not shared."""
Span = tuple[Session | Prefix, int, int]
"""Tokens [begin, end) of a session's or prefix's ids."""


class ImageNumbers:
    """Assigns the numbers that stand for images in the cache."""

    def __init__(self) -> None:
        self._first: dict[bytes, int] = {}
        self._next = FIRST_FEATURE

    def replaced(self, ids: list[int], images: Sequence[PlacedImage]) -> list[int]:
        """Copy `ids` with the images' numbers in their places."""
        if len(self._first) > _REMEMBERED:
            self._first.clear()
        ids = list(ids)
        for one in images:
            tokens = one.image.tokens
            first = self._first.get(one.image.digest)
            if first is None:
                first = self._first[one.image.digest] = self._next
                self._next += tokens
            ids[one.start : one.start + tokens] = range(first, first + tokens)
        return ids


def hold_images(model: PreTrainedModel, session: Session, ids: list[int], images: Sequence[PlacedImage]) -> None:
    """Set the images of a session whose request has the tokens `ids`, and the positions that follow from them."""
    session.images = list(images)
    session.rope, session.shift = None, 0
    if images and hasattr(model.base_model, "get_rope_index"):
        spans = [(one.start, one.image.tokens, list(one.image.grid)) for one in images]
        session.rope = rope_of(model, torch.tensor(ids), spans)
        session.shift = int(session.rope.max()) + 1 - len(ids)


@dataclass(frozen=True, slots=True)
class StepImages:
    """Images among the T tokens of a step."""

    rows: torch.Tensor  # [T] int64: the row of the features for each token, -1 where it is text
    positions: torch.Tensor | None  # [3, T]; None where the model has one position a token
    images: list[Image]

    @staticmethod
    def from_spans(spans: Sequence[Span], device: torch.device) -> StepImages | None:
        """Find the images in the spans that make up a step. None without images."""
        first: dict[bytes, int] = {}
        images: list[Image] = []
        rows = [np.full(end - begin, -1) for _, begin, end in spans]
        for (holder, begin, end), row in zip(spans, rows, strict=True):
            for one in holder.images:
                low, high = max(begin, one.start), min(end, one.start + one.image.tokens)
                if low >= high:
                    continue
                if one.image.digest not in first:
                    first[one.image.digest] = sum(image.tokens for image in images)
                    images.append(one.image)
                start = first[one.image.digest] - one.start
                row[low - begin : high - begin] = np.arange(start + low, start + high)
        if not images:
            return None
        rope = [_rope(*span) for span in spans] if any(holder.rope is not None for holder, _, _ in spans) else None
        return StepImages(
            torch.from_numpy(np.concatenate(rows)).to(device),
            None if rope is None else torch.cat(rope, dim=1).to(device),
            images,
        )

    def told_apart(self, ids: torch.Tensor, start: int) -> torch.Tensor:
        """Give each image token in `ids` [P], the step's tokens from `start` on, a number of its own -> [P] int64.

        See `agentrl.model.vision.told_apart`.
        """
        rows = self.rows[start:]
        return torch.where(rows < 0, ids, FIRST_FEATURE + rows)

    def select(self, tokens: torch.Tensor) -> StepImages:
        """Restrict to the tokens `tokens` [P] int64, in that order."""
        positions = None if self.positions is None else self.positions[:, tokens]
        return StepImages(self.rows[tokens], positions, self.images)

    def placed(self, model: PreTrainedModel) -> PlacedFeatures:
        """Run the vision tower over the images and place its features at the step's tokens."""
        patches = np.concatenate([image.patches for image in self.images])
        features = features_of(model, patches, np.array([image.grid for image in self.images]))
        places = (self.rows >= 0).nonzero()[:, 0]
        return PlacedFeatures(features, places, self.rows[places])


def _rope(holder: Session | Prefix, begin: int, end: int) -> torch.Tensor:
    """Positions [3, end - begin] int64 of a span. After the holder's known tokens only text follows."""
    if holder.rope is None:
        return torch.arange(begin, end).expand(3, -1)
    known = holder.rope.shape[1]
    after = torch.arange(max(begin, known), max(end, known)) + holder.shift
    return torch.cat([holder.rope[:, begin:end], after.expand(3, -1)], dim=1)
