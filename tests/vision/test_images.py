"""Images in the ragged batch: chosen, joined, pickled."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from agentrl.system.publish import published
from agentrl.trajectory import Image, PlacedImage, Trajectory, Transcript, Turn, parquet
from agentrl.trajectory.collate import from_trajectories
from agentrl.trajectory.files import image_file
from agentrl.trajectory.images import Images
from tests.naming import naming


def image(number: int, rows: int = 2, columns: int = 2) -> Image:
    patches = np.full((rows * columns, 3), number, np.float32)
    return Image(patches, (1, rows, columns), rows * columns // 4, bytes([number]) * 16, b"")


def seen(images: Images | None, size: int) -> list[list[tuple[int, int, tuple[int, ...]]]]:
    """For each sequence: where an image begins, the value in its patches, and its grid."""
    found: list[list[tuple[int, int, tuple[int, ...]]]] = [[] for _ in range(size)]
    if images is None:
        return found
    ends = np.cumsum(images.grid.prod(1))
    for sequence, start, index in zip(images.sequence, images.start, images.image, strict=True):
        patches = images.patches[ends[index] - images.grid[index].prod() : ends[index]]
        assert len(np.unique(patches)) == 1
        assert images.digests[index] == bytes([int(patches[0, 0])]) * 16
        assert images.tokens[index] == len(patches) // 4
        found[sequence].append((int(start), int(patches[0, 0]), tuple(images.grid[index].tolist())))
    return found


WIDE = (1, 2, 4)
SQUARE = (1, 2, 2)
PLACED = [
    [PlacedImage(3, image(1))],
    [],
    [PlacedImage(3, image(1)), PlacedImage(7, image(2, 2, 4))],
    [PlacedImage(1, image(3))],
]
SEEN = [[(3, 1, SQUARE)], [], [(3, 1, SQUARE), (7, 2, WIDE)], [(1, 3, SQUARE)]]


def test_each_image_is_stored_once_and_found_by_every_sequence() -> None:
    images = Images.from_sequences(PLACED)
    assert images is not None
    assert len(images.patches) == 4 + 8 + 4
    assert seen(images, 4) == SEEN
    assert seen(pickle.loads(pickle.dumps(images)), 4) == SEEN
    assert Images.from_sequences([[], []]) is None


@pytest.mark.parametrize("rows", [[2, 0], [3, 1], [0, 1, 2, 3], [2, 2]])
def test_a_selection_holds_its_own_images_only(rows: list[int]) -> None:
    images = Images.from_sequences(PLACED)
    assert images is not None
    chosen = images.select(rows, 4)
    assert seen(chosen, len(rows)) == [SEEN[row] for row in rows]
    assert chosen is not None and len(chosen.patches) == sum(
        4 if n != 2 else 8 for n in {n for row in rows for _, n, _ in SEEN[row]}
    )
    assert images.select([1], 4) is None
    assert images.select([], 4) is None


def test_batches_are_joined_with_what_they_share_once() -> None:
    first, second = Images.from_sequences(PLACED[:2]), Images.from_sequences(PLACED[2:])
    joined = Images.concat([(first, 2), (None, 1), (second, 2)])
    assert joined is not None and len(joined.patches) == 16
    assert seen(joined, 5) == [*SEEN[:2], [], *SEEN[2:]]
    assert Images.concat([(None, 2), (None, 1)]) is None


def test_trajectories_bring_their_images_into_the_batch() -> None:
    trajectories = []
    for number in (1, 2):
        transcript = Transcript()
        transcript.append_prompt([5, 9, 6], [PlacedImage(1, image(number))])
        transcript.append_sampled([7, 8], [-1.0, -2.0], 0)
        transcript.append_observed([4, 9, 4], [PlacedImage(1, image(3))])
        transcript.append_sampled([7], [-1.0], 0)
        turns = [Turn("assistant", "", 0, span.start, span.end) for span in transcript.versions]
        trajectories.append(Trajectory(str(number), 0, transcripts=[transcript], turns=turns, score=1.0))
    batch = from_trajectories(trajectories, turn_reward_coef=1.0)
    assert seen(batch.images, 2) == [[(1, 1, SQUARE), (6, 3, SQUARE)], [(1, 2, SQUARE), (6, 3, SQUARE)]]
    assert not batch.mask[batch.ids == 9].any()
    assert seen(batch.select([1]).images, 1) == [[(1, 2, SQUARE), (6, 3, SQUARE)]]


def test_an_image_must_fit_into_the_ids_it_stands_in() -> None:
    with naming(ValueError, "3 ids"):
        Transcript().append_prompt([5, 9, 6], [PlacedImage(2, image(1, 4, 4))])


def test_machines_that_write_an_image_at_once_leave_it_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their processes can have the same number."""
    monkeypatch.setattr(os, "getpid", lambda: 7)
    trajectory = Trajectory("a", 0, transcripts=[Transcript(images=[PlacedImage(0, image(1))])])
    writers: list[Path] = []

    @contextmanager
    def meanwhile(path: Path) -> Iterator[Path]:
        with published(path) as temporary:
            writers.append(temporary)
            if len(writers) == 1:
                parquet.write_images(tmp_path / "trajectories", [trajectory])
            yield temporary

    monkeypatch.setattr(parquet, "published", meanwhile)
    parquet.write_images(tmp_path / "trajectories", [trajectory])
    assert len(set(writers)) == 2
    [written] = (tmp_path / "images").iterdir()
    assert written == image_file(tmp_path / "trajectories", image(1).digest.hex()) and written.read_bytes() == b""
