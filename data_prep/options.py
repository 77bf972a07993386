"""Types of values on the command line."""

from __future__ import annotations

import argparse


def positive(text: str) -> int:
    """Parse a whole number above 0."""
    value = int(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"expected a number above 0, found {text}")
    return value


def span(text: str) -> slice:
    """Parse a range of numbers from 0: A:B without B, :B, or A: up to the end."""
    begin, _, end = text.partition(":")
    if ":" not in text or not all(part.isdecimal() for part in (begin, end) if part):
        raise argparse.ArgumentTypeError(f"expected A:B, e.g. 0:2000 or 2000:, found {text}")
    return slice(int(begin or 0), int(end) if end else None)
