"""The source of trajectories at every bound, with the embedded engine and a tiny policy."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pyarrow
import pyarrow.parquet as pq
import pytest
import torch

from agentrl.agent_loop.base import Episode
from agentrl.agent_loop.registry import LoopFunction
from agentrl.config import Config, load_config
from agentrl.config.sections.data import SamplerConfig
from agentrl.data.contract import Dataset
from agentrl.data.loader import make_loader
from agentrl.engines.contract import Generation, SamplingParams
from agentrl.engines.embedded.engine import EmbeddedEngine
from agentrl.engines.inspection import Comparison
from agentrl.engines.weights import SyncReport, Weights
from agentrl.errors import CodeError, DataError, TrainingError
from agentrl.model.packed import load_model
from agentrl.rollouts.async_source import AsyncSource
from agentrl.rollouts.context import load_chat, load_context, open_rows
from agentrl.rollouts.contract import Rollout, training, validation
from agentrl.rollouts.ledger import LedgerFile, RecordedBatch
from agentrl.rollouts.local import LocalRollouts, open_local_rollouts
from agentrl.rollouts.objects import UserObjects
from agentrl.rollouts.record import Record
from agentrl.rollouts.rounds import run_round
from agentrl.rollouts.staleness_scheduler import PromptStatus, Settings
from agentrl.system.call_journal import Entry
from agentrl.system.deadline import Clock
from agentrl.system.json_value import JSON, as_mapping
from agentrl.system.reporter import Progress
from agentrl.trajectory import Status
from agentrl.trajectory.batch import RaggedBatch
from agentrl.trajectory.parquet import read_trajectories
from agentrl.trajectory.sample import Sample
from tests.naming import naming
from tests.waiting import wait_for

B, N = 3, 2


class Silent:
    """An reporter that only keeps warnings."""

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.notes: list[str] = []

    @contextmanager
    def stage(self, name: str, total: int | None = None) -> Iterator[Progress]:
        yield self

    def advance(self, count: int = 1, **values: float) -> None: ...

    def note(self, text: str) -> None:
        self.notes.append(text)

    def warn(self, text: str) -> None:
        self.warnings.append(text)


async def uneven(episode: Episode) -> None:
    """From one to five turns, by the trajectory; what stands for a tool answers on the loop."""
    turns = 1 + 4 * (episode.seed % 3 == 0)
    await episode.start(episode.sample.prompt)
    for turn in range(turns):
        await episode.generate(max_tokens=3 + episode.seed % 5)
        if turn + 1 < turns:
            await asyncio.sleep(0)
            await episode.observe([{"role": "user", "content": f"turn {turn}"}])
    episode.finish(Status.COMPLETED)


def score(data_source: str, solution_str: str, ground_truth: object, extra_info: object = None) -> float:
    return len(solution_str) % 7 / 7


def rarely(data_source: str, solution_str: str, ground_truth: object, extra_info: object = None) -> float:
    return float(len(solution_str) % 3 == 0)


@pytest.fixture
def config(policy_dir: Path, tmp_path: Path) -> Config:
    rows = [{"prompt": [{"role": "user", "content": f"What is {n} + 2?"}], "data_source": "x"} for n in range(16)]
    pq.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    return load_config(
        [
            f"data.train_files={tmp_path}/rows.parquet",
            "data.val_files=null",
            f"data.train_batch_size={B}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={B}",
            "data.max_prompt_length=100",
            "data.max_response_length=200",
            f"actor_rollout_ref.model.path={policy_dir}",
            f"actor_rollout_ref.rollout.n={N}",
            "actor_rollout_ref.rollout.max_num_seqs=5",
            "actor_rollout_ref.rollout.multi_turn.tool_config_path=null",
            "actor_rollout_ref.rollout.agent.default_agent_loop=overlapped",
            f"trainer.default_local_dir={tmp_path}/run",
        ]
    )


@dataclass
class Bench:
    """A source over real rollouts, and a policy that changes a little with each update."""

    source: AsyncSource
    dataset: Dataset
    policy: torch.nn.Module
    seconds: float = 0.0
    """Time that an update takes."""
    until: Callable[[], bool] | None = None
    """What an update waits for."""
    version: int = 0
    batches: list[RaggedBatch] = field(default_factory=list)
    uids: list[list[str]] = field(default_factory=list)
    scores: list[list[float | None]] = field(default_factory=list)

    @property
    def rollouts(self) -> LocalRollouts:
        assert isinstance(self.source.rollouts, LocalRollouts)
        return self.source.rollouts

    @property
    def notes(self) -> list[str]:
        assert isinstance(self.rollouts.reporter, Silent)
        return self.rollouts.reporter.notes

    def samples(self, count: int) -> list[Sample]:
        return [self.dataset[n] for n in range(count)]

    def step(self, step: int, *, changes: bool = True) -> Rollout:
        """What the trainer asks of a source in one step."""
        made = self.source.next_batch(step)
        self.source.metrics()
        self.source.sleep()
        assert made.batch is not None
        self.batches.append(made.batch.load())
        self.uids.append([one.uid for one in made.outlines])
        self.scores.append([one.score for one in made.outlines])
        time.sleep(self.seconds)
        if self.until is not None:
            wait_for(self.until)
        if changes:
            self.version += 1
            self.change()
        if changes or self.source.needs_weights:
            self.source.publish(self.weights(), self.version)
        self.source.updated(made.outlines)
        return made

    def change(self) -> None:
        generator = torch.Generator().manual_seed(self.version)
        with torch.no_grad():
            for parameter in self.policy.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.003)

    def weights(self) -> Weights:
        return Weights.from_tensors(self.policy.named_parameters())

    def goes_on(self, state: dict[str, JSON], version: int) -> None:
        """Load a checkpoint."""
        for self.version in range(1, version + 1):
            self.change()
        self.source.load_state(state)
        self.source.publish(self.weights(), version)

    def staleness(self, after: int = 0) -> list[list[int]]:
        """How stale the policy's tokens of each batch were, where each step made a version."""
        return [sorted({step - v for v in b.version[b.mask].tolist()}) for step, b in enumerate(self.batches, after)]


