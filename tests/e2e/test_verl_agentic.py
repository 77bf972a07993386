"""Search-R1's and ReTool's commands with their own rows, YAML and classes, against real servers, two steps each."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentrl.trajectory import Trajectory
from agentrl.trajectory.parquet import read_trajectories, trajectory_files
from tests.e2e.taught import teach
from tests.e2e.verl_command import ACTOR, ROLLOUT, train
from tests.sandbox.servers import Server, running
from tests.verl.users import changed_imports

pytest.importorskip("tantivy", reason="the extra `retriever` is not installed")

from tests.tools.retriever_process import RetrieverProcess
from tools.retriever.build import create

FACTS = [
    {"id": "0", "contents": '"Zed"\nThe code of Zed is 412.'},
    {"id": "1", "contents": '"Bo"\nThe code of Bo is 77.'},
]
QUESTION = "What is the code of Zed?"

SEARCH_R1_ROW: dict[str, Any] = {
    "data_source": "nq",
    "prompt": [
        {
            "role": "user",
            "content": "Answer the given question. You must conduct reasoning inside <think> and </think> first every "
            "time you get new information. If you lack some knowledge, you can call a search engine by <search> query "
            "</search>, and it will return results between <information> and </information>. Provide the answer "
            f"inside <answer> and </answer>. For example, <answer> Beijing </answer>. Question: {QUESTION}\n",
        }
    ],
    "ability": "fact-reasoning",
    "reward_model": {"style": "rule", "ground_truth": {"target": ["412"]}},
}
SEARCH_R1 = [
    "data.train_data_num=null",
    "data.val_data_num=null",
    "data.max_prompt_length=4096",
    "data.max_response_length=60",
    "data.max_start_length=400",
    "data.max_obs_length=40",
    "data.shuffle_train_dataloader=True",
    "algorithm.adv_estimator=grpo",
    "algorithm.no_think_rl=false",
    "actor_rollout_ref.model.use_remove_padding=True",
    f"{ACTOR}.optim.lr_warmup_steps_ratio=0.285",
    f"{ACTOR}.use_kl_loss=true",
    f"{ACTOR}.kl_loss_coef=0.001",
    f"{ACTOR}.kl_loss_type=low_var_kl",
    f"{ACTOR}.ppo_micro_batch_size=4",
    f"{ACTOR}.state_masking=true",
    f"{ROLLOUT}.log_prob_micro_batch_size=8",
    f"{ROLLOUT}.n_agent=4",
    f"{ROLLOUT}.temperature=1",
    "+trainer.val_only=false",
    "max_turns=2",
    "retriever.topk=1",
]

SEARCH_TOOL = """
tools:
  - class_name: verl.tools.search_tool.SearchTool
    config:
      retrieval_service_url: URL/retrieve
      num_workers: 120
      rate_limit: 120
      timeout: 30
      type: native
    tool_schema:
      type: function
      function:
        name: search
        description: Searches the web.
        parameters:
          type: object
          properties:
            query_list:
              type: array
              item:
                type: string
              description: The queries.
          required:
            - query_list
"""
SEARCH_YAML = """
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
  shuffle: False
actor_rollout_ref:
  hybrid_engine: True
  rollout:
    name: sglang
    multi_turn:
      enable: True
      max_assistant_turns: 2
      format: qwen
