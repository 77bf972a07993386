"""The ragged batch: N sequences as T tokens in a row and the offsets where each begins. There is no padding."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

import numpy as np
import torch

from agentrl.config.columns import COLUMNS, column
from agentrl.trajectory import Transcript
from agentrl.trajectory.images import Images, Ints


class Sequences(Protocol):
    """Sequences whose tokens may be in another process: numbers by sequence to plan with, and a way to fetch tokens."""

    @property
    def sequences(self) -> Mapping[str, torch.Tensor]:
        """Columns [N] by sequence."""

    @property
    def group(self) -> torch.Tensor:
        """Index of each sequence's prompt, [N] int64."""

    @property
    def trajectory(self) -> torch.Tensor:
        """Index of each sequence's trajectory, [N] int64."""

    @property
    def lengths(self) -> torch.Tensor:
        """Tokens of each sequence, [N] int64."""

    @property
    def policy_tokens(self) -> torch.Tensor:
        """Tokens of each sequence that the policy sampled, [N] int64."""

    @property
    def policies(self) -> tuple[str, ...]:
        """Names of policies."""

    @property
    def num_tokens(self) -> int:
        """T, the tokens of all sequences."""

    def __len__(self) -> int: ...

    def has(self, name: str) -> bool:
        """Check whether the column is there."""

    def select(self, indices: Sequence[int]) -> Self:
        """Take the sequences `indices`, in that order."""

    def with_fields(self, **columns: Any) -> Self:
        """Return the same sequences with columns added or replaced."""

    def joined(self, others: Sequence[Self]) -> Self:
        """Append the sequences of `others`. All must have the same columns."""

    def load(self) -> RaggedBatch:
        """Fetch all tokens into this process."""


class _Always:
    """The columns that each batch has."""

    __slots__ = ()
    ids: torch.Tensor  # [T] int64
    mask: torch.Tensor  # [T] bool
    rollout_logprobs: torch.Tensor  # [T] float32, the engine's
    version: torch.Tensor  # [T] int32, of the weights that sampled the token
    turn: torch.Tensor  # [T] int32, index in the trajectory's `turns`
    rewards: torch.Tensor  # [T] float32, each on a policy token
    group: torch.Tensor  # [N] int64, index of the prompt
    trajectory: torch.Tensor  # [N] int64, sequences of one trajectory share it
    policy: torch.Tensor  # [N] int32, index in `policies`; -1 where no policy sampled


@dataclass(frozen=True, slots=True, eq=False)
class TeacherPrompts:
    """Prompts of N sequences, which a privileged teacher reads in place of the policy's."""

    ids: tuple[Ints, ...]
    """[N], each the tokens of a prompt; empty where the teacher is shown nothing that the policy is not."""
    replaced: Ints  # [N], tokens of the policy's own prompt, with which each sequence begins

    @staticmethod
    def from_transcripts(transcripts: Iterable[Transcript]) -> TeacherPrompts:
        """Collect the prompts of each transcript, in order."""
        found = [(np.array(one.teacher_prompt, np.int64), one.prompt_length) for one in transcripts]
        return TeacherPrompts(tuple(ids for ids, _ in found), np.array([length for _, length in found], np.int64))

    def select(self, rows: Sequence[int]) -> TeacherPrompts:
        """Take the prompts of the sequences `rows`, in that order."""
        return TeacherPrompts(tuple(self.ids[row] for row in rows), self.replaced[np.array(rows, np.int64)])

    @staticmethod
    def concat(parts: Sequence[TeacherPrompts]) -> TeacherPrompts:
        """Concatenate the prompts of batches."""
        return TeacherPrompts(
            tuple(ids for part in parts for ids in part.ids), np.concatenate([part.replaced for part in parts])
        )


