"""The layout of a packed batch, in which common beginnings of sequences may be stored once.

Sequences of a reinforcement-learning batch begin alike: the trajectories of one prompt share that prompt, all prompts
share the system message. In a causal model the hidden states of a shared beginning are equal, so it is enough to
compute them once: the batch becomes a prefix tree. A node is a run of tokens; it attends to itself causally and to
all of its ancestors fully. Nodes are stored in depth-first order, so that everything below a node follows it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch


@dataclass(slots=True, eq=False)
class PackedLayout:
    """A packed batch of P stored tokens standing for T tokens of N sequences (P <= T).

    Every span is [start, end) in stored tokens.
    """

    spans: list[tuple[int, int]]
    """The nodes: runs of tokens that attend causally to themselves."""
    shared: list[tuple[int, int, int, int]]
    """(first query, last query, first key, last key): the queries below a node attend to all of that node's keys."""
    ancestors: list[list[int]]
    """For each node, the indices of the nodes above it, outermost first."""
    stored: torch.Tensor
    """[P] int64: index of each stored token among the T tokens."""
    positions: torch.Tensor
    """[P] int64: position of each stored token in its sequence."""
    expand: torch.Tensor
    """[T] int64: the stored token that represents each of the T tokens."""
    longest: int
    """Length of the longest sequence."""

    @property
    def is_flat(self) -> bool:
        """True when no beginning is shared, so that each span is one whole sequence and stored is 0..T-1."""
        return not self.shared


def flat_layout(offsets: torch.Tensor, device: torch.device) -> PackedLayout:
    """Lay out each sequence on its own, so that nothing is shared. offsets [N + 1] int64."""
    bounds = offsets.tolist()
    spans = list(itertools.pairwise(bounds))
    lengths = offsets.diff().to(device)
    index = torch.arange(bounds[-1], device=device)
    starts = torch.repeat_interleave(offsets[:-1].to(device), lengths, output_size=bounds[-1])
    longest = max((end - start for start, end in spans), default=0)
    return PackedLayout(spans, [], [[] for _ in spans], index, index - starts, index, longest)
