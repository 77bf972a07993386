"""The order in which TRL's `GRPOTrainer` takes its rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from agentrl.data.sampler import EpochSampler

if TYPE_CHECKING:
    import torch


class RepeatOrder(EpochSampler):
    """Permutations by torch's generator, as `RepeatSampler` draws them: one generator for all epochs."""

    _drawn: tuple[int, torch.Generator] | None = None
    """Epochs that were drawn, and the generator after them."""

    def order(self, epoch: int) -> npt.NDArray[np.int64]:
        import torch  # late: samplers are loaded before torch, which takes seconds

        drawn, generator = self._drawn or (0, torch.Generator().manual_seed(self.seed))
        if drawn > epoch:
            drawn, generator = 0, generator.manual_seed(self.seed)
        for _ in range(drawn, epoch + 1):
            order = torch.randperm(len(self.data), generator=generator)
        self._drawn = epoch + 1, generator
        return np.asarray(order.tolist(), dtype=np.int64)
