"""The record of an update: the batch's values at the tokens of the trajectories' file, and nowhere else."""

from __future__ import annotations

import math
from pathlib import Path

import pyarrow.parquet as pq
import torch

from agentrl.trajectory import Status, Trajectory, Transcript, Turn
from agentrl.trajectory.collate import from_trajectories
from agentrl.trajectory.files import update_file
from agentrl.trajectory.parquet import SCHEMA, read_trajectories, write_trajectories
from agentrl.trajectory.update_record import RecordFile, write_updates
from tests.trajectory.written import tool_trajectory


def windows(uid: str) -> Trajectory:
    """Three context windows, of which the policy wrote in the first and the last."""
    transcripts = []
    for ids, sampled in (([1, 2], [3, 4]), ([5, 6, 7], []), ([8], [9])):
        transcript = Transcript()
        transcript.append_prompt(ids)
        if sampled:
            transcript.append_sampled(sampled, [-1.0] * len(sampled), 0)
        transcripts.append(transcript)
    turns = [Turn("assistant", "a", 0, 2, 4), Turn("assistant", "b", 2, 1, 2)]
    return Trajectory(uid, 0, transcripts=transcripts, turns=turns, score=1.0)


def test_values_stand_at_their_tokens(tmp_path: Path) -> None:
    failed = Trajectory("f", 0, transcripts=tool_trajectory().transcripts, status=Status.FAILED, failure="x: y")
    trajectories = [failed, windows("w"), tool_trajectory()]
    path = write_trajectories(tmp_path / "trajectories", trajectories, step=12, split="train", turn_reward_coef=1.0)
    batch = from_trajectories(trajectories, turn_reward_coef=1.0)
    values = torch.arange(batch.num_tokens, dtype=torch.float32)
    ratio = torch.where(batch.trajectory == 1, 1.00001, 0.8)[batch.sequence_ids()]
    ratio[3] = math.nan  # nothing was made of it
    batch = batch.with_fields(
        advantages=values,
        teacher_scores=torch.stack([values + 0.5, -values], 1),
        ratio=ratio,
        clipped=batch.mask.float(),
        correction_clipped=torch.full_like(ratio, math.nan),
    )
    numbers = {one.uid: place for place, one in enumerate(trajectories)}
    # A file of another machine is passed, and sequences come in any order.
    files = [RecordFile(tmp_path / "trajectories" / "train_000012.2of2.parquet", {}), RecordFile(path, numbers)]
    assert write_updates(batch.select([2, 0, 1]), files) == {}
    # Each folder is a table of its own, which readers of parquet open by its name.
    assert pq.read_table(tmp_path / "trajectories").column_names == SCHEMA.names
    assert update_file(path) == tmp_path / "updates" / "train_000012.parquet"
    rows = pq.read_table(tmp_path / "updates").to_pylist()
    assert [row["uid"] for row in rows] == ["f", "w", "train/1/0/0"]
    assert set(rows[0]) == {"uid", "advantages", "teacher_logprobs", "token_rewards", "ratio", "clipped"}
    assert rows[1]["advantages"] == [[None, None, 2.0, 3.0], [None] * 3, [None, 5.0]]
    assert rows[1]["teacher_logprobs"][2] == [None, 5.5]
    assert rows[1]["token_rewards"] == [[None, None, 0.0, 0.0], [None] * 3, [None, 1.0]]
    assert rows[1]["clipped"][0] == [None, None, True, True]
    assert rows[1]["ratio"] == [[None, None, 1.0, None], [None] * 3, [None, 1.0]]
    assert rows[0]["advantages"] == [[None] * len(failed.transcripts[0])]
    (tool,) = rows[2]["advantages"]
    assert [value is not None for value in tool] == [bool(one) for one in trajectories[2].transcripts[0].mask]


def test_trained_tokens_that_were_not_recorded_are_told(tmp_path: Path) -> None:
    path = write_trajectories(tmp_path / "trajectories", [windows("w")], step=1, split="train", turn_reward_coef=1.0)
    batch = from_trajectories([windows("w")], turn_reward_coef=1.0)
    other = batch.ids.clone()
    other[3] = 77
    files = [RecordFile(path, {"w": 0})]
    assert write_updates(batch.with_fields(ids=other), files) == {
        "w": "ids at token 3: 77 is trained on, and 4 recorded"
    }
    shifted = batch.mask.roll(-1)
    assert "mask at token 1" in write_updates(batch.with_fields(mask=shifted), files)["w"]
    assert "1 sequences" in write_updates(batch.select([0]), files)["w"]


def test_a_step_done_again_has_no_update_of_the_former_one(tmp_path: Path) -> None:
    """Neither by another number of workers, nor by the same."""

    def write(number: int, count: int) -> Path:
        folder = tmp_path / "trajectories"
        share = number, count
        return write_trajectories(folder, [windows("w")], step=1, split="train", share=share, turn_reward_coef=1.0)

    batch = from_trajectories([windows("w")], turn_reward_coef=1.0)
    for shares in ([(1, 1)], [(1, 2), (2, 2)], [(1, 2), (2, 2)], [(1, 1)]):
        paths = [write(*share) for share in shares]
        assert not list((tmp_path / "updates").glob("*"))
        write_updates(batch, [RecordFile(path, {"w": 0}) for path in paths])
        assert [path.name for path in sorted((tmp_path / "updates").iterdir())] == [path.name for path in paths]


def test_what_is_left_out_has_no_values(tmp_path: Path) -> None:
    """The whole first window, and the end of the last."""
    one = windows("w")
    one.transcripts[2].append_observed([10])
    one.transcripts[2].append_sampled([11], [-1.0], 0)
    one.turns.append(Turn("assistant", "c", 2, 3, 4))
    one.transcripts[0].trained_to, one.transcripts[2].trained_to = 0, 2
    path = write_trajectories(tmp_path / "trajectories", [one], step=1, split="train", turn_reward_coef=1.0)
    batch = from_trajectories([one], turn_reward_coef=1.0)
    values = torch.arange(batch.num_tokens, dtype=torch.float32)
    assert write_updates(batch.with_fields(advantages=values), [RecordFile(path, {"w": 0})]) == {}
    (row,) = pq.read_table(tmp_path / "updates").to_pylist()
    assert row["advantages"] == [[None] * 4, [None] * 3, [None, 1.0, None, None]]
    (again,) = read_trajectories(path)
    assert [each.trained_to for each in again.transcripts] == [0, None, 2], "a batch of the record is the same batch"
    assert torch.equal(from_trajectories([again], turn_reward_coef=1.0).ids, batch.ids)
