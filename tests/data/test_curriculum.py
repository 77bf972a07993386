"""The sampler `curriculum`: shares of sources, pools of rows, its state and its errors."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from agentrl.config.sections.data import DataConfig
from agentrl.data.curriculum import Curriculum
from agentrl.data.dataset import FileDataset
from agentrl.data.loader import Loader, make_loader
from agentrl.errors import ConfigError, DataError
from agentrl.trajectory import Outline, Status
from tests.data.test_dataset import row, write
from tests.naming import Names, naming

SIZES = {"easy": 12, "hard": 4, "nq": 24}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> FileDataset:
    sources = [name for name, size in SIZES.items() for _ in range(size)]
    rows = [row(number, data_source=source) for number, source in enumerate(sources)]
    return FileDataset(write(tmp_path_factory.mktemp("data") / "a.parquet", rows))


def loader_of(data: FileDataset, batch: int = 10, seed: int = 1, **options: Any) -> Loader:
    sampler = {"name": "curriculum", "options": options}
    return make_loader(data, DataConfig.model_validate({"train_batch_size": batch, "seed": seed, "sampler": sampler}))


def drawn(loader: Loader) -> list[int]:
    return [sample.index for sample in next(loader)]


def sources(loader: Loader, batches: int) -> Counter[str]:
    return Counter(sample.data_source for _ in range(batches) for sample in next(loader))


def outline(group: int, score: float | None) -> Outline:
    return Outline(
        uid=f"t/{group}", group=group, data_source="x", status=Status.COMPLETED, failure=None, score=score,
        score_extra={}, turn_reward=0.0, metrics={}, calls=[], assistant_turns=1, prompt_length=1, response_length=1,
        num_sampled=1,
    )  # fmt: skip


def learn(loader: Loader, rates: dict[int, float]) -> None:
    """Four trajectories of each row, of which a share succeeds; one more has failed."""
    pairs = [(row, outline(row, float(k < 4 * rate))) for row, rate in rates.items() for k in range(4)]
    loader.update([*pairs, *((row, outline(row, None)) for row in rates)])


@pytest.mark.parametrize(
    ("options", "shares"),
    [
        ({}, {"easy": 12, "hard": 4, "nq": 24}),
        ({"weights": "equal"}, {"easy": 40 / 3, "hard": 40 / 3, "nq": 40 / 3}),
        ({"temperature": 2.0}, {"easy": 13.371, "hard": 7.720, "nq": 18.909}),
        ({"weights": {"easy": 3, "hard": 1, "nq": 0}}, {"easy": 30, "hard": 10, "nq": 0}),
        ({"weights": {"easy": 1e200, "hard": 1e-200, "nq": 1e200}, "temperature": 0.001}, {"easy": 20, "nq": 20}),
    ],
)
def test_sources_are_drawn_by_their_shares(
    data: FileDataset, options: dict[str, Any], shares: dict[str, float]
) -> None:
    """After each batch, to a slot: so the least batch and many batches are right at once."""
    loader, found = loader_of(data, **options), Counter[str]()
    for batches in range(1, 25):
        found += sources(loader, 1)
        for name in SIZES:
            assert abs(found[name] - shares.get(name, 0.0) * batches / 4) < 1.1


def test_rows_of_a_source_come_in_rounds_and_in_another_order_each_time(data: FileDataset) -> None:
    loader = loader_of(data, batch=40)
    rounds = [drawn(loader) for _ in range(3)]
    assert all(sorted(one) == list(range(40)) for one in rounds)
    by_source = [[row for row in one if row >= 16] for one in rounds]
    assert len({tuple(one) for one in by_source}) == 3, "each round has an order of its own"
    assert drawn(loader_of(data, batch=40)) == rounds[0] != drawn(loader_of(data, batch=40, seed=2))
    small = loader_of(data, weights={"easy": 0, "hard": 1, "nq": 0})
    assert Counter(drawn(small)) + Counter(drawn(small)) == dict.fromkeys(range(12, 16), 5)


def test_sources_that_neither_fail_nor_succeed_are_drawn_most(data: FileDataset) -> None:
    loader = loader_of(data, weights="success")
    assert loader.learns and not loader_of(data, weights="equal").learns
    learn(loader, {0: 1.0, 1: 1.0, 12: 0.0, 16: 0.5, 17: 0.5})
    assert sources(loader, 12) == {"easy": 10, "hard": 10, "nq": 100}
    numbers = loader.metrics()
    assert {name: numbers[f"sampler/success/{name}"] for name in SIZES} == {"easy": 1.0, "hard": 0.0, "nq": 0.5}
    learn(loader, {16: 1.0})
    assert loader.metrics()["sampler/success/nq"] == pytest.approx(0.55), "a tenth of it is of the last step"


def test_rows_are_drawn_by_pool(data: FileDataset) -> None:
    loader = loader_of(data, pools=True, weights={"easy": 0, "hard": 0, "nq": 1})
    learn(loader, {row: 1.0 if row < 24 else 0.0 if row < 32 else 0.5 for row in range(16, 40)})
    found = Counter(row for _ in range(10) for row in drawn(loader))
    assert sum(count for row, count in found.items() if row < 24) == 10
    assert sum(count for row, count in found.items() if 24 <= row < 32) == 10
    assert {found[row] for row in range(32, 40)} == {10}
    pools = {f"sampler/pool/nq/{pool}": 8.0 for pool in ("too_hard", "teaches", "too_easy")}
    assert loader.metrics().items() >= (pools | {"sampler/pool/nq/new": 0.0, "sampler/drawn/nq": 100.0}).items()
    assert loader.metrics()["sampler/drawn/nq"] == 0.0, "numbers are taken once"
    learn(loader, dict.fromkeys(range(16, 32), 0.5))
    again = Counter(row for _ in range(5) for row in drawn(loader))
    assert len(again) == 24 and set(again.values()) <= {1, 2, 3}, "rows that come from another pool need not catch up"


def test_a_pool_with_few_rows_gives_none_twice_while_others_have_some(data: FileDataset) -> None:
    loader = loader_of(data, batch=20, pools=True, weights={"easy": 0, "hard": 0, "nq": 1}, hard_share=0.5)
    learn(loader, {16: 0.0})
    for _ in range(5):
        rows = drawn(loader)
        assert len(set(rows)) == 20 and 16 in rows


def test_sources_without_a_row_to_draw_give_their_slots_away(data: FileDataset) -> None:
    loader = loader_of(data, pools=True, weights="equal", easy_share=0.0, hard_share=0.0)
    learn(loader, dict.fromkeys(range(12), 1.0))
    assert sources(loader, 4) == {"hard": 20, "nq": 20}
    learn(loader, dict.fromkeys(range(12, 40), 0.0))
    with pytest.raises(DataError, match=r"28 too_hard, 0 teaches, 12 too_easy, 0 new\)\. Raise .*easy_share or"):
        next(loader)


def test_a_restored_sampler_continues_exactly(data: FileDataset) -> None:
    def other() -> Loader:
        return loader_of(data, batch=7, pools=True, weights="success", temperature=1.5)

    loader = other()
    for step in range(9):
        learn(loader, {row: (row * (step + 3) % 5) / 4 for row in drawn(loader)})
    state = json.loads(json.dumps(loader.state_dict()))
    restored = other()
    restored.load_state_dict(state)
    for step in range(6):
        rows = drawn(loader)
        assert rows == drawn(restored)
        for one in (loader, restored):
            learn(one, {row: (row * (step + 2) % 5) / 4 for row in rows})
    assert loader.state_dict() == restored.state_dict()
    with naming(DataError, "data.seed=1", "found data.seed=2"):
        loader_of(data, seed=2).load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "error", "problem"),
    [
        (
            {"weights": {"esay": 1, "hard": 1, "nq": 1}},
            DataError,
            ("data_source", "'esay'", "'easy'"),
        ),
        ({"weights": {"easy": 1, "nq": 1}}, DataError, ("'hard'", "weights")),
        ({"weights": {"easy": 0, "hard": 0, "nq": 0}}, DataError, "every weight"),
        ({"weights": {"easy": -1, "hard": 1, "nq": 1}}, ConfigError, ("easy", "-1")),
        ({"weights": {"easy": "nan", "hard": 1, "nq": 1}}, ConfigError, "data.sampler.options"),
        ({"weights": "sucess"}, ConfigError, ("'rows'", "'equal'", "'success'")),
        ({"temperature": 0}, ConfigError, ("temperature", "0")),
        ({"too_hard": 0.5, "too_easy": 0.5}, ConfigError, ("too_hard=0.5", "too_easy=0.5")),
        ({"hard_share": 0.6, "easy_share": 0.6}, ConfigError, ("hard_share=0.6", "easy_share=0.6", "1")),
        ({"wieghts": "equal"}, ConfigError, "'weights'"),
    ],
)
def test_options_that_cannot_be_are_refused(
    data: FileDataset, options: dict[str, Any], error: type[Exception], problem: Names
) -> None:
    with naming(error, problem):
        loader_of(data, **options)


def test_orders_without_numbers_have_none(data: FileDataset, tmp_path: Path) -> None:
    assert not make_loader(data, DataConfig(train_batch_size=4)).has_metrics
    loader = loader_of(data)
    assert loader.has_metrics and isinstance(loader.sampler, Curriculum)
    assert not loader.learns, "shares that are fixed go with asynchronous refilling, too"
