from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from agentrl.observe.plot import COLOURS, plot, plot_runs


def run(path: Path, steps: int) -> Path:
    lines = []
    for step in range(steps):
        line: dict[str, float] = {"step": step, "reward/mean": 0.2 + 0.8 * step / max(1, steps)}
        if step % 10 == 0:
            line |= {"val/success_sampled": step / max(1, steps), "val/success_greedy": 0.9 * step / max(1, steps)}
        lines.append(json.dumps(line))
    path.write_text("\n".join(lines))
    return path


def pixels(path: Path, colour: str) -> int:
    """How many pixels of the picture have that colour."""
    picture = imread(path)[..., :3]
    return int((np.abs(picture - np.array(to_rgb(colour))).max(axis=-1) < 0.02).sum())


def test_all_three_curves_are_drawn(tmp_path: Path) -> None:
    out = tmp_path / "made" / "reward.png"
    plot(run(tmp_path / "metrics.jsonl", 41), out, "quickstart $x_")
    assert min(pixels(out, colour) for colour in COLOURS[:3]) > 150
    assert [path.name for path in out.parent.iterdir()] == ["reward.png"]


def test_graded_rewards_of_validation_are_drawn(tmp_path: Path) -> None:
    path = run(tmp_path / "metrics.jsonl", 41)
    plot(path, tmp_path / "success.png", "scores of 0 and 1")
    assert pixels(tmp_path / "success.png", COLOURS[3]) == 0
    path.write_text(
        path.read_text().replace('"val/success_sampled"', '"val/reward_sampled": 0.4, "val/success_sampled"')
    )
    plot(path, tmp_path / "graded.png", "a judge's scores")
    assert pixels(tmp_path / "graded.png", COLOURS[3]) > 150


def test_one_point_is_visible(tmp_path: Path) -> None:
    plot(run(tmp_path / "metrics.jsonl", 1), tmp_path / "one.png", "one")
    assert min(pixels(tmp_path / "one.png", colour) for colour in COLOURS[:3]) > 20


def test_without_a_point_there_is_still_a_picture(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    for name in ("empty.jsonl", "missing.jsonl"):
        plot(tmp_path / name, tmp_path / "none.png", "none")
        assert pixels(tmp_path / "none.png", COLOURS[1]) == 0
    plot_runs({}, tmp_path / "no runs.png")
    assert (tmp_path / "no runs.png").exists()


def test_metrics_recorded_as_null_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "reward/mean": null}\n{"step": 2, "val/success_sampled": null}\n')
    plot(path, tmp_path / "null.png", "null")
    assert pixels(tmp_path / "null.png", COLOURS[1]) == 0


def test_three_runs_in_one_picture(tmp_path: Path) -> None:
    runs = {f"seed {seed}": run(tmp_path / f"{seed}.jsonl", 30 + seed) for seed in range(3)}
    plot_runs(runs, tmp_path / "runs.png")
    assert min(pixels(tmp_path / "runs.png", colour) for colour in COLOURS[:3]) > 150


def test_a_picture_that_cannot_be_drawn_leaves_the_old_one(tmp_path: Path) -> None:
    out = tmp_path / "reward.png"
    plot(run(tmp_path / "metrics.jsonl", 5), out, "fine")
    before = out.read_bytes()
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": "high"}\n{"step": 2, "reward/mean": {}}\n')
    with pytest.raises(TypeError):
        plot(tmp_path / "metrics.jsonl", out, "broken")
    assert out.read_bytes() == before
