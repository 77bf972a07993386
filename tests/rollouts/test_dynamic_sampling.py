"""Dynamic sampling: a step's batch is filled with groups that teach, from as many generation batches as it takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pyarrow
import pyarrow.parquet as pq
import pytest

from agentrl.agent_loop.base import Episode
from agentrl.config import Config, load_config
from agentrl.data.loader import make_loader
from agentrl.errors import CodeError, ConfigError, DataError, TrainingError
from agentrl.rollouts.async_source import AsyncSource
from agentrl.rollouts.context import load_chat, load_context, open_rows
from agentrl.rollouts.contract import Rollout
from agentrl.rollouts.local import open_local_rollouts
from agentrl.rollouts.objects import UserObjects
from agentrl.system.json_value import JSON
from agentrl.trajectory import Status, Trajectory
from agentrl.trajectory.parquet import read_trajectories
from tests.naming import Names, assert_names, naming
from tests.rollouts.test_async_source import Silent, equal

B, GENERATED, N, ROWS = 2, 3, 2, 12


async def short(episode: Episode) -> None:
    """One turn; of the rows whose number is 4 mod 6 one trajectory fails."""
    await episode.start(episode.sample.prompt)
    await episode.generate(max_tokens=4)
    if episode.sample.ground_truth % 6 == 4 and episode.trajectory.uid.endswith("1"):
        raise ConnectionError("broken")
    episode.finish(Status.COMPLETED)


def score(
    data_source: str, solution_str: str, ground_truth: int, extra_info: object, trajectory: Trajectory
) -> dict[str, float]:
    """The trajectories of the rows 0, 3, 6, ... differ in score, those of 1, 4, 7, ... in what is beside it alone."""
    number = int(trajectory.uid[-1])
    return {
        "score": float(ground_truth % 3 == 0 and number == 0),
        "form": float(ground_truth % 3 == 1 and number == 0),
    }


def config_of(policy_dir: Path, folder: Path, *more: str) -> Config:
    rows = [
        {"prompt": [{"role": "user", "content": f"{n}?"}], "data_source": "x", "reward_model": {"ground_truth": n}}
        for n in range(ROWS)
    ]
    pq.write_table(pyarrow.Table.from_pylist(rows), folder / "rows.parquet")
    return load_config(
        [
            f"data.train_files={folder}/rows.parquet",
            "data.val_files=null",
            "data.shuffle=false",
            f"data.train_batch_size={B}",
            f"data.gen_batch_size={GENERATED}",
            "algorithm.filter_groups.refill=true",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={B}",
            "data.max_prompt_length=100",
            "data.max_response_length=200",
            f"actor_rollout_ref.model.path={policy_dir}",
            f"actor_rollout_ref.rollout.n={N}",
            "actor_rollout_ref.rollout.multi_turn.tool_config_path=null",
            "actor_rollout_ref.rollout.agent.default_agent_loop=short",
            "actor_rollout_ref.rollout.agent.max_retries=0",
            "actor_rollout_ref.rollout.agent.max_failed_fraction=0.5",
            f"trainer.default_local_dir={folder}/run",
            *more,
        ]
    )


Opened = Callable[..., AbstractContextManager[AsyncSource]]


@pytest.fixture
def opened(policy_dir: Path, tmp_path: Path) -> Opened:
    @contextmanager
    def open_one(*more: str) -> Iterator[AsyncSource]:
        config = config_of(policy_dir, tmp_path, *more)
        context = load_context(config, UserObjects(loops={"short": short}, reward=score))
        chat = load_chat(config)
        context.bind(chat)
        data = open_rows(config, str(tmp_path / "rows.parquet"), None, context)
        with open_local_rollouts(config, "cpu", chat, context, tmp_path / "run", Silent()) as rollouts:
            yield AsyncSource(config, make_loader(data, config.data), rollouts)

    return open_one


def prompts(rollout: Rollout) -> list[int]:
    """Numbers in the step of the prompts of the batch's sequences."""
    assert rollout.batch is not None
    return rollout.batch.group.tolist()


def numbers(source: AsyncSource) -> dict[str, float]:
    return {name: value for name, value in source.metrics().items() if name.startswith("refill/")}


def test_a_batch_is_filled_with_the_first_groups_that_differ(opened: Opened) -> None:
    with opened() as source:
        made = source.next_batch(1, show=True)
        # Of rows 0 to 2 and 3 to 5 the rows 0 and 3 differ.
        assert prompts(made) == [0, 0, 3, 3]
        assert numbers(source) == {
            "refill/gen_batches": 2,
            "refill/groups_equal": 3,
            "refill/groups_failed": 1,
            "refill/groups_surplus": 0,
        }
        assert made.batch is not None and made.shown is not None
        batch = made.batch.load()
        assert len(made.outlines) == 2 * GENERATED * N, "all that were drawn are counted"
        uids = [made.outlines[one].uid for one in batch.trajectory.tolist()]
        assert uids == ["train/1/0/0", "train/1/0/1", "train/1/3/0", "train/1/3/1"]
        assert batch.rewards[batch.mask].sum() == 2
        written = [one.uid for path, count in made.files for one in read_trajectories(path)]
        assert written == [outline.uid for outline in made.outlines]
        assert [path.name for path, _ in made.files] == ["train_000001.parquet", "train_000001_001.parquet"]