def freeing(config: Config) -> Config:
    """The config with the engine's memory freed for updates, which no CPU has otherwise."""
    rollout = config.actor_rollout_ref.rollout.model_copy(update={"free_cache_engine": True})
    roles = config.actor_rollout_ref.model_copy(update={"rollout": rollout})
    return config.model_copy(update={"actor_rollout_ref": roles})


def replacing(config: Config) -> Config:
    """The config with groups replaced whose trajectories are equal."""
    filters = config.algorithm.filter_groups.model_copy(update={"refill": True})
    algorithm = config.algorithm.model_copy(update={"filter_groups": filters})
    return config.model_copy(update={"algorithm": algorithm})


def learning(config: Config) -> Config:
    """The config with rows drawn by the success of their groups."""
    options = {"pools": True, "too_hard": 0.0, "hard_share": 0.5, "easy_share": 0.0, "success_threshold": 0.5}
    sampler = SamplerConfig(name="curriculum", options=options)
    return config.model_copy(update={"data": config.data.model_copy(update={"sampler": sampler})})


Opened = Callable[..., AbstractContextManager[Bench]]


@pytest.fixture
def opened(config: Config, policy_dir: Path, tmp_path: Path) -> Opened:
    """Open a bench with a bound, its depth and more.

    refill: groups are replaced, and so many of them may leave before a batch; with a bound of 0, so many generation
        batches may be drawn.
    freed: the engine's memory is freed for updates.
    learns: the sampler does.
    """
    given = config

    @contextmanager
    def open_one(
        bound: int,
        depth: int = 0,
        every: int = 1,
        steps: int = 6,
        loop: LoopFunction = uneven,
        folder: str = "run",
        refill: int = 0,
        scorer: Callable[..., float] = score,
        freed: bool = False,
        learns: bool = False,
    ) -> Iterator[Bench]:
        config = replacing(given) if refill else given
        config = learning(config) if learns else config
        config = freeing(config) if freed else config
        context = load_context(config, UserObjects(loops={"overlapped": loop}, reward=scorer))
        chat = load_chat(config)
        context.bind(chat)
        data = open_rows(config, str(tmp_path / "rows.parquet"), None, context)
        loader = make_loader(data, config.data)
        with open_local_rollouts(config, "cpu", chat, context, tmp_path / folder, Silent()) as rollouts:
            policy = load_model(str(policy_dir), dtype="float32", device="cpu")
            left = refill or None
            settings = Settings(B, steps, bound, depth, every, bool(refill), left)
            if refill and not bound:
                settings = Settings(B, steps, replaces=True, draw_size=B, most_draws=left)
            source = AsyncSource(config, loader, rollouts, settings)
            with closing(source):
                yield Bench(source, data, policy)

    return open_one


async def passes(clock: Clock) -> None:
    """Return when a deadline of nearly no time has passed."""
    with suppress(TimeoutError):
        async with clock.timeout(1e-6):
            await asyncio.Event().wait()


def equal(one: RaggedBatch, other: RaggedBatch) -> bool:
    names = ("offsets", "ids", "mask", "rollout_logprobs", "version", "turn", "rewards", "group", "trajectory")
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in names)


def test_with_a_bound_of_0_each_batch_is_what_the_next_rows_give_in_turn(
    opened: Opened, config: Config, tmp_path: Path
) -> None:
    with opened(0) as bench:
        for step in range(1, 5):
            bench.step(step, changes=step != 2)
            assert bench.source.state()["loader"] == bench.source.prompts.state()["loader"]
            assert not bench.rollouts.loop.run(bench.rollouts.engine.health()).paused, "the engine is never held"
        state, samples = bench.source.state(), bench.samples(4)
        assert as_mapping(state["flow"])["groups"] == [] and bench.source.report() is None
        bench.source.saved()
        validated = [bench.source.validate(samples, 4, greedy=greedy) for greedy in (False, True)]
    assert not (tmp_path / "run" / "ledger.jsonl").exists() and not (tmp_path / "run" / "journal").exists()
    with opened(0) as same:
        loader = make_loader(same.dataset, config.data)
        for step in range(1, 5):
            made = run_round(same.rollouts, training(config, step), next(loader))
            assert made.batch is not None and equal(made.batch.load(), bench.batches[step - 1])
            assert [one.uid for one in made.outlines] == bench.uids[step - 1]
            if step != 2:
                same.version += 1
                same.change()
                same.rollouts.update_weights(same.weights(), same.version)
        assert state["loader"] == loader.state_dict()
        for greedy, one in zip((False, True), validated, strict=True):
            made = run_round(same.rollouts, validation(config, 4, greedy=greedy), samples)
            assert [(o.uid, o.score, o.num_sampled) for o in one.outlines] == [
                (o.uid, o.score, o.num_sampled) for o in made.outlines
            ]


