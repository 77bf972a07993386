"""Delta weights: only the elements that changed since the weights that a server holds, by any other sender.

The trainer keeps the weights that it last sent, in the servers' dtype. A server says itself which weights it holds, by
a random name. After a restart, or a failed update, it holds weights without a name, and is sent all.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

import torch

from agentrl.engines.contract import RequestError
from agentrl.engines.servers.client import WeightReceiver
from agentrl.engines.servers.delta import BEGIN, CHANGED, END, Named, differing, encode
from agentrl.engines.servers.sync.buckets import Bucket, Entry, check_weight
from agentrl.engines.servers.sync.checksum import compare
from agentrl.engines.servers.sync.filling import in_thread
from agentrl.engines.servers.sync.update import Comparison, ExpectedChecksums, Update, WeightSender
from agentrl.engines.weights import Weights
from agentrl.system.metrics import Metrics

ASKING = 60.0
"""Seconds for a server to say which weights it holds."""


@dataclass(slots=True)
class _Base:
    """Weights that were last sent, and what changed from the weights before them."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """By name, on the CPU and in the servers' dtype."""
    name: str = ""
    """Random, another one for each content."""
    before: str = ""
    """Name of the weights that `changes` change."""
    changes: dict[str, torch.Tensor | None] = field(default_factory=dict)
    """Changed elements by tensor, as `encode` writes them; None: the whole tensor is sent."""
    share: float = 1.0
    """Share of the elements that changed."""

    def entries(self) -> Iterator[Named]:
        """Yield the changes as a transport carries them."""
        for name, entry in self.changes.items():
            whole = self.tensors[name]
            changed = f"{CHANGED}{'x'.join(map(str, whole.shape))}:{name}"
            yield (name, whole) if entry is None else (changed, entry)

    @property
    def is_smaller(self) -> bool:
        """True where the changes take fewer bytes than the weights."""
        return any(entry is not None for entry in self.changes.values())