def test_groups_that_find_no_place_are_dropped_and_the_data_go_on_behind_all_that_was_drawn(opened: Opened) -> None:
    with opened("data.gen_batch_size=5") as source:
        assert prompts(source.next_batch(1)) == [0, 0, 3, 3]
        # Rows 5 to 9, of which 6 and 9 differ; then there are not 5 left, and an epoch begins.
        assert prompts(source.next_batch(2)) == [1, 1, 4, 4]
        assert numbers(source)["refill/gen_batches"] == 1
    with opened("data.gen_batch_size=9") as source:
        assert prompts(source.next_batch(1)) == [0, 0, 3, 3]
        assert numbers(source)["refill/groups_surplus"] == 1, "row 6"
        again = make_loader(source.prompts.loader.dataset, source.config.data)
        next(again)
        assert source.state()["loader"] == again.state_dict() and source.state()["first_prompt"] == 9


def test_a_metric_of_the_scorers_decides(opened: Opened) -> None:
    with opened("algorithm.filter_groups.metric=form") as source:
        assert prompts(source.next_batch(1)) == [1, 1, 7, 7], "of row 4 a trajectory failed"
    with opened("algorithm.filter_groups.metric=acc") as source:
        assert prompts(source.next_batch(1)) == [0, 0, 3, 3], "the score, where the scorer gives no acc"
    with (
        opened("algorithm.filter_groups.metric=accuracy") as source,
        naming(TrainingError, "metric=accuracy", "'x'"),
    ):
        source.next_batch(1)


OWN = """
from collections.abc import Sequence
from pydantic import BaseModel

class Options(BaseModel):
    least: float = 0.0

def scored(group, config, options: Options):
    assert [one.uid[-1] for one in group] == ["0", "1"], "both can be trained on"
    return max(one.score for one in group) >= options.least

def forgets(group, config):
    group[0].score >= 0.5

def fails(group, config):
    return group[7].score
"""


def test_a_rule_of_the_users_decides(opened: Opened, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    rule = f"algorithm.filter_groups.rule={tmp_path}/own.py"
    with opened(f"{rule}:scored") as source:
        assert prompts(source.next_batch(1)) == [0, 0, 1, 1]
        assert prompts(source.next_batch(2)) == [0, 0, 2, 2], "of row 4 a trajectory failed"
        assert numbers(source) == {
            "refill/gen_batches": 1,
            "refill/groups_equal": 0,
            "refill/groups_failed": 1,
            "refill/groups_surplus": 0,
        }
    with opened(f"{rule}:scored", "algorithm.filter_groups.options.least=1") as source:
        assert prompts(source.next_batch(1)) == [0, 0, 3, 3]
        assert numbers(source)["refill/groups_equal"] == 3
    for name, said in (("forgets", r"own\.forgets\): expected true or false, found None"), ("fails", "IndexError")):
        with opened(f"{rule}:{name}") as source, pytest.raises(CodeError, match=said):
            source.next_batch(1)


def test_a_step_that_is_never_filled_says_what_was_found(opened: Opened) -> None:
    bound = "algorithm.filter_groups.max_num_gen_batches="
    with opened(f"{bound}1") as source:
        with pytest.raises(TrainingError) as error:
            source.next_batch(7)
        text = str(error.value)
    assert_names(text, "step 7", "2 groups", f"{bound}1")
    assert_names(text, "data.train_batch_size")
    assert_names(text, "rule=differ", "metric=reward")
    with opened(f"{bound}2") as source:
        assert len(prompts(source.next_batch(1))) == B * N, "the bound may be reached"
    with opened(f"{bound}0", "data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4") as source:
        assert prompts(source.next_batch(1))[::N] == [0, 3, 6, 9]


def test_goes_on_where_its_state_was_taken(opened: Opened) -> None:
    with opened() as source:
        source.next_batch(1)
        state: dict[str, JSON] = source.state()
        rest = [source.next_batch(step).batch for step in (2, 3)]
    with opened() as again:
        again.load_state(state)
        for step, batch in zip((2, 3), rest, strict=True):
            found = again.next_batch(step).batch
            assert found is not None and batch is not None and equal(found.load(), batch.load())


def test_too_many_failures_end_a_step_before_its_batch_is_full(opened: Opened) -> None:
    with (
        opened("actor_rollout_ref.rollout.agent.max_failed_fraction=0.1") as source,
        pytest.raises(TrainingError, match=r"step 1: 1 of 6 trajectories failed.* ConnectionError: broken"),
    ):
        source.next_batch(1)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("actor_rollout_ref.rollout.n=1", ("refill=true", "actor_rollout_ref.rollout.n")),
        ("reward_model.enable=true", "algorithm.filter_groups.metric=score"),
        ("algorithm.filter_groups.rule=diffr", ("'diffr'", "'differ'", "unknown")),
        ("algorithm.filter_groups.options.least=1", ("least", "differ")),
        ("algorithm.filter_groups.refill=false", ("gen_batch_size=3", "refill=true", "no effect")),
    ],
)
def test_what_cannot_be_refilled_is_refused(policy_dir: Path, tmp_path: Path, more: str, said: Names) -> None:
    with naming(ConfigError, said):
        config_of(policy_dir, tmp_path, more)


def test_a_generation_batch_has_no_more_prompts_than_the_data(opened: Opened) -> None:
    with (
        naming(DataError, "data.gen_batch_size=13", "12 rows"),
        opened("data.gen_batch_size=13"),
    ):
        pass
