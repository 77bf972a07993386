"""Published coding programs act in containers, by the same harnesses: `make setup-programs`."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl.agents.agent import AgentOptions
from agentrl.trajectory import Status
from tests.harnesses.conftest import Harnessed
from tests.harnesses.test_programs import SHELLS, WRITE, Policy, run
from tests.programs import program


@pytest.mark.slice(0, "matrix")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", SHELLS)
async def test_a_program_repairs_a_folder_in_a_container(
    harnessed: Callable[..., Harnessed], options: Callable[..., AgentOptions], name: str
) -> None:
    place = program(SHELLS[name][0])
    node = shutil.which("node")
    roots = {str(place.parents[1].resolve()), sys.base_prefix, *([str(Path(node).parents[1])] if node else [])}
    mounts = [word for one in sorted(roots - {"/usr"}) for word in ("--volume", f"{one}:{one}:ro")]
    box = {"arguments": mounts, "memory_megabytes": 2048, "disk_megabytes": 256, "processes": 256}
    given = options(box, harness=name, command=[str(place.resolve())], train="auto")
    policy = Policy(name, [run(name, WRITE)])
    (found,) = await harnessed(given, policy).run()
    assert (found.status, found.score, found.failure) == (Status.COMPLETED, 1.0, None)
    assert found.metrics.get("openai_bad_requests", 0) == 0 and found.metrics["containers"] == 2