@dataclass(frozen=True, slots=True)
class RaggedBatch(_Always):
    """T tokens of N sequences in a row, without padding, and columns by name (`agentrl.config.columns`).

    `batch.name` is a column, [T, ...] by token or [N] by sequence; None where the batch does not have it. A token
    column's entry t belongs to ids[t]: `logprobs[t]` is log p(ids[t] | the tokens before it in its sequence). So the
    first token of a sequence never has a log-prob. `mask` is True where the policy sampled the token, and `version` and
    `turn` are -1 where it is False.
    """

    offsets: torch.Tensor  # [N + 1] int64, offsets[0] = 0, offsets[N] = T
    tokens: Mapping[str, torch.Tensor]
    """Columns by token."""
    sequences: Mapping[str, torch.Tensor]
    """Columns by sequence."""
    policies: tuple[str, ...] = ()
    """Names; `version` counts each policy's weights separately."""
    images: Images | None = None
    """The images of all sequences; None without images."""
    teacher_prompts: TeacherPrompts | None = None
    """Prompts that a privileged teacher reads; None where no teacher is."""

    @staticmethod
    def from_columns(
        *,
        offsets: torch.Tensor,
        policies: tuple[str, ...] = (),
        images: Images | None = None,
        teacher_prompts: TeacherPrompts | None = None,
        **columns: torch.Tensor | None,
    ) -> RaggedBatch:
        """Make a batch of offsets [N + 1] and columns by name, [T, ...] by token or [N] by sequence.

        Raises ConfigError for a column that is not registered.
        """
        return RaggedBatch(offsets, {}, {}, policies, images, teacher_prompts).with_fields(**columns)

    def __getattr__(self, name: str) -> torch.Tensor | None:
        if name in self.tokens:
            return self.tokens[name]
        if name in self.sequences:
            return self.sequences[name]
        if name in COLUMNS:
            return None
        raise AttributeError(f"a batch has no column {name!r}; see agentrl.algorithms.register_column", name=name)

    def __len__(self) -> int:
        return self.offsets.numel() - 1

    def __repr__(self) -> str:
        """Name the columns with their types, for a notebook: their values would fill pages."""
        by_token, by_sequence = (
            ", ".join(f"{name} {str(values.dtype).removeprefix('torch.')}" for name, values in sorted(columns.items()))
            for columns in (self.tokens, self.sequences)
        )
        held = f"{len(self)} sequences and {self.num_tokens} tokens"
        return f"RaggedBatch of {held}\nby token: {by_token}\nby sequence: {by_sequence}"

    @property
    def num_tokens(self) -> int:
        return self.ids.numel()

    @property
    def lengths(self) -> torch.Tensor:
        """Tokens of each sequence, [N] int64."""
        return self.offsets.diff()

    @property
    def policy_tokens(self) -> torch.Tensor:
        """Tokens of each sequence that the policy sampled, [N] int64."""
        return torch.zeros(len(self), dtype=torch.int64).index_add_(0, self.sequence_ids(), self.mask.long())

    def has(self, name: str) -> bool:
        return name in self.tokens or name in self.sequences

    def with_fields(self, **columns: torch.Tensor | None) -> RaggedBatch:
        """Add, replace or, with None, take away columns, [T, ...] by token or [N] by sequence.

        Raises ConfigError for a column that is not registered.
        """
        held = {"token": dict(self.tokens), "sequence": dict(self.sequences)}
        for name, values in columns.items():
            of_kind = held[(COLUMNS.get(name) or column(name)).per]
            if values is None:
                of_kind.pop(name, None)
            else:
                of_kind[name] = values
        return replace(self, tokens=held["token"], sequences=held["sequence"])

    def mapped(self, function: Callable[[torch.Tensor], torch.Tensor]) -> RaggedBatch:
        """Apply `function` to offsets [N + 1], columns by token [T, ...] and by sequence [N]."""
        tokens = {name: function(values) for name, values in self.tokens.items()}
        sequences = {name: function(values) for name, values in self.sequences.items()}
        return replace(self, offsets=function(self.offsets), tokens=tokens, sequences=sequences)

    def joined(self, others: Sequence[RaggedBatch]) -> RaggedBatch:
        return RaggedBatch.concat([self, *others])

    def load(self) -> RaggedBatch:
        return self

    @staticmethod
    def unsampled(
        offsets: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor, group: torch.Tensor, trajectory: torch.Tensor
    ) -> RaggedBatch:
        """Build a batch of tokens that no policy sampled, for supervised learning or a reward model.

        offsets [N + 1] int64, ids [T] int64, mask [T] bool (the tokens to learn), group and trajectory [N] int64.
        Log-probs and rewards are 0; version, turn and policy are -1.
        """
        tokens = torch.full((len(ids),), -1, dtype=torch.int32)
        return RaggedBatch.from_columns(
            offsets=offsets,
            ids=ids,
            mask=mask,
            rollout_logprobs=torch.zeros(len(ids)),
            version=tokens,
            turn=tokens.clone(),
            rewards=torch.zeros(len(ids)),
            group=group,
            trajectory=trajectory,
            policy=torch.full((len(group),), -1, dtype=torch.int32),
        )

    @staticmethod
    def concat(batches: Sequence[RaggedBatch]) -> RaggedBatch:
        """Put the sequences of batches, at least one, after each other. All must have the same columns."""
        first = batches[0]
        ends = torch.tensor([0, *(batch.num_tokens for batch in batches)]).cumsum(0).tolist()
        offsets = [batch.offsets[1:] + end for batch, end in zip(batches, ends, strict=False)]
        prompts = [batch.teacher_prompts for batch in batches if batch.teacher_prompts is not None]
        sequences, policies = join_sequences([(batch.sequences, batch.policies) for batch in batches])
        return RaggedBatch(
            torch.cat([first.offsets[:1], *offsets]),
            {name: torch.cat([batch.tokens[name] for batch in batches]) for name in first.tokens},
            sequences,
            policies,
            Images.concat([(batch.images, len(batch)) for batch in batches]),
            TeacherPrompts.concat(prompts) if prompts else None,
        )

    def select(self, indices: Sequence[int]) -> RaggedBatch:
        """Take the sequences `indices`, in that order; all columns go along."""
        rows = torch.as_tensor(indices, dtype=torch.int64)
        lengths = self.lengths[rows]
        offsets = torch.zeros(len(indices) + 1, dtype=torch.int64)
        torch.cumsum(lengths, 0, out=offsets[1:])
        take = token_places(self.offsets[rows], lengths)
        images, prompts = self.images, self.teacher_prompts
        return RaggedBatch(
            offsets,
            {name: values[take] for name, values in self.tokens.items()},
            {name: values[rows] for name, values in self.sequences.items()},
            self.policies,
            None if images is None else images.select(rows.tolist(), len(self)),
            None if prompts is None else prompts.select(rows.tolist()),
        )

    def cut(self, counts: Sequence[int]) -> list[RaggedBatch]:
        """Cut into batches of so many sequences each, in their order, whose columns are parts of these columns."""
        rows = list(itertools.accumulate(counts, initial=0))
        found = []
        images, prompts = self.images, self.teacher_prompts
        bounds = zip(rows, self.offsets[rows].tolist(), strict=True)
        for (first, start), (last, end) in itertools.pairwise(bounds):
            found.append(
                RaggedBatch(
                    self.offsets[first : last + 1] - start,
                    {name: values[start:end] for name, values in self.tokens.items()},
                    {name: values[first:last] for name, values in self.sequences.items()},
                    self.policies,
                    None if images is None else images.select(range(first, last), len(self)),
                    None if prompts is None else prompts.select(range(first, last)),
                )
            )
        return found

    def as_taught(self) -> RaggedBatch:
        """Put each sequence after its teacher's prompt, where it has one, in place of the policy's.

        Its sampled tokens are the same, in the same order; of the columns there are ids and mask alone.
        """
        prompts = self.teacher_prompts
        assert prompts is not None, "made where a teacher is privileged"
        ids, mask = [torch.zeros(0, dtype=torch.int64)], [torch.zeros(0, dtype=torch.bool)]
        offsets = torch.zeros(len(self) + 1, dtype=torch.int64)
        for row, (start, end) in enumerate(itertools.pairwise(self.offsets.tolist())):
            own = torch.from_numpy(prompts.ids[row])
            behind = slice(start + int(prompts.replaced[row]) if len(own) else start, end)
            ids += [own, self.ids[behind]]
            mask += [torch.zeros(len(own), dtype=torch.bool), self.mask[behind]]
            offsets[row + 1] = offsets[row] + len(own) + end - behind.start
        return RaggedBatch.unsampled(offsets, torch.cat(ids), torch.cat(mask), self.group, self.trajectory)

    def sequence_ids(self) -> torch.Tensor:
        """Index of the sequence that each token belongs to, [T] int64."""
        return torch.repeat_interleave(torch.arange(len(self)), self.lengths)


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of a column. Raises ConfigError where no column has the name."""
    dtype = getattr(torch, column(name).dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


def token_places(starts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """List start, start + 1, ... of each sequence: [sum of lengths] int64, from starts and lengths [N] int64."""
    before = lengths.cumsum(0) - lengths
    return torch.repeat_interleave(starts - before, lengths) + torch.arange(int(lengths.sum()))


def join_sequences(
    parts: Sequence[tuple[Mapping[str, torch.Tensor], tuple[str, ...]]],
) -> tuple[dict[str, torch.Tensor], tuple[str, ...]]:
    """Join columns [N_i] by sequence of batches, each with its `policies`, into columns [sum of N_i] and policies.

    Names of policies come in the order in which they first appear; `policy` counts these then, and -1 stays -1.
    """
    names = tuple(dict.fromkeys(name for _, policies in parts for name in policies))
    joined = {name: torch.cat([sequences[name] for sequences, _ in parts]) for name in parts[0][0]}
    if "policy" in joined:  # The entry after the last name is the one at index -1.
        codes = [torch.tensor([*map(names.index, policies), -1], dtype=torch.int32) for _, policies in parts]
        counted = [code[sequences["policy"].long()] for code, (sequences, _) in zip(codes, parts, strict=True)]
        joined["policy"] = torch.cat(counted)
    return joined, names


def split_by_tokens(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Group sequence indices into micro-batches of at most `max_tokens` tokens, longest first, first fit.

    A sequence longer than `max_tokens` gets a micro-batch of its own. Deterministic.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    bins: list[list[int]] = []
    room: list[int] = []
    for index in order:
        for position, free in enumerate(room):
            if lengths[index] <= free:
                bins[position].append(index)
                room[position] -= lengths[index]
                break
        else:
            bins.append([index])
            room.append(max_tokens - lengths[index])
    return bins
