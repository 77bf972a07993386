"""A parquet file with the score of each response, written in parts, so that a killed command continues."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Self, cast

import pyarrow as pa

from agentrl.config.sections.offline import EvaluateConfig
from agentrl.errors import DataError
from agentrl.offline.decisive import decisive
from agentrl.offline.responses import Parts
from agentrl.offline.scores import Responses, Scores
from agentrl.trajectory.parquet import valid_unicode

SCHEMA = pa.schema(
    {
        "uid": pa.string(),
        "step": pa.int64(),  # of a run's trajectory
        "row": pa.int64(),  # number of its group, from 0
        "data_source": pa.string(),
        "first": pa.float64(),  # its earlier score; null: it had none
        "score": pa.float64(),  # null: a failure
        "failure": pa.string(),
        "extra": pa.map_(pa.string(), pa.float64()),
        "content": pa.string(),  # hash of its row and the row's responses; parts of earlier versions lack it
    }
)
KEY = "data.scores_path"
IDLE = ("data.output_path", KEY, "reward_model.max_concurrent", "reward_model.*.max_concurrent", "ray_init.*")
"""Keys (patterns) that scores do not depend on."""


class ScoreFile:
    """The file that is being made, in a `with` block; the responses that it has scores of come first."""

    def __init__(self, config: EvaluateConfig) -> None:
        """Find the scores of an earlier command. Raises DataError as `Parts` does."""
        assert config.data.scores_path is not None
        self._parts = Parts(Path(config.data.scores_path), decisive(config, IDLE), KEY)
        self._known = self._parts.rows()
        self.left = self.known = self._parts.done
        """Responses that have scores, and those of them that `take` has not read."""

    def take(self, chunk: Sequence[Responses]) -> list[Scores]:
        """Return the scores of the next chunk; an empty one: the data have no further chunk.

        Raises DataError where the file holds scores of other or further responses.
        """
        if not chunk:
            raise DataError(
                f"{self._parts.folder} holds scores of {self.left} more responses than the data have: the data have "
                "changed. Remove the folder to begin again"
            )
        found = []
        for row in chunk:
            known = list(islice(self._known, len(row.texts)))
            same_names = [one["uid"] for one in known] == [valid_unicode(one.uid) for one in row.earlier]
            if not same_names or not {one.get("content") for one in known} <= {None, _content(row)}:
                raise DataError(
                    f"{self._parts.folder} holds scores of other responses than {row.sample.place}: the data have "
                    "changed. Remove the folder to begin again"
                )
            found.append(_scores(known))
            self.left -= len(known)
        return found

    def add(self, chunk: Sequence[Responses], scores: Sequence[Scores]) -> None:
        """Write the scores of a chunk. Raises TrainingError on a full disk."""
        rows = [row for one, its in zip(chunk, scores, strict=True) for row in _rows(one, its)]
        self._parts.add(pa.Table.from_pylist(rows, schema=SCHEMA))

    def publish(self) -> Path:
        """Join the parts to the file; returns its path."""
        self._parts.publish()
        return self._parts.output

    def discard(self) -> None:
        """Remove all scores, where there is none but failures."""
        self._parts.discard()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._parts.close()


def _content(row: Responses) -> str:
    """Hash what scorers are given of a row, as uids may name places alone."""
    return hashlib.sha256(repr((replace(row.sample, file="", row=0), [*row.texts])).encode()).hexdigest()[:16]


def _rows(row: Responses, scores: Scores) -> Iterator[dict[str, object]]:
    failures, extras, content = iter(scores.failures), iter(scores.extras), _content(row)
    for one, score in zip(row.earlier, scores.scores, strict=True):
        extra = {} if score is None else next(extras)
        yield {
            "uid": valid_unicode(one.uid),
            "step": one.step,
            "row": row.sample.index,
            "data_source": valid_unicode(row.sample.data_source),
            "first": one.score,
            "score": score,
            "failure": valid_unicode(next(failures)) if score is None else None,
            "extra": [(valid_unicode(name), value) for name, value in extra.items()],
            "content": content,
        }


def _scores(rows: Sequence[Mapping[str, object]]) -> Scores:
    return Scores(
        data_source=str(rows[0]["data_source"]),
        scores=[cast(float | None, row["score"]) for row in rows],
        extras=[cast(dict[str, float], row["extra"]) for row in rows if row["score"] is not None],
        failures=[str(row["failure"]) for row in rows if row["score"] is None],
    )
