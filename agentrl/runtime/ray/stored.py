"""A batch in pieces in Ray's object store: its holder knows sequences, not tokens.

The rollout workers store their trajectories, and ranks add columns (log-probs, values, advantages). A process that
needs some sequences loads these sequences only. The tokens never pass through the driver.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypedDict, TypeVar

import numpy as np
import numpy.typing as npt
import ray
import torch

from agentrl.trajectory.batch import RaggedBatch, TeacherPrompts, dtype_of, join_sequences, token_places
from agentrl.trajectory.images import Images

Arrays = TypeVar("Arrays")


class BatchArrays(TypedDict):
    """The tokens of a RaggedBatch, as numpy has them: the store reads these without a copy."""

    offsets: npt.NDArray[np.int64]
    tokens: dict[str, npt.NDArray[np.generic]]
    images: Images | None
    teacher_prompts: TeacherPrompts | None


class ColumnArrays(TypedDict):
    """One token column, or k of them."""

    values: npt.NDArray[np.generic]  # [tokens], or [tokens, ...]
    offsets: npt.NDArray[np.int64]  # [n + 1] int64


@dataclass(frozen=True, slots=True)
class Piece(Generic[Arrays]):
    """Some sequences of a batch in the object store."""

    ref: ray.ObjectRef[Arrays]
    """To BatchArrays or ColumnArrays."""
    rows: torch.Tensor
    """[n] int64: which sequences of the whole, in the piece's order."""


@dataclass(frozen=True, slots=True)
class Column:
    """One token column of a `StoredBatch`, in pieces."""

    pieces: tuple[Piece[ColumnArrays], ...]
    place: int | None = None
    """Index of the column in pieces of shape [tokens, k]; None: the whole pieces, [tokens, ...]."""


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """Implements `agentrl.trajectory.batch.Sequences`. N of the stored sequences; pickled, it is small."""

    rows: torch.Tensor  # [N] int64, numbers of the sequences in what is stored
    lengths: torch.Tensor  # [N] int64
    policy_tokens: torch.Tensor  # [N] int64
    sequences: Mapping[str, torch.Tensor]
    """Columns [N] by sequence: few numbers, which are not in the store."""
    policies: tuple[str, ...]
    tokens: frozenset[str]
    """Names of the stored columns by token."""
    batches: tuple[Piece[BatchArrays], ...]
    columns: Mapping[str, Column]
    """Columns by token that were added to the stored ones."""

    @property
    def group(self) -> torch.Tensor:
        return self.sequences["group"]

    @property
    def trajectory(self) -> torch.Tensor:
        return self.sequences["trajectory"]

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    def __len__(self) -> int:
        return len(self.lengths)

    def has(self, name: str) -> bool:
        return name in self.tokens or name in self.columns or name in self.sequences

    def select(self, indices: Sequence[int]) -> StoredBatch:
        chosen = torch.as_tensor(indices, dtype=torch.int64)
        return replace(
            self,
            rows=self.rows[chosen],
            lengths=self.lengths[chosen],
            policy_tokens=self.policy_tokens[chosen],
            sequences={name: values[chosen] for name, values in self.sequences.items()},
        )

    def with_fields(self, **columns: Column | torch.Tensor | None) -> StoredBatch:
        """Add, replace or, with None, take away columns: by token in pieces, by sequence as tensors [N].

        Raises ConfigError for a column that is not registered.
        """
        added = {name: one for name, one in self.columns.items() if name not in columns}
        by_sequence = {name: one for name, one in self.sequences.items() if name not in columns}
        for name, one in columns.items():
            dtype_of(name)  # refuses other names
            if isinstance(one, Column):
                added[name] = one
            elif one is not None:
                by_sequence[name] = one
        tokens = self.tokens.difference(name for name, one in columns.items() if one is None)
        return replace(self, tokens=tokens, columns=added, sequences=by_sequence)

    def joined(self, others: Sequence[StoredBatch]) -> StoredBatch:
        """See `Sequences.joined`. No batch among them may have a column that was added to the stored ones."""
        every = [self, *others]
        if any(one.columns for one in every):
            raise ValueError("joined: columns were added already")
        stored = [sum(len(piece.rows) for piece in one.batches) for one in every]
        ends = [sum(stored[:index]) for index in range(len(every))]
        sequences, policies = join_sequences([(one.sequences, one.policies) for one in every])
        return StoredBatch(
            rows=torch.cat([one.rows + end for one, end in zip(every, ends, strict=True)]),
            lengths=torch.cat([one.lengths for one in every]),
            policy_tokens=torch.cat([one.policy_tokens for one in every]),
            sequences=sequences,
            policies=policies,
            tokens=self.tokens,
            batches=tuple(
                Piece(piece.ref, piece.rows + end)
                for one, end in zip(every, ends, strict=True)
                for piece in one.batches
            ),
            columns={},
        )

    def column(self, parts: Iterable[tuple[ray.ObjectRef[ColumnArrays], Sequence[int]]]) -> Column:
        """Build a Column from (reference of `put_column`, indices of its sequences in this batch) pairs."""
        return Column(tuple(Piece(ref, self.rows[torch.as_tensor(part)]) for ref, part in parts if len(part)))

    def load(self) -> RaggedBatch:
        """Fetch these sequences; on the machine where a piece lies only they are copied."""
        batch = self._fetch()
        tokens = {name: values for name, values in batch.tokens.items() if name in self.tokens or name in self.columns}
        sequences = {**self.sequences, "row": self.rows}
        return replace(batch, tokens=tokens, sequences=sequences, policies=self.policies)

    def _empty_columns(self) -> dict[str, torch.Tensor]:
        return {name: torch.zeros(0, dtype=dtype_of(name)) for name in self.columns}

    def _fetch(self) -> RaggedBatch:
        stored = [piece for piece in self.batches if len(piece.rows)]
        if not stored:
            return _view(ray.get(self.batches[0].ref)).with_fields(**self._empty_columns())
        wanted = self.rows if len(self) else stored[0].rows[:1]
        parts, places = [], []
        for arrays, here, there in _found(stored, wanted):
            parts.append(_view(arrays).select(here.tolist()))
            places.append(there)
        batch = RaggedBatch.concat(parts).select(torch.cat(places).argsort().tolist())
        if not len(self):  # the row that stands in is in no column that was made without it
            return batch.select([]).with_fields(**self._empty_columns())
        for name, column in self.columns.items():
            batch = batch.with_fields(**{name: _tokens(_found(column.pieces, wanted), column.place, batch)})
        return batch


