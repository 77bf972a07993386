"""Trajectories that a run recorded, as rows for scorers: one row a group, with the scores that the run gave.

The run's folder is data. Nothing of its config is read, so the scorer is the caller's.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias, cast

from agentrl.config.sections.offline import EvaluateDataConfig
from agentrl.errors import ConfigError, DataError
from agentrl.offline.responses import response_text
from agentrl.offline.scores import CHUNK_ROWS, Earlier, ResponseRows, Responses, is_score
from agentrl.system.versions import check_folder
from agentrl.trajectory import Message, Trajectory
from agentrl.trajectory.files import TRAJECTORIES, FileName
from agentrl.trajectory.parquet import check_columns, read_rows, trajectory_files, trajectory_of
from agentrl.trajectory.sample import Sample, row_place

OF_A_RUN = (TRAJECTORIES, "metrics.jsonl")
"""A folder that has one of them is a run's."""
Row: TypeAlias = Mapping[str, object]
SURVEYED = ("uid", "group", "data_source", "baseline")
ABSENT = (
    "Nothing can be scored again. A run records its trajectories with trainer.save_trajectories=all (the default), and "
    "removes the oldest beyond trainer.trajectories_to_keep_gb"
)


class Group(NamedTuple):
    """The trajectories of one prompt: they are scored and compared together."""

    step: int
    part: str
    """Part of the step's files: a further generation batch, or a kind of validation, numbers its groups from 0."""
    number: int


class Record(NamedTuple):
    """A row of a file."""

    file: Path
    number: int
    row: Row

    def trajectory(self) -> Trajectory:
        """Rebuild the trajectory. Raises DataError for a row of another version."""
        return trajectory_of(self.row, self.file, self.number)


class RunRecords(ResponseRows):
    """The recorded trajectories of a run, group by group."""

    def __init__(self, folder: Path, keys: EvaluateDataConfig) -> None:
        """Count the groups of the chosen steps. Raises DataError for a run without records, or with other columns."""
        super().__init__()
        check_folder(folder)
        self.folder = folder
        self.files = _chosen(folder, keys)
        self._sizes = Counter[Group]()
        baselines = 0
        for path, name in self.files:
            for number, row in enumerate(_survey(path)):
                if row.get("baseline"):
                    baselines += 1
                    continue
                self._sizes[_group(name, row)] += 1
                self.sources.setdefault(str(row["data_source"]), row_place(str(path), number))
        self.rows = len(self._sizes)
        if not self.rows:
            raise DataError(f"{folder}: its files of {keys.split} trajectories hold no row. {ABSENT}")
        if baselines:
            self.notes[str(folder)] = f"{baselines} greedy baselines are not scored again: nothing trains on them"
        self.notes |= _lacking(self.files)

    def __iter__(self) -> Iterator[list[Responses]]:
        chunk: list[Responses] = []
        for row in self._rows():
            chunk.append(row)
            if sum(len(one.texts) for one in chunk) >= CHUNK_ROWS:
                yield chunk
                chunk = []
        if chunk:
            yield chunk

    def _rows(self) -> Iterator[Responses]:
        """Yield each group when its last trajectory is read: workers may have written parts of it to several files."""
        waiting, index = defaultdict[Group, list[Record]](list), itertools.count()
        for path, name in self.files:
            for number, record in enumerate(read_rows(path)):
                if record.get("baseline"):
                    continue
                group = _group(name, record)
                waiting[group].append(Record(path, number, record))
                if len(waiting[group]) == self._sizes[group]:
                    yield _responses(next(index), waiting.pop(group))
        if waiting:
            raise DataError(f"{self.folder}: its files change while they are read; start the same command again")


def run_folder(path: str | Sequence[str]) -> Path | None:
    """Return the folder of a run that `data.path` names; None for other data. Raises ConfigError for several runs."""
    paths = [Path(one).expanduser() for one in ([path] if isinstance(path, str) else path)]
    runs = [one.parent if one.name == TRAJECTORIES else one for one in paths if _is_run(one)]
    if runs and len(paths) > 1:
        raise ConfigError(f"data.path names {len(paths)} places, and {runs[0]} is a run; give one run alone")
    return runs[0] if runs else None


def _is_run(path: Path) -> bool:
    return path.is_dir() and (path.name == TRAJECTORIES or any((path / name).exists() for name in OF_A_RUN))


