"""The picture of a run, made from its metrics.jsonl alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, PercentFormatter

from agentrl.observe.tracking import read_metrics
from agentrl.system.json_value import JSON
from agentrl.system.publish import published

REWARD = "reward/mean"
SAMPLED = "val/success_sampled"
GREEDY = "val/success_greedy"
GRADED = "val/reward_sampled"
# People who see few colours can distinguish them, too (the Okabe-Ito palette).
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
UNIT = (-0.03, 1.03)

Lines = Sequence[Mapping[str, JSON]]


def plot(metrics_path: Path, out: Path, title: str) -> None:
    """Training reward (left axis) and validation success (right axis) against the step, as a PNG.

    Where rewards are graded, so that success does not determine the reward, validation's is on the left axis, too.
    """
    lines = _read(metrics_path)
    figure, axes = _figure(title, panels=1)
    reward, success = axes[0], axes[0].twinx()
    graded = any(line.get(GRADED) != line.get(SAMPLED) for line in lines)
    drawn = [
        *_draw(reward, lines, REWARD, label="training reward", color=COLOURS[0], linewidth=1.6),
        *_draw(reward, lines if graded else [], GRADED, label="validation reward", color=COLOURS[3], marker="."),
        *_draw(success, lines, SAMPLED, label="validation success, sampled", color=COLOURS[1], marker="o"),
        *_draw(
            success, lines, GREEDY, label="validation success, greedy", color=COLOURS[2], marker="s", linestyle="--"
        ),
    ]
    _share_scale(reward)
    reward.set_ylabel("mean reward", color=COLOURS[0])
    _percent_axis(success, "validation success")
    success.grid(False)
    if drawn:
        figure.legend(handles=drawn, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    _save(figure, out)


def plot_runs(runs: Mapping[str, Path], out: Path) -> None:
    """Several runs (name: metrics.jsonl) in one PNG: training reward on the left, validation success on the right."""
    figure, (reward, success) = _figure("", panels=2)
    reward.set_title("training reward", fontsize=11)
    success.set_title("validation success: sampled (solid), greedy (dashed)", fontsize=11)
    _percent_axis(success, "")
    drawn = []
    for index, (name, path) in enumerate(runs.items()):
        lines, color = _read(path), COLOURS[index % len(COLOURS)]
        drawn += _draw(reward, lines, REWARD, label=name, color=color, linewidth=1.6)
        _draw(success, lines, SAMPLED, label=name, color=color, marker="o")
        _draw(success, lines, GREEDY, label=name, color=color, marker="s", linestyle="--")
    _share_scale(reward)
    if drawn:
        figure.legend(handles=drawn, loc="outside lower center", ncols=len(COLOURS), frameon=False, fontsize=9)
    _save(figure, out)


def _read(path: Path) -> Lines:
    return read_metrics(path) if path.exists() else []


def _figure(title: str, panels: int) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(5 + 3 * panels, 4.6), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = [figure.add_subplot(1, panels, index + 1) for index in range(panels)]
    for one in axes:
        one.set_xlabel("step")
        one.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        one.grid(alpha=0.25)
        one.spines["top"].set_visible(False)
    if title:
        figure.suptitle(title.replace("$", r"\$"), fontsize=12)
    return figure, axes


def _percent_axis(axes: Axes, label: str) -> None:
    axes.set_ylabel(label)
    axes.set_ylim(*UNIT)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.spines["top"].set_visible(False)


def _draw(
    axes: Axes,
    lines: Lines,
    key: str,
    *,
    label: str,
    color: str,
    marker: str | None = None,
    linestyle: str | None = None,
    linewidth: float | None = None,
) -> list[Line2D]:
    """Draw a metric over the steps that have it; a single point gets a marker. Returns the legend's entry."""
    points = [(line["step"], line[key]) for line in lines if line.get(key) is not None]
    if not points:
        return []
    if len(points) == 1:
        marker = marker or "o"
    across, up = zip(*points, strict=True)
    return axes.plot(across, up, label=label, color=color, marker=marker, linestyle=linestyle, linewidth=linewidth)


def _share_scale(axes: Axes) -> None:
    """Rewards between 0 and 1, the usual case, stand on the scale of the success rate: the eye can compare them."""
    if axes.dataLim.ymin >= 0 and axes.dataLim.ymax <= 1:
        axes.set_ylim(*UNIT)


def _save(figure: Figure, out: Path) -> None:
    with published(out) as temporary:
        figure.savefig(temporary, format="png", dpi=144)
