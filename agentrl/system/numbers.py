"""Checks of numbers that user code gives: their type, and the range of float32."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from agentrl.system.throttle import OncePerKey

logger = logging.getLogger(__name__)
_is_new = OncePerKey()

LARGEST_FLOAT32 = 3.4028234663852886e38
"""Largest finite float32: rewards are trained on in it."""


def fits_float32(value: float) -> bool:
    """Check that a number is finite, and stays so in float32."""
    return abs(value) <= LARGEST_FLOAT32


def number_of(value: object) -> float | None:
    """Convert Python, numpy and 0-d tensor numbers and bools to float; None for anything else, texts included."""
    if type(value) is float:
        return value
    if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None


def finite(value: object) -> float | None:
    """Convert a number to float if it is finite in float32, in which rewards are kept; else return None."""
    number = number_of(value)
    return number if number is not None and fits_float32(number) else None


def finite_numbers(what: str, values: Mapping[str, object] | Mapping[object, object]) -> dict[str, float]:
    """Keep the finite numbers among the values next to a score, which may be texts, too.

    `what` names their source: the first number of a name that is not finite is logged.
    """
    kept = {}
    for name, value in values.items():
        number = finite(value)
        if number is not None:
            kept[str(name)] = number
        elif number_of(value) is not None and _is_new(f"{what} {name}"):
            logger.warning("%s gave %s=%s: what is not finite is left out of the metric", what, name, value)
    return kept
