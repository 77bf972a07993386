"""What every runner of trajectories keeps to: in this process, and in two rollout workers under real Ray."""

from __future__ import annotations

import asyncio
import io
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import psutil
import pyarrow
import pyarrow.parquet as pq
import pytest
import torch

from agentrl.agent_loop.base import Episode
from agentrl.config import Config, load_config
from agentrl.engines.weights import Weights
from agentrl.errors import CodeError, WorkerDied
from agentrl.model.packed import load_model
from agentrl.observe.plain import PlainDisplay
from agentrl.rollouts.build import open_rollouts
from agentrl.rollouts.context import load_chat, load_context, open_rows
from agentrl.rollouts.contract import EndedGroup, Log, PromptTask, RolloutRunner, training, validation
from agentrl.rollouts.journal import Journal
from agentrl.rollouts.objects import UserObjects
from agentrl.rollouts.ray import RayRunner
from agentrl.rollouts.rounds import run_round
from agentrl.rollouts.staleness_scheduler import GroupStatus
from agentrl.runtime.ray.session import ray_session
from agentrl.system.call_journal import Entry
from agentrl.trajectory import Status
from agentrl.trajectory.parquet import read_trajectories
from agentrl.trajectory.sample import Sample

pytest.importorskip("ray")
N, GOOD = 2, 4
STUCK, WRONG = 4, 5
"""Rows whose trajectories never end, and meet a bug; those before them end."""
Run = tuple[RolloutRunner, Config, list[Sample]]


async def two_turns(episode: Episode) -> None:
    await episode.start(episode.sample.prompt)
    origin = episode.trajectory.origin
    assert origin is not None and origin.uid == episode.trajectory.uid
    episode.trajectory.metrics["origin"] = 1000 * origin.step + 10 * origin.row + origin.rollout
    if episode.sample.ground_truth == WRONG:
        raise KeyError("forgotten")
    await episode.generate(max_tokens=4)
    await episode.observe([{"role": "user", "content": "and"}])
    if episode.sample.ground_truth == STUCK:
        await asyncio.Event().wait()
    await episode.generate(max_tokens=4)
    episode.finish(Status.COMPLETED)


def score(data_source: str, solution_str: str, ground_truth: object, extra_info: object = None) -> float:
    return len(solution_str) % 7 / 7


