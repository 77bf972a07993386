"""Buckets of weights filled beside the event loop, which drives trajectories in the meantime."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator

import torch

from agentrl.engines.servers.sync.buckets import Bucket, buckets
from agentrl.engines.servers.sync.checksum import ExpectedChecksums
from agentrl.engines.weights import Weights
from agentrl.system.thread_state import torch_state
from agentrl.system.threads import OwnThread


async def each_bucket(
    weights: Weights,
    buffer: torch.Tensor,
    bucket_bytes: int,
    dtype: torch.dtype,
    expected: ExpectedChecksums | None,
    send: Callable[[int, Bucket], Awaitable[object]],
) -> int:
    """Fill `buffer` [B] uint8 as `buckets` does, and `send` each bucket, numbered from 1, before the next is filled.

    Reading waits: for other readers, for ranks that gather a tensor, for copies from a device. So one thread reads
    everything, as settings such as no_grad, which a half-read generator holds, belong to a thread; it computes as the
    caller's does. When this returns or raises, nothing writes to the buffer any more. Returns the bytes sent.
    """
    state = torch_state()

    def filled() -> Generator[Bucket]:
        with state():
            for bucket in buckets(weights.read(), buffer, bucket_bytes, dtype):
                if expected is not None:
                    expected.add(bucket)
                if buffer.is_cuda:  # others read the buffer on streams, or in processes, of their own
                    torch.cuda.synchronize(buffer.device)
                yield bucket

    thread, source = OwnThread("weights"), filled()
    sent = number = 0
    try:
        while (bucket := await thread.submit(next, source, None)) is not None:
            number += 1
            await send(number, bucket)
            sent += bucket.data.numel()
        return sent
    finally:
        closed = thread.submit(source.close)
        thread.end()
        await closed
