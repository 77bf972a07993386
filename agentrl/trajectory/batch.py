"""The ragged batch: N sequences as T tokens in a row and the offsets where each begins. There is no padding."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol, Self

import torch

from agentrl.trajectory.images import Images
from agentrl.trajectory.teacher_prompts import TeacherPrompts

_TOKEN = {"kind": "token"}
_SEQUENCE = {"kind": "sequence"}


class Sequences(Protocol):
    """Sequences whose tokens may be in another process: numbers by sequence to plan with, and a way to fetch tokens."""

    @property
    def lengths(self) -> torch.Tensor:
        """Tokens of each sequence, [N] int64."""
        ...

    @property
    def group(self) -> torch.Tensor:
        """Index of each sequence's prompt, [N] int64."""
        ...

    @property
    def policy_tokens(self) -> torch.Tensor:
        """Tokens of each sequence that the policy sampled, [N] int64."""
        ...

    @property
    def policy(self) -> torch.Tensor:
        """Index in `policies` of the policy that sampled each sequence, [N] int32; -1 without sampled tokens."""
        ...

    @property
    def policies(self) -> tuple[str, ...]:
        """Names of policies."""
        ...

    @property
    def num_tokens(self) -> int:
        """T, the tokens of all sequences."""
        ...

    def __len__(self) -> int: ...

    def has(self, field: str) -> bool:
        """Check whether the optional field of `RaggedBatch` is there."""
        ...

    def select(self, indices: Sequence[int]) -> Self:
        """Take the sequences `indices`, in that order."""
        ...

    def with_fields(self, **values: Any) -> Self:
        """Return the same sequences with fields added or replaced: columns that a worker group computed for them."""
        ...

    def joined(self, others: Sequence[Self]) -> Self:
        """Append the sequences of `others`. All must have the same optional fields."""
        ...

    def load(self) -> RaggedBatch:
        """Fetch all tokens into this process."""
        ...


