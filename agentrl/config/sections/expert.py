"""Keys of `expert.*`: transcripts that are learnt next to the policy's own trajectories."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from agentrl.config.rules import OnlyWith
from agentrl.config.section import Section
from agentrl.config.sections.sft import SFTDataConfig

GIVEN = OnlyWith("files")


class ExpertConfig(Section):
    """`expert.*`: each optimizer step also learns the assistant's words in an expert's transcripts."""

    files: str | list[str] | None = None
    """Transcripts as `python -m agentrl.sft` reads them (docs/sft.md); null: none."""
    coef: Annotated[float, GIVEN] = Field(0.1, ge=0)
    """Weight of their mean negative log-likelihood by token, at rollout.temperature, in the loss."""
    batch_size: Annotated[int, GIVEN] = Field(32, gt=0)
    """Transcripts a training step, spread over its optimizer steps; the order is shuffled anew in each pass."""
    max_length: Annotated[int, GIVEN] = Field(2048, gt=0)
    """Tokens of a transcript; longer ones are left out, and counted."""

    @property
    def data(self) -> SFTDataConfig:
        """The same keys as supervised training has them."""
        assert self.files is not None
        return SFTDataConfig(
            train_files=self.files, train_batch_size=self.batch_size, max_length=self.max_length, truncation="skip"
        )
