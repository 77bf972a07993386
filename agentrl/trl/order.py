"""The order in which TRL's `GRPOTrainer` takes its rows."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from agentrl.data.sampler import EpochSampler


class RepeatOrder(EpochSampler):
    """Permutations by torch's generator, as `RepeatSampler` draws them: one generator for all epochs."""

    def order(self, epoch: int) -> npt.NDArray[np.int64]:
        import torch  # late: samplers are loaded before torch, which takes seconds

        generator = torch.Generator().manual_seed(self.seed)
        for _ in range(epoch):
            torch.randperm(len(self.data), generator=generator)
        return np.asarray(torch.randperm(len(self.data), generator=generator).tolist(), dtype=np.int64)
