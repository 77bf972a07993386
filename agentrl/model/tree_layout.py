"""The prefix tree of a batch's sequences: each common beginning is stored, and so computed, once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from agentrl.model.layout import PackedLayout, flat_layout
from agentrl.trajectory.beginnings import common_tokens, token_key

Ints = npt.NDArray[np.int64]
MIN_SHARED = 8
"""Least length of a shared run: a shorter one costs a CPU more in further kernel calls than it saves."""
_LEAST_SAVED, _PART_SAVED = 1024, 0.5
"""Tokens, and part of the tokens, that common beginnings must save before a device shares them. Its attention to a tree
is slower than to separate sequences: an H100 gained from about half of the tokens on (docs/gpu.md). And it computes a
few hundred tokens in no time."""


def tree_layout(ids: torch.Tensor, offsets: torch.Tensor) -> PackedLayout:
    """Lay out a batch with every common beginning of at least MIN_SHARED tokens stored once.

    ids [T] int64, offsets [N + 1] int64.
    """
    device = ids.device
    tokens, bounds = ids.cpu().numpy(), offsets.cpu().numpy()
    order, common = sort_by_tokens([tokens[start:end] for start, end in itertools.pairwise(bounds)])
    if not any(length >= MIN_SHARED for length in common):
        return flat_layout(offsets, device)
    return _Tree(order, common, bounds).layout(device)


def sort_by_tokens(rows: Sequence[Ints]) -> tuple[list[int], list[int]]:
    """Sort sequences lexicographically: their indices, and the length that each has in common with the one before.

    The last token of a sequence never counts as common: each sequence keeps a leaf of its own.
    """
    keys = [token_key(row) for row in rows]
    order = sorted(range(len(rows)), key=keys.__getitem__)
    common = [0] * len(rows)
    for place, (left, right) in enumerate(itertools.pairwise(order), 1):
        most = min(len(rows[left]), len(rows[right])) - 1
        common[place] = max(0, min(most, common_tokens(keys[left], keys[right])))
    return order, common


def pays(flat: int, stored: int, *, on_gpu: bool) -> bool:
    """Say whether a device shares common beginnings that leave `stored` of `flat` tokens: a CPU always does."""
    return not on_gpu or flat - stored >= max(_LEAST_SAVED, _PART_SAVED * flat)


class _Tree:
    """Builds the prefix tree of sequences in lexicographic order, node by node in depth-first order."""

    def __init__(self, order: list[int], common: list[int], bounds: Ints) -> None:
        self.order = order
        self.common = common
        self.bounds = bounds
        self.size = 0
        self.spans: list[tuple[int, int]] = []
        self.depths: list[int] = []  # position in its sequence of each node's first token
        self.ancestors: list[list[int]] = []
        self.shared: list[tuple[int, int, int, int]] = []
        self.stored: list[Ints] = []
        self.expand = np.empty(int(bounds[-1]), dtype=np.int64)

    def layout(self, device: torch.device) -> PackedLayout:
        """Build all nodes and return their layout."""
        # Work still to do: sequences order[low:high] below the nodes `path`, which cover their first `depth` tokens;
        # or, with low == high, close the last node of `path`. A stack, since trees of nested sequences are deep.
        work: list[tuple[int, int, int, list[int]]] = [(0, len(self.order), 0, [])]
        while work:
            low, high, depth, path = work.pop()
            if low == high:
                start, end = self.spans[path[-1]]
                self.shared.append((end, self.size, start, end))
                continue
            cuts = [i for i in range(low + 1, high) if self.common[i] < depth + MIN_SHARED]
            if cuts:
                runs = zip([low, *cuts], [*cuts, high], strict=True)
                work.extend((first, last, depth, path) for first, last in reversed(list(runs)))
            elif high - low == 1:
                self._leaf(self.order[low], depth, path)
            else:
                deeper = min(self.common[low + 1 : high])
                below = [*path, self._node(self.order[low], depth, deeper, path)]
                work += [(high, high, deeper, below), (low, high, deeper, below)]
        return self._finish(device)

    def _node(self, sequence: int, depth: int, stop: int, path: list[int]) -> int:
        """Store the tokens [depth, stop) of a sequence below the nodes `path`."""
        start = int(self.bounds[sequence])
        self.spans.append((self.size, self.size + stop - depth))
        self.depths.append(depth)
        self.ancestors.append(path)
        self.stored.append(np.arange(start + depth, start + stop))
        self.size += stop - depth
        return len(self.spans) - 1

    def _leaf(self, sequence: int, depth: int, path: list[int]) -> None:
        start, end = int(self.bounds[sequence]), int(self.bounds[sequence + 1])
        leaf = self._node(sequence, depth, end - start, path)
        for node in (*path, leaf):
            low, high = self.spans[node]
            first = start + self.depths[node]
            self.expand[first : first + high - low] = np.arange(low, high)

    def _finish(self, device: torch.device) -> PackedLayout:
        positions = [np.arange(d, d + high - low) for d, (low, high) in zip(self.depths, self.spans, strict=True)]
        return PackedLayout(
            spans=self.spans,
            shared=self.shared,
            ancestors=self.ancestors,
            stored=torch.from_numpy(np.concatenate(self.stored)).to(device),
            positions=torch.from_numpy(np.concatenate(positions)).to(device),
            expand=torch.from_numpy(self.expand).to(device),
            longest=int(np.diff(self.bounds).max()),
        )
