"""Order and position of the data."""

from __future__ import annotations

import hashlib
import json
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.config import load_config
from agentrl.config.sections.data import DataConfig
from agentrl.data.dataset import FileDataset
from agentrl.data.loader import Loader, make_loader
from agentrl.errors import CodeError, ConfigError, DataError
from tests.data.test_dataset import row, tokens, write
from tests.naming import Names, naming


@pytest.fixture(scope="module")
def ten(tmp_path_factory: pytest.TempPathFactory) -> FileDataset:
    return FileDataset(write(tmp_path_factory.mktemp("data") / "a.parquet", [row(i) for i in range(10)]))


def loader_of(data: FileDataset, batch: int, *, shuffle: bool = True, seed: int = 1) -> Loader:
    return make_loader(data, DataConfig(train_batch_size=batch, shuffle=shuffle, seed=seed))


def take(loader: Loader, count: int) -> list[list[int]]:
    return [[sample.index for sample in next(loader)] for _ in range(count)]


def test_an_epoch_holds_every_row_once(ten: FileDataset) -> None:
    loader = loader_of(ten, 5, seed=3)
    first, second = list(chain(*take(loader, 2))), list(chain(*take(loader, 2)))
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second and first != list(range(10))


def test_what_is_less_than_a_batch_is_dropped(ten: FileDataset) -> None:
    loader = loader_of(ten, 4, shuffle=False)
    assert (loader.steps_per_epoch, loader.passed_over, loader_of(ten, 5).passed_over) == (2, 2, 0)
    assert take(loader, 3) == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3]]
    assert loader.state_dict()["state"] == {"epoch": 1, "position": 4, "seed": 1}


def test_the_order_depends_on_the_seed_alone(ten: FileDataset) -> None:
    assert take(loader_of(ten, 5, seed=1), 6) == take(loader_of(ten, 5, seed=1), 6)
    assert take(loader_of(ten, 5, seed=1), 6) != take(loader_of(ten, 5, seed=2), 6)


def test_the_order_is_the_same_in_every_version(ten: FileDataset) -> None:
    """A resumed run may have newer packages; these numbers may never change."""
    assert take(loader_of(ten, 10, seed=1), 2) == [
        [2, 0, 1, 4, 5, 6, 7, 8, 3, 9],
        [7, 1, 6, 9, 3, 5, 0, 8, 2, 4],
    ]


@settings(max_examples=25, deadline=None)
@given(steps=st.integers(0, 12), batch=st.integers(1, 10), seed=st.integers(0, 2**40), shuffle=st.booleans())
def test_a_restored_loader_goes_on_exactly(ten: FileDataset, steps: int, batch: int, seed: int, shuffle: bool) -> None:
    loader = loader_of(ten, batch, seed=seed, shuffle=shuffle)
    take(loader, steps)
    state = json.loads(json.dumps(loader.state_dict()))
    restored = loader_of(ten, batch, seed=seed, shuffle=shuffle)
    restored.load_state_dict(state)
    assert restored.state_dict() == loader.state_dict()
    assert take(restored, 5) == take(loader, 5)


def test_a_state_of_other_data_is_refused(ten: FileDataset, tmp_path: Path) -> None:
    state = loader_of(ten, 2).state_dict()
    longer = FileDataset(write(tmp_path / "a.parquet", [row(i) for i in range(11)]))
    with naming(DataError, "other data"):
        loader_of(longer, 2).load_state_dict(state)
    moved = FileDataset(write(tmp_path / "b.parquet", [row(i) for i in range(10)]))
    loader_of(moved, 2).load_state_dict(state)
    moved.filter_overlong(tokens, 8)
    with naming(DataError, "other data"):
        loader_of(moved, 2).load_state_dict(state)


