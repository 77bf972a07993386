"""The network that the machines of a cluster share."""

from __future__ import annotations

import os
import socket
import time

import psutil
import ray

GLOO = "GLOO_SOCKET_IFNAME"
"""Variable that names the network interface of a process group on gloo."""
ANSWERS_WITHIN = 5.0
"""Seconds in which a machine of the cluster takes a connection."""
KNOWN_WITHIN = 120.0
"""Seconds in which Ray has found out that a machine is gone, which by itself takes it half a minute."""


def use_cluster_network() -> None:
    """In a process of Ray: have gloo announce the machine by its address in the cluster, unless a user chose.

    By itself it announces the address of the machine's own name, which on Debian is 127.0.1.1.
    """
    interface = interface_of(ray.util.get_node_ip_address())
    if interface is not None:
        os.environ.setdefault(GLOO, interface)


def interface_of(address: str) -> str | None:
    """Find the network interface with an IP address; None where no interface has it, e.g. with address translation."""
    for name, found in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == address for one in found):
            return name
    return None


def is_gone(node: str) -> bool:
    """Say whether a node is no longer in the cluster; for a node that does not answer, when Ray has found out.

    Until then Ray would start a new process there.
    """
    end = time.monotonic() + KNOWN_WITHIN
    while True:
        found = next((one for one in ray.nodes() if one["NodeID"] == node and one["Alive"]), None)
        if found is None:
            return True
        if _answers(str(found["NodeManagerAddress"]), int(found["NodeManagerPort"])) or time.monotonic() > end:
            return False
        time.sleep(1.0)


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), ANSWERS_WITHIN).close()
    except OSError:
        return False
    return True
