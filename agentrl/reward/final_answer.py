"""Exact match of what follows the last `####`."""

from __future__ import annotations


def compute_score(data_source: str, solution_str: str, ground_truth: object, extra_info: object = None) -> float:
    """1.0 when the text after the last `####`, without surrounding space, is the ground truth; else 0.0."""
    _, marker, answer = solution_str.rpartition("####")
    return float(bool(marker) and answer.strip() == str(ground_truth).strip())