def _chosen(folder: Path, keys: EvaluateDataConfig) -> list[tuple[Path, FileName]]:
    """List the files of the chosen steps, in their order. Raises DataError where there is no file."""
    named = [(path, FileName.read(path.name)) for path in trajectory_files(folder / TRAJECTORIES)]
    found = [(path, name) for path, name in named if name is not None]
    if not found:
        raise DataError(f"{folder}: this run has no recorded trajectories. {ABSENT}")
    of_split = [(path, name) for path, name in found if name.split == keys.split]
    if not of_split:
        others = ", ".join(sorted({name.split for _, name in found}))
        raise DataError(f"{folder}: data.split={keys.split}, and the recorded trajectories are of {others}")
    chosen = [(path, name) for path, name in of_split if _takes(keys.steps, name.step)]
    if not chosen:
        steps = sorted({name.step for _, name in of_split})
        raise DataError(
            f"{folder}: data.steps={keys.steps} names no recorded step; recorded are {len(steps)} steps from "
            f"{steps[0]} to {steps[-1]}"
        )
    return sorted(chosen, key=lambda one: (one[1].step, one[1].stem))


def _lacking(files: Sequence[tuple[Path, FileName]]) -> dict[str, str]:
    """Say by file where files of other rollout workers of its step are not there."""
    found = dict[str, str]()
    by_step: defaultdict[str, list[tuple[Path, int]]] = defaultdict(list)
    for path, name in files:
        stem, _, share = name.stem.partition(".")
        by_step[stem].append((path, int(share.partition("of")[2] or 1)))
    for parts in by_step.values():
        path, workers = parts[0]
        if len(parts) < workers:
            found[str(path)] = (
                f"{workers - len(parts)} of the {workers} files of its step are missing, so their groups are not scored"
            )
    return found


def _takes(steps: Sequence[int] | str | None, step: int) -> bool:
    """Say whether a step is chosen. Raises ConfigError for a text that is no range."""
    if steps is None:
        return True
    if not isinstance(steps, str):
        return step in steps
    begin, colon, end = steps.partition(":")
    if not all(part.isdecimal() for part in (begin, end) if part) or not (colon or begin):
        raise ConfigError(f"data.steps={steps}: want steps such as [10,20], or a range such as 10:20, 10: or :20")
    return int(begin or 0) <= step and (step == int(begin) if not colon else not end or step < int(end))


def _group(name: FileName, row: Row) -> Group:
    return Group(name.step, name.part, cast(int, row["group"]))


def _survey(path: Path) -> list[Row]:
    """Read the columns by which groups are counted. Raises DataError for a file of other columns."""
    found = check_columns(path)
    rows: list[Row] = list(read_rows(path, [one for one in SURVEYED if one in found]))
    for number, row in enumerate(rows):
        empty = next((name for name in ("uid", "group", "data_source") if row[name] is None), None)
        if empty is not None:
            raise DataError(f"{row_place(str(path), number)}: column {empty}: expected a value, found null")
    return rows


def _responses(index: int, members: Sequence[Record]) -> Responses:
    read = [(member, member.trajectory()) for member in members]
    first, trajectory = read[0]
    sample = Sample(
        prompt=prompt_of(trajectory),
        data_source=trajectory.data_source,
        agent_name=trajectory.agent_name,
        ground_truth=trajectory.ground_truth,
        index=index,
        file=str(first.file),
        row=first.number,
    )
    texts = [response_text(one) for _, one in read]
    return Responses(sample, texts, [member.row for member in members], [_earlier(*one) for one in read])


def _earlier(record: Record, trajectory: Trajectory) -> Earlier:
    reward, penalty = cast(float | None, record.row["reward"]), trajectory.overlong_penalty
    if not all(map(is_score, (trajectory.score, reward, penalty))):
        raise DataError(
            f"{row_place(str(record.file), record.number)}: expected finite numbers as score, reward and overlong "
            f"penalty, found {trajectory.score}, {reward} and {penalty}"
        )
    return Earlier(
        uid=trajectory.uid,
        score=trajectory.score,
        reward=reward,
        penalty=penalty,
        step=cast(int | None, record.row["step"]),
        page=f"#/run/0/trajectory/{record.file.stem}/{record.number}",
    )


def prompt_of(trajectory: Trajectory) -> list[Message]:
    """Return the messages before the policy's first; assistant messages beyond its turns are of the prompt."""
    places = [place for place, one in enumerate(trajectory.messages) if one["role"] == "assistant"]
    turns = sum(turn.role == "assistant" for turn in trajectory.turns)
    given = max(len(places) - turns, 0)
    return trajectory.messages[: places[given]] if given < len(places) else list(trajectory.messages)
