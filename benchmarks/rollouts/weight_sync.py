"""Cost of sending a policy's weights to an SGLang server, against their bytes and against the number of tensors.

    python -m benchmarks.rollouts.weight_sync

A real server on the CPU gets float32 weights by each of the three senders: parts of a model of 248 MB (one matrix of
its attention and more, two of its layers, all), then a model of many small tensors as large as those two layers. The
base is a bare copy of the same bytes in memory, in the same run. A hand-over is two copies at least: into
the buffer, and out of it into the server's parameters. The last column is the longest time
during a send by which the event loop, which drives trajectories, comes late.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from agentrl.engines.servers.sync import DiskSender, DistributedSender, TensorSender, WeightSender
from agentrl.engines.sglang.client import SGLangClient
from agentrl.engines.sglang.options import SGLangArguments
from agentrl.engines.sglang.process import SGLangProcess
from agentrl.engines.weights import Weights
from agentrl.quickstart.tiny_policy import TinyShape, make_tiny_policy
from agentrl.system.http import http_client
from agentrl.system.loop_thread import DelayWatch
from benchmarks.no_options import no_options

REPEATS = 15
BUCKET = 128 << 20  # bytes
STARTUP = 300.0  # seconds
LOOK = 0.002  # seconds between two looks at how late the event loop comes
LARGE = TinyShape(hidden=768, heads=24, kv_heads=24, intermediate=2304, layers=8)
MANY = TinyShape(hidden=192, heads=6, kv_heads=6, intermediate=576, layers=32)


@dataclass(frozen=True, slots=True)
class Row:
    """Medians in seconds."""

    sender: str
    tensors: int
    bytes: int
    seconds: float
    copy: float
    stood_still: float
    """Longest delay of a turn on the event loop during a send."""


def part(folder: Path, keep: Callable[[str], bool]) -> Weights:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return Weights.from_tensors([(name, weight.detach()) for name, weight in model.named_parameters() if keep(name)])


class Copy:
    """A bare copy of so many bytes, between pages that are there already."""

    def __init__(self, size: int) -> None:
        self._source, self._target = torch.ones(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)

    def seconds(self) -> float:
        began = time.perf_counter()
        self._target.copy_(self._source)
        return time.perf_counter() - began


async def measure(client: SGLangClient, weights: Weights, folder: Path) -> list[Row]:
    """One row for each sender; a first send, which makes buffer, group or folder, is not counted."""
    copy = Copy(sum(4 * tensor.numel() for _, tensor in weights.read()))
    senders: dict[str, WeightSender] = {
        "tensor": TensorSender(torch.float32, BUCKET),
        "distributed (gloo)": DistributedSender(torch.float32, BUCKET, "gloo"),
        "disk": DiskSender(torch.float32, BUCKET, folder),
    }
    delay = DelayWatch(LOOK)
    delay.begin()
    rows = []
    for name, sender in senders.items():
        seconds, copies, stood_still = [], [], []
        for version in range(REPEATS + 1):
            await asyncio.sleep(LOOK)  # after the copy, which holds the loop, too
            delay.take()
            began = time.perf_counter()
            faults = await sender.send([client], weights, version)
            seconds.append(time.perf_counter() - began)
            stood_still.append(delay.take())
            for fault in faults.values():
                raise fault
            copies.append(copy.seconds())
        await sender.close()
        medians = [statistics.median(column[1:]) for column in (seconds, copies, stood_still)]
        rows.append(Row(name, len(weights.shapes), sender.bytes_sent, *medians))
    return rows


async def with_server(shape: TinyShape, parts: list[Callable[[str], bool]], work: Path) -> list[Row]:
    model = make_tiny_policy(work / f"model-{shape.layers}", 1, shape=shape)
    arguments = SGLangArguments(str(model), device="cpu", dtype="float32", context_length=256, max_num_seqs=4)
    process = SGLangProcess(arguments, None, work / f"server-{shape.layers}.log")
    try:
        process.start()
        await process.ready(STARTUP)
        async with http_client() as http:
            client = SGLangClient(process.url, http)
            return [row for keep in parts for row in await measure(client, part(model, keep), work / "weights")]
    finally:
        process.stop()


async def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        large: list[Callable[[str], bool]] = [
            lambda name: name.startswith(("model.embed", "model.layers.0.self_attn.o_proj", "model.layers.0.input")),
            lambda name: name.startswith(("model.layers.0.", "model.layers.1.")),
            lambda name: True,
        ]
        rows = await with_server(LARGE, large, work)
        rows += await with_server(MANY, [lambda name: True], work)
    print("| sender | MB | tensors | seconds | copies of the same bytes | event loop stood still, s |")
    print("|---|---|---|---|---|---|")
    for row in sorted(rows, key=lambda row: row.sender):
        ratio = row.seconds / row.copy
        cells = f"{row.bytes / 1e6:.1f} | {row.tensors} | {row.seconds:.3f} | {ratio:.1f} | {row.stood_still:.4f}"
        print(f"| {row.sender} | {cells} |")


if __name__ == "__main__":
    no_options(__doc__)
    asyncio.run(main())
