"""The part of `sgl_kernel` that SGLang imports or calls on a CPU for a model that runs in plain torch."""

from __future__ import annotations

from typing import NoReturn, Protocol

import numpy as np
import numpy.typing as npt
import torch

Words = npt.NDArray[np.uint32]


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write the cache places of each request's tokens [start, end) into its row of `req_to_token`.

    req_pool_indices (rows), start_offset and end_offset [N] int, out_cache_loc [sum of end - start] int,
    req_to_token [rows, longest context] int, changed in place.
    """
    place = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        count = end - start
        req_to_token[row, start:end] = out_cache_loc[place : place + count].to(req_to_token.dtype)
        place += count


def murmur_hash32_cpu(seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor) -> torch.Tensor:
    """MurmurHash3 (x86, 32 bits) of the 16 bytes (seed 64, position 32, column 32) for each row and column.

    seed [N] uint64, positions [N], col_indices [M] -> [N, M] int64, 0 to 2**32 - 1: a request's random numbers.
    """
    seeds = seed.view(torch.int64).numpy().view(np.uint64)
    rows = np.zeros(len(seeds), dtype=np.uint32)
    for block in (seeds & np.uint64(0xFFFFFFFF), seeds >> np.uint64(32), positions.numpy()):
        rows = _mix(rows, block.astype(np.uint32))
    hashed = _mix(rows[:, None], col_indices.numpy().astype(np.uint32)[None, :]) ^ np.uint32(16)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        hashed = (hashed ^ (hashed >> np.uint32(shift))) * np.uint32(factor)
    return torch.from_numpy((hashed ^ (hashed >> np.uint32(16))).astype(np.int64))


def _mix(state: Words, block: Words) -> Words:
    state = state ^ _rotate(block * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593)
    return _rotate(state, 13) * np.uint32(5) + np.uint32(0xE6546B64)


def _rotate(x: Words, bits: int) -> Words:
    return (x << np.uint32(bits)) | (x >> np.uint32(32 - bits))


_LIBRARY = torch.library.Library("sgl_kernel", "FRAGMENT")
_LIBRARY.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor")
_LIBRARY.impl("murmur_hash32_cpu", murmur_hash32_cpu, "CPU")


class _Kernel(Protocol):
    def __call__(self, *args: object, **kwargs: object) -> NoReturn: ...


def _absent(name: str) -> _Kernel:
    def kernel(*_: object, **__: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} has no CPU stand-in (agentrl/engines/sglang/cpu/kernels.py)")

    return kernel


SPECULATIVE = (
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
)
"""Names imported with the scheduler and used by speculative decoding only."""

for _name in SPECULATIVE:
    globals()[_name] = _absent(_name)
