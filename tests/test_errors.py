"""Errors for users, as a notebook shows them."""

from __future__ import annotations

import json

import pytest

from agentrl.errors import UserError


def test_a_notebook_shows_the_users_places_and_the_message() -> None:
    """IPython asks the error for its lines. Frames of Python's library and of agentrl are none of the user's."""

    def own(pair: tuple[str, str]) -> None:
        raise UserError(f"key {pair[0]}: wrong")

    with pytest.raises(UserError) as found:
        json.loads('{"a": "b"}', object_pairs_hook=lambda pairs: own(pairs[0]))
    found.value.add_note("a note")
    lines = found.value._render_traceback_()
    assert lines[-2:] == ["UserError: key a: wrong", "a note"]
    assert lines[0].startswith(f"  {__file__}:") and all(__file__ in line for line in lines[:-2])
    assert "in own: raise UserError" in lines[-3]
