"""Description of the machine, and the rates that it reaches, which the other parts are compared with."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import tempfile
from functools import partial
from importlib.metadata import PackageNotFoundError, version

import torch

from agentrl import __version__
from benchmarks.gpu.part import GB, copy_bandwidth, matmul_flops, median_seconds, row, setting

PACKAGES = ("torch", "triton", "transformers", "tokenizers", "safetensors", "numpy", "peft", "hydra-core", "pydantic")
QUERY = "name,driver_version,memory.total,memory.free,clocks.max.sm,power.limit"


def installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not there"


def main() -> None:
    device = setting(__doc__).device
    row("agentrl", value=__version__)
    row("python", value=platform.python_version())
    row("kernel", value=platform.release())
    for package in PACKAGES:
        row(package, value=installed(package))
    row("CUDA of torch", value=torch.version.cuda)
    row("cores", value=os.cpu_count())
    row("memory, GB", value=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GB)
    for place in (tempfile.gettempdir(), "/dev/shm"):
        if os.path.isdir(place):  # noqa: PTH112
            row(f"free in {place}, GB", value=shutil.disk_usage(place).free / GB)
    if device == "cuda":
        gpu()
    row("matrix product, TFLOP/s", value=matmul_flops(device) / 1e12)
    row("copy in the device's memory, GB/s read and written", value=copy_bandwidth(device) / GB)


def gpu() -> None:
    properties = torch.cuda.get_device_properties(0)
    row("GPU", value=properties.name)
    row("compute capability", value=f"{properties.major}.{properties.minor}")
    row("multiprocessors", value=properties.multi_processor_count)
    free, total = torch.cuda.mem_get_info()
    row("GPU memory, GB", value=total / GB)
    row("GPU memory free, GB", value=free / GB)
    program = shutil.which("nvidia-smi")
    if program is not None:
        words = [program, f"--query-gpu={QUERY}", "--format=csv,noheader"]
        said = subprocess.run(words, capture_output=True, text=True, timeout=30).stdout.strip()
        row(f"nvidia-smi: {QUERY}", value=said)
    few = torch.ones(8, device="cuda")
    thousand = median_seconds(lambda: [few.add_(1) for _ in range(1000)], "cuda", 5)
    row("kernel launch, microseconds", value=thousand * 1e3)
    for name, pinned in (("page-locked", True), ("pageable", False)):
        host = torch.empty(1 << 28, pin_memory=pinned)
        there = torch.empty_like(host, device="cuda")
        for way, copy in (("host to GPU", partial(there.copy_, host)), ("GPU to host", partial(host.copy_, there))):
            row(f"{way}, {name}, GB/s", value=host.nbytes / median_seconds(copy, "cuda", 3) / GB)


if __name__ == "__main__":
    main()
