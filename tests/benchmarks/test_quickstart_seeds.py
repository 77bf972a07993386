"""The main job over seeds: what counts as standing still, and which seeds are counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.training.quickstart_seeds import (
    GREEDY,
    SAMPLED,
    SEEDS,
    Run,
    document,
    documented,
    run_whole,
    seed_of,
    stands_still,
    table,
)


@pytest.mark.parametrize(
    ("rates", "still"),
    [
        ((0.06, 0.0, 0.0), True),
        ((0.05, 0.3, 0.1), True),  # only its last step counts
        ((0.05, 0.05, 0.11), False),
        ((0.5, 0.7, 0.91), False),  # twice its start cannot be asked of it
        ((0.5, 0.7, 0.89), True),
    ],
)
def test_a_run_stands_still_at_twice_its_start_or_below(rates: tuple[float, ...], still: bool) -> None:
    assert stands_still(rates) is still


def test_a_commit_gives_one_seed_which_is_not_among_the_documented() -> None:
    one, other = seed_of("fcf92cd0" + 32 * "0"), seed_of("fcf92cd1" + 32 * "0")
    assert one != other
    assert seed_of("00000000" + 32 * "f") == 1000
    assert min(one, other) >= 1000 > max(SEEDS)


def made(folder: Path, ends: float) -> None:
    run = folder / "runs" / "quickstart"
    run.mkdir(parents=True)
    lines: list[dict[str, float]] = []
    for step in range(31):
        line: dict[str, float] = {"step": step} | ({"success/rate": 0.5} if step else {})
        if step % 5 == 0:
            line |= {"val/success_sampled": ends if step == 30 else 0.1, "val/success_greedy": 0.2}
        lines.append(line)
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "cpu_seconds.json").write_text("120.5")


def test_no_seed_is_left_out_of_the_count_and_a_run_that_is_there_is_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed, ends in ((501, 0.9), (502, 0.89), (503, 1.0)):
        made(tmp_path / str(seed), ends)
    runs = [run_whole(seed, tmp_path) for seed in (501, 502, 503)]
    assert table(runs).startswith(
        "2 of 3 seeds reach a sampled success of 90% in a validation, and 2 end there (seed 502 ends at 89.0%). "
        "Before GRPO the median success is 10.0%."
    )
    page = tmp_path / "page.md"
    (tmp_path / "images").mkdir()
    page.write_text("above\n<!-- seeds -->\nold\n<!-- end of seeds -->\nbelow\n")
    monkeypatch.setattr("benchmarks.training.quickstart_seeds.PAGE", page)
    document(runs)
    text = page.read_text()
    assert "old" not in text and text.startswith("above\n") and text.endswith("below\n")
    assert [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| 5")] == ["| 501", "| 502", "| 503"]
    assert documented(502) == {SAMPLED: (0.1, 0.89), GREEDY: (0.2, 0.2)}
    assert (tmp_path / "images" / "seeds.png").stat().st_size > 5_000


def test_a_seed_that_falls_back_after_its_best_validation_is_named() -> None:
    fallen = Run(9, (0.5,), tuple((5 * i, sampled, 0.5) for i, sampled in enumerate((0.95, 0.91, 0.5, 0.5, 0.8))), 1.0)
    late = Run(8, (0.5,), tuple((5 * i, sampled, 0.5) for i, sampled in enumerate((0.95, 0.2, 0.5, 0.5, 0.8))), 1.0)
    assert fallen.reaches and not late.reaches  # the validation before the first step does not count
    assert "1 of 2 seeds reach" in (text := table([fallen, late]))
    assert "0 end there (seed 9 ends at 80.0%; seed 8 ends at 80.0%)" in text


def test_a_run_is_read_whole(tmp_path: Path) -> None:
    made(tmp_path, 0.97)
    run = Run.read(7, tmp_path)
    assert len(run.training) == 30 and run.cpu_seconds == 120.5
    assert run.validation[0] == (0, 0.1, 0.2) and run.validation[-1] == (30, 0.97, 0.2)
