"""Memory that a process may take."""

from __future__ import annotations

import os
from pathlib import Path

import torch

CGROUP = Path("/sys/fs/cgroup/memory.max")


def room(device: str) -> float:
    """Bytes of the GPU, or on a CPU of the machine's memory, less where a container's limit is lower."""
    if device == "cuda":
        return float(torch.cuda.mem_get_info()[1])
    whole = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    try:
        limit = CGROUP.read_text(encoding="ascii").strip()
    except OSError:
        return whole
    return min(whole, float(limit)) if limit.isdecimal() else whole
