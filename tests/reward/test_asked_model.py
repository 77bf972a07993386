"""Functions that ask a generative reward model: what they are given, and what faults of its servers come to."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from agentrl.config.sections.reward import CustomRewardConfig, RewardModelConfig
from agentrl.errors import ConfigError
from agentrl.quickstart.tiny_policy import make_tiny_policy
from agentrl.remote.router import ServerAccess
from agentrl.reward import RewardManager, make_reward_manager, score_all
from agentrl.trajectory import Message, Status, Trajectory, Transcript
from agentrl.trajectory.sample import Sample
from tests.naming import naming
from tests.remote.conftest import FaultyServer, says

Serve = Callable[..., Awaitable[FaultyServer]]
MODELS = says(200, '{"data": []}')

GENERATE = """
import aiohttp

async def compute_score(data_source, solution_str, ground_truth, extra_info, reward_router_address,
                        reward_model_tokenizer, scale=1.0):
    prompt = [{"role": "user", "content": f"Is {solution_str} right?"}]
    ids = reward_model_tokenizer.apply_chat_template(prompt, tokenize=True, add_generation_prompt=True)
    payload = {"input_ids": ids, "sampling_params": {}}
    async with aiohttp.ClientSession() as session:
        async with session.post(f"http://{reward_router_address}/generate", json=payload) as answer:
            output = await answer.json(content_type=None)
    try:
        return scale * len(output["output_ids"])
    except Exception:
        return 0.0
"""
CHAT = """
import json, urllib.request

def compute_score(solution_str, reward_router_address, **kwargs):
    request = urllib.request.Request(f"http://{reward_router_address}/v1/chat/completions", b"{}")
    return float(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
"""
MANAGER = """
from agentrl.verl import RewardManagerBase

class Mine(RewardManagerBase):
    def __init__(self, config, tokenizer, compute_score, reward_router_address=None, reward_model_tokenizer=None):
        super().__init__(config, tokenizer, compute_score)
        self.address, self.reading = reward_router_address, reward_model_tokenizer

    async def run_single(self, data):
        score = await self.compute_score(
            data_source="", solution_str="x", ground_truth=None, extra_info={},
            reward_router_address=self.address, reward_model_tokenizer=self.reading,
        )
        return {"reward_score": score, "reward_extra_info": {}}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_policy(tmp_path_factory.mktemp("judge"), seed=1)


def manager(tmp_path: Path, model: Path, text: str, timeout: float = 20.0, **keys: object) -> RewardManager:
    (tmp_path / "grm.py").write_text(text)
    section = {"enable": True, "timeout": timeout, "model": {"path": str(model), "generative": True}, **keys}
    config = RewardModelConfig.model_validate(section)
    return make_reward_manager(config, CustomRewardConfig(path=str(tmp_path / "grm.py")))


async def scored(
    it: RewardManager,
    s: FaultyServer,
    trajectory: Trajectory | None = None,
    truth: str | None = None,
    date: str | None = None,
) -> Trajectory:
    it.check(["any"])
    it.serve(ServerAccess((s.url.rstrip("/"),), "key"), date)
    await it.start("run")
    answer: list[Message] = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "4"}]
    trajectory = trajectory or Trajectory("t", 0, messages=answer)
    await score_all(it, [trajectory], Sample([{"role": "user", "content": "?"}], "any", "single_turn", truth))
    await it.close()
    return trajectory


async def test_a_function_is_given_its_address_and_its_tokenizer(tmp_path: Path, model: Path, server: Serve) -> None:
    """The first answers are faults, which this function would take for a score of 0."""
    s = await server(MODELS, says(500), says(503), says(200, '{"output_ids": [1, 2, 3]}'))
    it = manager(tmp_path, model, GENERATE)
    assert not it.is_tried("any"), "no request before the first step"
    t = await scored(it, s)
    assert (t.score, t.status) == (3.0, Status.COMPLETED)
    assert len(json.loads(s.bodies[-1])["input_ids"]) > 5
    assert s.asked[-1].headers["Authorization"] == "Bearer key"
    assert it.take_metrics()["reward_model/retries"] == 2


async def test_its_template_writes_the_date_of_the_run(tmp_path: Path, server: Serve) -> None:
    model = make_tiny_policy(tmp_path, seed=1)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = "{{ strftime_now('%d %b %Y') }}" + tokenizer.chat_template
    tokenizer.save_pretrained(model)
    it = manager(tmp_path, model, GENERATE)
    s = await server(MODELS, says(200, '{"output_ids": [1]}'))
    await scored(it, s, date="2024-02-29")
    assert "29 Feb 2024" in tokenizer.decode(json.loads(s.bodies[-1])["input_ids"])


async def test_servers_that_do_not_answer_in_time_are_a_fault_and_no_reward_of_zero(
    tmp_path: Path, model: Path, server: Serve
) -> None:
    s = await server(MODELS, says(500, "broken"))
    t = await scored(manager(tmp_path, model, GENERATE, timeout=0.5), s)
    assert (t.score, t.status) == (None, Status.FAILED)
    assert t.failure == "scorer: no score within reward_model.timeout=0.5 s"


async def test_plain_functions_that_wait_ask_it_too(tmp_path: Path, model: Path, server: Serve) -> None:
    said = {"choices": [{"message": {"content": "0.25"}}]}
    t = await scored(manager(tmp_path, model, CHAT), await server(MODELS, says(200, json.dumps(said))))
    assert t.score == 0.25


@pytest.mark.parametrize(("solution", "score"), [("4", 1.0), ("5", 0.0)])
async def test_the_function_of_the_documents(
    tmp_path: Path, model: Path, server: Serve, solution: str, score: float
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text()
    text = page.partition("# my_critic.py\n")[2].partition("```")[0]
    said = {"id": "1", "object": "chat.completion", "created": 0, "model": "critic"}
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "Yes."}}
    s = await server(MODELS, says(200, json.dumps({**said, "choices": [choice]}), Content_Type="application/json"))
    answer: list[Message] = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": solution}]
    t = await scored(manager(tmp_path, model, text), s, Trajectory("t", 0, messages=answer), truth="4")
    assert (t.score, len(s.asked)) == (score, 1 + (score > 0)), "one that is wrong costs no request"


class Tokens:
    """A tokenizer that the manager keeps and does not ask."""

    def apply_chat_template(self, messages: list[dict[str, str]], return_dict: bool) -> list[int]:
        raise NotImplementedError


async def test_verls_manager_classes_are_made_with_both(tmp_path: Path, model: Path, server: Serve) -> None:
    (tmp_path / "mine.py").write_text(MANAGER)
    it = manager(tmp_path, model, GENERATE, reward_manager=f"{tmp_path}/mine.py:Mine")
    it.bind(Tokens())
    t = Trajectory("t", 0, messages=[])
    t.transcripts.append(Transcript())
    t.transcripts[0].append_prompt([1])
    t.transcripts[0].append_sampled([2], [0.0], 0)
    assert (await scored(it, await server(MODELS, says(200, '{"output_ids": [1, 2]}')), t)).score == 2.0


def test_a_model_that_nobody_asks_and_a_function_without_one_are_told(tmp_path: Path, model: Path) -> None:
    with naming(ConfigError, "reward_router_address", "scorer"):
        manager(tmp_path, model, "def compute_score(solution_str): return 1").check(["any"])
    with naming(ConfigError, "reward_model.model.generative=true", "none"):
        (tmp_path / "asking.py").write_text(GENERATE)
        make_reward_manager(RewardModelConfig(), CustomRewardConfig(path=str(tmp_path / "asking.py")))