def test_a_state_is_of_the_content_of_files(tmp_path: Path) -> None:
    """Other rows of the same number and size are other data; an earlier version compared number and size alone."""
    plain: dict[str, Any] = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    file = write(tmp_path / "a.parquet", [row(i) for i in range(4)], **plain)
    data, size = FileDataset(file), Path(file).stat().st_size
    state = loader_of(data, 2).state_dict()
    old = {**state, "fingerprint": data._hashed(data._sizes)}
    assert (
        old["fingerprint"]
        == hashlib.sha256(repr(([(4, size)], hashlib.sha256(np.arange(4).tobytes()).hexdigest())).encode()).hexdigest()[
            :16
        ]
    ), "as version 0.1.0 of October 2026 wrote it"
    write(tmp_path / "a.parquet", [row(i) for i in (0, 1, 3, 2)], **plain)
    assert Path(file).stat().st_size == size
    changed = loader_of(FileDataset(file), 2)
    with naming(DataError, "other data"):
        changed.load_state_dict(state)
    changed.load_state_dict(old)
    write(tmp_path / "a.parquet", [row(i) for i in range(5)], **plain)
    with naming(DataError, "other data"):
        loader_of(FileDataset(file), 2).load_state_dict(old)


@pytest.mark.parametrize(
    ("seed", "shuffle", "key"),
    [(2, True, "made with data.seed=1"), (1, False, "made by the sampler Shuffled, found Sequential")],
)
def test_a_state_of_another_order_is_refused(ten: FileDataset, seed: int, shuffle: bool, key: str) -> None:
    state = loader_of(ten, 2, seed=1, shuffle=True).state_dict()
    with pytest.raises(DataError, match=f"was {key}"):
        loader_of(ten, 2, seed=seed, shuffle=shuffle).load_state_dict(state)


def test_a_batch_larger_than_the_data_is_refused(ten: FileDataset) -> None:
    assert len(next(loader_of(ten, 10))) == 10
    with naming(DataError, "train_batch_size=11", "10 rows"):
        loader_of(ten, 11)


CURRICULUM = """
from pydantic import BaseModel
from agentrl.data.sampler import Sampler

class Options(BaseModel):
    stride: int = 1

class Strided(Sampler):
    def __init__(self, data, batch_size, seed, options: Options):
        super().__init__(data, batch_size, seed)
        self.at, self.stride = 0, options.stride

    def next_batch(self):
        batch = [(self.at + n * self.stride) % len(self.data) for n in range(self.batch_size)]
        self.at += 1
        return batch

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]

class Wild(Strided):
    def next_batch(self):
        return [99] * self.batch_size
"""


def test_a_users_sampler_is_gone_on_with(ten: FileDataset, tmp_path: Path) -> None:
    file = tmp_path / "curriculum.py"
    file.write_text(CURRICULUM)

    def own(name: str) -> Loader:
        sampler = {"name": f"{file}:{name}", "options": {"stride": 3}}
        return make_loader(ten, DataConfig.model_validate({"train_batch_size": 4, "sampler": sampler}))

    loader = own("Strided")
    assert take(loader, 2) == [[0, 3, 6, 9], [1, 4, 7, 0]]
    state = json.loads(json.dumps(loader.state_dict()))
    restored = own("Strided")
    restored.load_state_dict(state)
    assert take(restored, 3) == take(loader, 3)
    with naming(CodeError, "Wild", "next_batch", "4 indices"):
        next(own("Wild"))


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (["data.sampler.name=shufled"], ("data.sampler.name", "'shufled'", "'shuffled'", "unknown")),
        (
            ["data.sampler.name=FILE:Strided", "data.sampler.options.strid=2"],
            ("sampler.options", "key 'strid'", "unknown"),
        ),
        (["data.sampler.name=sequential", "data.shuffle=true"], ("data.shuffle=true", "no effect")),
        (["data.custom_cls.path=FILE:Stride"], ("data.custom_cls.path", "'Stride'", "'Strided'")),
        (["data.custom_cls.path=FILE", "data.custom_cls.name=Stride"], ("'Stride'", "'Strided'")),
        (
            ["data.custom_cls.path=FILE:Strided", "data.custom_cls.options.size=2"],
            ("options:", "key 'size'", "unknown"),
        ),
    ],
)
def test_wrong_choices_are_told_with_the_config(tmp_path: Path, keys: list[str], says: Names) -> None:
    file = tmp_path / "curriculum.py"
    file.write_text(CURRICULUM)
    with naming(ConfigError, says):
        load_config([key.replace("FILE", str(file)) for key in keys])