@dataclass(slots=True)
class RaggedBatch:
    """T tokens of N sequences in a row, without padding.

    A token field's entry t belongs to ids[t]: `logprobs[t]` is log p(ids[t] | the tokens before it in its sequence). So
    the first token of a sequence never has a log-prob. `mask` is True where the policy sampled the token, and `version`
    and `turn` are -1 where it is False.
    """

    offsets: torch.Tensor  # [N + 1] int64, offsets[0] = 0, offsets[N] = T
    ids: torch.Tensor = field(metadata=_TOKEN)  # [T] int64
    mask: torch.Tensor = field(metadata=_TOKEN)  # [T] bool
    rollout_logprobs: torch.Tensor = field(metadata=_TOKEN)  # [T] float32, the engine's
    version: torch.Tensor = field(metadata=_TOKEN)  # [T] int32, of the weights that sampled the token
    turn: torch.Tensor = field(metadata=_TOKEN)  # [T] int32, index in the trajectory's `turns`
    rewards: torch.Tensor = field(metadata=_TOKEN)  # [T] float32, each on a policy token
    group: torch.Tensor = field(metadata=_SEQUENCE)  # [N] int64, index of the prompt
    trajectory: torch.Tensor = field(metadata=_SEQUENCE)  # [N] int64, sequences of one trajectory share it
    policy: torch.Tensor = field(metadata=_SEQUENCE)  # [N] int32, index in `policies`; -1 where no policy sampled
    policies: tuple[str, ...]
    """Names; `version` counts each policy's weights separately."""
    state: torch.Tensor | None = field(default=None, metadata=_TOKEN)  # [T] int64, a hash; -1 where mask is False
    experts: torch.Tensor | None = field(default=None, metadata=_TOKEN)  # [T, L, k] uint8 or int16, to replay
    old_logprobs: torch.Tensor | None = field(default=None, metadata=_TOKEN)  # [T] float32, before the update
    ref_logprobs: torch.Tensor | None = field(default=None, metadata=_TOKEN)  # [T] float32, the reference policy's
    values: torch.Tensor | None = field(default=None, metadata=_TOKEN)  # [T] float32, the critic's
    entropy: torch.Tensor | None = field(default=None, metadata=_TOKEN)  # [T] float32, nats, before the update
    squared_probs: torch.Tensor | None = field(default=None, metadata=_TOKEN)  # [T] float32, sum over the vocabulary
    varentropy: torch.Tensor | None = field(default=None, metadata=_TOKEN)  # [T] float32, variance of -log p
    advantages: torch.Tensor | None = field(default=None, metadata=_TOKEN)  # [T] float32
    correction: torch.Tensor | None = field(default=None, metadata=_TOKEN)  # [T] float32, factor of the policy's loss
    staleness: torch.Tensor | None = field(default=None, metadata=_TOKEN)  # [T] int64, 0 where mask is False
    selected: torch.Tensor | None = field(default=None, metadata=_TOKEN)  # [T] bool, by the policy's loss
    returns: torch.Tensor | None = field(default=None, metadata=_TOKEN)  # [T] float32
    success: torch.Tensor | None = field(default=None, metadata=_TOKEN)  # [T] float32, 1: of a trajectory that succeeds
    teacher: torch.Tensor | None = field(default=None, metadata=_TOKEN)  # [T] int32, index; -1 without a teacher
    teacher_scores: torch.Tensor | None = field(default=None, metadata=_TOKEN)  # [T, 1 + X] float32, a teacher's
    greedy_rewards: torch.Tensor | None = field(default=None, metadata=_SEQUENCE)  # [N] float32, NaN: unknown
    ratio: torch.Tensor | None = field(default=None, metadata=_TOKEN)  # [T] float32, NaN: unknown
    clipped: torch.Tensor | None = field(default=None, metadata=_TOKEN)  # [T] float32, 1: by the loss
    correction_clipped: torch.Tensor | None = field(default=None, metadata=_TOKEN)  # [T] float32, likewise
    row: torch.Tensor | None = field(default=None, metadata=_SEQUENCE)  # [N] int64, in the batch of the whole step
    images: Images | None = None
    """The images of all sequences; None without images."""
    teacher_prompts: TeacherPrompts | None = None
    """Prompts that a privileged teacher reads; None where no teacher is."""

    def __len__(self) -> int:
        return self.offsets.numel() - 1

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

    def has(self, field: str) -> bool:
        return getattr(self, field) is not None

    def with_fields(self, **values: Any) -> RaggedBatch:
        return replace(self, **values)

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
        return RaggedBatch(
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
            policies=(),
        )

    @staticmethod
    def concat(batches: Sequence[RaggedBatch]) -> RaggedBatch:
        """Put the sequences of batches, at least one, after each other. All must have the same optional fields."""
        ends = torch.tensor([0, *(batch.num_tokens for batch in batches)]).cumsum(0).tolist()
        offsets = [batch.offsets[1:] + end for batch, end in zip(batches, ends, strict=False)]
        changes: dict[str, Any] = {"offsets": torch.cat([batches[0].offsets[:1], *offsets])}
        changes["images"] = Images.concat([(batch.images, len(batch)) for batch in batches])
        prompts = [batch.teacher_prompts for batch in batches if batch.teacher_prompts is not None]
        changes["teacher_prompts"] = TeacherPrompts.concat(prompts) if prompts else None
        for item in fields(RaggedBatch):
            if item.metadata and batches[0].has(item.name):
                changes[item.name] = torch.cat([getattr(batch, item.name) for batch in batches])
        changes["policy"], changes["policies"] = join_policies([(batch.policy, batch.policies) for batch in batches])
        return replace(batches[0], **changes)

    def select(self, indices: Sequence[int]) -> RaggedBatch:
        """Take the sequences `indices`, in that order; all columns go along."""
        rows = torch.as_tensor(indices, dtype=torch.int64)
        lengths = self.lengths[rows]
        offsets = torch.zeros(len(indices) + 1, dtype=torch.int64)
        torch.cumsum(lengths, 0, out=offsets[1:])
        take = token_places(self.offsets[rows], lengths)
        changes: dict[str, Any] = {"offsets": offsets}
        if self.images is not None:
            changes["images"] = self.images.select(rows.tolist(), len(self))
        if self.teacher_prompts is not None:
            changes["teacher_prompts"] = self.teacher_prompts.select(rows.tolist())
        for item in fields(self):
            value = getattr(self, item.name)
            if value is not None and item.metadata:
                changes[item.name] = value[take] if item.metadata["kind"] == "token" else value[rows]
        return replace(self, **changes)

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


def token_places(starts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """List start, start + 1, ... of each sequence: [sum of lengths] int64, from starts and lengths [N] int64."""
    before = lengths.cumsum(0) - lengths
    return torch.repeat_interleave(starts - before, lengths) + torch.arange(int(lengths.sum()))


def join_policies(parts: Sequence[tuple[torch.Tensor, tuple[str, ...]]]) -> tuple[torch.Tensor, tuple[str, ...]]:
    """Join the `policy` columns [N_i] int32 of batches, each with its `policies`, into one [sum of N_i] int32.

    Names come in the order in which they first appear. -1 stays -1.
    """
    names = tuple(dict.fromkeys(name for _, policies in parts for name in policies))
    # The entry after the last name is the one at index -1.
    codes = [torch.tensor([*map(names.index, policies), -1], dtype=torch.int32) for _, policies in parts]
    return torch.cat([code[policy.long()] for code, (policy, _) in zip(codes, parts, strict=True)]), names


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
