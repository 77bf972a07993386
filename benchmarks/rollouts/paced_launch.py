"""`agentrl.engines.sglang.launch` whose steps on the CPU take at least a given time, as those of a GPU do.

    PACE=FOLDER python -m benchmarks.rollouts.paced_launch ARGUMENTS

FOLDER has a file for each server, named by its port, with the seconds; it's read at every step. Servers that wait most
of the time do not take the cores from each other, so one more or less changes nothing for the others.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from agentrl.engines.sglang import cpu as sglang_cpu

PACE = "PACE"
"""Environment variable: the folder."""


def install() -> None:
    sglang_cpu.install()
    sglang_cpu.allow_seeds()
    from sglang.srt.managers.scheduler import Scheduler

    file = Path(os.environ[PACE]) / sys.argv[sys.argv.index("--port") + 1]
    run_batch = Scheduler.run_batch

    def paced(self: Any, *args: Any, **options: Any) -> Any:
        end = time.monotonic() + float(file.read_text())
        result = run_batch(self, *args, **options)
        time.sleep(max(0.0, end - time.monotonic()))
        return result

    Scheduler.run_batch = paced


if __name__ == "__main__" and "--help" in sys.argv:
    sys.exit(print(__doc__))

if __name__ in ("__main__", "__mp_main__"):
    install()

if __name__ == "__main__":
    import threading

    from agentrl.engines.servers.starter import STARTER, end_with
    from agentrl.engines.sglang.launch import main

    threading.Thread(target=end_with, args=(int(os.environ[STARTER]),), daemon=True).start()
    main()
