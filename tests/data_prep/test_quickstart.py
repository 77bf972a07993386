"""The quickstart's data: deterministic, split cleanly, and not answerable without its tools."""

import json
import subprocess
import sys
from itertools import islice, pairwise
from pathlib import Path
from random import Random

import pyarrow.parquet as pq
import pytest

from agentrl.errors import DataError
from agentrl.tool.toolset import ToolSet
from data_prep.made_up import KINDS, World, calculate
from data_prep.quickstart import Recipe, main, make
from data_prep.transcripts import ARGUMENTS, flawed, good

SMALL = Recipe(seed=1, train_rows=300, val_rows=96, good_rows=60, flawed_rows=400)
FILES = ("train.parquet", "val.parquet", "sft.parquet", "corpus.jsonl", "tools.yaml", "quickstart.json")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("quickstart")
    assert make(out, SMALL, lambda line: None)
    return out


def contents(out: Path) -> dict[str, bytes]:
    return {name: (out / name).read_bytes() for name in FILES}


def test_rows_follow_the_row_schema(made: Path) -> None:
    rows = pq.read_table(made / "train.parquet").to_pylist()
    assert len(rows) == 300
    assert [row["data_source"] for row in rows[:3]] == [f"quickstart/{kind}" for kind in KINDS]
    assert {row["agent_name"] for row in rows} == {"tool_agent"}
    assert {row["reward_model"]["style"] for row in rows} == {"rule"}
    assert rows[7]["extra_info"] == {"split": "train", "index": 7}
    assert [message["role"] for message in rows[0]["prompt"]] == ["system", "user"]


def test_the_same_seed_makes_the_same_bytes_and_another_does_not(made: Path, tmp_path: Path) -> None:
    make(tmp_path / "again", SMALL, lambda line: None)
    assert contents(tmp_path / "again") == contents(made)
    make(tmp_path / "other", Recipe(2, 300, 96, 60, 400), lambda line: None)
    other = contents(tmp_path / "other")
    assert all(other[name] != contents(made)[name] for name in FILES if name != "tools.yaml")


def test_files_made_before_are_used_again_only_when_whole_and_of_the_same_recipe(tmp_path: Path) -> None:
    assert make(tmp_path, SMALL, lambda line: None)
    before = (tmp_path / "train.parquet").stat().st_mtime_ns
    assert not make(tmp_path, SMALL, lambda line: None)
    assert (tmp_path / "train.parquet").stat().st_mtime_ns == before
    (tmp_path / "corpus.jsonl").unlink()
    assert make(tmp_path, SMALL, lambda line: None)
    assert make(tmp_path, Recipe(seed=5, train_rows=9, val_rows=3, good_rows=3, flawed_rows=3), lambda line: None)
    assert pq.read_metadata(tmp_path / "train.parquet").num_rows == 9


def test_validation_asks_nothing_that_training_or_warm_up_asks() -> None:
    world = World(1)
    asked = {split: list(islice(world.tasks(split), 6000)) for split in ("train", "val")}
    asked["train"] += islice(world.tasks("train", purpose="warm-up"), 6000)
    first_calls = {split: {task.calls[0].argument for task in tasks} for split, tasks in asked.items()}
    assert not first_calls["train"] & first_calls["val"]
    assert len(first_calls["val"]) > 1000


def test_questions_about_facts_do_not_hold_their_answers() -> None:
    tasks = [task for task in islice(World(3).tasks("train"), 900) if task.kind != "arithmetic"]
    assert len(tasks) == 600
    assert not [task for task in tasks if task.answer in task.question]
    assert len({task.answer for task in tasks}) > 400


