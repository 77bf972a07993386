"""Names of the files of a run's trajectories and updates: the one place that makes and reads them.

`trajectories/` has one file a step and split, `train_000012.parquet`, or of several rollout workers one each,
`train_000012.1of2.parquet`, and of a step's further generation batches `train_000012_001.parquet`, ... A file of
`updates/` has the name of the file of trajectories that it belongs to. `images/` has each image that a trajectory
holds, once, by the hash of its content.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from agentrl.errors import DataError

TRAJECTORIES, UPDATES, IMAGES = "trajectories", "updates", "images"
"""Folders of a run."""
DIGEST = re.compile(r"[0-9a-f]{8,128}")
"""Name of an image's file."""
_NAME = re.compile(
    r"(?P<stem>(?P<split>[A-Za-z]\w*?)_(?P<step>\d{6,9})(?P<part>(?:_\w+)?)(?P<share>\.\d+of\d+)?)\.parquet"
)


@dataclass(frozen=True, slots=True)
class FileName:
    """Parts of a file's name."""

    stem: str
    """Name without its ending."""
    split: str
    step: int
    part: str
    """`_001` of a further generation batch, `_greedy` of a validation; else empty."""

    @staticmethod
    def read(name: str) -> FileName | None:
        """Split a name into its parts; None where it is of no such file."""
        match = _NAME.fullmatch(name)
        return match and FileName(match["stem"], match["split"], int(match["step"]), match["part"])


def names_of(split: str, step: int, part: str, workers: int) -> list[str]:
    """Name the files of a step's trajectories, one for each rollout worker."""
    stem = f"{split}_{step:06d}{part}"
    return [f"{stem}.{one}of{workers}.parquet" for one in range(1, workers + 1)] if workers > 1 else [f"{stem}.parquet"]


def update_file(path: Path) -> Path:
    """Return the place of the update's record of a file of trajectories."""
    return path.absolute().parent.with_name(UPDATES) / path.name


def image_file(dir: Path, digest: str) -> Path:
    """Return the path of an image's file, named by its hexadecimal digest, next to the folder `dir` of trajectories.

    Raises DataError for another name: out of a file that somebody sent, it may be a path.
    """
    if not DIGEST.fullmatch(digest):
        raise DataError(f"{dir}: want the hexadecimal digest of an image, found {digest[:200]!r}")
    return dir.absolute().with_name(IMAGES) / digest


def remove_former(path: Path, names: list[str]) -> None:
    """Remove files of an earlier run of the step: files of other numbers of workers, and the update of `path`.

    names: all files that the step has now, `path` among them.
    """
    stem = names[0].partition(".")[0]
    for folder in (path.parent, update_file(path).parent):
        for other in folder.glob(f"{stem}.*parquet"):
            if other.name not in names:
                other.unlink(missing_ok=True)
    update_file(path).unlink(missing_ok=True)
