"""Ranks under real Ray give what one process gives, and what goes wrong with one of them is told once."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from agentrl.config import Config
from agentrl.config.sections.algorithm import RolloutCorrectionConfig
from agentrl.config.sections.trainer import RayInitConfig
from agentrl.errors import ConfigError, TrainingError, WorkerDied
from agentrl.runtime.placement import Pool, Role
from agentrl.runtime.ray.executor import RayExecutor
from agentrl.runtime.ray.pool import RankPool, WeightReader, ask, collect
from agentrl.runtime.ray.rank import Place, Rank
from agentrl.runtime.ray.reading import Turn
from agentrl.runtime.ray.session import ray_session
from agentrl.runtime.ray.stored import put_batch, put_column
from agentrl.sft import main as sft
from agentrl.trajectory.batch import RaggedBatch
from agentrl.workers.groups import TrainableGroup
from agentrl.workers.roles import Workers, open_workers
from agentrl.workers.trainable import MAX_SKIPPED
from tests.e2e.test_docs import commands
from tests.e2e.test_resume import numbers
from tests.model.families import make_model
from tests.naming import naming
from tests.runtime.sleepy_rank import SleepyRank
from tests.runtime.unstartable_rank import UnstartableRank
from tests.workers.conftest import BatchMaker

ray = pytest.importorskip("ray")
STEPS = 2
Configure = Callable[..., Config]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """One Ray for the module; executors use it and leave it."""
    ray.init(num_cpus=5, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


@pytest.fixture
def configure(tiny_policy: Path) -> Configure:
    def make(ranks: int = 1, **optim: object) -> Config:
        schedule = {"name": "muon", "lr": 1e-2, "adamw_lr": 1e-3, **optim}
        actor = {"ppo_mini_batch_size": 4, "ppo_max_token_len_per_gpu": 40, "use_kl_loss": True, "optim": schedule}
        actor["ulysses_sequence_parallel_size"] = 2 if ranks == 4 else 1  # of policy and reference, not of the critic
        return Config.model_validate(
            {
                "actor_rollout_ref": {"model": {"path": str(tiny_policy)}, "actor": actor},
                "critic": {"ppo_max_token_len_per_gpu": 40, "optim": schedule, "cliprange_value": 100.0},
                "algorithm": {"adv_estimator": "gae"},
                "trainer": {"n_gpus_per_node": ranks, "device": "cpu"},
            }
        )

    return make


@contextmanager
def workers_of(config: Config) -> Iterator[Workers]:
    workers = open_workers(config, "cpu", 10)
    try:
        yield workers
    finally:
        workers.executor.close()


class Shown:
    """A reporter that notes what it is shown, and creates a file at the first unit."""

    def __init__(self, file: Path) -> None:
        self.file, self.stages, self.done = file, list[tuple[str, int | None]](), 0

    @contextmanager
    def stage(self, name: str, total: int | None = None) -> Iterator[Shown]:
        self.stages.append((name, total))
        yield self

    def advance(self, count: int = 1, **values: float) -> None:
        self.done += count
        self.file.touch()

    def note(self, text: str) -> None: ...

    def warn(self, text: str) -> None: ...


@pytest.mark.slice(0, "cluster")
def test_what_a_rank_loads_is_shown_while_it_loads(cluster: None, tmp_path: Path) -> None:
    """The rank waits after its second unit until the driver has shown the progress."""
    seen = tmp_path / "seen"

    def make() -> object:
        from transformers.utils import logging

        for unit in logging.tqdm(range(3), desc="Loading weights"):
            while unit == 2 and not seen.exists():
                time.sleep(0.05)
        return object()

    shown = Shown(seen)
    pool = RankPool(Pool(1, 1, (Role("policy", make),), "trainer"), "cpu", shown)
    pool.stop()
    assert shown.stages == [("loading weights", 3)] and shown.done >= 2


def with_returns(batch: RaggedBatch) -> RaggedBatch:
    batch = batch.with_fields(returns=torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(1)))
    return batch


def trained(workers: Workers, batch: RaggedBatch, steps: int = STEPS, first: int = 1) -> list[dict[str, float]]:
    """The steps of PPO on one batch; its metrics, and by token what the loss made in the last step."""
    policy, reference, critic = workers.policy, workers.reference, workers.critic
    assert reference is not None and critic is not None
    metrics, kept = [], workers.executor.keep(batch)
    for step in range(first, first + steps):
        known, seen = policy.log_probs(kept)
        known = critic.values(reference.log_probs(known))
        seen |= critic.update(known, step=step)
        metrics.append(seen | policy.update(known, step=step, by_token=True))
        made = policy.of_update(known, RolloutCorrectionConfig()).load()
        assert made.ratio is not None and made.clipped is not None
        by_token = {f"ratio of token {place}": float(value) for place, value in enumerate(made.ratio) if value == value}
        assert len(by_token) == int(made.clipped.isfinite().sum()) == int(made.mask.sum())
        metrics[-1] |= by_token
    return metrics


def slowly(read: Callable[[], Iterator[tuple[str, torch.Tensor]]], pause: float) -> dict[str, torch.Tensor]:
    """Read weights [S] with a pause of so many seconds behind each tensor."""
    found = {}
    for name, tensor in read():
        found[name] = tensor
        time.sleep(pause)
    return found


def saved(workers: Workers) -> dict[str, TrainableGroup]:
    assert workers.critic is not None
    return {"policy": workers.policy, "critic": workers.critic}


def weights(workers: Workers) -> dict[str, torch.Tensor]:
    found = workers.policy.weights()
    read = {name: tensor.clone() for name, tensor in found.read()}
    assert {name: tuple(tensor.shape) for name, tensor in read.items()} == dict(found.shapes)
    assert {name: tensor.shape for name, tensor in found.read()}.keys() == read.keys(), "it can be read again"
    return read


@pytest.mark.slice(0, "cluster")
@pytest.mark.timeout(900)
def test_experts_that_one_rank_recorded_are_replayed_on_another(
    cluster: None, configure: Configure, make_batch: BatchMaker, tmp_path: Path, vocab_size: int
) -> None:
    """Shares of the batch and of its mini-batches differ; in a mini-batch of one prompt the second rank has none."""
    make_model("qwen3-moe", vocab_size=vocab_size).save_pretrained(tmp_path)
    batch = make_batch(prompts=3, n=1)
    found = []
    for ranks in (1, 2):
        tree = configure(ranks).model_dump()
        tree["algorithm"]["adv_estimator"] = "grpo"
        tree["actor_rollout_ref"]["model"]["path"] = str(tmp_path)
        tree["actor_rollout_ref"]["actor"] |= {
            "router_replay": {"mode": "R2"},
            "ppo_mini_batch_size": 1,
            "use_kl_loss": False,
        }
        config = Config.model_validate(tree)
        with workers_of(config) as workers:
            known, _ = workers.policy.log_probs(workers.executor.keep(batch))
            found.append((known.load().experts, workers.policy.update(known, step=1)))
    (recorded, metrics), (others, seen) = found
    assert recorded is not None and tuple(recorded.shape) == (batch.num_tokens, 2, 2)
    assert others is not None and torch.equal(others, recorded)
    assert seen == pytest.approx(metrics, rel=1e-4, abs=1e-6)


@pytest.mark.slice(0, "cluster")
@pytest.mark.timeout(900)  # Ray gives its processes little of a busy machine (nice 15)
def test_ranks_equal_one_process_which_goes_on_from_their_checkpoint(
    cluster: None, configure: Configure, make_batch: BatchMaker, tmp_path: Path
) -> None:
    """7 sequences in tiny micro-batches on 4 ranks: those of policy and reference work two by two on the same ones."""
    with workers_of(configure()) as local:
        expected = trained(local, with_returns(make_batch(prompts=7, n=1)))
        whole = weights(local)
        after = trained(local, with_returns(make_batch(prompts=7, n=1, seed=2)), 1, STEPS + 1)
    with workers_of(configure(4)) as workers:
        found = trained(workers, with_returns(make_batch(prompts=7, n=1)))
        for one, other in zip(found, expected, strict=True):
            assert one == pytest.approx(other, rel=1e-4, abs=1e-5)
        for name, tensor in weights(workers).items():
            assert torch.allclose(tensor, whole[name], rtol=0, atol=1e-5), name
        finish = [group.save(tmp_path / role, background=True) for role, group in saved(workers).items()]
        assert all(done(True) for done in finish)
    with workers_of(configure()) as local:
        for role, group in saved(local).items():
            group.load(tmp_path / role)
        found = trained(local, with_returns(make_batch(prompts=7, n=1, seed=2)), 1, STEPS + 1)
        assert found[0] == pytest.approx(after[0], rel=1e-4, abs=1e-5)


def test_a_stored_batch_is_what_was_put_down(cluster: None, make_batch: BatchMaker) -> None:
    """In pieces, with a column in other pieces, a selection of a selection, and nothing at all."""
    one, other = make_batch(prompts=3, n=2), make_batch(prompts=2, n=2, seed=5)
    plain = RaggedBatch.concat([one, other])
    stored = put_batch(one).joined([put_batch(other)])
    assert same(stored.load(), plain)
    assert (len(stored), stored.num_tokens) == (10, plain.num_tokens)
    assert torch.equal(stored.policy_tokens, plain.policy_tokens)

    column = torch.rand(plain.num_tokens)
    with_column = plain.with_fields(values=column)
    parts = [[8, 0, 2], [], [1, 3, 4, 5, 6, 7, 9]]
    shares_of = [with_column.select(part) for part in parts]
    refs = [put_column(share.values, share) for share in shares_of if share.values is not None]
    assert not stored.has("values")
    stored = stored.with_fields(values=stored.column(zip(refs, parts, strict=True)))
    assert stored.has("values")
    assert same(stored.load(), with_column)
    for name in ("values", "turn", "policy"):  # added, stored by token, by sequence
        assert not stored.with_fields(**{name: None}).has(name)
        assert same(stored.with_fields(**{name: None}).load(), with_column.with_fields(**{name: None}))
    with naming(ConfigError, "'valeus'"):
        stored.with_fields(valeus=None)
    assert same(stored.select([9, 0, 3, 2]).select([3, 0]).load(), with_column.select([2, 9]))
    assert same(stored.select([]).load(), with_column.select([]))

    without_first = plain.select([1, 5]).with_fields(returns=torch.rand(plain.select([1, 5]).num_tokens))
    assert without_first.returns is not None
    ref, later = put_column(without_first.returns, without_first), stored.select([1, 5])
    later = later.with_fields(returns=later.column([(ref, [0, 1])]))
    loaded = later.load().returns
    assert loaded is not None and torch.equal(loaded, without_first.returns)
    assert len(later.select([]).load()) == 0, "of a column in which the first row is not"
    some = stored.with_fields(returns=stored.column([(ref, [1, 5])])).select([0, 1]).load().returns
    assert some is not None and torch.equal(some.isnan(), plain.select([0, 1]).sequence_ids() == 0), "no piece has it"
    nothing = stored.with_fields(returns=stored.column([])).load().returns
    assert nothing is not None and nothing.isnan().all()
    for name, dtype in (("staleness", torch.int64), ("selected", torch.bool)):
        marked = plain.with_fields(**{name: torch.rand(plain.num_tokens).round().to(dtype)})
        ref = put_column(getattr(marked, name), marked)
        whole = put_batch(one).joined([put_batch(other)])
        whole = whole.with_fields(**{name: whole.column([(ref, range(10))])})
        assert same(whole.load(), marked)
        assert getattr(whole.select([]).load(), name).dtype == dtype, "a rank without sequences computes with it, too"
    with naming(ValueError, "5 entries"):
        put_column(torch.zeros(5), plain)


def same(one: RaggedBatch, other: RaggedBatch) -> bool:
    names = {*one.tokens, *one.sequences, "offsets"} - {"row"}
    if names != {*other.tokens, *other.sequences, "offsets"} - {"row"}:
        return False
    rest = ("policies", "images", "teacher_prompts")
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in names) and all(
        getattr(one, name) == getattr(other, name) for name in rest
    )


@pytest.mark.timeout(400)
def test_what_goes_wrong_on_a_rank(
    cluster: None, configure: Configure, make_batch: BatchMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl.runtime.ray.pool.GRACE", 1.0)
    with workers_of(configure(2)) as workers:
        executor, policy = workers.executor, workers.policy
        assert isinstance(executor, RayExecutor)
        batch = with_returns(make_batch(prompts=7, n=1))
        expected = trained(workers, batch, 1)

        # On every rank alike: skipped, and in the end told once, as the user's error that it is, and the ranks go on.
        broken = with_returns(make_batch(prompts=7, n=1))
        assert broken.advantages is not None
        broken.advantages[broken.mask] = float("nan")
        zeros = torch.zeros(broken.num_tokens)
        broken = broken.with_fields(old_logprobs=zeros, ref_logprobs=zeros)
        for step in range(2, 1 + MAX_SKIPPED):
            skipped = policy.update(executor.keep(broken), step=step)
            assert skipped["actor/skipped_updates"] > 0 and "actor/grad_norm" not in skipped
        with pytest.raises(TrainingError, match=r"advantages \(.*rank 0 of 2, policy\.update") as raised:
            policy.update(executor.keep(broken), step=1 + MAX_SKIPPED)
        assert "Traceback" not in str(raised.value)

        # A bug: with its traceback.
        with naming(TrainingError, "rank 0", "policy.update", "ValueError", "missing") as bug:
            broken = broken.with_fields(advantages=None)
            policy.update(executor.keep(broken), step=2)
        assert str(bug.value).count("Traceback") == 1 and "policy.py" in str(bug.value)

        # A dead rank: the other, which waits for it, is ended too; new ones begin from the start.
        victim = executor.pools[0].places[1].pid
        killer = threading.Timer(0.3, os.kill, (victim, signal.SIGKILL))
        killer.start()
        with pytest.raises(WorkerDied, match=r"rank \d of 2 died in "):
            for step in itertools.count(2):
                trained(workers, with_returns(make_batch(prompts=7, n=1)), 1, step)
        executor.restart()
        assert victim not in [place.pid for place in executor.pools[0].places]
        again = trained(workers, with_returns(make_batch(prompts=7, n=1)), 1)
        assert again[0] == pytest.approx(expected[0], rel=1e-6)

        # A reader of the weights that died (injected) before it had asked all ranks, and one that had.
        monkeypatch.setattr("agentrl.runtime.ray.pool.READY_WITHIN", 2.0)
        reader = policy.weights().read
        assert isinstance(reader, WeightReader)
        ranks, died, lives = executor.pools[0], Place(1, "node", "host"), Place(11, "node", "host")
        dead, other = f"{died.readers}reader", f"{lives.readers}reader"
        turn = ranks.first(Rank.turn, dead, "policy", 0, 1)
        assert isinstance(turn, Turn)
        ranks.everyone(Rank.read, "policy", turn, 0, 1)
        turn = ranks.first(Rank.turn, dead, "policy", 1, 1)
        assert isinstance(turn, Turn)
        reader.check(lives)
        assert ranks.first(Rank.turn, other, "policy", 0, 1) is None, "it came too late to join"
        waits = ask(reader.actors[0], Rank.read, "policy", turn, 1, 1 << 30)
        with naming(WorkerDied, "policy", "0"):
            reader.check(died)
        ray.get([ask(reader.actors[1], Rank.read, "policy", turn, 1, 1 << 30), waits])
        assert isinstance(ranks.first(Rank.turn, other, "policy", 0, 1), Turn)
        reader.check(lives)
        assert {name for name, _ in reader()} == {*policy.weights().shapes}

        # Three at once: gathered once, whoever is slow.
        before = ranks.everyone(Rank.turn, "counts", "policy", 0, 1)[0]
        assert isinstance(before, Turn)
        ranks.first(Rank.leave, "counts")
        monkeypatch.setattr("agentrl.runtime.ray.pool.READ_ELEMENTS", 2000)
        shared = policy.weights().read
        assert isinstance(shared, WeightReader)
        together = replace(shared, readers=3)
        with ThreadPoolExecutor() as threads:
            read = list(threads.map(lambda pause: slowly(together, pause), (0.0, 0.01, 0.03)))
        alone = weights(workers)
        for found in read:
            assert found.keys() == alone.keys() and all(torch.equal(found[name], alone[name]) for name in alone)
        after = ranks.first(Rank.turn, "counts", "policy", 0, 1)
        assert isinstance(after, Turn)
        assert after.reading - before.reading == 1 + 3, "one for all three, and two by `weights`"

        # One that fails alone: the other, which would wait for it for ever, is ended.
        whole = with_returns(make_batch(prompts=7, n=1))
        whole = whole.with_fields(values=torch.zeros(whole.num_tokens))
        begun = time.monotonic()
        with pytest.raises(TrainingError, match=r"rank 1 of 2, critic\.update: ValueError"):
            kept = executor.keep(whole)
            pool = executor.pools[0]
            given = zip(pool._actors, [kept, kept.select([])], strict=True)  # nothing for rank 1: injected
            pool.collect(
                [ask(actor, Rank.call, "critic", "update", (part,), {"step": 1}, None) for actor, part in given],
                "critic.update",
            )
        assert time.monotonic() - begun < 60


def test_a_cluster_without_room_is_named(cluster: None, configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.runtime.ray.pool.PLACED_WITHIN", 0.5)
    with naming(ConfigError, "trainer.nnodes=1", "trainer.n_gpus_per_node=99", "CPU"):
        open_workers(configure(99), "cpu", 10)


def test_a_timeline_is_written_and_hides_no_error(
    cluster: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "not yet there" / "timeline.json"
    with ray_session(RayInitConfig(timeline_json_file=str(file)), 1):
        pass
    assert file.read_text().startswith("[")
    nowhere = RayInitConfig(timeline_json_file=str(file / "below a file"))
    with pytest.raises(TrainingError, match="the run's own"), ray_session(nowhere, 1):
        raise TrainingError("the run's own")
    assert "ray_init.timeline_json_file: [Errno" in caplog.text


@pytest.mark.slice(0, "cluster")
@pytest.mark.timeout(400)
def test_ranks_that_do_not_answer_are_told_apart_and_ended(
    cluster: None,
    configure: Configure,
    make_batch: BatchMaker,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One sleeps, one is stopped, and the third waits for them in a collective call."""
    monkeypatch.setattr("agentrl.runtime.ray.pool.Rank", SleepyRank)
    monkeypatch.setattr("agentrl.runtime.ray.watch.SAYS_WITHIN", 1.0)
    with workers_of(configure(3)) as workers:
        executor = workers.executor
        assert isinstance(executor, RayExecutor)
        executor.pools[0].stall_seconds, executor.pools[0].timeout = 1.0, 4.0
        pids = [place.pid for place in executor.pools[0].places]
        stopped = pids[2]
        os.kill(stopped, signal.SIGSTOP)
        with pytest.raises(WorkerDied, match=r"They had 4 s") as died:
            workers.policy.log_probs(executor.keep(make_batch(prompts=7, n=1)))
        expected = (
            rf"policy\.compute_log_probs has taken \d+ s: rank 2 does not say where it is \(process {stopped} on "
            rf"{socket.gethostname()}: it is stopped, .*\); "
            r"rank 1 is in tests/runtime/sleepy_rank\.py:\d+, `time\.sleep\(3600\)`; "
            r"rank 0 waits for other ranks in all_\w+ at agentrl/parallel/\w+\.py:\d+, `.*`"
        )
        assert re.match(expected, str(died.value)), died.value
        told = [record.getMessage() for record in caplog.records if "compute_log_probs" in record.getMessage()]
        assert told and all(re.match(expected, text) for text in told), told
        psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], 30)
        assert not [pid for pid in pids if psutil.pid_exists(pid)]


