"""Batches of samples, endlessly over shuffled epochs, from a position that can be saved and restored exactly."""

from __future__ import annotations

from typing import TypedDict

import numpy as np
import numpy.typing as npt

from agentrl.data.dataset import ParquetDataset
from agentrl.errors import DataError
from agentrl.trajectory.sample import Sample


class LoaderState(TypedDict):
    """Position of a loader in its data, and what its order was made of."""

    epoch: int
    position: int
    seed: int
    shuffle: bool
    fingerprint: str


class Loader:
    """Endless iterator over batches of `batch_size` samples.

    Each epoch is a new order, made of `seed` and the epoch's number alone; what is left of an epoch when it is less
    than a batch is dropped.
    """

    def __init__(self, dataset: ParquetDataset, batch_size: int, *, shuffle: bool = True, seed: int = 1) -> None:
        """Begin with the first epoch. Raises DataError when the data set is smaller than a batch."""
        if batch_size > len(dataset):
            raise DataError(
                f"data.train_batch_size={batch_size} is more than the {len(dataset)} rows of the data set "
                f"({', '.join(dataset.files)}); make it at most that"
            )
        self.dataset = dataset
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        """Epochs finished before the next batch, or just finished with the last."""
        self._position = 0
        self._order = self._order_of(0)

    @property
    def steps_per_epoch(self) -> int:
        """Number of batches an epoch."""
        return len(self.dataset) // self.batch_size

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> list[Sample]:
        if self._position + self.batch_size > len(self.dataset):
            self.epoch += 1
            self._position = 0
            self._order = self._order_of(self.epoch)
        positions = self._order[self._position : self._position + self.batch_size]
        self._position += self.batch_size
        return [self.dataset[int(position)] for position in positions]

    def state_dict(self) -> LoaderState:
        """Return the position, as JSON."""
        return {
            "epoch": self.epoch,
            "position": self._position,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "fingerprint": self.dataset.fingerprint,
        }

    def load_state_dict(self, state: LoaderState) -> None:
        """Go on where the state was taken. Raises DataError when it belongs to other data or another order."""
        now = self.state_dict()
        if state["fingerprint"] != now["fingerprint"]:
            raise DataError(
                "the checkpoint was made with other data: the files, their rows or the rows left out have changed. "
                "Give the data it was made with, or start anew with trainer.resume_mode=disable"
            )
        for key, saved, found in (("seed", state["seed"], self.seed), ("shuffle", state["shuffle"], self.shuffle)):
            if saved != found:
                raise DataError(
                    f"the checkpoint's order of the data was made with data.{key}={saved}, found data.{key}={found}; "
                    "set it back, or start anew with trainer.resume_mode=disable"
                )
        self.epoch, self._position = state["epoch"], state["position"]
        self._order = self._order_of(self.epoch)

    def _order_of(self, epoch: int) -> npt.NDArray[np.int64]:
        """Return the positions of all rows in the epoch's order: [rows] int64.

        Made of Philox's raw numbers, which are the same in every version of numpy, so that a resumed run repeats
        exactly.
        """
        if not self.shuffle:
            return np.arange(len(self.dataset))
        bits = np.random.Philox(np.random.SeedSequence([self.seed, epoch]))
        return np.argsort(bits.random_raw(len(self.dataset)), kind="stable")
