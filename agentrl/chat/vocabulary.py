"""Comparison of two tokenizers' vocabularies, id by id."""

from __future__ import annotations

from collections.abc import Mapping


def difference(own: Mapping[str, int], other: Mapping[str, int]) -> str | None:
    """Say where another vocabulary gives ids of `own` another meaning; None where every id of `own` means the same.

    Both map tokens to ids. The other may have further tokens, at ids that `own` does not use.
    """
    meaning = {id: token for token, id in other.items()}
    wrong = sorted((id, token) for token, id in own.items() if meaning.get(id) != token)
    if not wrong:
        return None
    id, token = wrong[0]
    there = f"there it is {meaning[id]!r}" if id in meaning else "there is no such id there"
    placed = f", and {token!r} has id {other[token]} there" if token in other else f", and no token is {token!r} there"
    return f"{len(wrong)} of {len(own)} ids mean another token: {id} is {token!r} here, {there}{placed}"
