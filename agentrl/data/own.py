"""A data set class of a user's own (`data.custom_cls`) as the data set of a run."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Literal, Protocol, runtime_checkable

import numpy as np

from agentrl.config.sections.data import CustomDatasetConfig
from agentrl.config.sections.rollouts import RolloutsConfig
from agentrl.data.contract import Dataset, Names, digest_of_samples
from agentrl.errors import ConfigError, DataError
from agentrl.system.plugin import adapted
from agentrl.system.registry import configured
from agentrl.system.targets import load_target
from agentrl.system.user_code import contract_error, user_code
from agentrl.trajectory.sample import Sample


@runtime_checkable
class Samples(Protocol):
    """Contract of a user's class: samples by index, always the same.

    It is made with the names under data.train_files (or val_files), a list of text, and, where it has a parameter
    `options` that a pydantic model annotates, with `data.custom_cls.options`.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Sample:
        """Return a sample; an empty `agent_name` means the default loop. Raises DataError for a bad sample."""


@runtime_checkable
class ConfiguredSamples(Samples, Protocol):
    """Samples that depend on the run's config."""

    def configure(self, config: RolloutsConfig, max_samples: int | None) -> None:
        """Read the config; called once, before anything else. max_samples: samples to use, None for all."""


@runtime_checkable
class NotedSamples(Samples, Protocol):
    """Samples that know which columns of their rows are not read, once all of them were read."""

    @property
    def notes(self) -> dict[str, str]:
        """By file, in words."""


class OwnDataset(Dataset):
    """Samples of a user's class, checked."""

    def __init__(
        self,
        samples: Samples,
        files: Sequence[str],
        *,
        default_agent_loop: str = "single_turn",
        max_samples: int | None = None,
        on_bad_row: Literal["error", "skip"] = "error",
    ) -> None:
        """Raises DataError when there is no sample."""
        super().__init__(files, default_agent_loop, on_bad_row)
        self._samples = samples
        self._digest, self._digested = "", np.arange(0)
        """Digest of the samples of these indices."""
        self._what = f"data set {type(samples).__name__}"
        with user_code(self._what, samples.__len__):
            count = len(samples)
        self._kept = np.arange(count if max_samples is None else min(count, max_samples))
        if not len(self):
            raise DataError(f"the data set is empty: {self._what} of {', '.join(files)} has no sample")

    def check(
        self, *, agent_names: Collection[str], tool_names: Collection[str], interaction_names: Collection[str]
    ) -> list[str]:
        sources = super().check(agent_names=agent_names, tool_names=tool_names, interaction_names=interaction_names)
        if isinstance(self._samples, NotedSamples):
            self.notes = self._samples.notes
        return sources

    @property
    def _content(self) -> str:
        """Over the samples that are left, wherever they lie."""
        if self._digested is not self._kept:
            self._digest = digest_of_samples(replace(sample, file="", row=0) for sample in self)
            self._digested = self._kept
        return self._digest

    def _place(self, index: int) -> str:
        return f"{self._what}, sample {index}"

    def _sample(self, index: int) -> Sample:
        sample = self._made(index)
        file, row = (sample.file, sample.row) if sample.file else (self._what, index)
        return self._finished(sample, index, file, row)

    def _names(self, index: int) -> Names:
        return Names.of(self._made(index))

    def _made(self, index: int) -> Sample:
        with user_code(self._what, self._samples.__getitem__):
            sample: object = self._samples[index]
        if not isinstance(sample, Sample):
            raise contract_error(
                self._what, self._samples.__getitem__, f"it must give Sample objects, found {sample!r:.200}"
            )
        return sample


def load_own(
    custom: CustomDatasetConfig,
    files: str | Sequence[str],
    config: RolloutsConfig,
    max_samples: int | None,
) -> OwnDataset:
    """The data set of `data.custom_cls`, in the run of `config`. Raises UserError."""
    names = [files] if isinstance(files, str) else list(files)
    found = adapted(load_target(custom.target, "data.custom_cls.path"))
    if not callable(found):
        raise ConfigError(f"data.custom_cls: expected a class, {custom.target} is {found!r:.200}")
    with user_code(f"data set {custom.target}", found):
        samples: object = configured(found, custom.options, "data.custom_cls.options")(names)
        if isinstance(samples, ConfiguredSamples):
            samples.configure(config, max_samples)
    if not isinstance(samples, Samples):
        raise ConfigError(
            f"data.custom_cls: {custom.target} must have __len__ and __getitem__ (agentrl.data.own.Samples)"
        )
    return OwnDataset(
        samples,
        names,
        default_agent_loop=config.actor_rollout_ref.rollout.agent.default_agent_loop,
        max_samples=max_samples,
        on_bad_row=config.data.on_bad_row,
    )
