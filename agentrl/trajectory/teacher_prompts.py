"""Prompts that a privileged teacher reads in place of the policy's, and the sequences as it reads them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from agentrl.trajectory import Transcript

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class TeacherPrompts:
    """Prompts of N sequences."""

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
