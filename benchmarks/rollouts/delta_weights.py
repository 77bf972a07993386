"""Delta weights of a real model: each update against a full one, bit for bit, and its bytes and seconds.

    python -m benchmarks.rollouts.delta_weights --model MODEL [--updates 20] [--lr 1e-6 1e-5] [--dtypes bfloat16]
    python -m benchmarks.rollouts.delta_weights --model MODEL --sglang     in an environment that has SGLang

AdamW updates the model in float32 by random gradients, one rate after the other; servers hold it in bfloat16, and in
float32. A server is a receiving half in this process with plain parameters. After each update its parameters' SHA-256
are compared with those of the policy's weights, which a full update would have brought. Seconds are medians: to find
and encode the changes, to put them into place, and to send all weights instead, to the same parameters.

With --sglang a real SGLang server on this CPU holds the weights, and shared memory carries the changes. After each
update the server's own checksums of all parameters are compared with those of the policy's weights.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import torch
from transformers import AutoModelForCausalLM

from agentrl.engines.servers.client import WeightChecksums, WeightReceiver
from agentrl.engines.servers.delta import DeltaReceiver
from agentrl.engines.servers.sync import DeltaSender, TensorSender
from agentrl.engines.servers.sync.buckets import Bucket, Entry
from agentrl.engines.servers.sync.update import Comparison
from agentrl.engines.sglang.checksums import Expectation
from agentrl.engines.sglang.client import SGLangClient
from agentrl.engines.sglang.options import SGLangArguments
from agentrl.engines.sglang.process import SGLangProcess
from agentrl.engines.weights import Weights
from agentrl.system.http import http_client
from agentrl.system.json_value import JSON
from benchmarks.rollouts.sglang_work import STARTUP


class PlainServer:
    """A server in this process: the receiving half, and parameters that it answers the checksums of."""

    url = "http://in-this-process"

    def __init__(self, dtype: torch.dtype) -> None:
        self.held: dict[str, torch.Tensor] = {}
        self.dtype = dtype
        self.receiver = DeltaReceiver(self.load, lambda: self.held.values())

    def load(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in named:
            self.held.setdefault(name, torch.empty(tensor.shape, dtype=self.dtype)).copy_(tensor)

    async def held_weights(self, timeout: float) -> str:
        return self.receiver.held

    async def weight_checksums(self, timeout: float, leave_out: Sequence[str] = ()) -> WeightChecksums:
        expected = Expectation()
        for name, tensor in self.held.items():
            content = tensor.view(-1).view(torch.uint8)
            expected.add(Bucket([Entry(name, tuple(tensor.shape), self.dtype, 0, len(content))], content, last=False))
        return WeightChecksums({"target/0/0": expected.checksums()}, predictable=True)


class InMemory:
    """A WeightSender that calls the receiving half."""

    compared: Comparison = "none"

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.bytes_sent, self.seconds = dtype, 0, 0.0

    async def send(self, servers: Sequence[WeightReceiver], weights: Weights, version: int) -> dict[str, Exception]:
        self.bytes_sent = sum(tensor.nbytes for _, tensor in weights.read())
        began = time.perf_counter()
        for server in servers:
            cast(PlainServer, server).receiver(weights.read())
        self.seconds = time.perf_counter() - began
        return {}

    async def close(self) -> None:
        return


@dataclass(slots=True)
class Seen:
    """Updates of one dtype."""

    shares: list[float] = field(default_factory=list)
    parts: list[float] = field(default_factory=list)
    """Bytes sent, as parts of all weights."""
    finding: list[float] = field(default_factory=list)
    placing: list[float] = field(default_factory=list)
    full: list[float] = field(default_factory=list)


async def update_once(sender: DeltaSender, server: PlainServer, policy: Mapping[str, torch.Tensor], seen: Seen) -> None:
    """Send an update without checksums, measured; then again with them. Raises RuntimeError for other weights."""
    weights, inner = Weights.from_tensors(policy.items()), cast(InMemory, sender._inner)
    servers = cast(list[WeightReceiver], [server])
    sender._checksums = None
    began = time.perf_counter()
    await sender.send(servers, weights, 0)
    seconds = time.perf_counter() - began
    seen.finding.append(seconds - inner.seconds)
    seen.placing.append(inner.seconds)
    seen.parts.append(sender.bytes_sent / sum(tensor.nbytes for tensor in server.held.values()))
    seen.shares.append(sender._base.share)
    sender._checksums = Expectation
    faults = await sender.send(servers, weights, 0)
    if faults or sender.compared != "sent":
        raise RuntimeError(f"not the weights of a full update: {faults}")
    other = PlainServer(server.dtype)
    other.held = server.held
    began = time.perf_counter()
    await InMemory(server.dtype).send(cast(list[WeightReceiver], [other]), weights, 0)
    seen.full.append(time.perf_counter() - began)


async def measure(
    policy: Mapping[str, torch.Tensor], rate: float, updates: int, dtypes: Sequence[torch.dtype]
) -> dict[torch.dtype, Seen]:
    pairs = {dtype: (DeltaSender(InMemory(dtype)), PlainServer(dtype)) for dtype in dtypes}
    found = {dtype: Seen() for dtype in dtypes}
    for sender, server in pairs.values():
        await sender.send(cast(list[WeightReceiver], [server]), Weights.from_tensors(policy.items()), 0)
    optimizer = torch.optim.AdamW(policy.values(), lr=rate, weight_decay=0.01)
    for number in range(updates):
        learn(optimizer, policy)
        for dtype, (sender, server) in pairs.items():
            await update_once(sender, server, policy, found[dtype])
        changed = ", ".join(f"{100 * seen.shares[-1]:.2f} % in {dtype}" for dtype, seen in found.items())
        print(f"update {number + 1}: changed {changed}", file=sys.stderr)
    return found


async def measure_served(model: Path, rate: float, updates: int, dtype: torch.dtype) -> None:
    """Print the shares and bytes of updates of a real server. Raises RuntimeError for other weights."""
    policy = policy_of(model)
    with tempfile.TemporaryDirectory() as place:
        extra: dict[str, JSON] = {"dtype": str(dtype)[6:]}
        arguments = SGLangArguments(str(model.absolute()), device="cpu", context_length=64, max_num_seqs=1, extra=extra)
        server = SGLangProcess(replace(arguments, takes_deltas=True), None, Path(place) / "log")
        http = http_client()
        sender = DeltaSender(TensorSender(dtype, 128 << 20), Expectation)
        optimizer = torch.optim.AdamW(policy.values(), lr=rate, weight_decay=0.01)
        shares, parts = list[float](), list[float]()
        try:
            server.start()
            await server.ready(STARTUP)
            client = SGLangClient(server.url, http)
            whole = sum(tensor.numel() for tensor in policy.values()) * dtype.itemsize
            for number in range(updates + 1):
                if number:
                    learn(optimizer, policy)
                await client.pause("retract")
                faults = await sender.send([client], Weights.from_tensors(policy.items()), number)
                await client.resume()
                if faults or sender.compared != "sent":
                    raise RuntimeError(f"update {number} is not a full update's: {faults or sender.compared}")
                if number:
                    shares.append(sender._base.share)
                    parts.append(sender.bytes_sent / whole)
                    print(f"update {number}: changed {shares[-1]:.2%}, sent {parts[-1]:.2%}", file=sys.stderr)
        finally:
            await sender.close()
            server.stop()
            await http.close()
    ends = " | ".join(f"{100 * one[0]:.2f}, {100 * one[-1]:.2f}" for one in (shares, parts))
    print(f"| {rate:g} | {str(dtype)[6:]} | {updates} of {updates} | {ends} |", flush=True)


def policy_of(model: Path) -> dict[str, torch.Tensor]:
    found = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return {name: weight.detach() for name, weight in found.named_parameters()}


def learn(optimizer: torch.optim.Optimizer, policy: Mapping[str, torch.Tensor]) -> None:
    """Take a step by random gradients."""
    for tensor in policy.values():
        tensor.grad = torch.empty_like(tensor).normal_(std=1e-4)
    optimizer.step()
    optimizer.zero_grad()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of a model")
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-6, 1e-5])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"], help="of servers' weights")
    parser.add_argument("--sglang", action="store_true", help="send to a real server")
    options = parser.parse_args()
    dtypes = [getattr(torch, name) for name in options.dtypes]
    torch.manual_seed(0)
    if options.sglang:
        print("| lr | held in | equal to a full update | changed, % (first, last) | bytes of a full update, % |")
        print("|---|---|---|---|---|")
        for rate, dtype in itertools.product(options.lr, dtypes):
            asyncio.run(measure_served(options.model, rate, options.updates, dtype))
        return
    print("| lr | held in | changed, % (first, last) | bytes of a full update, % | find, s | place, s | full, s |")
    print("|---|---|---|---|---|---|---|")
    for rate in options.lr:
        for dtype, seen in asyncio.run(measure(policy_of(options.model), rate, options.updates, dtypes)).items():
            times = [f"{statistics.median(column):.3f}" for column in (seen.finding, seen.placing, seen.full)]
            share = f"{100 * seen.shares[0]:.2f}, {100 * seen.shares[-1]:.2f}"
            part = f"{100 * seen.parts[0]:.2f}, {100 * seen.parts[-1]:.2f}"
            print(f"| {rate:g} | {str(dtype)[6:]} | {share} | {part} | {' | '.join(times)} |", flush=True)


if __name__ == "__main__":
    main()
