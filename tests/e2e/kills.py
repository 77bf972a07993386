"""Runs that kill themselves at one of their events: from outside, a busy machine may come after their end."""

from __future__ import annotations

import signal
from pathlib import Path

OBSERVER = """
import os

from agentrl.trainer.observer import StepObserver


class Ends(StepObserver):
    def {event}(self, step):
        if step.number >= {step}:
            os.kill(os.getpid(), {number})
"""


def ends_at(folder: Path, step: int, event: str = "on_end", number: int = signal.SIGKILL) -> str:
    """Write an observer into the folder that a run begins in; return the override by which the run ends there."""
    (folder / "ends.py").write_text(OBSERVER.format(event=event, step=step, number=int(number)))
    return "trainer.observers=ends.py:Ends"
