"""A server on another machine than the trainer's, with nothing in common but the network and one folder."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import PROJECT
from tests.machines import HOME, SHARED, Network, why_not
from tests.sglang.test_training import ROLLOUT, assert_trained
from tests.sglang.training import overrides, write_assets

pytestmark = [pytest.mark.timeout(1500), pytest.mark.slice(0, "cluster")]
TRAINER, SERVER, PORT = "trainer", "server", 30000
SERVE = f"""
import asyncio
from pathlib import Path
from agentrl.engines.sglang.options import SGLangArguments
from agentrl.engines.sglang.process import SGLangProcess

arguments = SGLangArguments(
    "{HOME}/model", device="cpu", context_length=256, max_num_seqs=16, dtype="float32", host="10.99.0.2"
)
process = SGLangProcess(arguments, {PORT}, Path("server.log"))
process.start()
asyncio.run(process.ready(600))
Path("ready").touch()
asyncio.run(asyncio.Event().wait())
"""
ENVIRONMENT = {"PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


@pytest.fixture(scope="module")
def network(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    """A trainer's machine and a server's, on which one runs."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("machines")
    (folder / "shared").mkdir()
    made = Network([TRAINER, SERVER], folder / "shared")
    try:
        for machine in made.machines.values():
            shutil.copytree(model_dir, machine.path(HOME / "model"))
        home = made.machines[SERVER].path(HOME)
        # It announces itself to the trainer by what its own name resolves to, which is on loopback.
        serving = made.machines[SERVER].popen(
            [sys.executable, "-c", SERVE], {**ENVIRONMENT, "GLOO_SOCKET_IFNAME": "eth0"}
        )
        end = time.monotonic() + 600
        while not (home / "ready").exists():
            assert serving.poll() is None and time.monotonic() < end, (home / "server.log").read_text()[-3000:]
            time.sleep(0.2)
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("transport", ["distributed", "disk"])
def test_weights_reach_a_server_on_another_machine(network: Network, tmp_path: Path, transport: str) -> None:
    trainer = network.machines[TRAINER]
    assets = tmp_path / "assets"
    assets.mkdir()
    shutil.copytree(write_assets(assets), trainer.path(HOME / transport))
    run_dir = SHARED / transport if transport == "disk" else HOME / transport
    more = [
        f"{ROLLOUT}.server_urls=[http://{network.addresses[SERVER]}:{PORT}]",
        f"{ROLLOUT}.update_weights_transport={transport}",
        f"{ROLLOUT}.update_weights_checksum=true",
        "trainer.total_training_steps=2",
    ]
    arguments = overrides(HOME / transport, HOME / "model", run_dir, *more)
    run = trainer.popen(
        [sys.executable, "-m", "agentrl.train", *arguments],
        {**ENVIRONMENT, "PYTHONPATH": f"{PROJECT}:{HOME / transport}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    said, _ = run.communicate(timeout=900)
    assert run.returncode == 0, said
    assert_trained(trainer.path(run_dir), range(1, 3))
