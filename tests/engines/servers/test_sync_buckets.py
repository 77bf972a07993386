"""Packing weights into one buffer."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import pytest
import torch

from agentrl.engines.servers.sync.buckets import Bucket, buckets, buffer_bytes
from tests.naming import Names, naming

F32, BF16 = torch.float32, torch.bfloat16


def packed(weights: dict[str, torch.Tensor], bucket_bytes: int, dtype: torch.dtype = F32) -> list[tuple[Bucket, bytes]]:
    """Each bucket with a copy of its bytes, as they were when it was its turn."""
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    buffer = torch.empty(buffer_bytes(shapes, dtype, bucket_bytes), dtype=torch.uint8)
    filled = buckets(weights.items(), buffer, bucket_bytes, dtype)
    return [(bucket, bucket.data.numpy().tobytes()) for bucket in filled]


def of(*numels: int) -> dict[str, torch.Tensor]:
    return {f"w{i}": torch.randn(numel) for i, numel in enumerate(numels)}


@pytest.mark.parametrize(
    ("numels", "bucket_floats", "expected"),
    [
        ([2, 2, 2], 4, [["w0", "w1"], ["w2"]]),
        ([2, 2], 4, [["w0", "w1"]]),
        ([1, 9, 1, 1], 4, [["w0"], ["w1"], ["w2", "w3"]]),  # one is larger than a bucket
        ([9], 4, [["w0"]]),
        ([3, 3, 3], 4, [["w0"], ["w1"], ["w2"]]),
        ([3, 0, 1], 4, [["w0", "w1", "w2"]]),  # one is empty
    ],
)
def test_a_bucket_is_full_but_never_over(numels: list[int], bucket_floats: int, expected: list[list[str]]) -> None:
    filled = packed(of(*numels), 4 * bucket_floats)
    assert [[entry.name for entry in bucket.entries] for bucket, _ in filled] == expected
    assert [bucket.last for bucket, _ in filled] == [False] * (len(expected) - 1) + [True]


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_every_tensor_comes_back_in_the_dtype_asked_for(dtype: torch.dtype) -> None:
    weights = {"a": torch.randn(3, 5), "b": torch.randn(7), "c": torch.randn(5, 3).t(), "d": torch.randn(2, 2, 2)}
    found = {}
    for bucket, content in packed(weights, 64, dtype):
        kept = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        for entry in bucket.entries:
            found[entry.name] = Bucket(bucket.entries, kept, bucket.last).tensor(entry)
    assert list(found) == list(weights)
    assert all(torch.equal(found[name], weights[name].to(dtype)) for name in weights)


@pytest.mark.parametrize(
    ("numels", "bucket_bytes", "expected"), [([2, 2], 512, 16), ([2, 2, 2], 16, 16), ([2, 9], 16, 36), ([], 16, 0)]
)
def test_the_buffer_is_no_larger_than_needed(numels: list[int], bucket_bytes: int, expected: int) -> None:
    assert buffer_bytes({str(i): (numel,) for i, numel in enumerate(numels)}, F32, bucket_bytes) == expected


def test_one_tensor_at_a_time_is_held() -> None:
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def read() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal most
        for i in range(20):
            tensor = torch.randn(10)
            alive.append(weakref.ref(tensor))
            yield f"w{i}", tensor
            del tensor
            most = max(most, sum(ref() is not None for ref in alive))

    buffer = torch.empty(120, dtype=torch.uint8)
    assert sum(len(bucket.entries) for bucket in buckets(read(), buffer, 120, F32)) == 20
    assert most <= 1


def test_live_parameters_leave_no_graph_behind() -> None:
    buffer = torch.empty(16, dtype=torch.uint8)
    [bucket] = buckets([("w", torch.nn.Parameter(torch.ones(4)))], buffer, 16, F32)
    assert not bucket.data.requires_grad and not bucket.tensor(bucket.entries[0]).requires_grad


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([("w", torch.ones(2, dtype=torch.int32))], "torch.int32"),
        ([("w", torch.ones(2)), ("w", torch.ones(2))], ("w", "twice")),
        ([("w", torch.ones(5))], "announced"),
    ],
)
def test_what_cannot_be_sent_is_refused(tensors: list[tuple[str, torch.Tensor]], message: Names) -> None:
    with naming(ValueError, message):
        list(buckets(tensors, torch.empty(16, dtype=torch.uint8), 16, F32))
