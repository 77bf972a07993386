"""Solved puzzles of the Reasoning Gym recipe's warm-up."""

from __future__ import annotations

import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from data_prep.files import write_parquet
from examples.reasoning_gym import solved

PUZZLES = {
    "chain_sum": ("the following arithmetic problem: 4 - 6 =\n", "-2"),
    "gcd": ("Common Divisor (GCD) of these numbers: 12, 42. Give", "6"),
    "letter_counting": ('does the letter "r" appear in the text: "Me, her year"?', "2"),
    "spell_backward": ("(example: sun -> nus): ligas\n", "sagil"),
    "leg_counting": ("if you have 3 deers, 3 woodlouses?", None),
}


def test_conversations_have_the_right_answers_of_kinds_that_can_be_solved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        {"data_source": f"environment/reasoning_gym/{kind}", "prompt": [{"role": "user", "content": text}]}
        for kind, (text, _) in PUZZLES.items()
    ]
    write_parquet(tmp_path / "train.parquet", rows)
    monkeypatch.setattr(sys, "argv", ["solved", str(tmp_path / "train.parquet"), str(tmp_path / "sft.parquet")])
    solved.main()
    written = [row["messages"][-1]["content"] for row in pq.read_table(tmp_path / "sft.parquet").to_pylist()]
    assert written == [f"<answer>{answer}</answer>" for _, answer in PUZZLES.values() if answer is not None]