def put_batch(batch: RaggedBatch) -> StoredBatch:
    """Put a batch into the store as one piece."""
    arrays = BatchArrays(
        offsets=batch.offsets.numpy(),
        tokens={name: values.numpy() for name, values in batch.tokens.items()},
        images=batch.images,
        teacher_prompts=batch.teacher_prompts,
    )
    rows = torch.arange(len(batch))
    return StoredBatch(
        rows=rows,
        lengths=batch.lengths,
        policy_tokens=batch.policy_tokens,
        sequences=batch.sequences,
        policies=batch.policies,
        tokens=frozenset(batch.tokens),
        batches=(Piece(ray.put(arrays), rows),),
        columns={},
    )


def put_column(values: torch.Tensor, batch: RaggedBatch) -> ray.ObjectRef[ColumnArrays]:
    """Store a token column [T] of `batch`, or columns [T, F]. Raises ValueError when T differs from the batch's."""
    if len(values) != batch.num_tokens:
        raise ValueError(f"{len(values)} entries were returned for a share of {batch.num_tokens} tokens")
    return ray.put(ColumnArrays(values=values.numpy(), offsets=batch.offsets.numpy()))


def _found(pieces: Iterable[Piece[Arrays]], wanted: torch.Tensor) -> list[tuple[Arrays, torch.Tensor, torch.Tensor]]:
    """Fetch the pieces that have some of the `wanted` sequences [N] int64.

    Returns, for each, its arrays, which rows of it are wanted, and their places among the wanted (both [n] int64).
    """
    matches = []
    order = wanted.argsort()
    for piece in pieces:
        there = torch.searchsorted(wanted[order], piece.rows).clamp(max=len(wanted) - 1)
        here = (wanted[order][there] == piece.rows).nonzero()[:, 0]
        if len(here):
            matches.append((piece.ref, here, order[there[here]]))
    arrays = ray.get([ref for ref, _, _ in matches])
    return [(one, here, there) for one, (_, here, there) in zip(arrays, matches, strict=True)]


def _view(arrays: BatchArrays) -> RaggedBatch:
    """View arrays, without a copy, as a batch without columns by sequence. torch would warn that they are read-only."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        tokens = {name: torch.from_numpy(values) for name, values in arrays["tokens"].items()}
        offsets = torch.from_numpy(arrays["offsets"])
        return RaggedBatch(offsets, tokens, {}, images=arrays["images"], teacher_prompts=arrays["teacher_prompts"])


def _tokens(
    found: list[tuple[ColumnArrays, torch.Tensor, torch.Tensor]], place: int | None, batch: RaggedBatch
) -> torch.Tensor:
    """Put a column [T, ...] into the order of `batch`; see `Column.place`. Floats that no piece has are NaN."""
    first = found[0][0]["values"] if found else np.empty(0, np.float32)
    beside = first.shape[1:] if place is None else ()
    nothing = np.nan if np.issubdtype(first.dtype, np.floating) else 0
    column = torch.from_numpy(np.full((batch.num_tokens, *beside), nothing, first.dtype))
    for arrays, here, there in found:
        lengths = batch.lengths[there]
        source = token_places(torch.from_numpy(arrays["offsets"].copy())[here], lengths)
        values = arrays["values"] if place is None else arrays["values"][:, place]
        column[token_places(batch.offsets[there], lengths)] = torch.from_numpy(values[source.numpy()])
    return column