@pytest.fixture(scope="module", params=["local", pytest.param("ray", marks=pytest.mark.timeout(300))])
def run(request: pytest.FixtureRequest, policy_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp(request.param)
    rows = [
        {"prompt": [{"role": "user", "content": f"{n}?"}], "data_source": "x", "reward_model": {"ground_truth": n}}
        for n in range(WRONG + 1)
    ]
    pq.write_table(pyarrow.Table.from_pylist(rows), folder / "rows.parquet")
    apart = ["actor_rollout_ref.rollout.nnodes=2", "trainer.max_worker_restarts=2"] if request.param == "ray" else []
    config = load_config(
        [
            f"data.train_files={folder}/rows.parquet",
            "data.val_files=null",
            f"data.train_batch_size={GOOD}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={GOOD}",
            "data.max_prompt_length=100",
            "data.max_response_length=100",
            f"actor_rollout_ref.model.path={policy_dir}",
            f"actor_rollout_ref.rollout.n={N}",
            "actor_rollout_ref.rollout.multi_turn.tool_config_path=null",
            "actor_rollout_ref.rollout.agent.default_agent_loop=two_turns",
            "trainer.device=cpu",
            f"trainer.default_local_dir={folder}/run",
            *apart,
        ]
    )
    context = load_context(config, UserObjects(loops={"two_turns": two_turns}, reward=score))
    chat = load_chat(config)
    context.bind(chat)
    data = open_rows(config, str(folder / "rows.parquet"), None, context)
    samples = [data[n] for n in range(len(rows))]
    display = PlainDisplay("run", io.StringIO())
    with (
        ray_session(config.ray_init, 2) if apart else nullcontext(),
        open_rollouts(config, "cpu", chat, context, folder / "run", display) as rollouts,
    ):
        yield rollouts, config, samples


class Told:
    """What a runner tells of its groups."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.ends = 0
        self.entries: list[Entry] = []

    def end(self) -> None:
        self.ends += 1

    @property
    def log(self) -> Log:
        return Log(lambda: self.entries, self.entries.append)


def begun(run: Run, told: Told, rows: Sequence[int], ordinal: int = 0, *, log: bool = False) -> list[EndedGroup]:
    """Run the groups of some rows together, to their ends."""
    rollouts, config, samples = run
    works = [PromptTask(ordinal + place, samples[row], training(config, 1), place) for place, row in enumerate(rows)]

    async def whole() -> list[EndedGroup]:
        try:
            async with asyncio.TaskGroup() as tasks:
                given = told.log if log else None
                made = [
                    tasks.create_task(rollouts.run_group(work, told.begun.append, told.end, given)) for work in works
                ]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from errors
        finally:
            if any(row >= GOOD for row in rows):
                await rollouts.stop_groups()
        return [one.result() for one in made]

    return rollouts.loop.run(whole())


def ids_of(uids: Sequence[str]) -> list[str]:
    return [f"{uid}/{k}" for uid in uids for k in range(N)]


class TestRunner:
    def test_groups_that_begin_together_end_once_each_and_are_packed_in_order(self, run: Run) -> None:
        rollouts, config, _ = run
        told = Told()
        ended = begun(run, told, range(GOOD))
        assert [one.ordinal for one in ended] == list(range(GOOD))
        assert {one.outcome for one in ended} == {GroupStatus.SCORED} and {one.oldest for one in ended} == {0}
        assert told.begun == [0] * GOOD and told.ends == GOOD * N
        assert {one.record for one in ended} == {None}, "without a log nothing is written"
        made = rollouts.pack(training(config, 1), range(GOOD), None, first=3, show=True)
        assert [one.uid for one in made.outlines] == ids_of([f"train/1/{n}" for n in range(GOOD)])
        assert [one.metrics["origin"] for one in made.outlines] == [
            1000 + 10 * n + k for n in range(GOOD) for k in range(N)
        ]
        assert made.batch is not None and made.shown is not None
        batch = made.batch.load()
        assert batch.group.tolist() == [3 + n for n in range(GOOD) for _ in range(N)]
        assert batch.trajectory.tolist() == list(range(3 * N, (3 + GOOD) * N))
        assert sum(made.versions.values()) == int(batch.mask.sum()) and set(made.versions) == {0}
        written = [one.uid for path, _ in made.files for one in read_trajectories(path)]
        assert written == [one.uid for one in made.outlines] and sum(count for _, count in made.files) == len(written)

    def test_tokens_of_a_greedy_baseline_are_not_counted_as_trained(self, run: Run) -> None:
        rollouts, config, samples = run
        task = replace(training(config, 1), greedy=True)
        rollouts.loop.run(rollouts.run_group(PromptTask(0, samples[0], task, 0), lambda _: None, lambda: None, None))
        made = rollouts.pack(task, [0], None)
        assert [one.baseline for one in made.outlines] == [False] * N + [True] and made.batch is not None
        assert sum(made.versions.values()) == int(made.batch.load().mask.sum())

    def test_rewards_are_filled_into_all_parts_of_a_step(self, run: Run) -> None:
        rollouts, config, _ = run
        begun(run, Told(), range(GOOD))
        parts = [
            rollouts.pack(replace(training(config, 7), part=part), range(first, first + 2), None, first)
            for first, part in ((0, ""), (2, "_001"))
        ]
        outlines = [replace(one, model_reward=2.0) for part in parts for one in part.outlines]
        files = [file for part in parts for file in part.files]
        rollouts.fill_rewards(files, outlines)
        rewards = [reward for path, _ in files for reward in pq.read_table(path)["reward"].to_pylist()]
        assert rewards == [one.score + 2.0 for one in outlines if one.score is not None]

    def test_the_record_of_a_group_with_a_log_outlives_its_process(self, run: Run, tmp_path: Path) -> None:
        rollouts, config, _ = run
        told, journal = Told(), Journal(tmp_path, "key")
        ended = begun(run, told, range(GOOD), log=True)
        for one in ended:
            assert one.record is not None
            journal.add(one.record)
        assert {entry.trajectory for entry in told.entries} == set(ids_of([f"train/1/{n}" for n in range(GOOD)]))
        made = rollouts.pack(training(config, 1), range(GOOD), journal)
        rollouts.loop.run(rollouts.stop_groups())
        again = rollouts.pack(training(config, 1), range(GOOD), journal)
        assert made.batch is not None and again.batch is not None
        assert made.batch.load().ids.tolist() == again.batch.load().ids.tolist()
        journal.close()

    def test_recorded_answers_are_given_again(self, run: Run) -> None:
        told, entries = Told(), []
        for _ in range(2):
            begun(run, told, [0], log=True)
            entries.append(len(told.entries))
            run[0].loop.run(run[0].stop_groups())
        assert entries[0] == entries[1] > 0, "nothing was asked twice"

    def test_an_error_of_a_users_code_is_raised_and_nothing_is_left_running(self, run: Run) -> None:
        told = Told()
        with pytest.raises(CodeError, match=r"forgotten[\s\S]*trajectory train/1/2/"):
            begun(run, told, [0, STUCK, WRONG])
        begun(run, told, [0, 1])
        run[0].loop.run(run[0].stop_groups())

    def test_cancelled_groups_end_and_leave_the_others_alone(self, run: Run) -> None:
        rollouts, config, samples = run
        stuck = PromptTask(9, samples[STUCK], training(config, 1), 9)

        async def ignored() -> EndedGroup:
            task = asyncio.create_task(rollouts.run_group(stuck, lambda _: None, lambda: None, None))
            good = PromptTask(10, samples[0], training(config, 1), 10)
            ended = await rollouts.run_group(good, lambda _: None, lambda: None, None)
            task.cancel()
            await asyncio.wait({task})
            assert task.cancelled()
            return ended

        assert rollouts.loop.run(ignored()).ordinal == 10
        assert len(rollouts.pack(training(config, 1), [10], None).outlines) == N
        rollouts.loop.run(rollouts.stop_groups())

    def test_a_round_runs_next_to_groups_and_awaits_what_is_given(self, run: Run) -> None:
        rollouts, config, samples = run
        order: list[str] = []

        def note(what: str) -> Callable[[], object]:
            async def noted() -> None:
                order.append(what)

            return noted

        begun(run, Told(), [0])
        made = run_round(
            rollouts,
            validation(config, 3, greedy=True),
            samples[:GOOD],
            5,
            before=note("before"),  # type: ignore[arg-type]
            after=note("after"),  # type: ignore[arg-type]
        )
        assert order == ["before", "after"] and made.batch is None
        assert [one.uid for one in made.outlines] == [f"greedy/3/{5 + n}/0" for n in range(GOOD)]
        assert [one.group for one in made.outlines] == [5 + n for n in range(GOOD)]
        assert len(rollouts.pack(training(config, 1), [0], None).outlines) == N, "a group of before is still there"

    def test_groups_begin_by_the_weights_that_were_sent(self, run: Run) -> None:
        rollouts, config, _ = run
        policy = load_model(str(config.actor_rollout_ref.model.path), dtype="float32", device="cpu")
        rollouts.update_weights(Weights.from_tensors(policy.named_parameters()), 1)
        told = Told()
        (ended,) = begun(run, told, [0])
        assert told.begun == [1] and ended.oldest == 1
        assert not rollouts.checked().findings
        rollouts.loop.run(rollouts.stop_groups())


@pytest.mark.parametrize("run", ["ray"], indirect=True)
def test_a_replacement_that_could_not_read_its_weights_has_groups_once_all_are_sent_them(
    run: Run, tmp_path: Path
) -> None:
    """A rank that dies while a replacement reads the weights from it. The fault is injected into the reading."""
    rollouts, config, _ = run
    assert isinstance(rollouts, RayRunner)
    policy = load_model(str(config.actor_rollout_ref.model.path), dtype="float32", device="cpu")
    good = Weights.from_tensors(policy.named_parameters())
    workers = [one for one in psutil.Process().children(recursive=True) if "ray::RolloutWorker" in one.name()]
    known = [one.pid for one in workers]

    def read() -> Iterator[tuple[str, torch.Tensor]]:
        if os.getpid() not in known:
            raise WorkerDied("rank 2 of 2 died in policy.weights")
        return good.read()

    workers[0].kill()
    with pytest.raises(WorkerDied, match=r"policy\.weights"):
        rollouts.update_weights(replace(good, read=read), 2)
    rollouts.restart_workers()
    rollouts.update_weights(good, 2)
    begun(run, Told(), range(GOOD))
    assert set(rollouts.groups.holders(range(GOOD)) or ()) == {0, 1}
    rollouts.loop.run(rollouts.stop_groups())
