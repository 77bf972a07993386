"""Open questions as rows: their split, their prompts, and what a broken source gets."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from agentrl.data.dataset import FileDataset
from agentrl.reward import search_qa
from agentrl.reward.sources import kind_of
from data_prep.nq_open import main
from tests.naming import Names, assert_names


def lines(path: Path, first: int, count: int) -> Path:
    records = [
        {"question": f" who is number {n} ", "answer": [str(n), f"No. {n}"]} for n in range(first, first + count)
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def rows(source: Path, out: Path, *options: str) -> dict[str, list[dict[str, Any]]]:
    assert main(["--source", str(source), "--out", str(out), *options]) == 0
    return {split: pq.read_table(out / f"{split}.parquet").to_pylist() for split in ("train", "test")}


def questions(rows: list[dict[str, Any]]) -> list[str]:
    return [row["prompt"][-1]["content"] for row in rows]


def test_one_file_is_split_the_same_way_each_time(tmp_path: Path) -> None:
    source = lines(tmp_path / "nq.jsonl", 0, 40)
    first = rows(source, tmp_path / "a", "--test-rows", "10", "--train-rows", "25")
    assert rows(source, tmp_path / "b", "--test-rows", "10", "--train-rows", "25") == first
    assert [len(first["train"]), len(first["test"])] == [25, 10]
    assert not set(questions(first["train"])) & set(questions(first["test"]))
    other = rows(source, tmp_path / "c", "--test-rows", "10", "--seed", "2")
    assert len(other["train"]) == 30 and questions(other["test"]) != questions(first["test"])


def test_half_a_surrogate_pair_becomes_the_mark_of_no_character(tmp_path: Path) -> None:
    source = tmp_path / "nq.jsonl"
    source.write_text("".join(json.dumps({"question": f"{n} \ud83d?", "answer": ["\ud83d"]}) + "\n" for n in (1, 2)))
    (row,) = rows(source, tmp_path / "out", "--test-rows", "1")["train"]
    assert row["prompt"][-1]["content"].endswith(" \ufffd?")
    assert row["reward_model"]["ground_truth"]["target"] == ["\ufffd"]


def test_rows_are_search_r1s(tmp_path: Path) -> None:
    source = lines(tmp_path / "nq.jsonl", 7, 2)
    (row,) = rows(source, tmp_path / "out", "--test-rows", "1")["train"]
    number = row["reward_model"]["ground_truth"]["target"][0]
    assert row["prompt"][1] == {"role": "user", "content": f"who is number {number}?"}
    assert row["reward_model"] == {"style": "rule", "ground_truth": {"target": [number, f"No. {number}"]}}
    assert (row["data_source"], row["agent_name"]) == ("nq", "tool_agent") and kind_of("nq") == "search_qa"
    assert row["extra_info"] == {"split": "train", "index": 0}
    assert list(row["tools_kwargs"]) == ["search"]
    (row,) = rows(source, tmp_path / "out", "--test-rows", "1", "--agent", "search_r1")["train"]
    (message,) = row["prompt"]
    assert row["agent_name"] == "search_r1" and "tools_kwargs" not in row
    assert message["content"].endswith(f"Question: who is number {number}?")
    assert all(f"<{tag}>" in message["content"] for tag in ("think", "search", "information", "answer"))


def test_two_files_share_no_question(tmp_path: Path) -> None:
    lines(tmp_path / "NQ-open.train.jsonl", 0, 30)
    dev = lines(tmp_path / "NQ-open.dev.jsonl", 25, 10)
    dev.write_text(dev.read_text() + '{"question": "Who is the number 25?", "answer": ["25"]}\n')
    made = rows(tmp_path, tmp_path / "out")
    assert [len(made["train"]), len(made["test"])] == [25, 10]
    assert questions(rows(tmp_path, tmp_path / "few", "--train-rows", "3")["train"]) == questions(made["train"])[:3]


def test_the_real_data_set(shared_data: Path, tmp_path: Path) -> None:
    made = rows(shared_data / "data" / "nq_open", tmp_path)
    assert len(made["test"]) == 500 and len(made["train"]) > 3000
    assert all(question.endswith("?") for question in questions(made["train"]))
    data = FileDataset(str(tmp_path / "train.parquet"))
    sample = data[0]
    target = sample.ground_truth["target"][0]
    assert search_qa.compute_score("nq", f"<answer>{target}</answer>", sample.ground_truth)["score"] == 1.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"question": "?", "answer": ["a"]}\n{broken\n', ("nq.jsonl:2", "JSON")),
        ('{"question": "who", "answer": "a"}\n', ("nq.jsonl:1", "`answer`", "found 'a'")),
        ('{"question": "who", "answer": []}\n', "`answer`"),
        ('{"query": "who", "answer": ["a"]}\n', "`question`"),
        ('{"question": " ", "answer": ["a"]}\n', ("question", "empty")),
        ("[1]\n", ("nq.jsonl", "JSON")),
        ('{"question": "who", "answer": ["a"]}\n', ("1 different", "500")),
    ],
)
def test_a_bad_source_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, expected: Names) -> None:
    (tmp_path / "nq.jsonl").write_text(text)
    assert main(["--source", str(tmp_path / "nq.jsonl"), "--out", str(tmp_path / "out")]) == 2
    assert_names(capsys.readouterr().err, expected)
    assert not (tmp_path / "out").exists()


def test_files_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "nq.jsonl.gz").write_bytes(gzip.compress(b'{"question": "who", "answer": ["a"]}\n')[:-9])
    (tmp_path / "latin.jsonl").write_bytes(b'{"question": "\xe9"}')
    for name, said in (("nq.jsonl.gz", "cannot be read"), ("latin.jsonl", "UTF-8"), ("none.jsonl", "No such file")):
        assert main(["--source", str(tmp_path / name), "--out", str(tmp_path / "out")]) == 2
        error = capsys.readouterr().err
        assert name in error and said in error
    assert main(["--source", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert_names(capsys.readouterr().err, "`train`")
