"""Numbers that user code gives: what is one, and what float32 can hold."""

from __future__ import annotations

LARGEST_FLOAT32 = 3.4028234663852886e38
"""Rewards are trained on in float32."""


def fits_float32(value: float) -> bool:
    """Whether a number is finite, and stays so in float32."""
    return abs(value) <= LARGEST_FLOAT32


def number_of(value: object) -> float | None:
    """Python, numpy and 0-d tensor numbers and bools as float; None for anything else, texts included."""
    if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None


def finite(value: object) -> float | None:
    """The number, or None for what is no finite one in float32, in which rewards are kept."""
    number = number_of(value)
    return number if number is not None and fits_float32(number) else None
