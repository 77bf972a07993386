"""The images of a ragged batch: each stored once, however many sequences hold it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from agentrl.trajectory import Image, PlacedImage

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Images:
    """I images with P patches in a row, and the M places at which sequences hold one of them."""

    patches: npt.NDArray[np.float32]  # [P, D], as the model's image processor makes them
    grid: Ints  # [I, 3]: frames, rows and columns of patches
    tokens: Ints  # [I]: number of tokens of each image
    digests: tuple[bytes, ...]
    """A hash of each image's content; equal only where the images are."""
    sequence: Ints  # [M], ascending
    start: Ints  # [M]: which token of its sequence is the image's first, ascending within a sequence
    image: Ints  # [M]: which of the images it is

    @staticmethod
    def from_sequences(sequences: Iterable[Sequence[PlacedImage]]) -> Images | None:
        """Collect the images of each sequence, in order; None when there are no images."""
        known: dict[bytes, int] = {}
        images: list[Image] = []
        places: list[tuple[int, int, int]] = []
        for number, placed in enumerate(sequences):
            for one in placed:
                index = known.setdefault(one.image.digest, len(known))
                if index == len(images):
                    images.append(one.image)
                places.append((number, one.start, index))
        if not places:
            return None
        sequence, start, image = np.array(places, np.int64).T
        return Images(
            patches=np.concatenate([one.patches for one in images]),
            grid=np.array([one.grid for one in images], np.int64),
            tokens=np.array([one.tokens for one in images], np.int64),
            digests=tuple(known),
            sequence=sequence,
            start=start,
            image=image,
        )

    @property
    def features(self) -> Ints:
        """First row of each image among the features of all, [I] int64; each token of an image has one feature row."""
        return np.cumsum(self.tokens) - self.tokens

    def select(self, rows: Sequence[int], size: int) -> Images | None:
        """Take the images of the sequences `rows` of `size`, numbered again in that order; None without images."""
        counts = np.bincount(self.sequence, minlength=size)
        firsts = np.cumsum(counts) - counts
        taken = [np.arange(firsts[row], firsts[row] + counts[row]) for row in rows]
        chosen = np.concatenate([*taken, np.empty(0, np.int64)]).astype(np.int64)
        if not len(chosen):
            return None
        sequence = np.repeat(np.arange(len(rows)), [len(one) for one in taken])
        used, image = np.unique(self.image[chosen], return_inverse=True)
        return replace(self._only(used), sequence=sequence, start=self.start[chosen], image=image.astype(np.int64))

    def _only(self, used: Ints) -> Images:
        """Keep only the images `used` (ascending indices); the places stay as they are."""
        if len(used) == len(self.tokens):
            return self
        ends = np.cumsum(self.grid.prod(1))
        starts = ends - self.grid.prod(1)
        return replace(
            self,
            patches=np.concatenate([self.patches[starts[one] : ends[one]] for one in used]),
            grid=self.grid[used],
            tokens=self.tokens[used],
            digests=tuple(self.digests[one] for one in used),
        )

    @staticmethod
    def concat(parts: Sequence[tuple[Images | None, int]]) -> Images | None:
        """Join the images of batches, each with its number of sequences; an image that several have is stored once."""
        known: dict[bytes, int] = {}
        kept, places, before = [], [], 0
        for images, size in parts:
            if images is not None:
                new = [index for index, digest in enumerate(images.digests) if digest not in known]
                if new:
                    kept.append(images._only(np.array(new)))
                for index in new:
                    known[images.digests[index]] = len(known)
                numbers = np.array([known[digest] for digest in images.digests])
                places.append((images.sequence + before, images.start, numbers[images.image]))
            before += size
        if not kept:
            return None
        sequence, start, image = (np.concatenate(column) for column in zip(*places, strict=True))
        return Images(
            patches=np.concatenate([one.patches for one in kept]),
            grid=np.concatenate([one.grid for one in kept]),
            tokens=np.concatenate([one.tokens for one in kept]),
            digests=tuple(known),
            sequence=sequence,
            start=start,
            image=image,
        )
