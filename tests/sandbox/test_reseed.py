"""Two runs of a zygote draw different numbers, whichever library they ask."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sandbox.limits import Limits
from sandbox.pool import PRELOADED, Command, Job
from tests.sandbox.test_isolation import best

STATES = """
import gc, hashlib, json, random, sys
gc.unfreeze()
states = {}
for found in gc.get_objects():
    kind = type(found)
    if not issubclass(kind, random.SystemRandom) and (hasattr(kind, "seed") or hasattr(kind, "bit_generator")):
        asked = next((name for name in ("getstate", "get_state") if hasattr(kind, name)), None)
        state = getattr(found, asked)() if asked else found.bit_generator.state
        states[hashlib.sha256(repr(state).encode()).hexdigest()] = str(kind)
print(json.dumps(states))
"""
"""All generators in the memory that a run inherits: digest of the state, and kind."""

DRAWS = {
    "": [
        "random.random()",
        "random.getrandbits(64)",
        "random.Random().random()",
        "random.SystemRandom().random()",
        "os.urandom(8).hex()",
        "secrets.token_hex()",
        "uuid.uuid1().hex",
        "uuid.uuid4().hex",
        "tempfile.mkdtemp()",
        "tempfile.mktemp()",
        "ssl.RAND_bytes(8).hex()",
    ],
    "numpy": [
        "numpy.random.rand()",
        "numpy.random.bytes(8).hex()",
        "numpy.random.permutation(1000).tolist()",
        "numpy.random.RandomState().rand()",
        "numpy.random.default_rng().random()",
        "numpy.random.SeedSequence().entropy",
    ],
    "sympy": [
        "sympy.randprime(10**20, 10**21)",
        "sympy.core.random.random()",
        "sympy.core.random._assumptions_rng.random()",
        "str(sympy.randMatrix(6))",
        "sympy.srepr(sympy.Dummy('x'))",
        "str(mpmath.rand())",
    ],
}


async def printed(code: str, warm: str, times: int) -> list[Any]:
    """What a program prints as JSON in so many runs."""
    pool = await best()
    try:
        job = Job([Command(None, 20.0)], {"main.py": code.encode()}, warm=warm)
        outcomes = [(await pool.run(job, Limits())).commands[0] for _ in range(times)]
    finally:
        await pool.stop()
    assert [outcome.code for outcome in outcomes] == [0] * times, outcomes[0].stderr.decode()
    return [json.loads(outcome.stdout) for outcome in outcomes]


@pytest.mark.parametrize("warm", PRELOADED)
async def test_no_generator_is_inherited_as_it_was(warm: str) -> None:
    first, second = await printed(STATES, warm, 2)
    assert len(first) >= 1 + bool(warm) + 3 * (warm == "sympy")
    assert not set(first) & set(second), {first[state] for state in set(first) & set(second)}


@pytest.mark.parametrize("warm", PRELOADED)
async def test_no_draw_repeats_itself(warm: str) -> None:
    draws = [draw for name, more in DRAWS.items() if not name or name in PRELOADED[warm] for draw in more]
    modules = {"json", "mpmath"} if warm == "sympy" else {"json"}
    imports = ", ".join(sorted(modules | {draw.partition(".")[0] for draw in draws if not draw.startswith("str")}))
    code = f"import {imports}\nprint(json.dumps({{draw: eval(draw) for draw in {draws!r}}}))"
    runs = await printed(code, warm, 3)
    repeated = [draw for draw in draws if len({json.dumps(run[draw]) for run in runs}) < len(runs)]
    assert not repeated


async def test_a_session_draws_numbers_of_its_own(client: Any) -> None:
    code = "import random, numpy, sympy\n(random.random(), numpy.random.rand(), sympy.randprime(10**20, 10**21))"
    drawn = []
    for name in ("r", "s"):
        answer = (await client.post("/run_session", json={"session_id": name, "code": code})).json()
        drawn += answer["result"].strip("()").split(", ")
        await client.delete(f"/sessions/{name}")
    assert len(set(drawn)) == 6
