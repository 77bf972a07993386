"""Shared ground of the parts: their command line, the rows that they print, clocks and memory of a device."""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.gpu.orchestrate import ROW, Value
from benchmarks.training.peak_memory import peak_memory

GB = 1e9


@dataclass(frozen=True, slots=True)
class Setting:
    """Options of a part."""

    device: str
    tiny: bool
    shape: str
    model: str
    dtype: str


def setting(doc: str | None) -> Setting:
    """Read the options from the command line."""
    return setting_of(options(doc).parse_args())


def options(doc: str | None) -> argparse.ArgumentParser:
    """Make the parser of the options that all parts have."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="shapes that a CPU runs in seconds")
    parser.add_argument("--shape", default="1.5B", help="the model's, where the part has several")
    parser.add_argument("--model", default="", help="folder of a pretrained model, where the part trains one")
    parser.add_argument("--dtype", help="of the model; bfloat16 on a GPU, else float32")
    return parser


def setting_of(given: argparse.Namespace) -> Setting:
    """Check the options that were given. Raises SystemExit where torch sees no device."""
    if given.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("error: torch sees no CUDA device here: --device cpu")
    dtype = given.dtype or ("bfloat16" if given.device == "cuda" else "float32")
    return Setting(given.device, given.tiny, given.shape, given.model, dtype)


def row(label: str, **values: Value) -> None:
    """Print one row of the report; keyword arguments are columns, in which `_` stands for a space."""
    columns = {name.replace("_", " "): round_off(value) for name, value in values.items()}
    print(f"{ROW}{json.dumps([label, columns])}", flush=True)


def round_off(value: Value) -> Value:
    return float(f"{value:.4g}") if isinstance(value, float) else value


@contextmanager
def out_of_memory_is_a_row(label: str) -> Iterator[None]:
    """The rest of the part goes on after a case that the device has no room for."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        row(label, error=f"out of memory: {str(error).splitlines()[0][:120]}")
    finally:
        free()


def free() -> None:
    """Give back what nothing refers to any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def seconds(call: Callable[[], object], device: str) -> float:
    """Seconds by the clock of a call and all work of the device that it began."""
    wait(device)
    began = time.perf_counter()
    call()
    wait(device)
    return time.perf_counter() - began


def median_seconds(call: Callable[[], object], device: str, times: int, warm_up: int = 1) -> float:
    for _ in range(warm_up):
        call()
    return statistics.median(seconds(call, device) for _ in range(times))


@dataclass(slots=True)
class Memory:
    """Bytes of the device."""

    before: int = 0
    peak: int = 0
    """With what was there before; on a CPU without."""


@contextmanager
def memory(device: str) -> Iterator[Memory]:
    """The most that tensors took during the block; on a CPU what the process grew by."""
    seen = Memory()
    if device == "cuda":
        wait(device)
        torch.cuda.reset_peak_memory_stats()
        seen.before = torch.cuda.memory_allocated()
        yield seen
        wait(device)
        seen.peak = torch.cuda.max_memory_allocated()
        return
    with peak_memory() as host:
        yield seen
    seen.peak = host.bytes


def matmul_flops(device: str) -> float:
    """FLOPs a second of one large product of random matrices, in bfloat16 on a GPU: the most that can be had here."""
    size, dtype = (8192, torch.bfloat16) if device == "cuda" else (512, torch.float32)
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2.0 * size**3 / median_seconds(lambda: left @ right, device, 10, warm_up=3)


def copy_bandwidth(device: str) -> float:
    """Bytes a second that a copy within the device's memory reads and writes."""
    source = torch.randn(1 << (28 if device == "cuda" else 22), device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_seconds(lambda: target.copy_(source), device, 10, warm_up=3)


@contextmanager
def model_folder() -> Iterator[Path]:
    """A temporary folder, in memory where that has 40 GB of room: writing a model is not what is measured."""
    shared = Path("/dev/shm")
    place = shared if shared.is_dir() and shutil.disk_usage(shared).free > 40 * GB else None
    with tempfile.TemporaryDirectory(dir=place) as name:
        yield Path(name)
