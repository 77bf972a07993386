"""Buckets filled beside the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from agentrl.engines.servers.sync.buckets import Bucket
from agentrl.engines.servers.sync.filling import BucketSender
from agentrl.engines.weights import Weights

SHAPES = {f"w{number}": (4,) for number in range(6)}
BYTES_OF_TWO = 32  # of two tensors of SHAPES


class Notes:
    """Expected checksums, of which only the calls count."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def add(self, bucket: Bucket) -> None:
        self.names += [entry.name for entry in bucket.entries]

    def for_parameters(self, parameters: object) -> None:
        raise AssertionError


class Sent:
    """What was sent, as it was at that time."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.values: dict[str, torch.Tensor] = {}

    async def __call__(self, number: int, bucket: Bucket) -> None:
        self.numbers.append(number)
        self.values.update({entry.name: bucket.tensor(entry).clone() for entry in bucket.entries})
        await asyncio.sleep(0)


def tensors() -> Iterator[tuple[str, torch.Tensor]]:
    for number, name in enumerate(SHAPES):
        yield name, torch.full((4,), float(number))


async def sent_of(
    weights: Weights, sent: Sent, buffer: torch.Tensor, checksums: Callable[[], Notes] | None = None
) -> int:
    size, _ = await BucketSender(torch.float32, BYTES_OF_TWO, 1.0, checksums).each_bucket(weights, buffer, sent)
    return size


async def test_every_bucket_is_sent_before_the_next_is_filled() -> None:
    sent, notes = Sent(), Notes()
    size = await sent_of(Weights(SHAPES, tensors), sent, torch.empty(BYTES_OF_TWO, dtype=torch.uint8), lambda: notes)
    assert (size, sent.numbers, notes.names) == (6 * 16, [1, 2, 3], list(SHAPES))
    assert all(torch.equal(sent.values[name], tensor) for name, tensor in tensors())


async def test_the_event_loop_goes_on_while_reading_waits() -> None:
    """A reader waits for what only the event loop brings about, as a reader of ranks waits for other readers."""
    others_are_there = threading.Event()

    def read() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors():
            assert others_are_there.wait(20), "the event loop stood still"
            yield name, tensor

    async def join() -> None:
        await asyncio.sleep(0.01)
        others_are_there.set()

    sent = Sent()
    sending = asyncio.create_task(sent_of(Weights(SHAPES, read), sent, torch.empty(64, dtype=torch.uint8)))
    await asyncio.gather(sending, join())
    assert sent.numbers == [1, 2, 3]


async def test_one_thread_reads_all_with_the_settings_of_the_caller() -> None:
    """A half-read generator holds no_grad for the thread that reads: in another one it would stay switched off."""
    seen: list[tuple[int, bool]] = []

    def read() -> Iterator[tuple[str, torch.Tensor]]:
        seen.append((threading.get_ident(), torch.is_grad_enabled()))
        with torch.no_grad():
            for one in tensors():
                seen.append((threading.get_ident(), torch.is_grad_enabled()))
                yield one

    for enabled in (True, False):
        seen.clear()
        with torch.set_grad_enabled(enabled):
            await sent_of(Weights(SHAPES, read), Sent(), torch.empty(64, dtype=torch.uint8))
        assert {thread for thread, _ in seen} == {seen[0][0]} != {threading.get_ident()}
        assert [grad for _, grad in seen] == [enabled] + [False] * 6


async def test_an_error_of_reading_or_of_sending_ends_the_reading() -> None:
    closed: list[int] = []

    def read() -> Iterator[tuple[str, torch.Tensor]]:
        try:
            yield from list(tensors())[:3]
            raise ValueError("no more weights")
        finally:
            closed.append(threading.get_ident())

    async def refuse(number: int, bucket: Bucket) -> None:
        raise ConnectionError(f"bucket {number} refused")

    buffer = torch.empty(64, dtype=torch.uint8)
    with pytest.raises(ValueError, match="no more weights"):
        await sent_of(Weights(SHAPES, read), Sent(), buffer)
    with pytest.raises(ConnectionError, match="bucket 1 refused"):
        await BucketSender(torch.float32, BYTES_OF_TWO, 1.0, None).each_bucket(Weights(SHAPES, read), buffer, refuse)
    assert len(closed) == 2 and threading.get_ident() not in closed


async def test_nothing_writes_to_the_buffer_after_a_cancellation() -> None:
    """The next update fills the same buffer."""
    reads, go_on = threading.Event(), threading.Event()

    def read() -> Iterator[tuple[str, torch.Tensor]]:
        reads.set()
        assert go_on.wait(20)
        yield from tensors()

    buffer = torch.zeros(64, dtype=torch.uint8)
    sending = asyncio.create_task(sent_of(Weights(SHAPES, read), Sent(), buffer))
    while not reads.is_set():
        await asyncio.sleep(0.001)
    sending.cancel()
    await asyncio.sleep(0.01)
    assert not sending.done()  # its thread still reads
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await sending
    left = buffer.clone()
    await asyncio.sleep(0.05)
    assert torch.equal(buffer, left)
