"""A run's record of what its updates made of each token: through the real command, in process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from agentrl.train import main
from agentrl.trajectory.files import update_file
from agentrl.trajectory.parquet import read_trajectories, trajectory_files
from tests.e2e.test_train import lines
from tests.runs import Overrides


def test_what_the_update_made_of_each_token_is_recorded(small_run: Overrides, tmp_path: Path) -> None:
    correction = "algorithm.rollout_correction.rollout_is=token"
    run = small_run(
        correction,
        "trainer.total_training_steps=2",
        "trainer.save_trajectories=5",
        "algorithm.use_kl_in_reward=true",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    )
    assert main(run) == 0
    steps = lines(tmp_path / "run")
    for step, path in enumerate(trajectory_files(tmp_path / "run" / "trajectories")[:2], 1):
        written = read_trajectories(path)
        assert len(written) == 8, "five trajectories are two prompts of four"
        rows = pq.read_table(update_file(path)).to_pylist()
        assert [row["uid"] for row in rows] == [one.uid for one in written]
        gaps = []
        for row, trajectory in zip(rows, written, strict=True):
            assert set(row) == {
                *("uid", "trainer_logprobs", "entropy", "advantages", "weights", "weights_clipped", "ratio", "clipped"),
                *("token_rewards", "reference_logprobs"),
            }
            for place, transcript in enumerate(trajectory.transcripts):
                for name in set(row) - {"uid"}:
                    assert [value is not None for value in row[name][place]] == [one == 1 for one in transcript.mask]
                sampled = np.array(transcript.mask) == 1
                mine = np.array(row["trainer_logprobs"][place], dtype=float)[sampled]
                gaps.append(np.abs(mine - np.array(transcript.logprobs)[sampled]).max())
                assert np.array(row["weights"][place], dtype=float)[sampled] == pytest.approx(1, abs=1e-3)
        assert max(gaps) <= steps[step]["rollout/logprob_gap_max_abs"] + 1e-7
    columns = ["reward", "reward_parts", "score"]
    for written_row in pq.read_table(path, columns=columns).to_pylist(maps_as_pydicts="strict"):
        assert written_row["reward"] == sum(written_row["reward_parts"].values())
        assert written_row["reward_parts"]["score"] == written_row["score"]
