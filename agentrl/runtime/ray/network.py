"""The network that the machines of a cluster share."""

from __future__ import annotations

import os

import psutil
import ray

GLOO = "GLOO_SOCKET_IFNAME"
"""Variable that names the network interface of a process group on gloo."""


def use_cluster_network() -> None:
    """In a process of Ray: have gloo announce the machine by its address in the cluster, unless a user chose.

    By itself it announces what the machine's own name resolves to, which on Debian is 127.0.1.1.
    """
    interface = interface_of(ray.util.get_node_ip_address())
    if interface is not None:
        os.environ.setdefault(GLOO, interface)


def interface_of(address: str) -> str | None:
    """Find the network interface with an IP address; None where no interface has it, as behind a translation."""
    for name, found in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == address for one in found):
            return name
    return None
