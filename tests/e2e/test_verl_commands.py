"""Launch commands, rows, YAML and classes as verl's users have them, two steps each; only module names are changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.e2e.test_verl_classes import GSM8K_TOOL, row
from tests.e2e.verl_command import ACTOR, ROLLOUT, train

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
INTERACTION = """
interaction:
  - name: "gsm8k"
    class_name: "verl.interactions.gsm8k_interaction.Gsm8kInteraction"
    config: {}
"""
RETOOL = """
import datasets
from agentrl.verl import RLHFDataset


class CustomRLHFDataset(RLHFDataset):
    def _read_files_and_tokenize(self):
        parts = [datasets.load_dataset("parquet", data_files=file)["train"] for file in self.data_files]
        self.dataframe = datasets.concatenate_datasets(parts).map(lambda row: {"agent_name": "tool_agent"})


def compute_score(data_source, solution_str, ground_truth, extra_info, **kwargs):
    extra_info["rollout_reward_scores"]
    return {"score": len(solution_str) % 7 / 7 + (extra_info["num_turns"] - 2) / 2 * 0.1, "pred": ""}
"""
SCORER = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return len(solution_str) % 7 / 7
"""


class Case(NamedTuple):
    """A command: its module, its arguments, and the files that it names."""

    module: str
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
    "custom_reward_function.path=scorer.py",
]
CASES = {
    "ppo": Case(
        "agentrl.verl.main_ppo",
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
    "retool": Case(
        "agentrl.verl.main_dapo",
        [
            "algorithm.adv_estimator=grpo",
            "data.custom_cls.path=retool.py",
            "data.custom_cls.name=CustomRLHFDataset",
            "data.return_raw_chat=True",
            "data.truncation=error",
            "custom_reward_function.path=retool.py",
            "custom_reward_function.name=compute_score",
            f"{ACTOR}.clip_ratio_low=0.2",
            f"{ACTOR}.clip_ratio_high=0.28",
            f"{ACTOR}.clip_ratio_c=10.0",
            f"{ACTOR}.use_dynamic_bsz=True",
            f"{ROLLOUT}.mode=async",
            f"{ROLLOUT}.n=4",
            f"{ROLLOUT}.multi_turn.enable=True",
            f"{ROLLOUT}.multi_turn.max_user_turns=4",
            f"{ROLLOUT}.multi_turn.max_assistant_turns=4",
            f"{ROLLOUT}.multi_turn.tool_config_path=tools.yaml",
            f"{ROLLOUT}.multi_turn.format=hermes",
            f"{ROLLOUT}.val_kwargs.top_p=0.6",
            f"{ROLLOUT}.val_kwargs.temperature=1.0",
            f"{ROLLOUT}.val_kwargs.n=2",
        ],
        {"retool.py": RETOOL, "tools.yaml": GSM8K_TOOL},
    ),
    "tool": Case(
        "agentrl.verl.main_ppo",
        [
            "--config-path=config",
            "--config-name=gsm8k_multiturn_grpo",
            *GRPO,
            f"{ROLLOUT}.agent.default_agent_loop=tool_agent",
            f"{ROLLOUT}.multi_turn.tool_config_path=tools.yaml",
        ],
        {"config/gsm8k_multiturn_grpo.yaml": MULTI_TURN, "tools.yaml": GSM8K_TOOL, "scorer.py": SCORER},
    ),
    "interaction": Case(
        "agentrl.verl.main_ppo",
        [
            "--config-path=config",
            "--config-name=gsm8k_multiturn_grpo_w_interaction",
            *GRPO,
            f"{ROLLOUT}.agent.default_agent_loop=tool_agent",
            f"{ROLLOUT}.multi_turn.max_user_turns=1",
            f"{ROLLOUT}.multi_turn.interaction_config_path=talks.yaml",
        ],
        {"config/gsm8k_multiturn_grpo_w_interaction.yaml": MULTI_TURN, "talks.yaml": INTERACTION, "scorer.py": SCORER},
        [
            {
                **row(index),
                "extra_info": {
                    "index": index,
                    "interaction_kwargs": {"name": "gsm8k", "query": "?", "ground_truth": str(index)},
                },
                "agent_name": "tool_agent",
            }
            for index in range(8)
        ],
    ),
}


@pytest.mark.slice(1, "long run")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", CASES)
def test_a_command_of_verls_trains_two_steps(name: str, policy_dir: Path, tmp_path: Path) -> None:
    case = CASES[name]
    for file, text in case.files.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(text)
    (tmp_path / "policy").symlink_to(policy_dir)
    lengths = ["data.max_prompt_length=400", "data.max_response_length=60"]
    steps = train(tmp_path, case.module, [*case.arguments, *lengths], case.rows)
    assert all("actor/pg_loss" in line for line in steps), "verl's names of the metrics"
    assert ("critic/vf_loss" in steps[0]) == (name == "ppo")
