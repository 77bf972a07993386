"""A token keeps its origin (version, turn, policy), whatever is done with the batch that it is in."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentrl.algorithms.declared import made_columns
from agentrl.algorithms.policy_loss import PolicyLoss
from agentrl.config import Config
from agentrl.runtime.ranks import shares
from agentrl.runtime.ray.stored import StoredBatch, put_batch, put_column
from agentrl.trajectory import Trajectory, Transcript, Turn, VersionSpan
from agentrl.trajectory.batch import RaggedBatch, Sequences
from agentrl.trajectory.collate import from_trajectories
from agentrl.trajectory.parquet import write_trajectories
from agentrl.trajectory.update_record import RecordFile, write_updates
from tests.conftest import PROJECT
from tests.trajectory.written import tool_trajectory

ray = pytest.importorskip("ray")

Origin = tuple[bool, int, int, str]
"""Mask, version, turn and policy of a token."""


@pytest.fixture(scope="module")
def store() -> Iterator[None]:
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


@st.composite
def recorded(draw: st.DrawFn) -> tuple[list[Trajectory], dict[int, Origin]]:
    """Trajectories of one to three transcripts, and the origin of each token by its id: no two tokens share one."""
    fresh = count()
    origins: dict[int, Origin] = {}
    trajectories = []
    for number in range(draw(st.integers(1, 4))):
        trajectory = Trajectory(str(number), number // 2, score=1.0)
        for _ in range(draw(st.integers(1, 3))):
            trajectory.transcripts.append(Transcript(policy=draw(st.sampled_from(["policy", "critic", "user"]))))
            _observe(draw, trajectory, len(trajectory.transcripts) - 1, fresh, origins)
        for _ in range(draw(st.integers(1, 5))):  # of any transcript, as branches take turns
            index = draw(st.integers(0, len(trajectory.transcripts) - 1))
            draw(st.sampled_from([_observe, _sample, _sample]))(draw, trajectory, index, fresh, origins)
        trajectories.append(trajectory)
    return trajectories, origins


def _observe(
    draw: st.DrawFn, trajectory: Trajectory, index: int, fresh: Iterator[int], origins: dict[int, Origin]
) -> None:
    transcript = trajectory.transcripts[index]
    ids = [next(fresh) for _ in range(draw(st.integers(1, 3)))]
    start = len(transcript)
    transcript.append_observed(ids) if start else transcript.append_prompt(ids)
    if start:
        trajectory.turns.append(Turn("tool", "", index, start, len(transcript)))
    origins |= dict.fromkeys(ids, (False, -1, -1, transcript.policy))


def _sample(
    draw: st.DrawFn, trajectory: Trajectory, index: int, fresh: Iterator[int], origins: dict[int, Origin]
) -> None:
    """An assistant turn, of one version or across a change of weights."""
    transcript, turn, start = trajectory.transcripts[index], len(trajectory.turns), len(trajectory.transcripts[index])
    lengths = draw(st.lists(st.integers(1, 3), min_size=1, max_size=2))
    version = draw(st.integers(0, 5))
    spans: list[VersionSpan] = []
    for later, length in enumerate(lengths):
        end = spans[-1].end if spans else 0
        spans.append(VersionSpan(version + later, end, end + length))
        for _ in range(length):
            origins[next(fresh)] = (True, version + later, turn, transcript.policy)
    ids = list(origins)[-sum(lengths) :]
    experts = numpy.array([*transcript.ids, *ids][:-1]) % 200  # told by its id
    transcript.append_sampled(ids, [-1.0] * len(ids), spans, experts.astype(numpy.uint8).reshape(-1, 1, 1))
    trajectory.turns.append(Turn("assistant", "", index, start, len(transcript)))


def changed(draw: st.DrawFn, batch: Sequences) -> Sequences:
    """One of the things that are done with a batch on its way to an update."""
    what = draw(st.sampled_from(["select", "share", "column", "store", "load", "join", "concatenate"]))
    rows = list(range(len(batch)))
    if what == "select":
        return batch.select(draw(st.lists(st.sampled_from(rows), unique=True)) if rows else [])
    if what == "share":
        ranks = draw(st.integers(1, 3))
        return batch.select(shares(batch.lengths.tolist(), ranks)[draw(st.integers(0, ranks - 1))])
    if what == "column":
        if isinstance(batch, StoredBatch):
            parts = shares(batch.lengths.tolist(), 2)
            loaded = [batch.select(part).load() for part in parts]
            refs = [put_column(torch.stack([one.ids.float(), -one.ids.float()], dim=1), one) for one in loaded]
            column = batch.column(zip(refs, parts, strict=True))
            return batch.with_fields(values=replace(column, place=0), entropy=replace(column, place=1))
        ids = batch.load().ids.float()
        return batch.with_fields(values=ids, entropy=-ids)
    if what == "load":
        return batch.load()
    cut = draw(st.integers(0, len(batch)))
    if what == "join":
        if isinstance(batch, StoredBatch) and batch.columns:
            batch = batch.load()
        return batch.select(rows[:cut]).joined([batch.select(rows[cut:])])
    pieces = [batch.select(rows[:cut]).load(), batch.select(rows[cut:]).load()]
    if what != "store":
        return RaggedBatch.concat(pieces)
    first, *others = map(put_batch, pieces)
    return first.joined(others)


def test_a_users_column_reaches_every_place(store: None, tmp_path: Path) -> None:
    """The file of docs/extending.md: through collate, Ray's store, a selection, the record of the update and a loss."""
    found = re.search(r"```python\n(# my_column\.py\n.*?)```", (PROJECT / "docs/extending.md").read_text(), re.DOTALL)
    assert found
    (tmp_path / "my_column.py").write_text(found.group(1))
    target = f"{tmp_path}/my_column.py:fewer_answers"
    asked = replace(tool_trajectory(), uid="asked")
    said = [replace(turn, role="user" if turn.role == "tool" else turn.role) for turn in asked.turns]
    plain = replace(asked, uid="plain", group=1, turns=said)
    answers = sum(turn.role == "tool" for turn in asked.turns)
    assert answers > 0
    file = write_trajectories(tmp_path / "trajectories", [asked, plain], step=1, split="train", turn_reward_coef=1.0)
    config = Config.model_validate({"actor_rollout_ref": {"actor": {"policy_loss": {"loss_mode": target}}}})
    assert made_columns(config) == ["tool_answers"]
    batch = from_trajectories([asked, plain], turn_reward_coef=1.0, columns=made_columns(config))
    stored = put_batch(batch).joined([put_batch(batch)]).select([1, 2, 3])
    assert stored.has("tool_answers") and stored.sequences["tool_answers"].tolist() == [0, answers, 0]
    loaded = stored.load()
    assert loaded.tool_answers is not None and loaded.tool_answers.dtype == torch.int64
    assert loaded.tool_answers.tolist() == [0, answers, 0]

    assert write_updates(batch, [RecordFile(file, {"asked": 0, "plain": 1})]) == {}
    rows = pq.read_table(tmp_path / "updates").to_pylist()
    recorded = [{value for of_transcript in row["tool_answers"] for value in of_transcript} for row in rows]
    assert recorded == [{None, answers}, {None, 0}]

    zeros = torch.zeros(loaded.num_tokens)
    micro = loaded.with_fields(advantages=loaded.mask.float(), old_logprobs=zeros)
    loss = PolicyLoss.from_config(config.actor_rollout_ref.actor)(micro, zeros).by_token[micro.mask]
    assert sorted(set(loss.tolist())) == pytest.approx([-1, -1 / (1 + answers)])


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(made=recorded(), data=st.data())
def test_each_token_keeps_its_origin(
    store: None, made: tuple[list[Trajectory], dict[int, Origin]], data: st.DataObject
) -> None:
    trajectories, origins = made
    batch: Sequences = from_trajectories(trajectories, turn_reward_coef=1.0, experts=True)
    for _ in range(data.draw(st.integers(0, 5))):
        batch = changed(data.draw, batch)  # type: ignore[arg-type]
    loaded = batch.load()
    assert [batch.policies[code] for code in batch.sequences["policy"]] == [
        loaded.policies[code] for code in loaded.policy
    ]
    policy = torch.repeat_interleave(loaded.policy, loaded.lengths).tolist()
    found = zip(loaded.mask.tolist(), loaded.version.tolist(), loaded.turn.tolist(), policy, strict=True)
    for id, (mask, version, turn, code) in zip(loaded.ids.tolist(), found, strict=True):
        assert (mask, version, turn, loaded.policies[code]) == origins[id]
    assert {column.dtype for column in (loaded.version, loaded.turn, loaded.policy)} == {torch.int32}
    assert loaded.experts is not None
    for begin, end in itertools.pairwise(loaded.offsets.tolist()):
        told = begin + int(loaded.mask[begin:end].nonzero()[-1])
        assert loaded.experts[begin:told, 0, 0].tolist() == (loaded.ids[begin:told] % 200).tolist()
    if loaded.values is not None:
        assert loaded.entropy is not None
        assert torch.equal(loaded.values, loaded.ids.float()) and torch.equal(loaded.entropy, -loaded.ids.float())


