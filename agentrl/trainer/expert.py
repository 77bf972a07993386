"""An expert's transcripts that are learnt together with the policy's own trajectories."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

from agentrl.chat import Chat
from agentrl.config.sections.expert import ExpertConfig
from agentrl.data.sft import SFTSample, load_transcripts
from agentrl.observe.display import Display, warn_of_counts
from agentrl.trainer.run_sft import tell
from agentrl.trajectory.batch import RaggedBatch
from agentrl.workers.sft import to_batch


@dataclass(frozen=True, slots=True)
class ExpertStream:
    """Transcripts without an end: pass after pass, each in an order of its own.

    The transcripts of a training step follow from its number alone, so that a resumed run takes the same.
    """

    samples: list[SFTSample]
    batch_size: int
    seed: int

    def batch(self, step: int) -> RaggedBatch:
        """Take the transcripts of training step `step`, counted from 1."""
        count = len(self.samples)
        first = (step - 1) * self.batch_size
        orders: dict[int, list[int]] = {}
        taken = []
        for number in range(first, first + self.batch_size):
            turn, place = divmod(number, count)
            if turn not in orders:
                orders[turn] = random.Random(f"{self.seed}/{turn}").sample(range(count), count)
            taken.append(self.samples[orders[turn][place]])
        return to_batch(taken)


def open_expert(
    config: ExpertConfig, seed: int, chat: Chat, display: Display, on_bad_row: Literal["error", "skip"] = "error"
) -> ExpertStream | None:
    """Read the transcripts; None where the config names no file of them. Raises UserError."""
    if config.files is None:
        return None
    remarks = chat.remarks.copy()
    with display.stage("read transcripts", total=None) as stage:
        data = config.data.model_copy(update={"on_bad_row": on_bad_row, "feedback": "ignore"})
        found = load_transcripts(config.files, data, chat, stage.advance)
    if found.too_long:
        display.warn(f"{found.too_long} transcripts are longer than expert.max_length={config.max_length} and left out")
    tell(found, f"of {len(found.samples)} transcripts of {config.files}", display)
    warn_of_counts(display, chat.remarks - remarks, f"transcripts of {config.files}")
    return ExpertStream(found.samples, config.batch_size, seed)