@pytest.mark.slice(0, "cluster")  # without Ray: parallel/test_arrangements.py; the command without ranks: test_sft.py
@pytest.mark.timeout(400)
def test_supervised_training_on_ranks_equals_one_process(
    cluster: None, tiny_policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the command: an odd number of transcripts, validation, checkpoints in the background and in a remote
    folder, a profile of each rank. From another directory than that in which Ray was started.

    Two steps on 2 ranks that split the tokens, one in this process.
    """
    talk = [
        [{"role": "user", "content": "hi " * n}, {"role": "assistant", "content": "ho " * (7 - n)}] for n in range(1, 6)
    ]
    pq.write_table(pa.Table.from_pylist([{"messages": messages} for messages in talk]), tmp_path / "talk.parquet")
    given = {"data.train_files": f"{tmp_path}/talk.parquet", "data.val_files": f"{tmp_path}/talk.parquet"}
    given |= {"model.path": str(tiny_policy), "data.train_batch_size": "3", "data.max_token_len_per_gpu": "40"}
    given |= {"optim.name": "muon", "optim.lr": "1e-2", "optim.adamw_lr": "1e-3"}
    given |= {"trainer.device": "cpu", "trainer.test_freq": "1"}

    monkeypatch.chdir(tmp_path)

    def run(folder: Path, steps: int, **more: str) -> None:
        relative = str(folder.relative_to(tmp_path))
        keys = given | {"trainer.total_training_steps": str(steps), "trainer.default_local_dir": relative} | more
        assert sft([f"{key}={value}" for key, value in keys.items()]) == 0

    one, several = tmp_path / "one", tmp_path / "several"
    run(one, 3)
    (line,) = [one for one in commands("docs/sft.md") if "ulysses_sequence_parallel_size" in one]
    words = shlex.split(line)
    assert words[:3] == ["python", "-m", "agentrl.sft"]
    documented = dict(word.split("=", 1) for word in words[3:])
    saving = {key: value for key, value in documented.items() if key not in {**given, "trainer.default_local_dir": ""}}
    assert saving["ulysses_sequence_parallel_size"] == "2" and saving["trainer.checkpoint.async_save"] == "true"
    remote = f"file://{tmp_path}/remote"
    saving |= {"trainer.save_freq": "1", "trainer.default_remote_dir": remote}
    ranks = {"trainer.n_gpus_per_node": "2", "trainer.profile_steps": "[2]"}
    run(several, 2, **saving | ranks)
    profiles = sorted(path.name for path in (several / "profile" / "step_000002").iterdir())
    assert profiles == [f"rank{rank}_update.{kind}" for rank in (0, 1) for kind in ("json.gz", "txt")]
    assert "c10d::" in (several / "profile" / "step_000002" / "rank1_update.txt").read_text()
    assert sorted(path.name for path in (several / "checkpoints").iterdir()) == ["step_000001", "step_000002"]
    shutil.rmtree(several / "checkpoints")  # as if this were another machine
    run(several, 3, **{"trainer.save_freq": "1", "trainer.default_remote_dir": remote})
    found, expected = (numbers(folder) for folder in (several, one))
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    weights = [load_file(folder / "policy" / "model.safetensors") for folder in (several, one)]
    for name, tensor in weights[0].items():
        assert torch.allclose(tensor, weights[1][name], rtol=0, atol=1e-5), name
    assert (tmp_path / "remote" / "policy" / "trained_steps").read_text() == "3\n"


def test_why_a_rank_could_not_start_is_told(cluster: None) -> None:
    with naming(WorkerDied, "rank 0", "1 died", "'agentrl'"):
        collect([ray.remote(UnstartableRank).remote().make.remote()], "make")