@pytest.mark.slice(1, "matrix")
@pytest.mark.parametrize("bound, depth, every", [(1, 1, 1), (2, 1, 1), (2, 2, 1), (2, 2, 2)])
def test_no_token_is_above_the_bound_and_every_prompt_has_one_fate(
    opened: Opened, bound: int, depth: int, every: int
) -> None:
    with opened(bound, depth, every, steps=6) as bench:
        rollouts = bench.rollouts
        for step in range(1, 7):
            bench.step(step)
            assert rollouts.loop.run(rollouts.engine.health()).paused is bench.source.schedule.is_open is (step < 6), (
                "nothing is sampled until the next batch"
            )
            with pytest.raises(TimeoutError) if step < 6 else nullcontext():
                rollouts.loop.run(asyncio.wait_for(passes(rollouts.scheduler.clock), 0.01))
        counts = bench.source.record.ledger.counts
        assert bench.source.report() == f"{6 * B} prompts, each once: {6 * B} trained (ledger.jsonl names them by step)"
    stale = bench.staleness()
    assert max(map(max, stale)) <= bound
    assert any(len(ages) > 1 for ages in stale), "some trajectories went on under further weights"
    prompts = [uid.rsplit("/", 1)[0] for uids in bench.uids for uid in uids[::N]]
    assert sorted(prompts) == sorted({f"train/{step}/{i}" for step in range(1, 7) for i in range(B)})
    assert counts[PromptStatus.TRAINED] == 6 * B and sum(counts.values()) == 6 * B
    spread = [b.version[b.mask] for b in bench.batches]
    assert any(len(versions.unique()) > 1 for versions in spread)
    assert all(b.group.unique().tolist() == list(range(B)) for b in bench.batches)


def test_what_is_sampled_depends_on_no_clock(opened: Opened) -> None:
    made = []
    for seconds in (0.0, 0.03):
        with opened(2, 2, steps=5) as bench:
            bench.seconds = seconds
            samples = bench.samples(2)
            for step in range(1, 6):
                bench.step(step)
                if step == 3:
                    time.sleep(seconds)
                    bench.source.validate(samples, step, greedy=False)
        made.append(bench)
    assert made[0].uids == made[1].uids
    assert all(map(equal, made[0].batches, made[1].batches))


def test_an_engine_whose_memory_is_freed_for_updates_samples_the_same(opened: Opened) -> None:
    made, waiting = [], list[int]()
    for freed in (False, True):
        with opened(2, 2, steps=6, freed=freed) as bench:
            samples = bench.samples(2)

            def sleeps(bench: Bench = bench, freed: bool = freed) -> bool:
                health = bench.rollouts.loop.run(bench.rollouts.engine.health())
                waiting.append(health.waiting if freed else 0)
                return health.asleep is freed

            bench.until = sleeps
            for step in range(1, 6):
                bench.step(step)
                health = bench.rollouts.loop.run(bench.rollouts.engine.health())
                assert health.paused and not health.asleep, "until the next batch is asked for"
                if step == 3:
                    bench.source.validate(samples, step, greedy=False)
        made.append(bench)
    assert made[0].uids == made[1].uids
    assert all(map(equal, made[0].batches, made[1].batches))
    assert max(waiting) > 0, "some were in the middle of a turn"


def test_a_step_that_changes_nothing_wakes_the_engine_with_the_weights_of_before(opened: Opened) -> None:
    with opened(1, 1, steps=4, freed=True) as bench:
        for step in range(1, 5):
            bench.step(step, changes=step % 2 == 0)
        versions = [sorted({*b.version[b.mask].tolist()}) for b in bench.batches]
        assert bench.source.record.ledger.counts[PromptStatus.TRAINED] == 4 * B
    assert versions[-1][-1] == 1 and bench.version == 2


def test_closed_while_the_engine_is_asleep(opened: Opened) -> None:
    with opened(2, 2, freed=True) as bench:
        bench.source.next_batch(1)
        bench.source.sleep()
        assert bench.source.needs_weights and bench.source._running
    counts = bench.source.record.ledger.counts
    assert (counts[PromptStatus.TRAINED], counts[PromptStatus.CANCELLED]) == (B, counts.total() - B) and counts[
        PromptStatus.CANCELLED
    ]


def test_a_validation_is_by_the_weights_of_its_step_alone(opened: Opened) -> None:
    with opened(2, 2, every=3, steps=6) as bench:
        samples = bench.samples(3)
        for step in range(1, 3):
            bench.step(step)
        assert bench.source.schedule.served == 0, "every third version is published"
        rollouts = bench.rollouts
        running = dict(bench.source._running)
        bench.source.validate(samples, 2, greedy=False)
        (file,) = rollouts.record_dir.glob("val_000002*.parquet")
        validated = read_trajectories(file)
        assert {span.version for one in validated for span in one.transcripts[0].versions} == {2}
        assert bench.source._running.keys() == running.keys(), "none began meanwhile, and none is lost"
        for step in range(3, 7):
            bench.step(step)
        assert bench.source.record.ledger.counts[PromptStatus.TRAINED] == 6 * B


