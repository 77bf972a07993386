"""The live display on a terminal, made with rich.

Finished things (notes, validations, trajectories) scroll away above. Below stays one small frame with the running
stages, the last steps and the reward's curve, drawn again four times a second. The frame never grows taller than the
terminal, and rich restores the terminal however the `with` is left.
"""

from __future__ import annotations

import io
import math
import re
import time
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from agentrl.observe.display import (
    STEP_COLUMNS,
    VALIDATION_COLUMNS,
    Clock,
    Column,
    Display,
    Stage,
    duration,
    remark,
    score_columns,
    stage_seconds,
)
from agentrl.observe.excerpt import Kind, Piece, cut, headline, pieces
from agentrl.system.visible import visible
from agentrl.trajectory import Trajectory

# Each has a contrast of at least 4:1 against black and against white.
BLUE, ORANGE, GREEN, PURPLE, RED, GREY = "#1f78c8", "#c25e00", "#2a8540", "#a05ac8", "#d83a3a", "#767676"
PIECE_COLOURS: dict[Kind, str] = {
    "prompt": GREY,
    "policy": BLUE,
    "call": ORANGE,
    "tool": GREEN,
    "user": PURPLE,
    "template": GREY,
}
LEGEND = (
    ("trained on:", (("policy", BLUE), ("tool call", ORANGE))),
    ("only read:", (("tool answer", GREEN), ("user", PURPLE), ("prompt", GREY))),
)
STAGE_COLOURS = (BLUE, ORANGE, GREEN, PURPLE, RED, GREY)
BLOCKS = "▁▂▃▄▅▆▇█"


