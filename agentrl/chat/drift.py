"""How far a transcript is from what the chat template would write for the same messages."""

from __future__ import annotations

from enum import StrEnum


class Drift(StrEnum):
    """A metric, not a fault: training uses the transcript, never the re-render."""

    CLEAN = "clean"
    """The same token ids."""
    REALIGN = "realign"
    """The same text with other token boundaries, as when the policy samples an unusual tokenization."""
    FORK = "fork"
    """Another text. Legitimate where a template rewrites history, e.g. drops earlier turns' reasoning."""
