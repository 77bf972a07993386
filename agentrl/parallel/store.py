"""The store at which the ranks of a process group meet. Who reaches it may read and write all that is in it."""

from __future__ import annotations

import ipaddress
import socket
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore


def listening_store(listening: socket.socket, ranks: int, timeout: timedelta) -> TCPStore:
    """Make the store of a group of `ranks` on a listening socket, which it takes over.

    By itself torch listens at every address of the machine, for any host. `timeout` bounds its calls.
    """
    address, port = listening.getsockname()[:2]
    host = "localhost" if ipaddress.ip_address(address).is_unspecified else address
    return TCPStore(
        host, port, ranks, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=listening.detach()
    )