@pytest.mark.parametrize("changes", [True, False])
def test_asking_for_the_state_changes_nothing(opened: Opened, changes: bool) -> None:
    with opened(1, 1) as bench:
        made = bench.source.next_batch(1)
        schedule = bench.source.schedule
        assert bench.source.state() == bench.source.state() and bench.source.schedule is schedule
        assert schedule.updating, "the update of step 1 has not ended"
        if changes:
            bench.version = 1
            bench.change()
            bench.source.publish(bench.weights(), 1)
        bench.source.updated(made.outlines)
        ended = bench.source.schedule
        assert (ended.version, ended.served, ended.updating) == (changes, changes, False)
        state = bench.source.state()
        assert state == bench.source.state() and as_mapping(state["flow"])["updating"] is False
        bench.step(2)


def rows_drawn(bench: Bench) -> list[list[int]]:
    """Row indices of the batches that the loader gives from now on."""
    found: list[list[int]] = []
    sampler = bench.source.loader.sampler
    drawing = sampler.next_batch

    def next_batch() -> Sequence[int]:
        rows = drawing()
        found.append(list(rows))
        return rows

    sampler.next_batch = next_batch  # type: ignore[method-assign]
    return found


def test_a_sampler_that_learns_draws_the_same_rows_after_a_kill(opened: Opened, tmp_path: Path) -> None:
    """The checkpoint is of step 2. Batches that were drawn before it, and after later steps, have the same rows."""
    with opened(2, 2, steps=7, learns=True) as bench:
        before = rows_drawn(bench)
        for step in range(1, 6):
            bench.step(step)
            if step == 2:
                state: dict[str, JSON] = {"step": 2, "version": 2, **bench.source.state()}
                bench.source.saved()
                first = state["first_prompt"]
                assert isinstance(first, int) and state["rows"] == [row for rows in before for row in rows][first:]
        killed(bench, tmp_path / "killed", 0)
        learnt = bench.source.loader.state_dict()
        assert bench.source.rollouts.in_flight_updates is False and len(before) == 7
    with opened(2, 2, steps=7, learns=True, folder="killed") as resumed:
        after = rows_drawn(resumed)
        resumed.goes_on(state, 2)
        assert not after, "rows of later steps are drawn once the sampler has learnt again"
        for step in range(3, 6):
            resumed.step(step)
        assert after == before[4:] and resumed.uids == bench.uids[2:]
        assert resumed.source.loader.state_dict() == learnt
    with opened(2, 2, steps=7) as fixed, naming(DataError, "Curriculum"):
        fixed.source.load_state(state)


def test_without_a_journal_what_was_begun_begins_anew(opened: Opened, config: Config, tmp_path: Path) -> None:
    with opened(2, 2, steps=6) as bench:
        first: dict[str, JSON] = {"step": 0, **bench.source.state()}
        for step in range(1, 4):
            bench.step(step)
        state: dict[str, JSON] = {"step": 3, "version": 3, **bench.source.state()}
        version = bench.version
        assert bench.source.schedule.groups, "some were begun"
    with opened(2, 2, steps=6, folder="elsewhere") as resumed:
        for loaded, begin in ((first, 0), (state, version)):
            resumed.version = begin
            resumed.source.load_state(loaded)
            resumed.source.publish(resumed.weights(), begin)
        for step in range(4, 7):
            resumed.step(step)
        rollouts, loader = resumed.rollouts, make_loader(resumed.dataset, config.data)
        with naming(DataError, "async_training.max_staleness=1"):
            AsyncSource(config, loader, rollouts).load_state(state)
        schedule = as_mapping(state["flow"])
        more = {**schedule, "groups": [[ordinal, 3, None] for ordinal in range(7)]}
        with pytest.raises(DataError, match=r"holds 7 prompts .* async_training.depth=1 at most 6 may be"):
            AsyncSource(config, loader, rollouts, Settings(B, 6, 1, 1)).load_state({**state, "flow": more})
    assert_each_once(bench.uids + resumed.uids, 6)
    assert min(int(b.version[b.mask].min()) for b in resumed.batches) >= version


def assert_each_once(uids: list[list[str]], steps: int) -> None:
    prompts = [uid.rsplit("/", 1)[0] for batch in uids for uid in batch[::N]]
    assert sorted(prompts) == sorted({f"train/{step}/{i}" for step in range(1, steps + 1) for i in range(B)})


def teaches_nothing(data_source: str, solution_str: str, ground_truth: object, extra_info: object = None) -> float:
    return 1.0


