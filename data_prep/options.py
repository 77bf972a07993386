"""Types of values on the command line."""

from __future__ import annotations

import argparse


def positive(text: str) -> int:
    """Parse a whole number above 0."""
    value = int(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"expected a number above 0, found {text}")
    return value
