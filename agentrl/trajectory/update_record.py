"""Records of an update's values for each token: a file of `updates/` for each file of `trajectories/`.

A row for each row of the trajectories' file, in its order. Each column but `uid` has one list for each transcript, with
a value for each of its tokens. The value is null where the policy did not sample the token, or where the token was
not trained on. A column that a run does not compute is absent. Columns that a user registered are there by their names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from agentrl.config.columns import is_users
from agentrl.system.publish import published
from agentrl.trajectory.batch import RaggedBatch
from agentrl.trajectory.files import update_file
from agentrl.trajectory.parquet import rows_together

Values = npt.NDArray[np.float32 | np.float64 | np.int32 | np.int64 | np.bool_]
COLUMNS: Mapping[str, tuple[str, pa.DataType]] = {
    "trainer_logprobs": ("old_logprobs", pa.float32()),
    "entropy": ("entropy", pa.float32()),
    "advantages": ("advantages", pa.float32()),
    "weights": ("correction", pa.float32()),
    "reference_logprobs": ("ref_logprobs", pa.float32()),
    "teacher_logprobs": ("teacher_scores", pa.float32()),
    "token_rewards": ("rewards", pa.float32()),
    "ratio": ("ratio", pa.float32()),
    "clipped": ("clipped", pa.bool_()),
    "weights_clipped": ("correction_clipped", pa.bool_()),
}
"""By name, the column of `RaggedBatch` and the type."""
MAY_BE_UNKNOWN = ("ratio", "clipped", "weights", "weights_clipped")
"""Columns that are NaN where the update made nothing; elsewhere a NaN is a fault, and recorded as it is."""
RATIO_DECIMALS = 4
"""Digits of a ratio that are kept: most are 1 but for rounding, and take no room then."""


@dataclass(frozen=True, slots=True)
class RecordFile:
    """One file of trajectories, and which sequences of a batch each of its trajectories is."""

    path: Path
    numbers: Mapping[str, int]
    """By uid, the trajectory's number in `RaggedBatch.trajectory`."""


def write_updates(batch: RaggedBatch, files: Sequence[RecordFile]) -> dict[str, str]:
    """Write the columns of a batch for the files of its trajectories; files on other machines are passed.

    Returns by uid how a trajectory's trained tokens differ from the recorded ones: nothing of it is written then.
    Raises TrainingError on a full disk.
    """
    found: dict[str, Values] = {}
    for name, (field, _) in COLUMNS.items():
        column: torch.Tensor | None = getattr(batch, field)
        if column is not None:
            found[name] = (column[:, 0] if column.ndim > 1 else column).numpy()
    found |= {name: values.numpy() for name, values in batch.tokens.items() if is_users(name)}
    owner = batch.sequence_ids()
    found |= {name: values[owner].numpy() for name, values in batch.sequences.items() if is_users(name)}
    if "ratio" in found:
        found["ratio"] = found["ratio"].round(RATIO_DECIMALS)
    rows: dict[int, list[int]] = {}
    for row, owner in enumerate(batch.trajectory.tolist()):
        rows.setdefault(owner, []).append(row)
    differences: dict[str, str] = {}
    for file in files:
        if file.path.exists():
            differences |= _write(batch, found, file, rows)
    return differences


def _write(
    batch: RaggedBatch,
    columns: Mapping[str, Values],
    file: RecordFile,
    rows: Mapping[int, Sequence[int]],
) -> dict[str, str]:
    table = pq.read_table(file.path, columns=["uid", "ids", "mask", "trained_to"]).combine_chunks()
    uids = table["uid"].to_pylist()
    tokens, ids = _Nested.from_column(table["mask"]), _Nested.from_column(table["ids"]).values
    offsets, batch_ids, batch_mask = batch.offsets.tolist(), batch.ids.numpy(), batch.mask.long().numpy()
    sampled, ends = tokens.values, table["trained_to"].to_pylist()
    source = np.full(len(tokens.values), -1, dtype=np.int64)
    differences: dict[str, str] = {}
    for place, uid in enumerate(uids):
        mine = rows.get(file.numbers.get(uid, -1), ())
        parts = zip(tokens.spans(place), ends[place], strict=True)
        spans = [(start, end if to is None else min(end, start + to)) for (start, end), to in parts]
        spans = [span for span in spans if sampled[slice(*span)].any()]
        if not mine:
            continue
        if len(mine) != len(spans):
            differences[uid] = (
                f"{len(mine)} sequences are trained on, and {len(spans)} transcripts have tokens to train"
            )
            continue
        for row, (start, end) in zip(mine, spans, strict=True):
            first, last = offsets[row], offsets[row + 1]
            there = slice(first, last)
            if not np.array_equal(batch_ids[there], ids[start:end]):
                differences.setdefault(uid, _first_difference("ids", batch_ids[there], ids[start:end]))
            elif not np.array_equal(batch_mask[there], sampled[start:end]):
                differences.setdefault(uid, _first_difference("mask", batch_mask[there], sampled[start:end]))
            else:
                source[start:end] = np.arange(first, last)
    known = (sampled != 0) & (source >= 0)
    arrays = {"uid": table["uid"].combine_chunks()}
    for name, values in columns.items():
        by_token = values[source] if len(values) else np.zeros(len(source), values.dtype)
        there = known & ~np.isnan(by_token) if name in MAY_BE_UNKNOWN else known
        if name in MAY_BE_UNKNOWN and np.isnan(values).all():
            continue
        kind = COLUMNS[name][1] if name in COLUMNS else pa.from_numpy_dtype(values.dtype)
        by_token = by_token != 0 if kind == pa.bool_() else by_token
        lists = pa.ListArray.from_arrays(pa.array(tokens.inner, pa.int32()), pa.array(by_token, kind, mask=~there))
        arrays[name] = pa.ListArray.from_arrays(pa.array(tokens.outer, pa.int32()), lists)
    with published(update_file(file.path)) as temporary:
        pq.write_table(pa.table(arrays), temporary, compression="zstd", row_group_size=rows_together(table))
    return differences


def _first_difference(name: str, trained: npt.NDArray[np.int64], recorded: npt.NDArray[np.int64]) -> str:
    if len(trained) != len(recorded):
        return f"{len(trained)} tokens are trained on, and {len(recorded)} recorded"
    place = int((trained != recorded).argmax())
    return f"{name} at token {place}: {trained[place]} is trained on, and {recorded[place]} recorded"


@dataclass(frozen=True, slots=True)
class _Nested:
    """A column of lists of lists, taken apart."""

    outer: npt.NDArray[np.int32]  # [rows + 1], offsets into `inner`
    inner: npt.NDArray[np.int32]  # [transcripts + 1], offsets into `values`
    values: npt.NDArray[np.int64]

    @staticmethod
    def from_column(column: pa.ChunkedArray) -> _Nested:
        lists = column.combine_chunks()
        inner = lists.flatten()
        values = inner.flatten().to_numpy(zero_copy_only=False).astype(np.int64)
        outer_offsets, inner_offsets = lists.offsets.to_numpy(), inner.offsets.to_numpy()
        return _Nested(outer_offsets - outer_offsets[0], inner_offsets - inner_offsets[0], values)

    def spans(self, row: int) -> list[tuple[int, int]]:
        """List where the values of each transcript of a row begin and end."""
        return [(int(self.inner[one]), int(self.inner[one + 1])) for one in range(self.outer[row], self.outer[row + 1])]