@pytest.mark.slice(1, "matrix")
@pytest.mark.parametrize("bound, depth", [(1, 1), (2, 1), (3, 3)])
def test_groups_that_teach_nothing_are_replaced(opened: Opened, tmp_path: Path, bound: int, depth: int) -> None:
    """And a run that is killed takes its batches again, and knows which prompts had left."""
    with opened(bound, depth, steps=5, refill=99, scorer=rarely) as bench:
        for step in range(1, 4):
            bench.step(step)
            if step == 2:
                state: dict[str, JSON] = {"step": 2, "version": 2, **bench.source.state()}
                bench.source.saved()
        killed(bench, tmp_path / "killed", 0)
        for step in range(4, 6):
            bench.step(step)
        counts = bench.source.record.ledger.counts
        lines = LedgerFile(tmp_path / "run").read()
    for made in bench.scores:
        assert all(one != other for one, other in zip(made[::N], made[1::N], strict=True))
    assert max(map(max, bench.staleness())) <= bound
    assert counts[PromptStatus.TRAINED] == 5 * B and counts[PromptStatus.FILTERED] > 0
    statuses = [one for line in lines for one in line.statuses]
    assert len(statuses) == len(set(statuses)) == counts.total()
    assert [sum(status is PromptStatus.TRAINED for status in line.statuses.values()) for line in lines] == [B] * 5
    with opened(bound, depth, steps=5, refill=99, scorer=rarely, folder="killed") as resumed:
        resumed.goes_on(state, 2)
        for step in range(3, 6):
            resumed.step(step)
        again = LedgerFile(tmp_path / "killed").read()
        ledger = resumed.source.record.ledger
    assert resumed.uids[0] == bench.uids[2] and equal(resumed.batches[0], bench.batches[2])
    assert again[:3] == lines[:3] and ledger.counts[PromptStatus.TRAINED] == 5 * B
    statuses = [one for line in again for one in line.statuses]
    assert len(statuses) == len(set(statuses)) == ledger.counts.total()
    assert max(map(max, resumed.staleness(after=2))) <= bound


def test_too_many_replaced_groups_end_the_run_with_what_to_do(opened: Opened) -> None:
    with opened(1, 1, steps=5, refill=4, scorer=teaches_nothing) as bench:
        with naming(TrainingError, "step 1", "5 groups"):
            bench.step(1)
        assert not bench.source._running
        counts = bench.source.record.ledger.counts
        assert counts[PromptStatus.FILTERED] == 5 and counts.total() == bench.source.schedule.next_ordinal


def killed(bench: Bench, folder: Path, cut: int) -> None:
    """Leave in `folder` what a SIGKILL now would, in the middle of writing a record."""
    shutil.copytree(bench.rollouts.record_dir.parent, folder)
    newest = max((folder / "journal").iterdir())
    newest.write_bytes(newest.read_bytes()[: -cut or None])


def test_a_run_killed_before_its_first_checkpoint_begins_anew_and_says_so(opened: Opened, tmp_path: Path) -> None:
    """Whatever had become of its prompts."""
    with opened(2, 2) as bench:
        bench.step(1, changes=False)
        killed(bench, tmp_path / "killed", 0)
        journal = bench.source.record.journal
        assert len(journal.ended) >= B and journal.unfinished, "trained on, and open"
        begun = len(journal.ended) + len(journal.unfinished)
    with opened(2, 2, folder="killed") as anew, opened(2, 2, folder="another") as fresh:
        for one, notes in ((anew, 1), (fresh, 0)):
            one.step(1)
            one.step(2)
            assert len(one.notes) == notes
        assert anew.uids[0] == bench.uids[0] and equal(anew.batches[0], bench.batches[0])
        assert anew.notes[0].startswith(f"{begun} prompts that a run before had begun are left behind")


@pytest.mark.slice(2, "kill")
@pytest.mark.parametrize("at, twice", [(2, False), (3, False), (4, False), (5, False), (4, True)])
@pytest.mark.parametrize("cut", [0, 100])
def test_killed_at_any_point_it_takes_the_same_batches_again(
    opened: Opened, tmp_path: Path, at: int, twice: bool, cut: int
) -> None:
    """The checkpoint is of step 2; `at`: the step in whose update the run is killed; `twice`: later once more."""
    ran: list[str] = []

    async def counted(episode: Episode) -> None:
        ran.append(episode.trajectory.uid)
        await uneven(episode)

    with opened(2, 2, steps=7, loop=counted) as bench:
        for step in range(1, at + 1):
            bench.step(step, changes=step < at or at == 2)
            if step == 2:
                state: dict[str, JSON] = {"step": 2, "version": 2, **bench.source.state()}
                bench.source.saved()
        killed(bench, tmp_path / "killed", cut)
        ended = bench.source.record.journal.ended.keys() - {o for o in range(99) if bench.source.record.ledger.has(o)}
    lost = 1 if cut else 0
    if twice:
        with opened(2, 2, steps=7, loop=counted, folder="killed") as again:
            again.goes_on(state, 2)
            again.step(3)
            killed(again, tmp_path / "killed2", 0)
    ran.clear()
    with opened(2, 2, steps=7, loop=counted, folder="killed2" if twice else "killed") as resumed:
        resumed.goes_on(state, 2)
        for step in range(3, 8):
            resumed.step(step)
            if step == 5:
                resumed.source.saved()
        found = resumed.source.record
        assert [batch.step for batch in LedgerFile(found.journal.folder.parent).read()] == list(range(1, 8))
        assert found.journal.size == sum(path.stat().st_size for path in found.journal.folder.iterdir())
    assert_each_once(bench.uids[:2] + resumed.uids, 7)
    assert max(map(max, resumed.staleness(after=2))) <= 2
    same = [step for step in range(2, at) if resumed.uids[step - 2] == bench.uids[step]]
    assert len(same) >= at - 2 - lost
    assert all(equal(resumed.batches[step - 2], bench.batches[step]) for step in same)
    assert len(ran) == len(set(ran)), "no trajectory begins twice"
    assert found.found >= (at - 2) * B + len(ended) - lost * 2 * B, "what had ended is not sampled again"
    assert not lost or not ended or found.found


