"""Real input: GSM8K through its data preparation, with the calculator, a few steps, every record checked."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq

from agentrl.chat import Chat
from agentrl.observe.invariants import check_trajectory
from agentrl.train import main
from agentrl.trajectory.parquet import read_trajectories, trajectory_files
from data_prep.gsm8k import main as prepare
from tests.e2e.test_train import lines
from tests.runs import Overrides


def test_gsm8k_rows_train_and_every_trajectory_keeps_the_invariants(
    small_run: Overrides, shared_data: Path, policy_dir: Path, tmp_path: Path
) -> None:
    data = tmp_path / "gsm8k"
    arguments = [
        "--source",
        str(shared_data / "data" / "gsm8k"),
        "--out",
        str(data),
        "--agent",
        "both",
        "--interaction",
    ]
    assert prepare(arguments) == 0
    assert pq.read_metadata(data / "train.parquet").num_rows == 2 * 7473
    assert pq.read_metadata(data / "test.parquet").num_rows == 2 * 1319
    kept = [
        word for word in small_run() if not word.startswith(("data.train_f", "data.val_f", "custom_reward", "data.max"))
    ]
    status = main(
        [
            *kept,
            f"data.train_files={data}/train.parquet",
            f"data.val_files={data}/test.parquet",
            "data.train_max_samples=400",
            "data.val_max_samples=4",
            "data.train_batch_size=8",
            "data.max_prompt_length=600",
            "data.max_response_length=160",
            "actor_rollout_ref.rollout.multi_turn.tool_config_path=tools/calculator.yaml",
            "actor_rollout_ref.rollout.multi_turn.interaction_config_path=interactions/gsm8k.yaml",
            "actor_rollout_ref.rollout.multi_turn.max_tokens_per_turn=24",
            "actor_rollout_ref.rollout.multi_turn.max_user_turns=2",
        ]
    )
    assert status == 0
    run = tmp_path / "run"
    vocab = Chat.from_pretrained(str(policy_dir)).vocab_size
    files = trajectory_files(run / "trajectories")
    assert len(files) == 2 + 3 + 2, "validation at 0 and 3, sampled and greedy; training at 1, 2 and 3"
    trajectories = [trajectory for file in files for trajectory in read_trajectories(file)]
    assert len(trajectories) == 2 * (4 + 4) + 3 * 32
    assert [problem for t in trajectories for problem in check_trajectory(t, vocab_size=vocab)] == []
    assert {t.agent_name for t in trajectories} == {"tool_agent", "single_turn"}
    assert {t.data_source for t in trajectories} == {"openai/gsm8k"}
    assert all(t.score in (0.0, 0.1, 1.0) for t in trajectories)
    assert all(line["rollout/logprob_gap_max_abs"] < 1e-4 for line in lines(run)[1:])
