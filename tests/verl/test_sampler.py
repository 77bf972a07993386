"""Samplers of verl's users: their order, what they are told of each step, and exact resuming."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from agentrl.config.sections.data import DataConfig
from agentrl.data.dataset import FileDataset
from agentrl.data.loader import Loader, make_loader
from agentrl.errors import CodeError, DataError
from agentrl.train import main
from agentrl.trajectory import Outline, Status
from agentrl.trajectory.parquet import trajectory_files
from tests.naming import assert_names, naming
from tests.verl.users import changed_imports

SAMPLERS = """
import numpy as np
from omegaconf import DictConfig

from verl import DataProto
from verl.experimental.dataset.sampler import AbstractCurriculumSampler, AbstractSampler


class Shuffle(AbstractSampler):
    def __init__(self, data_source, data_config: DictConfig):
        self.data_source, self.rng = data_source, np.random.default_rng(data_config.get("seed"))
        assert data_source[3]["extra_info"]["index"] == 3

    def __iter__(self):
        return iter(self.rng.permutation(len(self.data_source)))

    def __len__(self):
        return len(self.data_source)


class Forgetful(Shuffle):
    def __iter__(self):
        return iter(np.random.default_rng().permutation(len(self.data_source)))


class Hardest(AbstractCurriculumSampler):
    '''Rows by their last score, the lowest first; none is seen twice in an epoch.'''

    def __init__(self, data_source, data_config: DictConfig):
        self.scores = {index: 0.5 for index in range(len(data_source))}
        self.seen = []

    def __iter__(self):
        while len(self.seen) < len(self.scores):
            left = [index for index in self.scores if index not in self.seen]
            chosen = min(left, key=lambda index: (self.scores[index], index))
            self.seen.append(chosen)
            yield chosen
        self.seen = []

    def update(self, batch: DataProto) -> None:
        for item in range(len(batch)):
            row = batch[item]
            score = row.batch["token_level_scores"].sum().item()
            self.scores[row.non_tensor_batch["position"]] = score

    def state_dict(self):
        return {"scores": list(self.scores.items()), "seen": self.seen}

    def load_state_dict(self, state):
        self.scores, self.seen = {int(index): score for index, score in state["scores"]}, list(state["seen"])


class NoState(AbstractCurriculumSampler):
    def __init__(self, data_source, data_config):
        self.size = len(data_source)

    def __iter__(self):
        return iter(range(self.size))

    def update(self, batch):
        pass


class Opaque(NoState):
    def state_dict(self):
        return {"rng": object()}

    def load_state_dict(self, state):
        pass
"""


@pytest.fixture
def rows(tmp_path: Path) -> FileDataset:
    prompt = [{"role": "user", "content": "?"}]
    table = [{"prompt": prompt, "data_source": "x", "extra_info": {"index": n}} for n in range(10)]
    pq.write_table(pa.Table.from_pylist(table), tmp_path / "rows.parquet")
    (tmp_path / "samplers.py").write_text(changed_imports(SAMPLERS))
    return FileDataset(str(tmp_path / "rows.parquet"))


@pytest.fixture
def own(rows: FileDataset, tmp_path: Path) -> Callable[[str], Loader]:
    def make(name: str) -> Loader:
        sampler = {"name": f"{tmp_path}/samplers.py:{name}"}
        return make_loader(rows, DataConfig.model_validate({"train_batch_size": 4, "sampler": sampler}))

    return make


def take(loader: Loader) -> list[int]:
    return [sample.index for sample in next(loader)]


def outline(group: int, score: float | None) -> Outline:
    return Outline(
        uid=f"t/{group}", group=group, data_source="x", status=Status.COMPLETED, failure=None, score=score,
        score_extra={}, turn_reward=0.0, metrics={}, calls=[], assistant_turns=1, prompt_length=1, response_length=1,
        num_sampled=1,
    )  # fmt: skip


def test_an_order_goes_on_after_a_restart(own: Callable[[str], Loader]) -> None:
    loader = own("Shuffle")
    first = [take(loader) for _ in range(3)]
    assert len({*first[0], *first[1]}) == 8 and loader.steps_per_epoch == 2
    state = json.loads(json.dumps(loader.state_dict()))
    restored = own("Shuffle")
    restored.load_state_dict(state)
    assert [take(restored) for _ in range(4)] == [take(loader) for _ in range(4)]
    forgetful = own("Forgetful")
    take(forgetful)
    with naming(DataError, "Forgetful"):
        own("Forgetful").load_state_dict(forgetful.state_dict())


@pytest.mark.parametrize("back_to", [0, 1, 3])
def test_an_order_without_a_state_goes_back_after_a_worker_s_death(own: Callable[[str], Loader], back_to: int) -> None:
    loader = own("Shuffle")
    states, drawn = [loader.state_dict()], []
    for _ in range(3):
        drawn.append(take(loader))
        states.append(loader.state_dict())
    loader.load_state_dict(states[back_to])
    assert [take(loader) for _ in range(3 - back_to)] == drawn[back_to:]
    learning = own("NoState")
    start = learning.state_dict()
    first = take(learning)
    learning.load_state_dict(start)
    assert take(learning) == first


def test_a_curriculum_is_told_of_each_step_and_resumes(own: Callable[[str], Loader]) -> None:
    loader = own("Hardest")
    assert loader.learns and not own("Shuffle").learns
    assert take(loader) == [0, 1, 2, 3]
    loader.update([(row, outline(row, score)) for row, score in ((0, 0.9), (0, 0.9), (1, 0.1), (2, None), (3, 0.2))])
    assert take(loader) == [4, 5, 6, 7]
    loader.update([(group + 4, outline(group, 1.0)) for group in range(4)])
    state = json.loads(json.dumps(loader.state_dict()))
    restored = own("Hardest")
    restored.load_state_dict(state)
    for one in (loader, restored):
        assert take(one) == [1, 3, 2, 8], "the epoch's last two rows are no batch; then the lowest scores"
        one.update([])
    take(loader)
    loader.load_state_dict(state)
    assert take(loader) == [1, 3, 2, 8], "a step that did not end begins again"
    loader.update([(1, outline(0, 1.0))])
    assert loader.sampler.inner.scores[1] == 1.0  # type: ignore[attr-defined]
    none = own("NoState")
    take(none)
    with pytest.raises(DataError, match="has no state_dict and load_state_dict"):
        own("NoState").load_state_dict(none.state_dict())
    with naming(CodeError, "JSON"):
        own("Opaque").state_dict()


def test_a_resumed_run_draws_the_rows_of_the_undisturbed_one(
    small_run: Callable[..., list[str]], rows: FileDataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = [f"data.sampler.name={tmp_path}/samplers.py:Hardest", "data.val_files=null"]

    def drawn(folder: Path, *steps: int) -> list[object]:
        for step in steps:
            run = small_run(*more, f"trainer.total_training_steps={step}", run_dir=folder)
            assert main(run) == 0
        found: list[Any] = [pq.read_table(file) for file in trajectory_files(folder / "trajectories")]
        return [[message for row in table.to_pylist() for message in row["messages"][:2]] for table in found]

    assert drawn(tmp_path / "whole", 3) == drawn(tmp_path / "parts", 1, 3)
    refused = small_run(
        *more, "async_training.max_staleness=1", "algorithm.filter_groups.refill=true", run_dir=tmp_path / "ahead"
    )
    assert main(refused) == 2
    assert_names(capsys.readouterr().err, "learns")
