"""CPU-seconds of a call, for tests of how they grow."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable


def cpu_seconds(call: Callable[[], object]) -> float:
    gc.disable()  # a collection of all that the tests hold takes longer than most calls
    try:
        begun = time.process_time()
        call()
        return time.process_time() - begun
    finally:
        gc.enable()