@dataclass
class Life:
    """What an engine sampled until the process was killed, and what trajectories ended with."""

    begun: int = 0
    turns: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    """Session, prompt and sampled ids of each generation that was finished."""
    ended: dict[str, list[int]] = field(default_factory=dict)
    """Ids of the transcript, by the trajectory's name."""
    dies_at: int = -1
    """Turns after which it is killed."""
    is_over: bool = False

    async def uneven(self, episode: Episode) -> None:
        await uneven(episode)
        if not self.is_over:
            self.ended[episode.trajectory.uid] = episode.transcript.ids

    def begin(self, bench: Bench, patch: pytest.MonkeyPatch, folder: Path) -> None:
        """Watch the engine, and leave in `folder` what a SIGKILL would; the run then ends."""
        engine, record = bench.rollouts.engine, bench.source.record
        generate, answered = engine.generate, record.journal.answered

        async def counted(ids: Sequence[int], params: SamplingParams, session: str) -> Generation:
            self.fails()
            self.begun += 1
            made = await generate(ids, params, session)
            self.fails()
            self.turns.append((session, tuple(ids), tuple(made.ids)))
            return made

        def taken_down(ordinal: int, prompt: str, entry: Entry) -> None:
            answered(ordinal, prompt, entry)
            if len(self.turns) == self.dies_at and not self.is_over:
                self.is_over = True
                killed(bench, folder, 0)

        patch.setattr(engine, "generate", counted)
        patch.setattr(record.journal, "answered", taken_down)

    async def ends(self, bench: Bench, folder: Path) -> None:
        """Leave in `folder` what a SIGKILL now would; on the event loop, so that no turn is finished meanwhile."""
        self.is_over = True
        killed(bench, folder, 0)

    def fails(self) -> None:
        if self.is_over:
            raise CodeError("killed")


@pytest.mark.parametrize("bound, first, second", [(2, 1, 1), (1, 8, 5), (2, 20, 9), (1, 33, 20), (2, 45, 3)])
def test_killed_in_the_middle_of_trajectories_no_finished_turn_is_sampled_twice(
    opened: Opened, tmp_path: Path, bound: int, first: int, second: int
) -> None:
    """The checkpoint is of step 2, the kills when so many turns after it are finished."""
    lives = [Life(), Life(), Life()]
    with (
        opened(bound, bound, steps=9, loop=lives[0].uneven, folder="life0") as bench,
        pytest.MonkeyPatch.context() as patch,
    ):
        lives[0].begin(bench, patch, tmp_path / "life1")
        for step in (1, 2):
            bench.step(step)
        state: dict[str, JSON] = {"step": 2, "version": 2, **bench.source.state()}
        bench.source.saved()
        lives[0].dies_at = len(lives[0].turns) + first
        with pytest.raises(CodeError, match="killed"):
            for step in range(3, 10):
                bench.step(step)
    for number, turns in ((1, second), (2, -1)):
        life = lives[number]
        with (
            opened(bound, bound, steps=9, loop=life.uneven, folder=f"life{number}") as bench,
            pytest.MonkeyPatch.context() as patch,
        ):
            life.dies_at = turns
            life.begin(bench, patch, tmp_path / f"life{number + 1}")
            bench.goes_on(state, 2)
            try:
                for step in range(3, 10):
                    bench.step(step)
            except CodeError:
                assert life.is_over
            assert life.is_over == (turns > 0)
            numbers = bench.source._numbers
    assert numbers["async/begun_anew"] == 0 and max(map(max, bench.staleness(after=2))) <= bound
    asked = Counter((session, ids) for life in lives for session, ids, _ in life.turns)
    assert max(asked.values()) == 1, "no finished turn is sampled twice"
    ended = {uid: ids for life in lives for uid, ids in life.ended.items()}
    assert len(ended) == 9 * B * N
    for life in lives:
        for session, prompt, ids in life.turns:
            whole = ended[session.rsplit(".", 1)[0]]
            assert whole[: len(prompt) + len(ids)] == [*prompt, *ids], "what was sampled stays, bit for bit"
    for life in lives[:2]:
        assert life.begun - len(life.turns) <= 3 * B * N, "but those that were in flight at the kill"


class Flying(EmbeddedEngine):
    """The embedded engine as one with devices of its own."""

    asked: list[str]

    async def update_in_flight(self, weights: Weights, version: int) -> SyncReport:
        self.asked.append("update")
        await self.pause("retract")
        report = await self.update_weights(weights, version)
        await self.resume()
        return report

    async def compare(self, sent: Mapping[str, torch.Tensor], names: Collection[str]) -> Comparison:
        self.asked.append("compare")
        return await super().compare(sent, names)

    async def lock_weights(self) -> None:
        self.asked.append("release")

    async def unlock_weights(self, weights: Weights, version: int) -> None:
        self.asked.append(f"offer {version}")


