"""Several rankings of the same documents as one: reciprocal rank fusion (Cormack et al., SIGIR 2009)."""

from __future__ import annotations

from collections.abc import Sequence

from tools.retriever.lexical import Hit

K = 60
"""Constant of the paper: the larger, the less the first ranks differ."""


def fuse(rankings: Sequence[Sequence[Hit]], topk: int) -> list[Hit]:
    """Fuse rankings and return the best `topk`; the score is the sum of 1 / (K + rank) over the rankings with the
    document."""
    scores: dict[int, float] = {}
    for ranking in rankings:
        for rank, hit in enumerate(ranking, 1):
            scores[hit.row] = scores.get(hit.row, 0.0) + 1 / (K + rank)
    fused = [Hit(row, score) for row, score in scores.items()]
    return sorted(fused, key=lambda hit: (-hit.score, hit.row))[:topk]
