"""Responses that were written to a file, scored as if their trajectories had just ended."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar, cast

from agentrl.config.sections.offline import EvaluateConfig
from agentrl.data.bad_rows import BadRows
from agentrl.data.messages import Unfit, read_messages, without_nulls
from agentrl.data.rows import Columns
from agentrl.data.table import Row, open_table
from agentrl.errors import CodeError, DataError, UserError
from agentrl.offline.responses import ADDED
from agentrl.reward import RewardManager, score_all
from agentrl.reward.scorer import Verdict
from agentrl.system.quota import run_concurrently
from agentrl.trajectory import Message, Status, Trajectory, Turn
from agentrl.trajectory.parquet import LONGEST_TRUTH
from agentrl.trajectory.parquet import trajectory_of as recorded
from agentrl.trajectory.sample import AGENT_ALIASES, Sample

T = TypeVar("T")
CHUNK_ROWS = 256
"""Rows that are scored together."""
LARGEST = 1e300
"""Largest score whose differences and sums stay finite."""
RECORDS = "trajectories"
"""The column in which `agentrl.generate` keeps whole records, for scorers that ask for the trajectory."""
SCORE = "response_score"
"""The column with the scores that `agentrl.generate` gave."""
NO_TRUTH = f"A run does not record a ground truth of more than {LONGEST_TRUTH:,} characters"
ADVICE = (
    "Perhaps only some responses meet it. Mend the function, or count such responses as failures with "
    "data.on_code_error=count"
)
RUN = "evaluate"
"""The name by which the sandbox knows us."""


@dataclass(frozen=True, slots=True)
class Earlier:
    """A response before it is scored here: its name, and its earlier score."""

    uid: str
    score: float | None = None
    reward: float | None = None
    """The reward that training took: the score, turn rewards, the reward model's; None: none is recorded."""
    penalty: float = 0.0
    """Part of the reward: the scorer's penalty of a response close to its limit."""
    step: int | None = None
    page: str | None = None
    """Its page in the viewer, of a run's folder."""


@dataclass(frozen=True, slots=True)
class Responses:
    """One row: a prompt with its responses."""

    sample: Sample
    texts: Sequence[str | None]
    records: Sequence[Mapping[str, object]] | None
    """Rows of a run's trajectories/, one a response."""
    earlier: Sequence[Earlier] = ()
    """One a response; empty where nobody asks for it."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores of one row's responses."""

    data_source: str
    scores: list[float | None]
    """None: a failure, which is never a score of zero."""
    extras: list[dict[str, float]]
    """The further numbers of each verdict."""
    failures: list[str]
    """The causes."""


class ResponseRows(ABC):
    """Rows with responses, checked, a chunk at a time."""

    def __init__(self) -> None:
        self.rows = 0
        self.notes: dict[str, str] = {}
        """By file, in words: what is not read."""
        self.sources: dict[str, str] = {}
        """The data sources, each with the place of its first row."""

    @abstractmethod
    def __iter__(self) -> Iterator[list[Responses]]:
        """Yield chunks of rows, the same each time. Raises DataError for a row that cannot be scored."""


class ResponseFiles(ResponseRows):
    """The rows of files."""

    def __init__(self, files: Sequence[str], config: EvaluateConfig) -> None:
        """Read all rows once. Raises DataError for a file that cannot be read, or a row that cannot be scored."""
        super().__init__()
        keys = config.data
        self.files = files
        self._columns = Columns(keys.prompt_key, None, keys.data_source_key, keys.reward_model_key)
        self._response_key = keys.response_key
        self._needed = {keys.response_key: "data.response_key"}
        if config.custom_reward_function.path is None:
            self._needed |= {
                keys.data_source_key: "data.data_source_key",
                keys.reward_model_key: "data.reward_model_key",
            }
        for row in self._rows():
            self.rows += 1
            self.sources.setdefault(row.sample.data_source, row.sample.place)
        if not self.rows:
            raise DataError(f"there is no row in {', '.join(files)}")

    def __iter__(self) -> Iterator[list[Responses]]:
        """Yield chunks of rows. Raises DataError for a row whose records do not fit its responses."""
        rows = self._rows(RECORDS, SCORE)
        while chunk := list(itertools.islice(rows, CHUNK_ROWS)):
            yield chunk

    def _rows(self, *further: str) -> Iterator[Responses]:
        """Iterate over the rows; records are read where `further` names their column."""
        columns, index = (*self._columns.names, *further), itertools.count()
        for file in self.files:
            table = open_table(file)
            rows = table.read(columns, self._responses, BadRows(None), needed=self._needed, known=ADDED)
            for number, row in rows:
                sample = replace(row.sample, index=next(index), file=file, row=number)
                earlier = [
                    one if one.uid else replace(one, uid=f"{sample.index}/{place}")
                    for place, one in enumerate(row.earlier)
                ]
                yield replace(row, sample=sample, earlier=earlier)
            if table.unread:
                self.notes[file] = table.unread

    def _responses(self, row: Row) -> Responses:
        """Check a row. Raises Unfit."""
        found, records = row[self._response_key], row.get(RECORDS)
        texts = (found or [None]) if isinstance(found, list) else [found]
        if not all(isinstance(text, str | None) for text in texts):
            raise Unfit(f"column {self._response_key}", "text, or a list of texts", found)
        if isinstance(records, list) and not all(isinstance(one, dict) and one.get("uid") for one in records):
            expected = "records as agentrl.generate writes them (rename the column if it holds something else)"
            raise Unfit(f"column {RECORDS}", expected, records)
        if isinstance(records, list) and len(records) != len(texts):
            expected = f"a record for each of the {len(texts)} responses in the column {self._response_key}"
            raise Unfit(f"column {RECORDS}", expected, f"{len(records)} records")
        sample, _ = self._columns.sample(row, messages(row.get(self._columns.prompt)))
        agent = sample.agent_name or "single_turn"
        sample = replace(sample, agent_name=AGENT_ALIASES.get(agent, agent))
        known = records if isinstance(records, list) else None
        names = [""] * len(texts) if known is None else [str(record["uid"]) for record in known]
        earlier = [Earlier(name, score) for name, score in zip(names, earlier_scores(row, len(texts)), strict=True)]
        return Responses(sample, cast(list[str | None], texts), known, earlier)


