"""The table of a recipe's runs: shares, intervals and sources of each run's own files."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from labs.learning.recipe_runs import main
from tests.naming import naming

PAGE = "before\n<!-- seeds -->\nold\n<!-- end of seeds -->\nafter\n"


def run_folder(folder: Path, greedy: tuple[float, float]) -> Path:
    (folder / "trajectories").mkdir(parents=True)
    pq.write_table(
        pa.table({"data_source": ["a"] * 60 + ["b"] * 36}), folder / "trajectories" / "val_000000_greedy.parquet"
    )
    lines = [
        {"step": 0, "val/success_greedy": greedy[0], "val/a/success_greedy": 0.25, "val/b/success_greedy": 1.0},
        {"step": 1, "time/step": 1800.0, "reward/mean": 0.5, "val/success_greedy": 0.5},
        {
            "step": 2, "time/step": 1800.0, "reward/mean": 0.7, "val/success_greedy": greedy[1],
            "val/a/success_greedy": 0.75, "val/b/success_greedy": 1.0,
        },
    ]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_each_run_has_its_shares_with_intervals_and_its_hours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wilson's intervals of 59, 0 and 96 of 96 are those of scipy 1.17.1's `binomtest(...).proportion_ci`; of 45 of 60
    and 36 of 36 by his formula with z = 1.96."""
    runs = [run_folder(tmp_path / "seed-1", (59 / 96, 1.0)), run_folder(tmp_path / "seed-2", (0.0, 59 / 96))]
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    words = [*map(str, runs), "--document", str(page), "--name", "seeds", "--picture", str(tmp_path / "runs.png")]
    assert main(words) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[2] == "| run | before | on the way | after | a | b | hours |"
    assert printed[4] == (
        "| seed-1 | 61.5 % (51.5 to 70.6) | 50.0 % at step 1 | 100.0 % (96.2 to 100.0) at step 2 "
        "| 25.0 to 75.0 % (62.8 to 84.2) | 100.0 to 100.0 % (90.4 to 100.0) | 1.00 |"
    )
    assert printed[5].startswith("| seed-2 | 0.0 % (0.0 to 3.8) | 50.0 % at step 1 | 61.5 % (51.5 to 70.6) at step 2 |")
    text = page.read_text()
    assert text.startswith("before\n<!-- seeds -->\nGreedy") and text.endswith("<!-- end of seeds -->\nafter\n")
    assert "old" not in text and (tmp_path / "runs.png").read_bytes().startswith(b"\x89PNG")


def test_one_validation_before_all_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, before = run_folder(tmp_path / "seed-1", (0.0, 1.0)), run_folder(tmp_path / "val_only", (0.25, 0.0))
    (run / "trajectories" / "val_000000_greedy.parquet").unlink()
    for folder, kept in ((run, slice(1, None)), (before, slice(1))):
        lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
        (folder / "metrics.jsonl").write_text("".join(lines[kept]))
    picture = tmp_path / "runs.png"
    assert main([str(run), "--before", str(before), "--picture", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "| seed-1 | 25.0 % (17.4 to 34.5) | 50.0 % at step 1 | 100.0 %" in capsys.readouterr().out


def test_a_page_without_the_marks_is_left_as_it_is(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "seed-1", (0.5, 0.5))
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    with naming(ValueError, "lacks"):
        main([str(run), "--document", str(page), "--name", "others"])
    assert page.read_text() == PAGE