class DeltaSender:
    """A WeightSender that hands changes to another one, and all weights where a server does not hold the base.

    It keeps the weights once in the servers' dtype, and the changes between the last two updates.
    """

    def __init__(
        self,
        inner: WeightSender,
        checksums: Callable[[], ExpectedChecksums] | None = None,
        notify: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`inner`: carries entries, and verifies nothing. `checksums`: as for `BucketSender`. `notify`: says once for
        each server why it is sent all weights."""
        self.dtype, self.bytes_sent = inner.dtype, 0
        self.compared: Comparison = "none"
        self._inner, self._checksums, self._notify = inner, checksums, notify
        self._base = _Base()
        self._version: int | None = None
        self._known: set[str] = set()
        """Servers that were sent weights."""
        self._doubtful: set[str] = set()
        """Servers that failed in their last update: their answers do not count."""
        self._said: set[tuple[str, str]] = set()
        self._full: Counter[str] = Counter()

    async def send(self, servers: Sequence[WeightReceiver], weights: Weights, version: int) -> dict[str, Exception]:
        """Send weights as a WeightSender does. A server that does not hold the result after its changes is sent all."""
        expected = await self._read(weights, version)
        self.bytes_sent, base = 0, self._base
        update = Update(servers, version, ASKING)
        held, why = await self._ask(update, update.servers)
        for url in self._doubtful & held.keys():
            held[url] = ""
        await self._pass(update, [one for one in update.servers if held.get(one.url) == base.name], base.name)
        if base.before and base.is_smaller:
            late = [one for one in update.servers if held.get(one.url) == base.before]
            await self._pass(update, late, base.before)
            taken, _ = await self._ask(update, [one for one in late if one.url not in update.faults])
            held |= {one.url: taken.get(one.url, "") for one in late}
        full = [one for one in update.servers if held.get(one.url) != base.name]
        for server in full:
            self._count(server, held.get(server.url), why.get(server.url))
        await self._pass(update, [one for one in full if one.url in held], "")
        await self._pass(update, [one for one in full if one.url not in held], None)
        if expected is not None:
            self.compared = await compare(update, expected)
        taking = {server.url for server in servers}
        self._known |= taking
        self._doubtful = self._doubtful - taking | update.faults.keys()
        return update.faults

    async def close(self) -> None:
        """Free the weights, and the other sender's memory, files or group."""
        self._base = _Base()
        await self._inner.close()

    def add_metrics(self, metrics: Metrics) -> None:
        """Record the share of changed elements, and the full updates of servers by their reason."""
        metrics.mean("delta_changed_share", self._base.share)
        metrics.sum("delta_full", self._full.total())
        for why, count in self._full.items():
            metrics.sum(f"delta_full_{why}", count)

    async def _ask(
        self, update: Update, servers: Sequence[WeightReceiver]
    ) -> tuple[dict[str, str], dict[str, RequestError]]:
        """Ask servers for the names of their weights. Returns the names, and why others take no changes; by URL."""
        held: dict[str, str] = {}
        why: dict[str, RequestError] = {}

        async def ask(server: WeightReceiver) -> None:
            try:
                held[server.url] = await server.held_weights(update.timeout)
            except RequestError as error:
                why[server.url] = error

        await update.each("asking which weights it holds", ask, servers)
        return held, why

    async def _pass(self, update: Update, servers: Sequence[WeightReceiver], base: str | None) -> None:
        """Send what changed from the weights named `base`; all weights for ""; for None without a name."""
        if not servers:
            return
        own, mark = self._base, torch.zeros(1, dtype=self.dtype)
        entries = [*own.tensors.items()]
        if base is not None:
            entries = [] if base == own.name else [*own.entries()] if base else entries
            entries = [(BEGIN + base, mark), *entries, (END + own.name, mark)]
        update.drop(await self._inner.send(servers, Weights.from_tensors(entries), update.version))
        self.bytes_sent += self._inner.bytes_sent

    def _count(self, server: WeightReceiver, held: str | None, refusal: RequestError | None) -> None:
        """Count why a server is sent all weights, and say it where that is no matter of course."""
        if refusal is not None:
            why, text = "unable", f"takes no delta weights and is sent all of them each time: {refusal}"
        elif server.url not in self._known:
            why, text = "first", ""
        elif held and held == self._base.before:
            why, text = "changed", f"is sent all weights, as {self._base.share:.0%} of the elements changed"
        else:
            why = "lost"
            text = "does not hold the weights that it was last sent (it was restarted, or failed), and is sent all"
        self._full[why] += 1
        if text and (server.url, why) not in self._said:
            self._said.add((server.url, why))
            self._notify(f"{server.url} {text}")

    async def _read(self, weights: Weights, version: int) -> ExpectedChecksums | None:
        """Read the weights off the event loop; keep them and what changed. Returns the checksums to expect."""
        old, self._base = self._base, _Base()  # an error leaves nothing that a later update would begin with
        expected = self._checksums() if self._checksums else None
        new, changed = _Base(before=old.name), 0
        async with aclosing(in_thread(self._compared(weights, old, new, expected))) as comparing:
            async for count in comparing:
                changed += count
        if new.changes.keys() != old.tensors.keys() or len(new.tensors) != len(new.changes):
            self._base = _Base(new.tensors, secrets.token_hex(8))
        elif changed:
            total = sum(tensor.numel() for tensor in new.tensors.values())
            self._base = replace(new, name=secrets.token_hex(8), share=changed / total)
        else:
            self._base = old if version == self._version else replace(old, share=0.0)
        self._version = version
        return expected

    def _compared(self, weights: Weights, old: _Base, new: _Base, expected: ExpectedChecksums | None) -> Generator[int]:
        """Fill `new` with the tensors of `old` and their changes. Yields each tensor's number of changes."""
        for name, tensor in weights.read():
            check_weight(name, tensor, new.tensors)
            content = tensor.detach().to(self.dtype).contiguous()
            if expected is not None:
                entry = Entry(name, tuple(content.shape), self.dtype, 0, content.nbytes)
                expected.add(Bucket([entry], content.view(-1).view(torch.uint8), last=False))
            kept = old.tensors.get(name)
            if kept is None or kept.shape != content.shape:
                new.tensors[name] = content.to("cpu", copy=True)
                yield content.numel()
                continue
            places = differing(content, kept.to(content.device))
            coded = encode(content, places)
            new.changes[name] = None if coded is None else coded.cpu()
            if len(places):
                kept.view(-1)[places.cpu()] = content.view(-1)[places].cpu()
            new.tensors[name] = kept
            yield len(places)
