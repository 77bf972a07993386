"""docs/openai_endpoint.md: its agents and commands, trained as shown."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet as pq
import pytest

from tests.e2e.test_docs import SMALL, commands, run, write_files
from tests.e2e.test_train import lines

PAGE = "docs/openai_endpoint.md"
ROW = {
    "prompt": [{"role": "user", "content": "What is 2 + 3?"}],
    "data_source": "quickstart/arithmetic",
    "reward_model": {"style": "rule", "ground_truth": "5"},
}


@pytest.mark.slice(1, "documents")
@pytest.mark.timeout(400)
@pytest.mark.parametrize("number", [0, 1], ids=["function", "command"])
def test_the_pages_agents_are_trained(
    policy_dir: Path, reward_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")  # as where a venv is active
    assert write_files(PAGE, tmp_path) == ["my_agent.py", "my_command.py"]
    pq.write_table(pyarrow.Table.from_pylist([ROW] * 4), tmp_path / "rows.parquet")
    words = shlex.split(commands(PAGE)[number])
    assert words[0] == "python"
    words = [word.replace("Qwen/Qwen3-0.6B", str(policy_dir)) for word in words[1:]]
    more = [
        *SMALL,
        "data.train_batch_size=2",
        "data.val_max_samples=1",
        "trainer.val_before_train=false",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        f"custom_reward_function.path={reward_file}",
        "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=3",
        "actor_rollout_ref.rollout.multi_turn.tool_config_path=null",
        "algorithm.filter_groups.enable=false",
        f"trainer.default_local_dir={tmp_path / 'run'}",
    ]
    run([*words, *more], tmp_path)
    metrics = lines(tmp_path / "run")[-1]
    assert metrics["left_out/failed"] == 0
    assert metrics["trajectory/openai_calls"] >= 1
    assert metrics["response/sampled_mean"] > 1
    assert "score/calls" in metrics or number == 1


def test_a_run_without_an_agent_ends_before_its_first_step(policy_dir: Path, tmp_path: Path) -> None:
    pq.write_table(pyarrow.Table.from_pylist([{**ROW, "agent_name": "openai_proxy"}] * 4), tmp_path / "rows.parquet")
    files = [f"data.train_files={tmp_path}/rows.parquet", f"data.val_files={tmp_path}/rows.parquet"]
    with pytest.raises(AssertionError, match="set either openai_proxy"):
        run(["-m", "agentrl.train", *files, f"actor_rollout_ref.model.path={policy_dir}", *SMALL], tmp_path)
    assert not (tmp_path / "runs").exists()
