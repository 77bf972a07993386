"""Launch commands, rows, YAML and classes as verl's users have them, two steps each; only module names are changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from agentrl.trajectory.parquet import read_trajectories, trajectory_files
from tests.e2e.verl_command import ACTOR, ROLLOUT, train
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

MULTI_TURN = """
hydra:
  searchpath:
    - file://verl/trainer/config
defaults:
  - ppo_trainer
  - _self_
data:
  max_prompt_length: 1024
  max_response_length: 1024
  train_batch_size: 256
  return_raw_chat: True
actor_rollout_ref:
  hybrid_engine: True
  rollout:
    name: sglang
    multi_turn:
      enable: True
      max_assistant_turns: 5
"""
INTERACTIONS = """
interaction:
  - name: "gsm8k"
    class_name: "verl.interactions.gsm8k_interaction.Gsm8kInteraction"
    config: {}
  - {name: "number", class_name: "verl_talks.NumberInteraction", config: {}}
"""
LOOPS = "- {name: twice, _target_: verl_loops.TwiceLoop}\n- {name: best, _target_: verl_loops.BestOfLoop}\n"
SCORER = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return len(solution_str) % 7 / 7
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


class Case(NamedTuple):
    """A command of `agentrl.verl.main_ppo`: its arguments, and the further files that they name."""

    arguments: list[str]
    files: dict[str, str] = {}
    rows: list[dict[str, Any]] = [row(index) for index in range(8)]  # type: ignore[name-defined]  # mypy's fault


GRPO = [
    "algorithm.adv_estimator=grpo",
    f"{ACTOR}.use_kl_loss=True",
    f"{ACTOR}.kl_loss_coef=0.001",
    f"{ACTOR}.kl_loss_type=low_var_kl",
    "algorithm.use_kl_in_reward=False",
    f"{ROLLOUT}.n=4",
    f"{ROLLOUT}.multi_turn.tool_config_path=tools.yaml",
    "custom_reward_function.path=scorer.py",
]
CASES = {
    "ppo": Case(
        [
            f"{ACTOR}.ppo_micro_batch_size_per_gpu=4",
            f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=8",
            f"{ROLLOUT}.gpu_memory_utilization=0.4",
            "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4",
            "critic.optim.lr=1e-5",
            "critic.model.path=policy",
            "critic.ppo_micro_batch_size_per_gpu=4",
            "algorithm.kl_ctrl.kl_coef=0.001",
        ],
        rows=[
            {**row(index), "extra_info": {"split": "train", "index": index, "answer": "#### 1", "question": "?"}}
            for index in range(8)
        ],
    ),
    "tool": Case(
        [
            "--config-path=config",
            "--config-name=gsm8k_multiturn_grpo",
            *GRPO,
            f"{ROLLOUT}.agent.default_agent_loop=tool_agent",
            "reward_model.reward_manager=verl_rewards:LengthManager",
        ],
        {"config/gsm8k_multiturn_grpo.yaml": MULTI_TURN},
    ),
    "interaction": Case(
        [
            "--config-path=config",
            "--config-name=gsm8k_multiturn_grpo_w_interaction",
            *GRPO,
            f"{ROLLOUT}.agent.default_agent_loop=tool_agent",
            f"{ROLLOUT}.multi_turn.max_user_turns=1",
            f"{ROLLOUT}.multi_turn.interaction_config_path=talks.yaml",
        ],
        {"config/gsm8k_multiturn_grpo_w_interaction.yaml": MULTI_TURN, "talks.yaml": INTERACTIONS},
        [
            {
                **row(index, interaction_kwargs={"name": name, "query": "?", "ground_truth": str(index)}),
                "agent_name": "tool_agent",
            }
            for index, name in enumerate(("gsm8k", "number") * 4)
        ],
    ),
    "loops": Case(
        [*GRPO, f"{ROLLOUT}.agent.agent_loop_config_path=loops.yaml"],
        {"loops.yaml": LOOPS},
        [{**row(index), "agent_name": ("twice", "best")[index % 2]} for index in range(8)],
    ),
}


@pytest.mark.slice(1, "long run")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", CASES)
def test_a_command_of_verls_trains_two_steps(name: str, policy_dir: Path, tmp_path: Path) -> None:
    case = CASES[name]
    users.write(tmp_path)
    for file, text in {"tools.yaml": GSM8K_TOOL, "scorer.py": SCORER, **case.files}.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(text)
    (tmp_path / "policy").symlink_to(policy_dir)
    lengths = ["data.max_prompt_length=400", "data.max_response_length=60"]
    steps = train(tmp_path, "agentrl.verl.main_ppo", [*case.arguments, *lengths], case.rows)
    assert all("actor/pg_loss" in line for line in steps), "verl's names of the metrics"
    assert ("critic/vf_loss" in steps[0]) == (name == "ppo")
    written = [one for file in trajectory_files(tmp_path / "run" / "trajectories") for one in read_trajectories(file)]
    assert len(written) >= 8 and not any(one.failure for one in written)
