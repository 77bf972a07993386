"""Responses that were written to a file, scored as if their trajectories had just ended."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar, cast

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from agentrl.config.sections.offline import EvaluateConfig
from agentrl.data.columns import is_struct, is_text
from agentrl.data.messages import without_nulls
from agentrl.data.rows import to_sample
from agentrl.data.sources import no_parquet
from agentrl.data.unread import UnreadColumns
from agentrl.errors import CodeError, DataError, UserError
from agentrl.offline.responses import ADDED
from agentrl.reward import RewardManager, score_all
from agentrl.reward.scorer import Verdict
from agentrl.system.quota import run_concurrently
from agentrl.trajectory import Message, Status, Trajectory, Turn
from agentrl.trajectory.parquet import from_row
from agentrl.trajectory.sample import Sample, row_place

T = TypeVar("T")
CHUNK_ROWS = 256
"""Rows that are scored together."""
RECORDS = "trajectories"
"""The column in which `agentrl.generate` keeps whole records, for scorers that ask for the trajectory."""
ADVICE = (
    "Perhaps only some responses meet it. Mend the function, or count such responses as failures with "
    "data.on_code_error=count"
)
RUN = "evaluate"
"""The name by which the sandbox knows us."""


@dataclass(frozen=True, slots=True)
class Responses:
    """One row: a prompt with its responses."""

    sample: Sample
    texts: Sequence[str | None]
    records: Sequence[Mapping[str, object]] | None
    """Rows of `trainer.record`, one a response."""


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


class ResponseFiles:
    """The rows of parquet files, checked, a chunk at a time."""

    def __init__(self, files: Sequence[str], config: EvaluateConfig) -> None:
        """Check all files. Raises DataError for a file that cannot be read, or whose columns cannot be scored."""
        self.files = files
        self.keys = config.data
        self.has_function = config.custom_reward_function.path is not None
        self.rows = 0
        self.notes: dict[str, str] = {}
        """By file, in words: the columns that are not read."""
        for file in files:
            try:
                parquet = pq.ParquetFile(file)
            except (pa.ArrowException, OSError) as error:
                raise DataError(no_parquet(file, error)) from error
            self._check(file, parquet.schema_arrow)
            unread = UnreadColumns({*self._columns, *ADDED})
            unread.note_schema(parquet.schema_arrow)
            if note := unread.told():
                self.notes[file] = note
            self.rows += parquet.metadata.num_rows
        if not self.rows:
            raise DataError(f"there is no row in {', '.join(files)}")

    def sources(self) -> dict[str, str]:
        """Return each data source with the place of its first row. Raises DataError for a row without one."""
        key, found = self.keys.data_source_key, dict[str, str]()
        for file, first, batch in self._batches([key]):
            if key not in batch.schema.names:
                found.setdefault("unknown", f"{file}, row {first}")
                continue
            column = batch.column(key).cast(pa.string())
            for source in pc.unique(column).to_pylist():
                place = pc.index(column.is_null() if source is None else pc.equal(column, source), True).as_py()
                where = row_place(file, first + place)
                if source is None:
                    raise DataError(f"{where}, column {key}: expected text, found null")
                found.setdefault(source, where)
        return found

    def __iter__(self) -> Iterator[list[Responses]]:
        """Yield chunks of rows. Raises DataError for a row whose records do not fit its responses."""
        index = 0
        for file, first, batch in self._batches(self._columns):
            chunk = []
            for number, row in enumerate(batch.to_pylist(maps_as_pydicts="strict"), first):
                chunk.append(self._responses(row, index, file, number))
                index += 1
            yield chunk

    @property
    def _columns(self) -> list[str]:
        keys = self.keys
        named = [keys.prompt_key, keys.response_key, keys.data_source_key, keys.reward_model_key]
        return [*named, "extra_info", "agent_name", RECORDS]

    def _batches(self, columns: Sequence[str]) -> Iterator[tuple[str, int, pa.RecordBatch]]:
        """Yield record batches, each with its file and the number of its first row there."""
        for file in self.files:
            parquet, first = pq.ParquetFile(file, buffer_size=1 << 20, pre_buffer=False), 0
            known = [name for name in dict.fromkeys(columns) if name in parquet.schema_arrow.names]
            try:
                for batch in parquet.iter_batches(CHUNK_ROWS, columns=known):
                    yield file, first, batch
                    first += batch.num_rows
            except (pa.ArrowException, OSError) as error:
                raise DataError(f"{file}: the parquet file is damaged after row {first}: {error}") from error

    def _check(self, file: str, schema: pa.Schema) -> None:
        keys = {
            "response_key": (self.keys.response_key, True),
            "data_source_key": (self.keys.data_source_key, not self.has_function),
            "reward_model_key": (self.keys.reward_model_key, not self.has_function),
        }
        for key, (column, needed) in keys.items():
            if needed and column not in schema.names:
                raise DataError(
                    f"{file}: there is no column {column!r}; its columns are {', '.join(schema.names)}. "
                    f"Name the right one with data.{key}"
                )

        def expect(column: str, fits: bool, what: str) -> None:
            if not fits:
                raise DataError(f"{file}, column {column}: expected {what}, found {schema.field(column).type}")

        column = self.keys.response_key
        kind = schema.field(column).type
        is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
        expect(column, is_text(kind.value_type if is_list else kind), "text, or a list of texts")
        if (column := self.keys.data_source_key) in schema.names:
            expect(column, is_text(schema.field(column).type), "text")
        if (column := self.keys.reward_model_key) in schema.names:
            expect(column, is_struct(schema.field(column).type), "a struct with ground_truth")
        if "extra_info" in schema.names:
            expect("extra_info", is_struct(schema.field("extra_info").type), "a struct (a mapping)")

    def _responses(self, row: Mapping[str, object], index: int, file: str, number: int) -> Responses:
        keys, found = self.keys, row[self.keys.response_key]
        records = row.get(RECORDS)
        # `_check` has seen that they are texts.
        texts: list[str | None] = (found or [None]) if isinstance(found, list) else [cast(str | None, found)]
        if isinstance(records, list) and len(records) != len(texts):
            raise DataError(
                f"{row_place(file, number)}: {len(texts)} responses in the column {keys.response_key}, and "
                f"{len(records)} records in {RECORDS}"
            )
        sample = to_sample(
            {
                "data_source": row.get(keys.data_source_key),
                "reward_model": row.get(keys.reward_model_key),
                "extra_info": row.get("extra_info"),
                "agent_name": row.get("agent_name"),
            },
            prompt=messages(without_nulls(row.get(keys.prompt_key))),
            image_key=None,
            default_agent_loop="single_turn",
            index=index,
            file=file,
            number=number,
        )
        return Responses(sample, texts, records if isinstance(records, list) else None)


def messages(prompt: object) -> list[Message]:
    """Return the prompt's messages; a text becomes a message of the user."""
    if isinstance(prompt, list):
        return prompt
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
            raise type(error)(f"{row.sample.place}: {error}") from error
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
        record = from_row(dict(row.records[number]))
        # What failed and yet has a text failed when it was scored.
        status = Status.COMPLETED if record.status is Status.FAILED else record.status
        return replace(record, status=status, failure=None, failure_cause=None, score=None)
    text = row.texts[number] or ""
    return Trajectory(
        uid=f"{row.sample.index}/{number}",
        group=row.sample.index,
        data_source=row.sample.data_source,
        agent_name=row.sample.agent_name,
        turns=[Turn("assistant", text, transcript=0, start=0, end=0)],
        messages=[*row.sample.prompt, {"role": "assistant", "content": text}],
    )