def flying(bench: Bench) -> list[str]:
    """Have the engine sample on while it is sent weights; returns what it is asked from now on."""
    engine = bench.rollouts.engine
    engine.__class__ = Flying
    assert isinstance(engine, Flying)
    bench.rollouts._in_flight, bench.rollouts.in_flight_updates, engine.asked = engine, True, []
    return engine.asked


def test_what_began_between_two_kills_goes_on_after_the_second(opened: Opened, tmp_path: Path) -> None:
    """Prompts 10 and 11 are open in the checkpoint, of version 2; the oldest of their turns is by version 3."""
    slow, now = (10, 11), 0

    async def two_turns(episode: Episode) -> None:
        _, step, number, _ = episode.trajectory.uid.split("/")
        await episode.start(episode.sample.prompt)
        for turn in range(2):
            if now == turn and (int(step) - 1) * B + int(number) in slow:
                await asyncio.Event().wait()
            await episode.generate(max_tokens=3)
            await episode.observe([{"role": "user", "content": f"turn {turn}"}])
        episode.finish(Status.COMPLETED)

    def wait_behind_a_turn(record: Record) -> bool:
        return all(len(record.journal.entries(one)) == N for one in slow)

    lives, state = [Life(), Life(), Life()], dict[str, JSON]()
    for now, last in enumerate((3, 4, 6)):
        with (
            opened(1, 1, loop=two_turns, folder=f"life{now}") as bench,
            pytest.MonkeyPatch.context() as patch,
        ):
            flying(bench)
            lives[now].begin(bench, patch, tmp_path / "not killed by a turn")
            if now == 0:
                bench.step(1)
                bench.step(2)
                state |= {"step": 2, "version": 2, **bench.source.state()}
                bench.source.saved()
                assert [one.ordinal for one in bench.source.schedule.groups] == list(range(6, 12))
            else:
                bench.goes_on(state, 2)
            for step in range(3, last + 1):
                bench.step(step)
            if now == 1:
                wait_for(partial(wait_behind_a_turn, bench.source.record))
                assert all(bench.source.record.journal.unfinished[one].oldest == 3 for one in slow)
            if now < 2:
                bench.rollouts.loop.run(lives[now].ends(bench, tmp_path / f"life{now + 1}"))
            numbers = bench.source._numbers
    # Turns of later prompts may have ended before the kill, too.
    assert numbers["async/begun_anew"] == 0 and numbers["async/turns_resumed"] >= len(slow) * N
    asked = Counter((session, ids) for life in lives for session, ids, _ in life.turns)
    assert max(asked.values()) == 1, "no finished turn is sampled twice"


def test_an_engine_with_devices_of_its_own_samples_while_the_policy_is_updated(opened: Opened) -> None:
    with opened(2, 2, every=2, steps=7) as bench:
        asked = flying(bench)
        # Nothing would end if the engine were held.
        bench.until = lambda: all(one.outcome is not None for one in bench.source.schedule.groups)
        sampled = []
        for step in range(1, 8):
            bench.step(step, changes=step != 3)
            sampled.append(bench.rollouts.loop.run(bench.rollouts.engine.health()).paused)
        counts = bench.source.record.ledger.counts
        metrics = bench.source._numbers
    assert not any(sampled), "it is never held"
    assert_each_once(bench.uids, 7)
    assert counts[PromptStatus.TRAINED] == 7 * B
    made = [0, 1, 2, 2, 3, 4, 5]
    ages = [{v - one for one in b.version[b.mask].tolist()} for v, b in zip(made, bench.batches, strict=True)]
    assert max(map(max, ages)) == 2, "as stale as they may be: an update waits until all that was begun has ended"
    # Published is every second version; the others, and what a step left as it was, are there for what comes back.
    assert asked == [
        *("release", "offer 1", "release", "update", "compare", "release", "offer 2", "release", "offer 3"),
        *("release", "update", "compare", "release", "offer 5", "release", "update"),
    ], "what was sent is compared once prompts have begun by it, and before an update changes it"
    assert 0 < metrics["async/trainer_idle"] <= 1 and 0 <= metrics["async/engine_idle"] <= 1


def test_rows_that_are_others_now_are_named(opened: Opened, tmp_path: Path) -> None:
    with opened(2, 2, steps=6) as bench:
        bench.step(1)
        state: dict[str, JSON] = {"step": 1, "version": 1, **bench.source.state()}
        begun = sorted(group.ordinal for group in bench.source.schedule.groups)
    table = pq.read_table(tmp_path / "rows.parquet").to_pylist()
    for row in table:
        row["prompt"][0]["content"] = row["prompt"][0]["content"].replace("2?", "3?")
    pq.write_table(pyarrow.Table.from_pylist(table), tmp_path / "rows.parquet")
    with opened(2, 2, steps=6) as resumed:
        # Of the files the loader knows the sizes only.
        state["loader"] = {**as_mapping(state["loader"]), "fingerprint": resumed.dataset.fingerprint}
        with pytest.raises(DataError, match=rf"disagrees with the data: prompts {begun[0]}, .*rows.parquet row \d"):
            resumed.source.load_state(state)
        ledger = as_mapping(state["ledger"])
        with naming(DataError, "prompts 0"):
            resumed.source.load_state({**state, "ledger": {**ledger, "before": 0, "counts": {}}})


