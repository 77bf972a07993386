"""Whole runs, with the embedded engine, of files as verl's users write them: only their import lines are changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from agentrl.trajectory.parquet import trajectory_files
from tests.e2e.conftest import command
from tests.verl import users

GSM8K_TOOL = """
tools:
  - class_name: "verl.tools.gsm8k_tool.Gsm8kTool"
    config:
      type: native
    tool_schema:
      type: "function"
      function:
        name: "calc_gsm8k_reward"
        description: "Checks an answer."
        parameters:
          type: "object"
          properties: {answer: {type: "string", description: "The answer."}}
          required: ["answer"]
"""


def row(index: int, **extra: Any) -> dict[str, Any]:
    """Make a row as verl's preparation of GSM8K for its tool writes it."""
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "system", "content": "Solve it."}, {"role": "user", "content": f"{index} + 1 = ?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(index + 1)},
        "extra_info": {
            "split": "train",
            "index": index,
            "need_tools_kwargs": True,
            "tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": str(index + 1)}}},
            "interaction_kwargs": {"query": f"{index} + 1 = ?", "ground_truth": str(index + 1)},
            **extra,
        },
    }


TOOL = (
    [row(index) for index in range(8)],
    [
        "actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent",
        "reward_model.reward_manager=verl_rewards:LengthManager",
    ],
)
LOOP = (
    [{**row(index), "agent_name": ("twice", "best")[index % 2]} for index in range(8)],
    ["actor_rollout_ref.rollout.agent.agent_loop_config_path=loops.yaml"],
)
INTERACTION = (
    [
        {**row(index, interaction_kwargs={"name": "number", "ground_truth": str(index)}), "agent_name": "tool_agent"}
        for index in range(8)
    ],
    ["actor_rollout_ref.rollout.multi_turn.interaction_config_path=talks.yaml"],
)


@pytest.mark.slice(1, "long run")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", [TOOL, LOOP, INTERACTION], ids=["tool", "loop", "interaction"])
def test_a_run_of_files_made_for_verl(
    small_run: Callable[..., list[str]], tmp_path: Path, case: tuple[list[dict[str, Any]], list[str]]
) -> None:
    rows, keys = case
    users.write(tmp_path)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    (tmp_path / "tools.yaml").write_text(GSM8K_TOOL)
    (tmp_path / "loops.yaml").write_text(
        "- name: twice\n  _target_: verl_loops.TwiceLoop\n- name: best\n  _target_: verl_loops.BestOfLoop\n"
    )
    (tmp_path / "talks.yaml").write_text(
        "interaction:\n  - name: number\n    class_name: verl_talks.NumberInteraction\n    config: {}\n"
    )
    done = command(
        small_run(
            "data.train_files=train.parquet",
            "data.val_files=null",
            "data.max_prompt_length=400",
            "data.max_response_length=120",
            "actor_rollout_ref.rollout.multi_turn.tool_config_path=tools.yaml",
            "custom_reward_function.path=verl_rewards.py",
            "trainer.total_training_steps=2",
            *keys,
        ),
        cwd=tmp_path,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    files = trajectory_files(tmp_path / "run" / "trajectories")
    written = [one for file in files for one in pq.read_table(file).to_pylist()]
    assert len(written) == 32 and not any(one["failure"] for one in written)
