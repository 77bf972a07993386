"""The display as lines with the time of day."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Self, TextIO

from agentrl.observe.display import STEP_COLUMNS, Clock, Display, Stage, remark, stage_seconds
from agentrl.observe.excerpt import cut, headline, pieces
from agentrl.system.visible import visible
from agentrl.trajectory import Trajectory


class PlainDisplay(Display):
    """Lines with the time of day: for log files and CI."""

    INTERVAL = 5.0
    """Least seconds between two progress lines of one stage."""
    PIECE_LINES = 12
    """Lines shown of one piece of a trajectory."""
    PIECES = 24

    def __init__(self, title: str, stream: TextIO | None = None, clock: Clock = time.monotonic) -> None:
        super().__init__(title, clock)
        self._stream = stream
        self._told: dict[Stage, float] = {}

    def __enter__(self) -> Self:
        self._line(self.title)
        return self

    def step(self, step: int, total_steps: int, metrics: Mapping[str, float]) -> None:
        texts = [(column.label.replace(" ", "_"), column.text(metrics)) for column in STEP_COLUMNS]
        numbers = [f"{label}={text}" for label, text in texts if text is not None]
        seconds = [f"{name}={value:.2f}s" for name, value in stage_seconds(metrics).items()]
        said = [] if (text := remark(metrics)) is None else [f"({text})"]
        self._line(" ".join([f"step {step}/{total_steps}:", *numbers, *seconds, *said]))

    def validation(self, step: int, metrics: Mapping[str, float]) -> None:
        numbers = [f"{key.removeprefix('val/')}={value:.4g}" for key, value in metrics.items() if key[:4] == "val/"]
        self._line(" ".join([f"validation at step {step}:", *numbers]))

    def trajectory(self, trajectory: Trajectory, title: str) -> None:
        reading = self._reading()
        self._line(f"{title}: {headline(trajectory)}")
        for index in range(len(trajectory.transcripts)):
            lines = []
            for piece in pieces(trajectory, index, reading):
                shown = cut(piece.text.strip("\n").split("\n"), self.PIECE_LINES)
                lines.append("\n".join(f"    {piece.kind:>8} | {line}" for line in shown))
            for line in cut(lines, self.PIECES, "pieces"):
                self._write(line + "\n")

    def note(self, text: str) -> None:
        self._line(text)

    def warn(self, text: str) -> None:
        self._line(f"warning: {text}")

    def error(self, text: str) -> None:
        self._line(f"error: {text}")

    def _stage_began(self, stage: Stage) -> None:
        with self.lock:
            self._told[stage] = self.clock()
        if stage.depth == 0:
            self._line(f"{stage.name}: begins" + (f", {stage.total} to do" if stage.total else ""))

    def _stage_advanced(self, stage: Stage) -> None:
        with self.lock:
            now = self.clock()
            if now - self._told.get(stage, now) < self.INTERVAL:
                return
            self._told[stage] = now
        self._line(f"{stage.name}: {stage.progress}")

    def _stage_ended(self, stage: Stage, finished: bool) -> None:
        with self.lock:
            self._told.pop(stage, None)
        # A stage inside another is shown only when it was long: the step's line has its seconds.
        if stage.depth == 0 or stage.elapsed >= self.INTERVAL or not finished:
            self._line(f"{stage.name}: {'done' if finished else 'stopped'}  {stage.progress}")

    def _line(self, text: str) -> None:
        lines = visible(text).split("\n")
        self._write(
            "\n".join([f"{time.strftime('%H:%M:%S')} {lines[0]}", *(f"         {more}" for more in lines[1:])]) + "\n"
        )

    def _write(self, text: str) -> None:
        stream = self._stream or sys.stdout
        encoding = getattr(stream, "encoding", None) or "utf-8"
        # A character that the stream's encoding lacks must not end the run.
        stream.write(text.encode(encoding, "replace").decode(encoding))
        stream.flush()
