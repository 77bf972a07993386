"""Order and position of the data."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.data.dataset import ParquetDataset
from agentrl.data.loader import Loader
from agentrl.errors import DataError
from tests.data.test_dataset import row, tokens, write


@pytest.fixture(scope="module")
def ten(tmp_path_factory: pytest.TempPathFactory) -> ParquetDataset:
    return ParquetDataset(write(tmp_path_factory.mktemp("data") / "a.parquet", [row(i) for i in range(10)]))


def take(loader: Loader, count: int) -> list[list[int]]:
    return [[sample.index for sample in next(loader)] for _ in range(count)]


def test_an_epoch_holds_every_row_once(ten: ParquetDataset) -> None:
    loader = Loader(ten, 5, seed=3)
    first, second = list(chain(*take(loader, 2))), list(chain(*take(loader, 2)))
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second and first != list(range(10))


def test_what_is_less_than_a_batch_is_dropped(ten: ParquetDataset) -> None:
    loader = Loader(ten, 4, shuffle=False)
    assert loader.steps_per_epoch == 2
    assert take(loader, 3) == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3]]
    assert loader.epoch == 1


def test_the_order_depends_on_the_seed_alone(ten: ParquetDataset) -> None:
    assert take(Loader(ten, 5, seed=1), 6) == take(Loader(ten, 5, seed=1), 6)
    assert take(Loader(ten, 5, seed=1), 6) != take(Loader(ten, 5, seed=2), 6)


def test_the_order_is_the_same_in_every_version(ten: ParquetDataset) -> None:
    """A resumed run may have newer packages; these numbers may never change."""
    assert take(Loader(ten, 10, seed=1), 2) == [
        [2, 0, 1, 4, 5, 6, 7, 8, 3, 9],
        [7, 1, 6, 9, 3, 5, 0, 8, 2, 4],
    ]


@settings(max_examples=25, deadline=None)
@given(steps=st.integers(0, 12), batch=st.integers(1, 10), seed=st.integers(0, 2**40), shuffle=st.booleans())
def test_a_restored_loader_goes_on_exactly(
    ten: ParquetDataset, steps: int, batch: int, seed: int, shuffle: bool
) -> None:
    loader = Loader(ten, batch, seed=seed, shuffle=shuffle)
    take(loader, steps)
    state = json.loads(json.dumps(loader.state_dict()))
    restored = Loader(ten, batch, seed=seed, shuffle=shuffle)
    restored.load_state_dict(state)
    assert restored.epoch == loader.epoch
    assert take(restored, 5) == take(loader, 5)


def test_a_state_of_other_data_is_refused(ten: ParquetDataset, tmp_path: Path) -> None:
    state = Loader(ten, 2).state_dict()
    longer = ParquetDataset(write(tmp_path / "a.parquet", [row(i) for i in range(11)]))
    with pytest.raises(DataError, match="made with other data"):
        Loader(longer, 2).load_state_dict(state)
    moved = ParquetDataset(write(tmp_path / "b.parquet", [row(i) for i in range(10)]))
    Loader(moved, 2).load_state_dict(state)
    moved.filter_overlong(tokens, 8)
    with pytest.raises(DataError, match="made with other data"):
        Loader(moved, 2).load_state_dict(state)


@pytest.mark.parametrize(("seed", "shuffle", "key"), [(2, True, "seed=1"), (1, False, "shuffle=True")])
def test_a_state_of_another_order_is_refused(ten: ParquetDataset, seed: int, shuffle: bool, key: str) -> None:
    state = Loader(ten, 2, seed=1, shuffle=True).state_dict()
    with pytest.raises(DataError, match=f"was made with data.{key}"):
        Loader(ten, 2, seed=seed, shuffle=shuffle).load_state_dict(state)


def test_a_batch_larger_than_the_data_is_refused(ten: ParquetDataset) -> None:
    assert len(next(Loader(ten, 10))) == 10
    with pytest.raises(DataError, match=r"train_batch_size=11 is more than the 10 rows"):
        Loader(ten, 11)