def earlier_scores(row: Row, count: int) -> list[float | None]:
    """Return the scores that `agentrl.generate` gave to a row's responses. Raises Unfit."""
    found = row.get(SCORE)
    scores = found if isinstance(found, list) else [found] * count
    if len(scores) != count or not all(map(is_score, scores)):
        raise Unfit(f"column {SCORE}", f"a finite number or null for each of the {count} responses", found)
    return cast(list[float | None], scores)


def is_score(value: object) -> bool:
    """Check for a score, or for none."""
    return value is None or (isinstance(value, float | int) and abs(value) <= LARGEST)


def messages(prompt: object) -> list[Message]:
    """Return the prompt's messages as training reads them. Others stay as they are; a text is a message of the user."""
    try:
        return read_messages(prompt)
    except Unfit:
        if isinstance(prompt, list):
            return cast(list[Message], without_nulls(prompt))
        return [{"role": "user", "content": str(prompt)}] if prompt else []


def check_sources(reward: RewardManager, sources: Mapping[str, str]) -> None:
    """Raise UserError, with the first row's place, for a data source that nothing scores."""
    for source, where in sources.items():
        try:
            reward.check([source])
        except UserError as error:
            raise type(error)(f"{where}: {error}") from error


def check_rows(chunk: list[Responses], reward: RewardManager) -> list[Responses]:
    """Return the rows. Raises UserError, with the row's place, for a row that cannot be scored."""
    for row in chunk:
        try:
            reward.check_row(row.sample)
        except UserError as error:
            cause = f" {NO_TRUTH}." if row.records is not None and row.sample.ground_truth is None else ""
            raise type(error)(f"{row.sample.place}: {error}{cause}") from error
    return chunk


async def score_chunk(chunk: Sequence[Responses], reward: RewardManager, *, count: bool) -> list[Scores]:
    """Score all rows, as many at once as the reward manager lets run; see `score_row`."""
    return await run_concurrently(score_row(row, reward, count=count) for row in chunk)


async def score_row(row: Responses, reward: RewardManager, *, count: bool) -> Scores:
    """Score one row's responses. Raises CodeError for an error of a scorer's code; with `count` it is a failure."""
    answered = {number: trajectory_of(row, number) for number, text in enumerate(row.texts) if text is not None}
    verdicts = dict(zip(answered, await _verdicts(list(answered.values()), row, reward, count=count), strict=True))
    found = [verdicts.get(number) for number in range(len(row.texts))]
    unscored = [answered.get(number) for number, verdict in enumerate(found) if verdict is None]
    return Scores(
        data_source=row.sample.data_source,
        scores=[None if verdict is None else verdict.score for verdict in found],
        extras=[verdict.extra for verdict in found if verdict is not None],
        failures=["no response" if one is None else one.failure or "" for one in unscored],
    )


async def _verdicts(
    answered: Sequence[Trajectory], row: Responses, reward: RewardManager, *, count: bool
) -> list[Verdict | None]:
    together = [answered] if reward.by_group else [[one] for one in answered]
    scored = await run_concurrently(_scored_together(one, row, reward, count=count) for one in together)
    return list(itertools.chain.from_iterable(scored))


async def _scored_together(
    trajectories: Sequence[Trajectory], row: Responses, reward: RewardManager, *, count: bool
) -> list[Verdict | None]:
    try:
        return await score_all(reward, trajectories, row.sample)
    except CodeError as error:
        if count:
            return [None] * len(trajectories)
        raise CodeError(f"{error}\n  in {row.sample.place}\n{ADVICE}", error.place) from error


def trajectory_of(row: Responses, number: int) -> Trajectory:
    """Make the trajectory of one response: its record, or what its text alone says."""
    if row.records is not None:
        record = recorded(row.records[number], Path(row.sample.file), row.sample.row)
        # What failed and yet has a text failed when it was scored.
        status = Status.COMPLETED if record.status is Status.FAILED else record.status
        return replace(record, status=status, failure=None, failure_cause=None, score=None, score_extra={})
    text = row.texts[number] or ""
    return Trajectory(
        uid=f"{row.sample.index}/{number}",
        group=row.sample.index,
        data_source=row.sample.data_source,
        agent_name=row.sample.agent_name,
        turns=[Turn("assistant", text, transcript=0, start=0, end=0)],
        messages=[*row.sample.prompt, {"role": "assistant", "content": text}],
    )