class RichDisplay(Display):
    """The display on a terminal that can be redrawn."""

    STEPS = 5
    """Steps in the table."""
    PIECE_LINES = 14
    """Lines shown of one piece of a trajectory."""
    PIECES = 24
    """Pieces shown of one transcript."""
    VALIDATION_NUMBERS = 6
    """Numbers shown of a validation that has no success rates."""
    HISTORY = 200
    """Things above the frame that `save_svg` still knows."""

    def __init__(self, title: str, console: Console | None = None, clock: Clock = time.monotonic) -> None:
        super().__init__(title, clock)
        self.console = console or Console(markup=False, highlight=False, emoji=False)
        self._started = clock()
        self._printed: deque[RenderableType] = deque(maxlen=self.HISTORY)
        self._steps: deque[tuple[int, dict[str, float]]] = deque(maxlen=self.STEPS)
        self._total_steps = 0
        self._rewards: list[float] = []
        self._validations: list[tuple[int, dict[str, float]]] = []
        self._deepest = 0
        self._live = Live(
            console=self.console, get_renderable=self._frame, refresh_per_second=4, vertical_overflow="crop"
        )

    def __enter__(self) -> Self:
        self._started = self.clock()
        self._live.start(refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._live.stop()

    def step(self, step: int, total_steps: int, metrics: Mapping[str, float]) -> None:
        with self.lock:
            self._total_steps = total_steps
            self._steps.append((step, dict(metrics)))
            if math.isfinite(reward := metrics.get("reward/mean", math.nan)):
                self._rewards.append(reward)
        if (text := remark(metrics)) is not None:
            self.warn(f"step {step}: {text}")

    def validation(self, step: int, metrics: Mapping[str, float]) -> None:
        with self.lock:
            self._validations.append((step, dict(metrics)))
        line = Text.assemble(("✓ ", GREEN), (f"validation at step {step}", "bold"))
        numbers = [(f"success {column.label}", column.text(metrics)) for column in VALIDATION_COLUMNS]
        numbers += [(column.label, column.text(metrics)) for column in score_columns(metrics)]
        if not any(text for _, text in numbers):
            named = [(name.removeprefix("val/"), value) for name, value in metrics.items() if name.startswith("val/")]
            numbers = [(visible(name), f"{value:.4g}") for name, value in named[: self.VALIDATION_NUMBERS]]
        for label, text in numbers:
            if text is not None:
                line.append_text(Text.assemble((f"   {label} ", GREY), (text, "bold")))
        self._print(line)

    def trajectory(self, trajectory: Trajectory, title: str) -> None:
        reading = self._reading()
        parts: list[RenderableType] = [
            Rule(Text(visible(title), style="bold"), style=GREY, align="left"),
            Text(headline(trajectory), style=GREY),
        ]
        for index in range(len(trajectory.transcripts)):
            if index:
                parts.append(Rule(Text(f"context window {index + 1}", style=GREY), style=GREY, characters="┄"))
            parts.append(self._pieces(pieces(trajectory, index, reading)))
        self._print(Group(*parts, _legend(), Text("")))

    def note(self, text: str) -> None:
        self._print(Text(visible(text)))

    def warn(self, text: str) -> None:
        self._print(Text.assemble(("! ", f"bold {ORANGE}"), (visible(text), ORANGE)))

    def error(self, text: str) -> None:
        self._print(Text.assemble(("✗ ", f"bold {RED}"), (visible(text), RED)))

    def save_svg(self, path: str | Path, printed: int = HISTORY) -> None:
        """The last `printed` things above the frame, and the frame as it stands, as a picture of the terminal."""
        console = self.console
        picture = Console(
            record=True,
            width=console.width,
            height=console.height,
            file=io.StringIO(),
            force_terminal=True,
            color_system="truecolor",
        )
        picture.print(*list(self._printed)[-printed:], self._frame(), sep="\n")
        with_font = picture.export_svg(title=self.title)
        # rich's template fetches a font from a server; the picture stands alone without it.
        Path(path).write_text(re.sub(r"@font-face \{.*?\}", "", with_font, flags=re.DOTALL), encoding="utf-8")

    def _print(self, item: RenderableType) -> None:
        self._printed.append(item)
        self.console.print(item)

    def _stage_began(self, stage: Stage) -> None:
        with self.lock:
            self._deepest = max(self._deepest, len(self.stages))

    def _stage_ended(self, stage: Stage, finished: bool) -> None:
        if stage.depth == 0:
            with self.lock:
                self._deepest = 0
            sign = ("✓ ", GREEN) if finished else ("✗ ", RED)
            self._print(Text.assemble(sign, (stage.name, "bold"), (f"  {stage.progress}", GREY)))

    def _pieces(self, shown: Sequence[Piece]) -> Table:
        grid = Table.grid(padding=(0, 1))
        grid.add_column(justify="right", no_wrap=True)
        grid.add_column(overflow="fold")
        width = max(20, self.console.width - 12)
        rows = [(piece.kind, _lines(piece, width, self.PIECE_LINES)) for piece in shown]
        if len(rows) > self.PIECES:
            half = self.PIECES // 2
            hidden = len(rows) - 2 * half
            rows[half:-half] = [("template", f"… {hidden} pieces not shown …")]
        for kind, text in rows:
            colour = PIECE_COLOURS[kind]
            grid.add_row(Text(f"{kind} ▏", style=colour), Text(text, style=colour))
        return grid

    def _frame(self) -> RenderableType:
        with self.lock:
            stages = self._stage_rows()
            parts: list[RenderableType] = [self._header(), *stages]
            if self._steps:
                tail = [self._curve(), self._seconds(), *self._validation_line()]
                room = self.console.height - len(parts) - len(tail) - 4
                parts += [self._table(max(1, room)), *tail]
            return Group(*parts)

    def _header(self) -> RenderableType:
        left = Text(self.title, style=f"bold {BLUE}")
        right = Text(duration(self.clock() - self._started), style=GREY)
        if self._steps:
            right = Text(f"step {self._steps[-1][0]} of {self._total_steps}  ", style=GREY) + right
        grid = Table.grid(expand=True)
        grid.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
        grid.add_column(justify="right", no_wrap=True)
        grid.add_row(left, right)
        return Group(Rule(style=GREY), grid)

    def _stage_rows(self) -> list[RenderableType]:
        """One line a running stage, padded to the most there were, so that the frame does not jump."""
        rows: list[RenderableType] = []
        for stage in self.stages:
            grid = Table.grid(padding=(0, 1), expand=True)
            grid.add_column(width=self.console.width // 4, no_wrap=True, overflow="ellipsis")
            grid.add_column(ratio=1)
            grid.add_column(no_wrap=True, justify="right")
            bar = ProgressBar(
                total=stage.total,
                completed=stage.completed,
                pulse=stage.total is None,
                animation_time=self.clock(),
                style=GREY,
                complete_style=BLUE,
                finished_style=GREEN,
                pulse_style=BLUE,
            )
            grid.add_row(Text("  " * stage.depth + stage.name), bar, Text(stage.progress, style=GREY))
            rows.append(grid)
        rows.extend(Text("") for _ in range(self._deepest - len(rows)))
        return rows

    def _table(self, room: int) -> RenderableType:
        rows = list(self._steps)[-room:]
        columns = _fitting(
            [column for column in STEP_COLUMNS if column.text(rows[-1][1]) is not None], self.console.width - 8
        )
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(justify="right")
        for _ in columns:
            table.add_column(justify="right")
        table.add_row(*(Text(label, style=GREY) for label in ["step", *(column.label for column in columns)]))
        for step, metrics in rows:
            style = "bold" if step == rows[-1][0] else ""
            cells = [str(step), *((column.text(metrics) or "-") for column in columns)]
            table.add_row(*(Text(cell, style=style) for cell in cells))
        return Padding(table, (1, 0, 1, 0))

    def _curve(self) -> RenderableType:
        width = max(8, min(60, self.console.width - 24))
        low, high = min(self._rewards, default=0.0), max(self._rewards, default=0.0)
        return Text.assemble(
            ("reward  ", GREY),
            (f"{low:.2f} ", GREY),
            (sparkline(self._rewards, width), BLUE),
            (f" {high:.2f}", GREY),
            no_wrap=True,
        )

    def _seconds(self) -> RenderableType:
        """The last step's seconds by stage, as a stacked bar with its legend."""
        seconds = sorted(stage_seconds(self._steps[-1][1]).items(), key=lambda item: -item[1])
        total = sum(value for _, value in seconds) or 1.0
        line = Text("time    ", style=GREY, no_wrap=True, overflow="ellipsis")
        for (_, value), colour in zip(seconds, STAGE_COLOURS, strict=False):
            line.append("█" * round(value / total * 20), colour)
        for (name, value), colour in zip(seconds, STAGE_COLOURS, strict=False):
            line.append(f"  {visible(name)} {value:.1f} s", colour)
        return line

    def _validation_line(self) -> list[RenderableType]:
        if not self._validations:
            return []
        (first_step, first), (last_step, last) = self._validations[0], self._validations[-1]
        line = Text("valid.  ", style=GREY, no_wrap=True, overflow="ellipsis")
        for column in (*VALIDATION_COLUMNS, *score_columns(last)):
            before, now = column.text(first), column.text(last)
            if before is None or now is None:
                continue
            change = f"{before} → {now}" if last_step > first_step else now
            line.append_text(Text.assemble((f"{column.label} ", GREY), (change, "bold"), "   "))
        line.append(f"at step {last_step}", GREY)
        return [line]


def sparkline(values: Sequence[float], width: int) -> str:
    """The curve of `values` in at most `width` characters; where there are more values, means of neighbours.

    >>> sparkline([0.0, 0.5, 1.0], 10)
    '▁▅█'
    """
    count = min(width, len(values))
    if not count:
        return ""
    edges = [len(values) * index // count for index in range(count + 1)]
    means = [sum(values[start:end]) / (end - start) for start, end in pairwise(edges)]
    low, span = min(means), max(means) - min(means)
    return "".join(BLOCKS[round((mean - low) / span * 7)] if span else BLOCKS[3] for mean in means)


def _legend() -> Text:
    line = Text()
    for title, entries in LEGEND:
        line.append(f"{title} ", GREY)
        for name, colour in entries:
            line.append(f"■ {name}  ", colour)
    return line


def _fitting(columns: list[Column], width: int) -> list[Column]:
    """The most important columns that fit in `width` characters, in their own order."""
    chosen: list[Column] = []
    for column in sorted(columns, key=lambda column: -column.importance):
        width -= max(6, len(column.label)) + 2
        if width < 0:
            break
        chosen.append(column)
    return [column for column in columns if column in chosen]


def _lines(piece: Piece, width: int, limit: int) -> str:
    """The piece's text broken at `width` and cut to `limit` lines."""
    lines = [
        line[at : at + width]
        for line in piece.text.strip("\n").split("\n")
        for at in range(0, max(1, len(line)), width)
    ]
    return "\n".join(cut(lines, limit))
