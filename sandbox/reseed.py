"""Random generators that libraries seeded when a zygote imported them.

Every run would get the same numbers from them. A zygote finds them all once, whichever library they are of, and each
run seeds them anew, as a fresh interpreter would have.
"""

from __future__ import annotations

import gc
import random
import sys
from typing import Any

_found: list[Any] = []


def find() -> None:
    """Remember all generators of this process, before a garbage collector that is frozen hides them."""
    numpy = sys.modules.get("numpy.random")
    kinds = (random.Random, numpy.RandomState, numpy.Generator) if numpy else (random.Random,)
    _found[:] = [found for found in gc.get_objects() if issubclass(type(found), kinds)]


def seed() -> None:
    """Seed each of them by the system's randomness."""
    for generator in _found:
        if hasattr(generator, "seed"):
            generator.seed()
        else:
            bits = generator.bit_generator
            bits.state = type(bits)().state
    if symbols := sys.modules.get("sympy.core.symbol"):  # drawn when it was imported
        symbols.Dummy._base_dummy_index = symbols.Dummy._prng.randint(10**6, 9 * 10**6)
