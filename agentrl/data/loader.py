"""Batches of samples, endlessly, from a position that can be saved and restored exactly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from agentrl.config.registries import SAMPLERS
from agentrl.config.sections.data import DataConfig
from agentrl.data.contract import Dataset
from agentrl.data.sampler import Sampler
from agentrl.errors import DataError
from agentrl.system.json_value import JSON, as_mapping
from agentrl.system.metrics import Numbers
from agentrl.system.registry import configured
from agentrl.system.user_code import contract_error, user_code
from agentrl.trajectory import Outline
from agentrl.trajectory.sample import Sample


class Loader:
    """Endless iterator over batches of samples, in the order of a sampler."""

    def __init__(self, dataset: Dataset, sampler: Sampler) -> None:
        self.dataset, self.sampler = dataset, sampler
        self.rows: list[int] = []
        """Row indices of the last batch."""
        self.has_metrics = type(sampler).metrics is not Sampler.metrics
        self._what = f"sampler {type(sampler).__name__}"

    @property
    def learns(self) -> bool:
        """True when the order depends on the trajectories of earlier steps."""
        return self.sampler.learns

    @property
    def steps_per_epoch(self) -> int:
        return self.sampler.steps_per_epoch

    @property
    def passed_over(self) -> int:
        """Number of rows that an epoch leaves, since it takes whole batches."""
        return max(len(self.dataset) - self.steps_per_epoch * self.sampler.batch_size, 0)

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> list[Sample]:
        """Raises CodeError for a user's sampler that gives anything but a batch of row indices."""
        with user_code(self._what, self.sampler.next_batch):
            indices = list(self.sampler.next_batch())
        size, rows = self.sampler.batch_size, len(self.dataset)
        if len(indices) != size or not all(0 <= index < rows for index in indices):
            raise contract_error(
                self._what,
                self.sampler.next_batch,
                f"it must give {size} indices from 0 to {rows - 1}, found {len(indices)}: {indices!r:.200}",
            )
        self.rows = indices
        return [self.dataset[index] for index in indices]

    def update(self, trajectories: Sequence[tuple[int, Outline]]) -> None:
        """Pass the trajectories of a step to the sampler, each with the index of its row."""
        with user_code(self._what, self.sampler.update):
            self.sampler.update(trajectories)

    def metrics(self) -> Numbers:
        """Take the sampler's numbers, if it `has_metrics`. Raises CodeError for a value that is no number."""
        with user_code(self._what, self.sampler.metrics):
            numbers = self.sampler.metrics()
        for name, value in numbers.items():
            if not isinstance(value, int | float):
                problem = f"it must give numbers by name, found {name!r}: {value!r:.200}"
                raise contract_error(self._what, self.sampler.metrics, problem)
        return numbers

    def state_dict(self) -> dict[str, JSON]:
        """Return the position: the name of the sampler's class, its own state, and the fingerprint of the data."""
        with user_code(self._what, self.sampler.state_dict):
            state = self.sampler.state_dict()
        return {"sampler": type(self.sampler).__name__, "state": state, "fingerprint": self.dataset.fingerprint}

    def load_state_dict(self, state: Mapping[str, JSON]) -> None:
        """Continue where the state was taken. Raises DataError when it belongs to other data or another order."""
        if not self.dataset.is_of(str(state["fingerprint"])):
            raise DataError(
                "the checkpoint was made with other data: the files, their rows or the rows left out have changed. "
                "Give the data it was made with, start anew with trainer.resume_mode=disable, or train on from its "
                "weights: another trainer.experiment_name, and as actor_rollout_ref.model.path the policy/ that the "
                "run exported at its end"
            )
        name = type(self.sampler).__name__
        if (made_by := state.get("sampler")) != name:
            raise DataError(
                f"the checkpoint's order of the data was made by the sampler {made_by}, found {name}: set "
                "data.sampler.name or data.shuffle back, or start anew with trainer.resume_mode=disable"
            )
        with user_code(self._what, self.sampler.load_state_dict):
            self.sampler.load_state_dict(as_mapping(state["state"]))


def check_fills_batch(dataset: Dataset, config: DataConfig) -> None:
    """Raise DataError where the data set is smaller than a batch."""
    size, key = config.draw_size, "train_batch_size" if config.gen_batch_size is None else "gen_batch_size"
    if size > len(dataset):
        raise DataError(
            f"data.{key}={size} is more than the {len(dataset)} rows of the data set ({', '.join(dataset.files)}); "
            "make it at most that"
        )


def make_loader(dataset: Dataset, config: DataConfig) -> Loader:
    """The loader of a training. Raises DataError when the data set is smaller than a batch, ConfigError."""
    check_fills_batch(dataset, config)
    size = config.draw_size
    name = config.sampler.name or ("shuffled" if config.shuffle else "sequential")
    found = cast(type[Sampler], SAMPLERS.get(name))
    make = configured(found, config.sampler.options, "data.sampler.options")
    with user_code(f"sampler {name}", found):
        sampler = make(dataset, size, config.seed)
        sampler.configure(config)
        return Loader(dataset, sampler)