@settings(max_examples=60, deadline=None)
@given(made=recorded())
def test_the_columns_are_those_of_the_record(made: tuple[list[Trajectory], dict[int, Origin]]) -> None:
    """Every trajectory with a policy token is in it, each span on its own tokens."""
    trajectories, _ = made
    batch = from_trajectories(trajectories, turn_reward_coef=1.0)
    transcripts = [
        (trajectory, index, one)
        for trajectory in trajectories
        for index, one in enumerate(trajectory.transcripts)
        if one.sampled_length
    ]
    assert len(batch) == len(transcripts)
    for row, (trajectory, index, transcript) in enumerate(transcripts):
        one = batch.select([row])
        assert one.ids.tolist() == transcript.ids
        for span in transcript.versions:
            assert set(one.version[span.start : span.end].tolist()) == {span.version}
        for number, turn in enumerate(trajectory.turns):
            if turn.transcript == index:
                expected = number if turn.role == "assistant" else -1
                assert set(one.turn[turn.start : turn.end].tolist()) == {expected}


@pytest.mark.parametrize(("missing", "said"), [("turns", "in no assistant turn"), ("versions", "of no version")])
def test_a_sampled_token_of_unknown_origin_is_refused(missing: str, said: str) -> None:
    transcript = Transcript()
    transcript.append_prompt([1])
    transcript.append_sampled([2, 3], [-1.0, -1.0], 0)
    trajectory = Trajectory("t/1", 0, score=1.0, transcripts=[transcript])
    if missing == "versions":
        trajectory.turns.append(Turn("assistant", "", 0, 1, 3))
        transcript.versions.clear()
    with pytest.raises(ValueError, match=rf"trajectory t/1: sampled token 1 of transcript 0 is {said}"):
        from_trajectories([trajectory], turn_reward_coef=1.0)
