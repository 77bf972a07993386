"""Time of one update by kernel: matrix products, attention, the rest, and the gaps in which the device waits.

An update of four micro-batches of Qwen2.5's shapes with random weights, as `update-*` has it: with all layers computed
again, with none where that fits, and compiled; each with the head at once and in parts. The update is timed without the
profiler, and profiled once. On a CPU operators stand for kernels.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch._C._autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from agentrl.model.compiled import compile_layers, text_layers
from agentrl.plan.sizing import ModelShape, Work, update_flops
from agentrl.trajectory.batch import RaggedBatch
from agentrl.workers import PolicyWorker
from benchmarks.gpu.part import (
    Setting,
    free,
    matmul_flops,
    median_seconds,
    out_of_memory_is_a_row,
    row,
    setting,
    wait,
)
from benchmarks.gpu.states import CHUNK_LOGITS, logits_at_once, made_once, policy_folder, update_bytes
from benchmarks.gpu.update import ROOM, data_sheet_flops
from benchmarks.training.update_utilization import MICRO_BATCHES, SHAPES, fsdp, made_batch, make_worker

TOKENS = {"tiny": 512, "0.5B": 32768, "1.5B": 16384}
"""Tokens of a micro-batch."""
LONGEST = 8192
TINY_LOGITS = 1 << 17
"""Logits alive at once of a tiny shape."""
TOP = 12
"""Kernels that get a row."""
KINDS = {
    "attention": ("flash", "fmha", "attn", "attention", "flex"),
    "matrix products": ("gemm", "nvjet", "cutlass", "xmma", "cublas", "aten::mm", "aten::addmm", "aten::bmm", "matmul"),
    "optimizer and norms of gradients": ("multi_tensor", "foreach", "adam"),
    "copies and fills": ("memcpy", "memset", "aten::copy_", "fill", "aten::zero_"),
}
"""Parts of names, in lower case, by kind; the first kind that has one takes the kernel."""
REST = "elementwise, sums, indexing"


@dataclass(frozen=True, slots=True)
class Kernel:
    """One run of a kernel, in microseconds."""

    name: str
    begin: float
    end: float
    busy: float
    """Time of its own; an operator's on a CPU is without those that it calls."""


def kind_of(name: str) -> str:
    """Name the kind of a kernel or an operator."""
    lower = name.lower()
    return next((kind for kind, parts in KINDS.items() if any(part in lower for part in parts)), REST)


def covered(kernels: Iterable[Kernel]) -> float:
    """Microseconds in which at least one of the kernels ran."""
    total, until = 0.0, float("-inf")
    for one in sorted(kernels, key=lambda one: one.begin):
        total += max(0.0, one.end - max(one.begin, until))
        until = max(until, one.end)
    return total


def seen_kernels(events: Iterable[FunctionEvent], device: str) -> list[Kernel]:
    """Take the device's kernels out of a profile; on a CPU its operators."""
    wanted = DeviceType.CUDA if device == "cuda" else DeviceType.CPU
    found = []
    for one in events:
        if one.device_type != wanted or getattr(one, "is_user_annotation", False):
            continue
        begin, end = float(one.time_range.start), float(one.time_range.end)
        found.append(Kernel(one.name, begin, end, end - begin if device == "cuda" else float(one.self_cpu_time_total)))
    return found


def profiled_update(worker: PolicyWorker, batch: RaggedBatch, device: str) -> tuple[list[Kernel], float]:
    """Profile one update: its kernels, and microseconds from the first to the last."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    wait(device)
    with profile(activities=activities, acc_events=True) as seen:
        worker.update(batch, step=3)
        wait(device)
    kernels = seen_kernels(seen.events() or (), device)
    return kernels, max(one.end for one in kernels) - min(one.begin for one in kernels)


def tell(label: str, kernels: list[Kernel], span: float, update: float, flops: float, asked: Setting) -> None:
    """Print the rows of one case. update: seconds without the profiler."""
    busy: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    for one in kernels:
        busy[one.name] += one.busy
        calls[one.name] += 1
    whole, ran = sum(busy.values()), covered(kernels)
    peak = data_sheet_flops(asked.device)
    by_kind: dict[str, float] = defaultdict(float)
    for name, spent in busy.items():
        by_kind[kind_of(name)] += spent
    row(
        label,
        update_seconds=update,
        MFU=None if peak is None else flops / update / peak,
        device_busy=ran / span,
        host_gaps=1 - ran / span,
        kernels=len(kernels),
        microseconds_a_kernel=whole / len(kernels),
        profiled_seconds=span / 1e6,
    )
    for kind, spent in sorted(by_kind.items(), key=lambda one: -one[1]):
        row(f"{label}: {kind}", part_of_the_kernels=spent / whole, milliseconds=spent / 1e3)
    for name in sorted(busy, key=lambda name: -busy[name])[:TOP]:
        row(
            f"{label}: {name[:100]}",
            part_of_the_kernels=busy[name] / whole,
            milliseconds=busy[name] / 1e3,
            calls=calls[name],
        )


def watch(asked: Setting, name: str, shape: ModelShape) -> None:
    device, tokens, autocast = asked.device, TOKENS[name], asked.dtype == "bfloat16"
    batch = made_batch(shape, MICRO_BATCHES * tokens, min(LONGEST, tokens))
    work = Work.from_lengths(batch.lengths.tolist(), float(batch.policy_tokens.sum()))
    flops = update_flops(shape, work, recompute=0, recompute_head=False)
    row(
        f"{name}: matrix product",
        TFLOPs_a_second=matmul_flops(device) / 1e12,
        tokens=batch.num_tokens,
        logits_made_once=made_once(batch, CHUNK_LOGITS // shape.vocab),
    )
    with policy_folder(shape, device) as folder:
        for recompute in (True, False):
            label = f"{name}, {'all' if recompute else 'no'} layers computed again"
            needed = sum(update_bytes(shape, tokens, autocast=autocast, recompute=recompute).values())
            if device == "cuda" and needed > ROOM * torch.cuda.mem_get_info()[0]:
                row(label, error=f"would take {needed / 1e9:.0f} GB")
                continue
            with out_of_memory_is_a_row(label):
                worker = make_worker(folder, device, asked.dtype, tokens, checkpointing=recompute)
                for compiled in (False, True):
                    if compiled:
                        compile_layers(text_layers(fsdp(worker).model.base), device)
                    for fsdp(worker).by_parts in (False, True):
                        update = median_seconds(partial(worker.update, batch, step=2), device, 2)
                        kernels, span = profiled_update(worker, batch, device)
                        way = f"{', compiled' if compiled else ''}{', head in parts' if fsdp(worker).by_parts else ''}"
                        tell(label + way, kernels, span, update, flops, asked)
                del worker
            free()


def main() -> None:
    asked = setting(__doc__)
    for name in ("tiny",) if asked.tiny else ("1.5B", "0.5B"):
        with logits_at_once(TINY_LOGITS if asked.tiny else CHUNK_LOGITS):
            watch(asked, name, SHAPES[name])


if __name__ == "__main__":
    main()