def test_answers_follow_from_the_corpus(made: Path) -> None:
    documents = [json.loads(line)["contents"] for line in (made / "corpus.jsonl").read_text().splitlines()]
    values = dict(document.split(": ") for document in documents)
    assert len(values) == len(documents) == 600
    for row in pq.read_table(made / "val.parquet").to_pylist():
        question, answer = row["prompt"][1]["content"], row["reward_model"]["ground_truth"]
        if row["data_source"] == "quickstart/search":
            (key,) = [key for key in values if key in question]
            assert answer == values[key]
        if row["data_source"] == "quickstart/two_step":
            (key,) = [key for key in values if key in question]
            factor = question.rstrip("?.").split()[-1]
            assert int(answer) == int(values[key]) * int(factor)


@pytest.mark.parametrize(("expression", "answer"), [("605-291", "314"), ("34*77", "2618"), ("216+824", "1040")])
def test_sums(expression: str, answer: str) -> None:
    assert calculate(expression).answer == answer


def test_a_good_conversation_calls_every_tool_and_ends_with_the_answer() -> None:
    task = next(task for task in World(1).tasks("train") if task.kind == "two_step")
    messages = good(task)
    assert [message["role"] for message in messages] == ["system", "user"] + ["assistant", "tool"] * 2 + ["assistant"]
    calls = [message["tool_calls"][0]["function"] for message in messages if message.get("tool_calls")]
    assert [call["name"] for call in calls] == ["search", "calculator"]
    assert json.loads(str(calls[1]["arguments"])) == {"expression": task.calls[1].argument}
    assert messages[-1]["content"] == f"#### {task.answer}"


def test_flawed_conversations_go_wrong_in_every_way() -> None:
    world, rng = World(1), Random(0)
    seen: list[str] = []
    for task in islice(world.tasks("train"), 2000):
        messages = flawed(task, world, rng)
        answers = [str(message["content"]) for message in messages if message["role"] == "tool"]
        last = str(messages[-1]["content"])
        if not answers:
            seen.append("guess")
        elif answers[0].startswith("Error"):
            seen.append("malformed")
            assert not well_formed(messages[2]["tool_calls"][0]["function"]["arguments"], ARGUMENTS[task.calls[0].tool])
        elif answers[0] == task.calls[0].answer:
            seen.append("wrong form")
            assert not last.startswith("####")
            assert task.answer in last
        else:
            seen.append("wrong argument")
            assert last == f"#### {answers[0].split()[-1]}"
    shares = {flaw: round(seen.count(flaw) / 2000, 1) for flaw in set(seen)}
    assert shares == {"guess": 0.7, "malformed": 0.1, "wrong form": 0.1, "wrong argument": 0.1}


def well_formed(arguments: object, required: str) -> bool:
    try:
        return required in json.loads(str(arguments))
    except ValueError:
        return False


async def test_conversations_show_what_the_tools_really_answer(made: Path) -> None:
    tools = ToolSet.from_yaml(made / "tools.yaml")
    tools.bind(lambda text: list(text.encode()), lambda ids: bytes(ids).decode())
    session = await tools.open("test", {})
    world, rng = World(1), Random(0)
    for task in islice(world.tasks("val"), 150):
        for messages in (good(task), flawed(task, world, rng)):
            for calling, answer in pairwise(messages):
                if answer["role"] == "tool" and not str(answer["content"]).startswith("Error (parse)"):
                    function = calling["tool_calls"][0]["function"]
                    result = await session.call(function["name"], json.loads(str(function["arguments"])))
                    assert result.text == answer["content"]
    await session.close()


def test_warm_up_is_in_learning_order(made: Path) -> None:
    table = pq.read_table(made / "sft.parquet").to_pylist()
    assert [row["phase"] for row in table] == ["good"] * 60 + ["flawed"] * 400
    assert json.loads(table[0]["tools"])[0]["function"]["name"] == "calculator"
    right = [row["messages"][-1]["content"].startswith("#### ") for row in table]
    assert all(right[:60])


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="file"):
        make(tmp_path / "file" / "out", SMALL, lambda line: None)
    assert main(["--out", str(tmp_path / "file" / "out")]) == 2
    assert str(tmp_path / "file") in capsys.readouterr().err


def test_data_preparation_imports_no_torch() -> None:
    code = "import sys, data_prep.quickstart, data_prep.gsm8k; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
