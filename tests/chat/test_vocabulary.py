"""Two vocabularies, compared id by id."""

from __future__ import annotations

from agentrl.chat.vocabulary import difference

OWN = {"x": 0, "y": 1, "z": 2}


def test_every_id_must_mean_the_same() -> None:
    assert difference(OWN, OWN) is None
    assert difference(OWN, OWN | {"w": 3}) is None, "further tokens are the other's alone"
    swapped = difference(OWN, {"x": 0, "z": 1, "y": 2})
    assert swapped == "2 of 3 ids mean another token: 1 is 'y' here, there it is 'z', and 'y' has id 2 there"
    less = difference(OWN, {"x": 0, "y": 1})
    assert less == "1 of 3 ids mean another token: 2 is 'z' here, there is no such id there, and no token is 'z' there"
