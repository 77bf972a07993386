"""Drift: the difference between a transcript and a full render of the same messages."""

from __future__ import annotations

from enum import StrEnum


class Drift(StrEnum):
    """Kind of drift: a metric, not a fault, since training uses the transcript and never the render."""

    CLEAN = "clean"
    """The same token ids."""
    REALIGN = "realign"
    """The same text with other token boundaries, as when the policy samples an unusual tokenization."""
    FORK = "fork"
    """Another text. Legitimate where a template rewrites history, e.g. drops earlier turns' reasoning."""
