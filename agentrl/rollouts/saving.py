"""Choice of the trajectories of a step that are written, and removal of the oldest files."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Callable, Collection
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

from agentrl.config import Config
from agentrl.rollouts.contract import Task
from agentrl.trajectory.files import IMAGES, TRAJECTORIES, UPDATES, FileName

GB = 10**9
LONGEST = 100
"""Steps after which the records' size is read again, at the latest."""


class Saving:
    """Which trajectories are written, as `trainer.save_trajectories` says; the same in every process of a run."""

    def __init__(self, config: Config) -> None:
        self.kept = config.trainer.save_trajectories
        self.prompts = config.prompts_per_draw
        self.n = config.actor_rollout_ref.rollout.n

    def writes(self, split: str) -> bool:
        """Say whether trajectories of that split are written, some or all."""
        return self.kept in ("all", split) or (not isinstance(self.kept, str) and split in ("train", "val"))

    def takes(self, task: Task, group: int) -> bool:
        """Say whether a prompt's trajectories are written; `group` counts the step's prompts from 0."""
        if not self.writes(task.split):
            return False
        return isinstance(self.kept, str) or task.split == "val" or group % self.prompts in self._chosen(task.step)

    def _chosen(self, step: int) -> Collection[int]:
        """Draw prompts by a hash of the step, so that no process need ask another."""
        assert not isinstance(self.kept, str)
        wanted = self.kept * self.prompts if self.kept < 1 else self.kept / self.n
        order = sorted(range(self.prompts), key=lambda one: blake2b(f"{step}/{one}".encode(), digest_size=8).digest())
        return set(order[: math.ceil(wanted)])


class Retention:
    """Removal of the oldest training steps' records once the records of `run` take over `most_gb` 10^9 bytes.

    A long run has many files. So their sizes are read again only when half of the room could be full: at the speed at
    which they grew before.
    """

    def __init__(self, run: Path, most_gb: float | None) -> None:
        self._run, self._most = run, most_gb
        self._read = self._due = 0
        """Training steps after which the sizes were read, and are to be read again."""
        self._size = 0

    def remove_oldest(self, step: int, keep: Callable[[], Collection[int]]) -> list[int]:
        """Remove records after a training step; return the steps of the removed records.

        These are trajectories, updates, and images that no later step has used. keep: lists steps whose trajectories
        and updates stay, where sizes are read. Files that vanish meanwhile are no error.
        """
        if self._most is None or self._read < step < self._due:
            return []
        room = int(self._most * GB)
        size, left, removed = _remove_oldest(self._run, room, keep())
        growth = (size - self._size) / max(1, step - self._read)
        wait = min(LONGEST, (room - left) / (2 * growth)) if self._read and growth > 0 else 1
        self._read, self._due, self._size = step, step + max(1, int(wait)), left
        return removed


def _remove_oldest(run: Path, room: int, keep: Collection[int]) -> tuple[int, int, list[int]]:
    """Remove the oldest steps' records until they take `room` bytes; return (size before, size after, steps)."""
    found = [path for folder in (TRAJECTORIES, UPDATES) for path in (run / folder).glob("*.parquet")]
    states: dict[Path, os.stat_result] = {}
    for path in (*found, *(run / IMAGES).glob("*")):
        with suppress(FileNotFoundError):  # somebody else may have removed it since it was listed
            states[path] = path.stat()
    files = [path for path in states if path.parent.name != IMAGES]
    pictures = sorted((path for path in states if path.parent.name == IMAGES), key=lambda path: states[path].st_mtime)
    by_step: defaultdict[int, list[Path]] = defaultdict(list)
    for path in files:
        name = FileName.read(path.name)
        if name is not None and name.split == "train" and name.step not in keep:
            by_step[name.step].append(path)
    removed, size = [], sum(state.st_size for state in states.values())
    left = size
    last = 0.0  # when the newest of what is removed was written
    for step, paths in sorted(by_step.items()):
        if left <= room:
            break
        last = max(last, *(states[path].st_mtime for path in paths))
        unused = [path for path in pictures if states[path].st_mtime <= last]
        pictures = pictures[len(unused) :]
        for path in (*paths, *unused):
            path.unlink(missing_ok=True)
            left -= states[path].st_size
        removed.append(step)
    return size, left, removed
