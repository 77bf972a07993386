"""verl's contract of a sampler (`data.sampler`), and the sampler of ours that a class of it becomes."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from omegaconf import DictConfig, OmegaConf

from agentrl.config.sections.data import DataConfig
from agentrl.data.contract import Dataset
from agentrl.data.sampler import Sampler
from agentrl.errors import DataError
from agentrl.system.json_value import JSON
from agentrl.system.user_code import contract_error
from agentrl.trajectory import Outline
from agentrl.verl.calling import fitting, stand_in
from agentrl.verl.fields import sample_fields
from agentrl.verl.reward import DataProto


class Rows:
    """The data set as such a sampler sees it: rows by position, as mappings with verl's fields."""

    def __init__(self, data: Dataset) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> dict[str, object]:
        return sample_fields(self._data[index])


class AbstractSampler(ABC):
    """Base class of a sampler, as verl's: its iterator gives the rows of an epoch by their positions."""

    @abstractmethod
    def __init__(self, data_source: Any, data_config: DictConfig) -> None:
        """Take the rows and the section `data`."""

    @classmethod
    def adapted_class(cls) -> type[Sampler]:
        """Return the sampler that replaces this class."""
        return stand_in(AdaptedSampler, cls)

    @abstractmethod
    def __iter__(self) -> Iterator[int]:
        """Begin an epoch; after `load_state_dict`, where a class has it, continue with the rest of one."""


class AbstractCurriculumSampler(AbstractSampler):
    """Base class of a sampler that receives each step's trajectories.

    A run resumes exactly where it has `state_dict` (JSON values) and `load_state_dict`, and is refused otherwise.
    """

    @abstractmethod
    def update(self, batch: DataProto) -> None:
        """Take note of a step: of each trajectory its row's fields, `uid`, and `token_level_scores` [N, 1]."""


class AdaptedSampler(Sampler):
    """A sampler of ours around one of verl's contract."""

    wrapped: ClassVar[type[AbstractSampler]]

    def __init__(self, data: Dataset, batch_size: int, seed: int) -> None:
        super().__init__(data, batch_size, seed)
        self._rows = Rows(data)
        self.inner: Any = None
        self._iterator: Iterator[int] = iter(())

    def configure(self, config: DataConfig) -> None:
        """Make the user's sampler."""
        self._config = config
        self._begin()

    def _begin(self) -> None:
        values = OmegaConf.create(self._config.model_dump(mode="json"))
        offered: dict[str, Any] = {"data_source": self._rows, "data_config": values}
        self.inner = self.wrapped(**fitting(self.wrapped.__init__, offered))
        self._iterator = iter(self.inner)
        self._batches, self._digest = 0, hashlib.sha256()

    def next_batch(self) -> Sequence[int]:
        """Take the next rows; the rest of an epoch, smaller than a batch, is dropped."""
        batch = self._drawn()
        if len(batch) < self.batch_size:
            self._iterator = iter(self.inner)
            batch = self._drawn()
        if len(batch) < self.batch_size:
            problem = f"an epoch must have {self.batch_size} rows or more (a batch), found {len(batch)}"
            raise contract_error(self._what, self.wrapped.__iter__, problem)
        self._batches += 1
        self._digest.update(json.dumps(batch).encode())
        return batch

    def _drawn(self) -> list[int]:
        return [int(index) for _, index in zip(range(self.batch_size), self._iterator, strict=False)]

    @property
    def learns(self) -> bool:
        return isinstance(self.inner, AbstractCurriculumSampler)

    def update(self, trajectories: Sequence[tuple[int, Outline]]) -> None:
        if self.learns:
            self.inner.update(batch=self._told(trajectories))

    def _told(self, trajectories: Sequence[tuple[int, Outline]]) -> DataProto:
        import torch

        scored = [(index, one, one.score + one.model_reward) for index, one in trajectories if one.score is not None]
        rows = [{**self._rows[index], "uid": str(one.group), "position": index} for index, one, _ in scored]
        columns: dict[str, Any] = {}
        for name in rows[0] if rows else ():
            columns[name] = np.empty(len(rows), dtype=object)
            columns[name][:] = [row[name] for row in rows]
        scores = torch.tensor([[score] for _, _, score in scored], dtype=torch.float32).reshape(-1, 1)
        return DataProto({"token_level_scores": scores, "token_level_rewards": scores}, columns)

    @property
    def _keeps_state(self) -> bool:
        return hasattr(self.inner, "state_dict") and hasattr(self.inner, "load_state_dict")

    def state_dict(self) -> dict[str, JSON]:
        state: dict[str, JSON] = {"batches": self._batches, "digest": self._digest.hexdigest()}
        if self._keeps_state:
            own: JSON = self.inner.state_dict()
            try:
                state["own"] = json.loads(json.dumps(own))
            except (TypeError, ValueError) as error:
                problem = f"it must return what JSON can write ({error}), found {own!r:.200}"
                raise contract_error(self._what, self.inner.state_dict, problem) from None
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give the user's sampler its state, or draw all batches again and compare them.

        A run that goes back after a worker's death has drawn more: without a state a new sampler draws them.
        """
        if self._keeps_state:
            self.inner.load_state_dict(state["own"])
            self._iterator, self._batches = iter(self.inner), state["batches"]
            self._digest = hashlib.sha256(state["digest"].encode())
            return
        if self.learns and state["batches"]:
            raise DataError(
                f"{self._what} learns from each step, and has no state_dict and load_state_dict that would hold what "
                "it has learnt: write them, or start anew with trainer.resume_mode=disable"
            )
        if state["batches"] < self._batches:
            self._begin()
        for _ in range(state["batches"] - self._batches):
            self.next_batch()
        if self._digest.hexdigest() != state["digest"]:
            raise DataError(
                f"{self._what} gives other rows than in the run that is resumed: draw from a generator with a seed of "
                "its own, write state_dict and load_state_dict, or start anew with trainer.resume_mode=disable"
            )

    @property
    def _what(self) -> str:
        return f"sampler {self.wrapped.__name__}"
