"""A fault: a rank that sleeps before its part of a call."""

from __future__ import annotations

import time
from typing import Any

from agentrl.runtime.ray.rank import Rank


class SleepyRank(Rank):
    """The second rank does not begin with `compute_log_probs`."""

    def column(self, role: str, method: str, *arguments: Any) -> Any:
        if self.rank == 1 and method == "compute_log_probs":
            time.sleep(3600)
        return super().column(role, method, *arguments)
