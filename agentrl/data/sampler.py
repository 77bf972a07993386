"""The order in which a training takes its rows. Choose one of your own by `data.sampler.name`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from agentrl.config.sections.data import DataConfig
from agentrl.data.contract import Dataset
from agentrl.errors import DataError
from agentrl.system.json_value import JSON
from agentrl.system.metrics import Numbers
from agentrl.trajectory import Outline


class Sampler(ABC):
    """Endless batches of row indices.

    A parameter `options` of the constructor, annotated with a pydantic model, is given `data.sampler.options`.
    """

    def __init__(self, data: Dataset, batch_size: int, seed: int) -> None:
        """`data`: the rows that are left after all checks; `seed`: data.seed."""
        self.data, self.batch_size, self.seed = data, batch_size, seed

    def configure(self, config: DataConfig) -> None:  # noqa: B027 - most samplers need no more than they are made with
        """Take the section `data`, once, before the first batch."""

    @property
    def steps_per_epoch(self) -> int:
        """Batches of an epoch; `trainer.total_epochs` turns them into steps."""
        return len(self.data) // self.batch_size

    @abstractmethod
    def next_batch(self) -> Sequence[int]:
        """Return `batch_size` indices, each from 0 to len(data) - 1."""

    @property
    def learns(self) -> bool:
        """True when `update` does anything."""
        return type(self).update is not Sampler.update

    def update(self, trajectories: Sequence[tuple[int, Outline]]) -> None:  # noqa: B027 - most orders are fixed
        """Take note of the trajectories of a step, each with the index of its row, after the policy's update.

        With async_training.max_staleness above 0 the batches of the next steps are drawn before.
        """

    def metrics(self) -> Numbers:
        """Take the numbers to log with a step. Names begin with sampler/."""
        return {}

    @abstractmethod
    def state_dict(self) -> Mapping[str, JSON]:
        """Return all that the next batches depend on, as JSON: a resumed run repeats them exactly."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where the state was taken. Raises DataError where that cannot be."""


class EpochSampler(Sampler):
    """Epochs that hold every row once. The rest of an epoch, smaller than a batch, is dropped."""

    def __init__(self, data: Dataset, batch_size: int, seed: int) -> None:
        super().__init__(data, batch_size, seed)
        self.epoch = 0
        self._position = 0
        self._order = self.order(0)

    @abstractmethod
    def order(self, epoch: int) -> npt.NDArray[np.int64]:
        """All row indices, [len(data)] int64, in the order of an epoch, which depends on seed and epoch alone."""

    def next_batch(self) -> Sequence[int]:
        if self._position + self.batch_size > len(self.data):
            self.epoch += 1
            self._position = 0
            self._order = self.order(self.epoch)
        positions = self._order[self._position : self._position + self.batch_size]
        self._position += self.batch_size
        return [int(position) for position in positions]

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self._position, "seed": self.seed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        if state["seed"] != self.seed:
            raise DataError(
                f"the checkpoint's order of the data was made with data.seed={state['seed']}, found "
                f"data.seed={self.seed}; set it back, or start anew with trainer.resume_mode=disable"
            )
        self.epoch, self._position = state["epoch"], state["position"]
        self._order = self.order(self.epoch)


class Shuffled(EpochSampler):
    """A new random order in each epoch."""

    def order(self, epoch: int) -> npt.NDArray[np.int64]:
        """Philox's raw numbers are the same in every version of numpy."""
        bits = np.random.Philox(np.random.SeedSequence([self.seed, epoch]))
        return np.argsort(bits.random_raw(len(self.data)), kind="stable")


class Sequential(EpochSampler):
    """The order of the files."""

    def order(self, epoch: int) -> npt.NDArray[np.int64]:
        return np.arange(len(self.data))
