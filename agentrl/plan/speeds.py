"""Speeds that a plan reckons with, and where each of them comes from.

A figure is a value for a field of `Cluster`. Assumed ones are the fields' defaults; a data sheet, a measurement of this
process or the report of a GPU (`measured.py`) replaces them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from time import perf_counter
from typing import NamedTuple

import torch

from agentrl.plan.sizing import ModelShape
from agentrl.plan.step_times import Cluster

CARDS = {
    "H100 PCIe": (756e12, 2.0e12),
    "H100 NVL": (835e12, 3.9e12),
    "H100": (989e12, 3.35e12),
    "H200": (989e12, 4.8e12),
    "A100": (312e12, 2.0e12),
}
"""By what a GPU's name contains: dense bfloat16 FLOPs and bytes of memory a second (NVIDIA's data sheets)."""
ASSUMED = "assumed (docs/scale.md)"
ONE_BY_ONE = {"step_fixed": 0.03, "step_each": 0.0}
"""The embedded engine's decoding step that launches its operations one by one on a GPU, with any number of requests."""
ON_A_CPU = {"mfu_update": 0.85, "mfu_forward": 0.9, "mfu_prefill": 0.9, "attention_slower": 2.0, "step_fixed": 0.0}
"""Parts of a matrix product's rate that passes reach on a CPU, and how much slower attention is (docs/scale.md)."""


class Figure(NamedTuple):
    """A speed and its origin in words."""

    value: float
    origin: str


Figures = Mapping[str, Figure]
"""By the field of `Cluster`."""


def _scaled(value: float) -> str:
    size, unit = next((one for one in ((1e12, "T"), (1e9, "G")) if value >= one[0]), (1e6, "M"))
    return f"{value / size:.3g} {unit}"


SHOWN: Mapping[str, Callable[[float], str]] = {
    "flops": lambda value: f"{_scaled(value)}FLOP/s in matrix products",
    "bandwidth": lambda value: f"{_scaled(value)}B/s of memory",
    "mfu_update": lambda value: f"updates at {value:.2g} of the products' rate",
    "mfu_forward": lambda value: f"log-probs at {value:.2g}",
    "mfu_prefill": lambda value: f"prefills at {value:.2g}",
    "attention_slower": lambda value: f"attention's FLOPs {value:g} times as long",
    "bandwidth_used": lambda value: f"decoding at {value:.2g} of the memory's rate",
    "step_fixed": lambda value: f"{value * 1e3:.3g} ms more a step of decoding",
    "step_each": lambda value: f"{value * 1e6:.3g} µs more for each request",
    "host_copy": lambda value: f"{_scaled(value)}B/s in a copy of the host",
    "pcie": lambda value: f"{_scaled(value)}B/s from host to device",
    "link": lambda value: f"{_scaled(value)}B/s between devices of a machine",
    "network": lambda value: f"{_scaled(value)}B/s between machines",
    "disk": lambda value: f"{_scaled(value)}B/s to disk",
}
"""Fields of `Cluster` that are speeds, each as a plan prints it."""


def described(figures: Figures) -> Iterator[str]:
    """Write a line for each origin, with all figures that come from it."""
    origins: dict[str, list[str]] = {}
    for name, show in SHOWN.items():
        origins.setdefault(figures[name].origin, []).append(show(figures[name].value))
    for origin, texts in origins.items():
        yield f"{origin}: {', '.join(texts)}"


def from_one(origin: str, values: Mapping[str, float]) -> dict[str, Figure]:
    """Make figures of one origin."""
    return {name: Figure(value, origin) for name, value in values.items()}


def assumed() -> dict[str, Figure]:
    """Make the figures of an unknown cluster."""
    plain = Cluster()
    return from_one(ASSUMED, {name: getattr(plain, name) for name in SHOWN})


def on_gpu(name: str, dtype: str) -> dict[str, Figure]:
    """Take a GPU's figures from the data sheet of its name."""
    found = next((card for card in CARDS if all(word in name for word in card.split())), None)
    flops, bandwidth = CARDS[found or "H100"]
    if dtype == "float32":
        flops /= 2  # TF32's rate, the most that float32 products reach
    origin = f"the data sheet of {found}" if found else f"an H100's data sheet, since none of {name} is known"
    return assumed() | from_one(origin, {"flops": flops, "bandwidth": bandwidth})


def on_cpu(product: float, copy: float) -> dict[str, Figure]:
    """Take a CPU's figures from its FLOPs a second in a product, and its copied bytes a second."""
    # A copy reads and writes each of its bytes.
    now = {"flops": product, "bandwidth": 2 * copy, "host_copy": copy, "link": copy, "pcie": copy}
    return assumed() | from_one(ASSUMED, ON_A_CPU) | from_one("this CPU now", now)


def one_by_one() -> dict[str, Figure]:
    """Make the figures of the embedded engine's decoding on a GPU without graphs."""
    return from_one("seen on an H200, without graphs (docs/gpu.md)", ONE_BY_ONE)


def rates(shape: ModelShape) -> tuple[float, float]:
    """Measure this process: FLOPs a second of an MLP's product, and copied bytes a second. Takes about two seconds.

    Rates are means, so that other work of the machine counts. A copy reads and writes each of its bytes.
    """
    left, right = torch.ones(512, shape.hidden), torch.ones(shape.hidden, shape.intermediate)
    source = torch.ones(1 << 24)
    into = torch.ones_like(source)  # memory that the system has given already
    product = mean_seconds(lambda: torch.mm(left, right))
    copy = mean_seconds(lambda: into.copy_(source))
    return 2.0 * 512 * shape.hidden * shape.intermediate / product, source.nbytes / copy


def mean_seconds(call: Callable[[], object]) -> float:
    """Mean seconds of calls that are repeated for a second, after a first call that does not count."""
    call()
    count, began = 0, perf_counter()
    while (passed := perf_counter() - began) < 1.0:
        call()
        count += 1
    return passed / count
