"""Several jobs from one command line: `--multirun trainer.seed=1,2,3`, in Hydra's grammar of overrides."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Generic

from agentrl.config.command_line import parse_command_line
from agentrl.config.hydra_section import read_override
from agentrl.config.load import (
    FOLDER,
    Keys,
    SchemaT,
    checked,
    compose_keys,
    load_command,
    long_key,
    resolve,
    told_as_config_errors,
)
from agentrl.config.section import Section
from agentrl.errors import ConfigError

NAME = "trainer.experiment_name"
LONGEST = 120
"""Characters of a job's folder."""


@dataclass(frozen=True, slots=True)
class Job(Generic[SchemaT]):
    """One run of a sweep."""

    name: str
    """The overrides by which it differs from the others; empty where it is the only one."""
    config: SchemaT


def load_jobs(argv: Sequence[str], config_name: str, schema: type[SchemaT]) -> list[Job[SchemaT]]:
    """Load the config of each job of a command line: one job, or with --multirun one for each combination.

    Jobs have run folders and names of their own. Flags and errors are the same as for `load_config`; an error of a
    job's config names the job, before any job begins.
    """
    command = parse_command_line(argv, config_name, schema, jobs=True)
    if not command.multirun:
        return [Job("", load_command(command, schema))]
    with told_as_config_errors():
        fixed: list[str]
        combinations: Iterator[list[str]]
        fixed, combinations = split(command.overrides, schema)
        texts: list[str]
        jobs: list[tuple[list[str], Keys]] = []
        for texts in combinations:
            with named(texts):
                jobs.append((texts, compose_keys(replace(command, overrides=[*fixed, *texts]), schema)))
        loaded: list[Job[SchemaT]] = []
        for job, keys in in_own_folders(jobs, schema):
            with named(job):
                loaded.append(Job(",".join(job), checked(keys, schema)))
        return loaded


@contextmanager
def named(swept: Sequence[str]) -> Iterator[None]:
    """Raise ConfigError with the name of the job that it is of."""
    try:
        with told_as_config_errors():
            yield
    except ConfigError as error:
        raise ConfigError(f"job {','.join(swept)}: {error}" if swept else str(error)) from error


def split(overrides: Sequence[str], schema: type[Section]) -> tuple[list[str], Iterator[list[str]]]:
    """Split overrides into the common ones of all jobs and, for each job, one value of each of the others.

    Where no key has several values there is one job. Raises ConfigError for an empty range, and for values that cannot
    be listed.
    """
    fixed: list[str] = []
    swept: dict[str, list[str]] = {}
    for text in overrides:
        override = read_override(long_key(text, schema))
        if not override.is_sweep_override():
            fixed.append(text)
            continue
        if not override.is_discrete_sweep() or "glob(" in text:
            raise ConfigError(
                f"{text}: jobs are run for values that are listed: {override.key_or_group}=a,b or range(1,4)"
            )
        key = override.get_key_element()
        swept[key] = [f"{key}={value}" for value in override.sweep_string_iterator()]
    for key, values in swept.items():
        if not values:
            raise ConfigError(f"{key}: no value is listed; list them as {key}=a,b or range(1,4)")
    return fixed, map(list, itertools.product(*swept.values()))


def in_own_folders(jobs: list[tuple[list[str], Keys]], schema: type[Section]) -> list[tuple[list[str], Keys]]:
    """Give separate folders and names, by their swept values, to jobs that would share a run folder or a name."""
    values = [resolve(keys, schema) for _, keys in jobs]
    shared = [key for key in (FOLDER, NAME) if len({one[key] for one in values}) < len(jobs)]
    return [
        (swept, replace(keys, values={**keys.values, **{key: f"{found[key]}/{folder_name(swept)}" for key in shared}}))
        for (swept, keys), found in zip(jobs, values, strict=True)
    ]


def folder_name(swept: Sequence[str]) -> str:
    """Make a folder's name of a job's overrides, the same in each sweep; a hash replaces text unfit for names."""
    text = ",".join(override.lstrip("+") for override in swept)
    name = re.sub(r"[^\w.,=+-]", "_", text)[:LONGEST]
    return name if name == text else f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
