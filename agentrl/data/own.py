"""A data set class of a user's own (`data.custom_cls`) as the data set of a run."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Literal, Protocol, runtime_checkable

import numpy as np

from agentrl.config.sections.data import CustomDatasetConfig
from agentrl.config.sections.rollouts import RolloutsConfig
from agentrl.data.contract import CONTENT, Dataset, unknown_name
from agentrl.errors import ConfigError, DataError
from agentrl.system.plugin import adapted
from agentrl.system.registry import configured
from agentrl.system.targets import load_target
from agentrl.system.user_code import contract_error, user_code
from agentrl.trajectory.sample import AGENT_ALIASES, Sample


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
        super().__init__(files, on_bad_row)
        self._samples, self._default_agent_loop = samples, default_agent_loop
        self._what = f"data set {type(samples).__name__}"
        with user_code(self._what, samples.__len__):
            count = len(samples)
        self._kept = np.arange(count if max_samples is None else min(count, max_samples))
        if not len(self):
            raise DataError(f"the data set is empty: {self._what} of {', '.join(files)} has no sample")

    def __getitem__(self, position: int) -> Sample:
        return self._sample(int(self._kept[position]))

    @property
    def fingerprint(self) -> str:
        return f"{CONTENT}{self._hashed(self._digest)}"

    def is_of(self, fingerprint: str) -> bool:
        known = self.fingerprint if fingerprint.startswith(CONTENT) else self._hashed(self._digest_over(self))
        return fingerprint == known

    def _hashed(self, digest: str) -> str:
        text = repr((digest, hashlib.sha256(self._kept.tobytes()).hexdigest()))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @cached_property
    def _digest(self) -> str:
        """Over the samples that are left at its first use, wherever they lie."""
        return self._digest_over(replace(sample, file="", row=0) for sample in self)

    def _digest_over(self, samples: Iterable[Sample]) -> str:
        digest = hashlib.sha256()
        for sample in samples:
            digest.update(repr(sample).encode())
        return digest.hexdigest()

    def check(
        self, *, agent_names: Collection[str], tool_names: Collection[str], interaction_names: Collection[str]
    ) -> list[str]:
        known = {"agent_name": agent_names, "tools_kwargs": tool_names, "interaction_kwargs": interaction_names}
        sources, bad, fault, self.without_loop = set(), [], "", 0
        for index, place, _ in self._rows():
            try:
                made = self._made(index)
                sample = self._placed(made, index)
                self._check_names(sample, place, known)
            except DataError as error:
                if self.on_bad_row == "error":
                    raise
                fault = fault or str(error)
                bad.append(index)
            else:
                sources.add(sample.data_source)
                self.without_loop += not made.agent_name
        if isinstance(self._samples, NotedSamples):
            self.notes = self._samples.notes
        if bad:
            self._leave_out(np.array(bad), fault)
        return sorted(sources)

    def _check_names(self, sample: Sample, place: str, known: dict[str, Collection[str]]) -> None:
        named = {
            "agent_name": [sample.agent_name],
            "tools_kwargs": list(sample.tools_kwargs),
            "interaction_kwargs": [sample.interaction or ""] if sample.interaction_kwargs else [],
        }
        for kind, names in named.items():
            for name in names:
                if (name or known[kind]) and name not in known[kind]:
                    raise DataError(unknown_name(kind, name, place, known[kind]))

    def _rows(self) -> Iterator[tuple[int, str, Callable[[], Sample]]]:
        for index in map(int, self._kept):
            yield index, self._place(index), partial(self._sample, index)

    def _place(self, index: int) -> str:
        """Name a sample in messages."""
        return f"{self._what}, sample {index}"

    def _sample(self, index: int) -> Sample:
        return self._placed(self._made(index), index)

    def _made(self, index: int) -> Sample:
        with user_code(self._what, self._samples.__getitem__):
            sample: object = self._samples[index]
        if not isinstance(sample, Sample):
            raise contract_error(
                self._what, self._samples.__getitem__, f"it must give Sample objects, found {sample!r:.200}"
            )
        return sample

    def _placed(self, sample: Sample, index: int) -> Sample:
        """Return a sample with its loop and its place."""
        agent = sample.agent_name or self._default_agent_loop
        file, row = (sample.file, sample.row) if sample.file else (self._what, index)
        return replace(sample, agent_name=AGENT_ALIASES.get(agent, agent), index=index, file=file, row=row)


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