def test_a_cancellation_that_nobody_asked_for_ends_its_try_and_leaves_nobody_waiting(opened: Opened) -> None:
    """One of a library, say, that cancels what a loop awaits: the second try goes well."""

    async def leaky(episode: Episode) -> None:
        if episode.trajectory.uid == "train/2/1/0" and not episode.trajectory.attempt:
            inner = asyncio.ensure_future(asyncio.Event().wait())
            inner.cancel()
            await inner
        await uneven(episode)

    with opened(1, 1, loop=leaky, steps=3) as bench:
        made = [bench.step(step) for step in range(1, 4)]
    retried = [one for rollout in made for one in rollout.outlines if one.metrics.get("retries")]
    assert [one.uid for one in retried] == ["train/2/1/0"]
    assert_each_once(bench.uids, 3)


def test_a_full_disk_at_the_ledger_is_told(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault injected."""

    def full(file: LedgerFile, batch: RecordedBatch) -> None:
        raise TrainingError("the disk is full")

    monkeypatch.setattr(LedgerFile, "add", full)
    with opened(1, 1) as bench:
        with pytest.raises(TrainingError, match="the disk is full"):
            bench.step(1)
        assert bench.source.record.ledger.counts == {PromptStatus.CANCELLED: 2 * B}


@pytest.mark.parametrize("every", [1, 2])
def test_weights_are_released_before_the_update_of_a_batch_that_is_taken_again(
    opened: Opened, tmp_path: Path, every: int
) -> None:
    with opened(2, 2, every=every, steps=7) as bench:
        flying(bench)
        for step in range(1, 6):
            bench.step(step)
            if step == 2:
                state = {"step": 2, "version": 2, **bench.source.state()}
                bench.source.saved()
        killed(bench, tmp_path / "killed", 0)
    with opened(2, 2, every=every, steps=7, folder="killed") as resumed:
        asked = flying(resumed)
        resumed.goes_on(state, 2)
        for step in (3, 4, 5):
            assert resumed.source.record.plan
            asked.clear()
            resumed.source.next_batch(step)
            assert asked[-1:] == ["release"], "after what was sent was compared, where it was"
            resumed.version += 1
            resumed.change()
            resumed.source.publish(resumed.weights(), resumed.version)
            assert resumed.source.checked().findings == []


@pytest.mark.parametrize("kept", [2, 3])
def test_where_the_ledger_lost_its_last_lines_nothing_of_later_weights_is_trained_on(
    opened: Opened, tmp_path: Path, kept: int
) -> None:
    """A loss of power took them, and not the journal: slow prompts that began early ended by version 5."""
    slow = set[int]()
    benches: list[Bench] = []

    async def loop(episode: Episode) -> None:
        group, first = episode.trajectory.group, len(benches) == 1
        if first and benches[0].version == 2 and (group in slow or len(slow) < 2):
            slow.add(group)
        await episode.start(episode.sample.prompt)
        await episode.generate(max_tokens=3)
        while first and group in slow and benches[0].version < 5:
            await asyncio.sleep(0.005)
        await episode.observe([{"role": "user", "content": "turn"}])
        await episode.generate(max_tokens=3)
        episode.finish(Status.COMPLETED)

    with opened(4, 1, steps=9, loop=loop) as bench:
        benches.append(bench)
        flying(bench)
        for step in range(1, 7):
            bench.step(step, changes=step < 6)
            if step == 2:
                state = {"step": 2, "version": 2, **bench.source.state()}
                bench.source.saved()
        killed(bench, tmp_path / "killed", 0)
    assert slow
    path = tmp_path / "killed" / "ledger.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:kept]))
    with opened(4, 1, steps=9, loop=loop, folder="killed") as resumed:
        benches.append(resumed)
        flying(resumed)
        resumed.goes_on(state, 2)
        for step in range(3, 10):
            version = resumed.source.schedule.version
            resumed.step(step)
            assert int(resumed.batches[-1].version.max()) <= version, "by weights that this run has not made"
        assert resumed.source.record.ledger.counts[PromptStatus.TRAINED] == 9 * B


def test_an_error_of_a_users_code_ends_all_and_is_raised(opened: Opened) -> None:
    ended = []

    async def careless(episode: Episode) -> None:
        try:
            if episode.trajectory.uid == "train/2/1/0":
                raise KeyError("forgotten")
            await uneven(episode)
        finally:
            ended.append(episode.trajectory.uid)

    with opened(1, 1, loop=careless) as bench:
        with pytest.raises(CodeError, match=r"forgotten[\s\S]*trajectory train/2/1/0"):
            for step in range(1, 4):
                bench.step(step)
        assert not bench.source._running
        assert not bench.rollouts.scheduler.running
        assert len(set(ended)) == len(ended)
        assert bench.source.schedule.groups == () and bench.source.record.ledger.counts[PromptStatus.CANCELLED]
