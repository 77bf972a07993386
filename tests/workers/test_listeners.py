"""Where the processes of a run listen: on loopback, when all of them are on one machine."""

from __future__ import annotations

import ipaddress
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from agentrl.config import Config
from agentrl.config.sections.trainer import RayInitConfig
from agentrl.engines.servers.sync import distributed
from agentrl.parallel.store import listening_store
from agentrl.workers.roles import open_workers

LIMIT = timedelta(seconds=30)


def reachable_from_outside(processes: list[psutil.Process]) -> list[str]:
    """Listening sockets of the processes that another machine can reach."""
    found = []
    for process in processes:
        for one in process.net_connections("tcp"):
            address = ipaddress.ip_address(one.laddr.ip) if one.status == psutil.CONN_LISTEN else None
            mapped = getattr(address, "ipv4_mapped", None) or address
            if mapped is not None and not mapped.is_loopback:
                found.append(f"{process.name()}: {one.laddr}")
    return found


def test_the_store_and_the_connections_of_a_group_are_where_they_are_told_to_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # as ranks of one machine have it
    before = reachable_from_outside([psutil.Process(os.getpid())])
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        store = listening_store(listening, 2, LIMIT)

    def join(rank: int) -> torch.Tensor:
        mine = store if rank == 0 else TCPStore("127.0.0.1", port, 2, is_master=False, timeout=LIMIT)
        group = dist.ProcessGroupGloo(mine, rank, 2, timeout=LIMIT)
        summed = torch.ones(1)
        group.allreduce([summed]).wait()  # type: ignore[attr-defined]  # torch does not declare it
        assert reachable_from_outside([psutil.Process(os.getpid())]) == before
        return summed

    with ThreadPoolExecutor(2) as threads:
        assert [float(summed) for summed in threads.map(join, range(2))] == [2.0, 2.0]


def test_gloo_announces_the_address_that_servers_see_whatever_the_machines_own_name_resolves_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(distributed, "address_towards", lambda url: "127.0.0.9")
    process = psutil.Process(os.getpid())
    before = {one.laddr for one in process.net_connections("tcp")}
    group = distributed._Group([SimpleNamespace(url="http://server:1")], [("http://server:1", 0)], "gloo", 30.0)
    group.join()
    listening = {one.laddr for one in process.net_connections("tcp") if one.status == psutil.CONN_LISTEN}
    group.abort()
    assert {laddr.ip for laddr in listening - before} == {"127.0.0.9"}
    assert len(listening - before) == 2, "the store and gloo"


def test_the_interface_of_an_address_of_this_machine() -> None:
    pytest.importorskip("ray")
    from agentrl.runtime.ray.network import interface_of

    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.7") is None, "an address of nobody (RFC 5737)"


@pytest.mark.slice(0, "cluster")
@pytest.mark.timeout(600)
def test_no_process_of_a_run_on_one_machine_is_reached_from_outside(tiny_policy: Path) -> None:
    pytest.importorskip("ray")
    from agentrl.runtime.ray.session import ray_session

    config = Config.model_validate(
        {
            "actor_rollout_ref": {"model": {"path": str(tiny_policy)}},
            "trainer": {"n_gpus_per_node": 2, "device": "cpu"},
        }
    )
    with ray_session(RayInitConfig(num_cpus=2), 2):
        workers = open_workers(config, "cpu", 10)
        try:
            this = psutil.Process(os.getpid())
            processes = [this, *this.children(recursive=True)]
            names = {process.name() for process in processes}
            assert {"gcs_server", "raylet"} <= names and any("Rank" in name for name in names)
            assert reachable_from_outside(processes) == []
        finally:
            workers.executor.close()
