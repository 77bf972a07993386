"""Buckets of weights filled off the event loop, which drives trajectories in the meantime."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import aclosing
from typing import TypeVar

import torch

from agentrl.engines.servers.sync.buckets import Bucket, buckets, buffer_bytes
from agentrl.engines.servers.sync.update import Comparison, ExpectedChecksums
from agentrl.engines.weights import Weights
from agentrl.system.thread_state import torch_state
from agentrl.system.threads import OwnThread

T = TypeVar("T")


class BucketSender:
    """Part of a WeightSender that fills a buffer with one bucket after the other, and takes their checksums."""

    def __init__(
        self,
        dtype: torch.dtype,
        bucket_bytes: int,
        timeout: float,
        checksums: Callable[[], ExpectedChecksums] | None,
    ) -> None:
        """`dtype`: the servers' dtype. `timeout`: seconds that a server may take. `checksums`: makes the expected
        checksums of a send; None: what arrives is not verified."""
        self.bytes_sent = 0
        self.compared: Comparison = "none"
        self.dtype = dtype
        self._bucket_bytes, self._timeout, self._checksums = bucket_bytes, timeout, checksums

    def buffer_bytes(self, weights: Weights) -> int:
        """Size of the buffer that `each_bucket` needs."""
        return buffer_bytes(weights.shapes, self.dtype, self._bucket_bytes)

    async def each_bucket(
        self, weights: Weights, buffer: torch.Tensor, send: Callable[[int, Bucket], Awaitable[object]]
    ) -> tuple[int, ExpectedChecksums | None]:
        """Fill `buffer` [B] uint8 as `buckets` does, and `send` each bucket, counted from 1, before the next is filled.

        Reading waits: for other readers, for ranks that gather a tensor, for copies from a device. So one thread reads
        everything, as settings such as no_grad, which a half-read generator holds, belong to a thread; it computes as
        the caller's does. When this returns or raises, nothing writes to the buffer any more. Returns (bytes sent,
        checksums that a server must answer).
        """
        expected = self._checksums() if self._checksums else None

        def filled() -> Generator[Bucket]:
            for bucket in buckets(weights.read(), buffer, self._bucket_bytes, self.dtype):
                if expected is not None:
                    expected.add(bucket)
                if buffer.is_cuda:  # others read the buffer on streams, or in processes, of their own
                    torch.cuda.synchronize(buffer.device)
                yield bucket

        sent = number = 0
        async with aclosing(in_thread(filled())) as filling:
            async for bucket in filling:
                number += 1
                await send(number, bucket)
                sent += bucket.data.numel()
        return sent, expected


async def in_thread(source: Generator[T]) -> AsyncGenerator[T]:
    """Run a generator of anything but None in a thread of its own, which computes as the caller's does.

    Close it (`aclosing`): when that returns, nothing of the generator runs any more.
    """
    state = torch_state()

    def run() -> Generator[T]:
        with state():
            yield from source

    thread, steps = OwnThread("weights"), run()
    try:
        while (one := await thread.submit(next, steps, None)) is not None:
            yield one
    finally:
        closed = thread.submit(steps.close)
        thread.end()
        await closed
