"""The kernels of the CPU stand-ins, against an implementation of MurmurHash3 by bytes and against plain loops."""

from __future__ import annotations

import struct

import pytest
import torch

from agentrl.engines.sglang.cpu import kernels

MASK = 0xFFFFFFFF


def murmur3(data: bytes, seed: int = 0) -> int:
    """MurmurHash3_x86_32 as its author describes it, for any length."""
    state = seed

    def scrambled(block: int) -> int:
        block = block * 0xCC9E2D51 & MASK
        block = (block << 15 | block >> 17) & MASK
        return block * 0x1B873593 & MASK

    whole = len(data) // 4 * 4
    for (block,) in struct.iter_unpack("<I", data[:whole]):
        state ^= scrambled(block)
        state = (state << 13 | state >> 19) & MASK
        state = (state * 5 + 0xE6546B64) & MASK
    if data[whole:]:
        state ^= scrambled(int.from_bytes(data[whole:], "little"))
    state ^= len(data)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        state = (state ^ state >> shift) * factor & MASK
    return state


@pytest.mark.parametrize(
    ("text", "seed", "hashed"),
    [
        ("", 0, 0),
        ("", 1, 0x514E28B7),
        ("", MASK, 0x81F16F39),
        ("test", 0, 0xBA6BD213),
        ("aaaa", 0x9747B28C, 0x5A97808A),
        ("Hello, world!", 0x9747B28C, 0x24884CBA),
        ("The quick brown fox jumps over the lazy dog", 0x9747B28C, 0x2FA826CD),
    ],
)
def test_the_implementation_compared_with_gives_the_published_values(text: str, seed: int, hashed: int) -> None:
    assert murmur3(text.encode(), seed) == hashed


def test_murmur_hash_of_every_row_and_column() -> None:
    """Negative seeds and those of more than 63 bits too; by the operator that SGLang calls."""
    seeds = [0, 1, 42, 2**31, 2**32 + 5, 2**63 - 1, -1, -(2**63)]
    positions = [0, 1, 17, 4095, 2**20, 3, 2, 2**31 - 1]
    columns = [*range(300), 151_935]
    given = torch.tensor(seeds, dtype=torch.int64).view(torch.uint64)
    hashed = torch.ops.sgl_kernel.murmur_hash32_cpu(
        given, torch.tensor(positions, dtype=torch.int64), torch.tensor(columns)
    )
    assert hashed.dtype == torch.int64
    assert hashed.tolist() == [
        [murmur3(struct.pack("<QII", seed % 2**64, position, column)) for column in columns]
        for seed, position in zip(seeds, positions, strict=True)
    ]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_positions_of_either_type_hash_alike(dtype: torch.dtype) -> None:
    hashed = kernels.murmur_hash32_cpu(
        torch.tensor([7], dtype=torch.uint64), torch.tensor([9], dtype=dtype), torch.tensor([3], dtype=dtype)
    )
    assert hashed.tolist() == [[murmur3(struct.pack("<QII", 7, 9, 3))]]


def test_cache_places_are_written_into_the_rows_of_their_requests() -> None:
    rows = torch.full((4, 6), -1, dtype=torch.int32)
    kernels.assign_req_to_token_pool_cpu(
        torch.tensor([2, 0, 3]),
        rows,
        torch.tensor([1, 0, 4]),
        torch.tensor([4, 2, 4]),  # the last has none
        torch.tensor([10, 11, 12, 20, 21]),
        6,
    )
    assert rows.tolist() == [
        [20, 21, -1, -1, -1, -1],
        [-1, -1, -1, -1, -1, -1],
        [-1, 10, 11, 12, -1, -1],
        [-1, -1, -1, -1, -1, -1],
    ]


def test_what_only_speculative_decoding_needs_says_so_when_called() -> None:
    for name in kernels.SPECULATIVE:
        with pytest.raises(NotImplementedError, match=f"sgl_kernel.{name} has no CPU stand-in"):
            getattr(kernels, name)(1, of=2)