"""
SEARCH_MULTI_TURN = [
    "--config-path=config",
    "--config-name=search_multiturn_grpo",
    "algorithm.adv_estimator=grpo",
    "algorithm.use_kl_in_reward=False",
    "data.max_prompt_length=400",
    "data.max_response_length=200",
    "data.filter_overlong_prompts=True",
    "data.truncation=error",
    "data.return_raw_chat=True",
    f"{ACTOR}.optim.lr_warmup_steps_ratio=0.285",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu=8",
    f"{ACTOR}.use_kl_loss=True",
    f"{ACTOR}.kl_loss_coef=0.001",
    f"{ACTOR}.kl_loss_type=low_var_kl",
    f"{ACTOR}.entropy_coeff=0",
    f"{ROLLOUT}.max_model_len=1500",
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=8",
    f"{ROLLOUT}.n=4",
    f"{ROLLOUT}.multi_turn.max_assistant_turns=2",
    f"{ROLLOUT}.multi_turn.format=hermes",
    f"{ROLLOUT}.agent.default_agent_loop=tool_agent",
    f"{ROLLOUT}.multi_turn.tool_config_path=tools.yaml",
]
SEARCH_ROW: dict[str, Any] = {
    "data_source": "searchR1_nq",
    "prompt": [{"role": "system", "content": "You are helpful."}, {"role": "user", "content": QUESTION}],
    "ability": "fact-reasoning",
    "reward_model": {"style": "rule", "ground_truth": {"target": ["412"]}},
    "metadata": None,
}

RETOOL = '''
import logging
import re
from typing import Any

import datasets

from verl.tools.base_tool import OpenAIFunctionToolSchema
from verl.tools.sandbox_fusion_tools import SandboxFusionTool
from verl.utils.dataset import RLHFDataset
from verl.utils.reward_score import math_dapo
from verl.utils.rollout_trace import rollout_trace_op

logger = logging.getLogger(__name__)


class CustomSandboxFusionTool(SandboxFusionTool):
    """Prints what the last line is."""

    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self.code_pattern = re.compile(r"```python(.*?)```", re.DOTALL)

    @rollout_trace_op
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs) -> tuple[str, float, dict]:
        code = parameters["code"]
        if (found := self.code_pattern.findall(code)):
            code = found[0].strip()
        first, last = code.rpartition("\\n")[::2]
        code = code if last.startswith("print") else f"{first}\\nprint({last})"
        timeout = parameters.get("timeout", self.default_timeout)
        language = parameters.get("language", self.default_language)
        result = await self.execution_pool.execute.remote(self.execute_code, instance_id, code, timeout, language)
        return result, None, None


class CustomRLHFDataset(RLHFDataset):
    def _read_files_and_tokenize(self):
        parts = [datasets.load_dataset("parquet", data_files=file)["train"] for file in self.data_files]
        self.dataframe = datasets.concatenate_datasets(parts).map(self.map_fn)

    def map_fn(self, row: dict):
        row["prompt"][0]["content"] += "\\nThe answer format must be: \\\\boxed{...}"
        row["agent_name"] = "tool_agent"
        return row


def compute_score(data_source, solution_str, ground_truth, extra_info):
    result = math_dapo.compute_score(solution_str, ground_truth, strict_box_verify=True)
    if result["score"] < 0:
        result["score"] = min(-0.6, result["score"] + (extra_info["num_turns"] - 2) / 2 * 0.1)
    if result["pred"] is None:
        result["pred"] = ""
    return result
'''
RETOOL_TOOL = """
tools:
  - class_name: "recipe.retool.retool.CustomSandboxFusionTool"
    config:
      sandbox_fusion_url: "URL/run_code"
      num_workers: 128
      enable_global_rate_limit: true
      rate_limit: 128
      default_timeout: 30
      default_language: "python"
      memory_limit_mb: 256
      type: native
    tool_schema:
      type: "function"
      function:
        name: "code_interpreter"
        description: "A tool for executing code."
        parameters:
          type: "object"
          properties:
            code:
              type: "string"
              description: "The code to execute."
          required: ["code"]
"""
RETOOL_COMMAND = [
    "algorithm.adv_estimator=grpo",
    "algorithm.use_kl_in_reward=False",
    "algorithm.kl_ctrl.kl_coef=0.0",
    "data.return_raw_chat=True",
    "data.max_prompt_length=400",
    "data.max_response_length=300",
    "data.filter_overlong_prompts=True",
    "data.truncation=error",
    "data.custom_cls.path=recipe/retool/retool.py",
    "data.custom_cls.name=CustomRLHFDataset",
    "custom_reward_function.path=recipe/retool/retool.py",
    "custom_reward_function.name=compute_score",
    "actor_rollout_ref.model.use_remove_padding=True",
    f"{ACTOR}.use_kl_loss=False",
    f"{ACTOR}.kl_loss_coef=0.0",
    f"{ACTOR}.clip_ratio_low=0.2",
    f"{ACTOR}.clip_ratio_high=0.28",
    f"{ACTOR}.clip_ratio_c=10.0",
    f"{ACTOR}.use_dynamic_bsz=True",
    f"{ACTOR}.ppo_max_token_len_per_gpu=2000",
    f"{ACTOR}.fsdp_config.optimizer_offload=True",
    f"{ROLLOUT}.mode=async",
    f"{ROLLOUT}.n=4",
    f"{ROLLOUT}.multi_turn.enable=True",
    f"{ROLLOUT}.multi_turn.max_user_turns=4",
    f"{ROLLOUT}.multi_turn.max_assistant_turns=4",
    f"{ROLLOUT}.multi_turn.tool_config_path=recipe/retool/sandbox_fusion_tool_config.yaml",
    f"{ROLLOUT}.multi_turn.format=hermes",
    f"{ROLLOUT}.val_kwargs.top_p=0.6",
    f"{ROLLOUT}.val_kwargs.temperature=1.0",
    f"{ROLLOUT}.val_kwargs.n=2",
]
RETOOL_ROW: dict[str, Any] = {
    "data_source": "math_dapo",
    "prompt": [{"role": "user", "content": "What is 6 * 7?"}],
    "ability": "MATH",
    "reward_model": {"ground_truth": "42", "style": "rule-lighteval/MATH_v2"},
}


@pytest.fixture(scope="module")
def retriever(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RetrieverProcess]:
    folder = tmp_path_factory.mktemp("retriever")
    (folder / "corpus.jsonl").write_text("".join(json.dumps(fact) + "\n" for fact in FACTS))
    create([folder / "corpus.jsonl"], folder / "index")
    server = RetrieverProcess(folder / "index", "--workers", "1")
    yield server
    server.process.kill()
    server.process.wait()


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Server]:
    with running(None, options=("--concurrency", "4")) as up:
        yield up


def called(name: str, **arguments: object) -> str:
    """What a policy writes to call a tool in the hermes format."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call><|im_end|>"


