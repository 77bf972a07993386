"""A data set class of a user's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentrl.config import Config
from agentrl.config.sections.data import CustomDatasetConfig, DataConfig
from agentrl.data.loader import make_loader
from agentrl.data.own import OwnDataset, load_own
from agentrl.errors import CodeError, ConfigError, DataError
from tests.naming import naming

SUMS = """
from pydantic import BaseModel
from agentrl.trajectory.sample import Sample

class Options(BaseModel):
    largest: int = 3

class Sums:
    def __init__(self, files, options: Options):
        self.files, self.largest = files, options.largest

    def __len__(self):
        return self.largest

    def __getitem__(self, index):
        prompt = [{"role": "user", "content": f"{index} + {index} = ?" * (5 if index == 2 else 1)}]
        return Sample(prompt, "sums", "" if index else "tool_agent", ground_truth=str(2 * index))

class Dicts(Sums):
    def __getitem__(self, index):
        return {"prompt": "1"}

LIMIT = 3
"""
NAMES: dict[str, Any] = {"tool_names": [], "interaction_names": []}


def own(tmp_path: Path, name: str = "Sums", on_bad_row: Any = "error", **options: int) -> OwnDataset:
    file = tmp_path / "sums.py"
    file.write_text(SUMS)
    custom = CustomDatasetConfig(path=str(file), name=name, options=options)
    assert custom.target == CustomDatasetConfig(path=f"{file}:{name}").target
    config = Config.model_validate({"data": {"on_bad_row": on_bad_row}})
    return load_own(custom, "made up", config, None)


def test_samples_are_checked_filtered_and_drawn(tmp_path: Path) -> None:
    data = own(tmp_path, largest=4)
    assert data.files == ["made up"]
    assert data.check(agent_names=["single_turn", "tool_agent"], **NAMES) == ["sums"]
    before = data.fingerprint
    assert data.filter_overlong(lambda sample: len(str(sample.prompt[0]["content"])), 20) == 1
    assert data.fingerprint not in (before, own(tmp_path, largest=3).fingerprint)
    assert [(one.index, one.agent_name, one.ground_truth, one.row) for one in data] == [
        (0, "tool_agent", "0", 0),
        (1, "single_turn", "2", 1),
        (3, "single_turn", "6", 3),
    ]
    loader = make_loader(data, DataConfig(train_batch_size=2, shuffle=False))
    assert [one.index for one in next(loader)] == [0, 1]
    assert loader.state_dict()["fingerprint"] == data.fingerprint


def test_names_that_nobody_knows(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data set Sums, sample 0, column agent_name: unknown name 'tool_agent'"):
        own(tmp_path).check(agent_names=["single_turn"], **NAMES)
    data = own(tmp_path, on_bad_row="skip")
    assert data.check(agent_names=["single_turn"], **NAMES) == ["sums"]
    assert (len(data), data.bad.count) == (2, 1)


def test_what_a_class_must_give(tmp_path: Path) -> None:
    with naming(CodeError, "Dicts", "Sample", "found {'prompt': '1'}"):
        own(tmp_path, "Dicts")[0]
    with naming(DataError, "empty"):
        own(tmp_path, largest=0)
    with naming(ConfigError, "data.custom_cls", "LIMIT"):
        own(tmp_path, "LIMIT")
