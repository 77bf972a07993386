"""Data set classes made for verl, of which only the import lines are changed."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from agentrl.config import Config
from agentrl.data.own import OwnDataset, load_own
from agentrl.errors import CodeError, DataError
from agentrl.quickstart.tiny_policy import make_tiny_policy
from tests.workers.conftest import SHAPE

RETOOL = """
import datasets
from verl.utils.dataset import RLHFDataset


def to_row(row, *, data_source):
    prompt = [{"role": "user", "content": row["Problem"] + " Put it into a box."}]
    return {
        "data_source": data_source,
        "prompt": prompt,
        "ability": "MATH",
        "reward_model": {"ground_truth": str(row["Answer"])},
        "agent_name": "tool_agent",
    }


class CustomRLHFDataset(RLHFDataset):
    def _read_files_and_tokenize(self):
        parts = []
        for file in self.data_files:
            part = datasets.load_dataset("parquet", data_files=file)["train"]
            parts.append(part.map(to_row, fn_kwargs={"data_source": "aime"}, remove_columns=part.column_names))
        self.dataframe: datasets.Dataset = datasets.concatenate_datasets(parts)


class Shouting(RLHFDataset):
    def _build_messages(self, example):
        messages = super()._build_messages(example)
        assert len(self.tokenizer("a b")["input_ids"]) and self.config.max_prompt_length == 64
        assert isinstance(self.tokenizer.apply_chat_template([{"role": "user", "content": "a"}])[0], int)
        return [{**message, "content": message["content"].upper()} for message in messages]


class Wrong(RLHFDataset):
    def __getitem__(self, item):
        return {**super().__getitem__(item), "data_source": 3}


class Broken(RLHFDataset):
    def __getitem__(self, item):
        raise RuntimeError("no such row")
"""


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_policy(tmp_path_factory.mktemp("policy"), seed=0, shape=SHAPE)


def opened(folder: Path, policy: Path, name: str, rows: list[dict[str, object]], most: int | None = None) -> OwnDataset:
    file = folder / "retool.py"
    file.write_text(RETOOL.replace("from verl.utils.dataset import", "from agentrl.verl import"))
    pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")
    config = Config.model_validate(
        {
            "data": {"custom_cls": {"path": str(file), "name": name}, "max_prompt_length": 64},
            "actor_rollout_ref": {"model": {"path": str(policy)}},
        }
    )
    return load_own(config.data.custom_cls, [str(folder / "rows.parquet")], config, most)


def row(number: int) -> dict[str, object]:
    """One as verl's preparation of GSM8K writes it."""
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"what is {number} + 1?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(number + 1)},
        "extra_info": {
            "split": "train",
            "index": number,
            "tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": str(number + 1)}}},
            "interaction_kwargs": {"query": "?", "ground_truth": str(number + 1)},
        },
    }


def test_a_class_that_reads_other_columns(tmp_path: Path, policy: Path) -> None:
    problems: list[dict[str, object]] = [{"Problem": f"{number} + 1", "Answer": number + 1} for number in range(3)]
    data = opened(tmp_path, policy, "CustomRLHFDataset", problems)
    assert data.check(agent_names=["tool_agent"], tool_names=[], interaction_names=[]) == ["aime"]
    assert [(one.prompt[0]["content"], one.ground_truth, one.agent_name) for one in data] == [
        (f"{number} + 1 Put it into a box.", str(number + 1), "tool_agent") for number in range(3)
    ]


def test_rows_of_verls_preparation(tmp_path: Path, policy: Path) -> None:
    data = opened(tmp_path, policy, "Shouting", [{**row(number), "feedback": 0} for number in range(4)], most=2)
    assert len(data) == 2
    data.check(agent_names=["single_turn"], tool_names=["calc_gsm8k_reward"], interaction_names=[])
    assert list(data.notes.values()) == ["columns that are not read: feedback"]
    sample = data[1]
    assert sample.prompt == [{"role": "user", "content": "WHAT IS 1 + 1?"}]
    assert sample.ground_truth == "2"
    assert sample.tools_kwargs == {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "2"}}}
    assert sample.interaction_kwargs == {"query": "?", "ground_truth": "2"}
    assert sample.extra_info["index"] == 1
    assert sample.agent_name == "single_turn"


def test_whose_fault_it_is(tmp_path: Path, policy: Path) -> None:
    with pytest.raises(DataError, match="data set Wrong, sample 0, column data_source: expected text, found 3"):
        list(opened(tmp_path, policy, "Wrong", [row(0)]))
    with pytest.raises(CodeError, match="no such row"):
        list(opened(tmp_path, policy, "Broken", [row(0)]))