def answered(text: str) -> str:
    """What the tiny policy's template writes of a tool's answer, up to the next turn."""
    return f"\n<|im_start|>user\n<tool_response>\n{text}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"


def trains(
    folder: Path, row: dict[str, Any], arguments: list[str], mini_batch: int = 2, trainer: str = "main_ppo"
) -> list[Trajectory]:
    """Run a command of verl's on rows like this one, two steps; return the trajectories that were written."""
    info = {"split": "train", "need_tools_kwargs": False}
    rows = [{**row, "extra_info": {"index": index, **info, **row.get("extra_info", {})}} for index in range(8)]
    train(folder, f"agentrl.verl.{trainer}", arguments, rows, mini_batch)
    files = trajectory_files(folder / "run" / "trajectories")
    written = [one for file in files for one in read_trajectories(file)]
    assert not any(one.failure for one in written)
    return written


def search_r1(folder: Path, retriever: RetrieverProcess) -> None:
    """Search-R1's own command: tags in the text, the retriever's address in the command."""
    seen = "\n\n<information>Doc 1(Title: Zed) The code of Zed is 412.</information>\n\n"
    turns = ["<search>code of Zed</search>", "<answer>412</answer>"]
    teach(folder / "policy", turns, [seen], SEARCH_R1_ROW["prompt"])
    url = f'retriever.url="{retriever.url}/retrieve"'
    check(trains(folder, SEARCH_R1_ROW, [*SEARCH_R1, url], mini_batch=8), "search", "The code of Zed is 412.")


def search_tool(folder: Path, retriever: RetrieverProcess) -> None:
    """verl's example of a search tool, with its YAML of the tool and its rows."""
    (folder / "config").mkdir()
    (folder / "config" / "search_multiturn_grpo.yaml").write_text(SEARCH_YAML)
    (folder / "tools.yaml").write_text(SEARCH_TOOL.replace("URL", retriever.url))
    tools = [yaml.safe_load(SEARCH_TOOL)["tools"][0]["tool_schema"]]
    call = called("search", query_list=["code of Zed"])
    seen = answered("Doc 1(Title: Zed) The code of Zed is 412.")
    teach(folder / "policy", [call, "<answer>412</answer><|im_end|>"], [seen], SEARCH_ROW["prompt"], tools)
    kwargs = {"ground_truth": {"target": ["412"]}, "question": QUESTION, "data_source": "searchR1_nq"}
    info = {"need_tools_kwargs": True, "question": QUESTION, "tools_kwargs": {"search": {"create_kwargs": kwargs}}}
    check(trains(folder, {**SEARCH_ROW, "extra_info": info}, SEARCH_MULTI_TURN), "search", "The code of Zed is 412.")


def retool(folder: Path, sandbox: Server) -> None:
    """ReTool's command, with the data set, scorer and tool of its file, in which only imports are changed."""
    (folder / "recipe" / "retool").mkdir(parents=True)
    (folder / "recipe" / "retool" / "retool.py").write_text(changed_imports(RETOOL))
    tool = RETOOL_TOOL.replace("URL", sandbox.url)
    (folder / "recipe" / "retool" / "sandbox_fusion_tool_config.yaml").write_text(tool)
    call = called("code_interpreter", code="6*7")
    tools = [yaml.safe_load(tool)["tools"][0]["tool_schema"]]
    asked = [{"role": "user", "content": "What is 6 * 7?\nThe answer format must be: \\boxed{...}"}]
    teach(folder / "policy", [call, "It is \\boxed{42}<|im_end|>"], [answered("42\n")], asked, tools)
    check(trains(folder, RETOOL_ROW, RETOOL_COMMAND, trainer="main_dapo"), "code_interpreter", "42")


def check(written: list[Trajectory], tool: str, answer: str) -> None:
    """Most trajectories called the tool, were answered by the server, and were scored for what they then said."""
    right = [
        one
        for one in written
        if one.score == 1.0
        and any(call.name == tool and answer in call.response and call.error is None for call in one.tool_calls)
    ]
    assert len(right) > len(written) // 2, [(one.score, one.tool_calls) for one in written]


@pytest.mark.slice(1, "long run")
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("case", "server"), [(search_r1, "retriever"), (search_tool, "retriever"), (retool, "sandbox")]
)
def test_a_command_trains_two_steps_against_its_server(
    case: Callable[[Path, Any], None], server: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    case(tmp_path, request.getfixturevalue(server))
