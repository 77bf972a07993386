"""Files as verl's users write them; only their import lines are changed before they run here."""

from __future__ import annotations

import re
from pathlib import Path

TOOLS = """
import logging
from typing import Any, Optional
from uuid import uuid4

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.rollout_trace import rollout_trace_op

logger = logging.getLogger(__name__)


class AddTool(BaseTool):
    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self.bonus = config.get("bonus", 0.0)
        self._instance_dict = {}

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        return self.tool_schema

    async def create(self, instance_id: Optional[str] = None, start: Optional[int] = None, **kwargs):
        if instance_id is None:
            instance_id = str(uuid4())
        if start is None:
            start = kwargs.get("create_kwargs", {}).get("start", 0)
        self._instance_dict[instance_id] = {"total": start}
        return instance_id, ToolResponse()

    @rollout_trace_op
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs):
        agent_data = kwargs["agent_data"]
        agent_data.extra_fields["calls"] = agent_data.extra_fields.get("calls", 0) + 1
        if "numbers" not in parameters:
            return ToolResponse(), None, None
        self._instance_dict[instance_id]["total"] += sum(parameters["numbers"])
        total = self._instance_dict[instance_id]["total"]
        metrics = {"status": "success", "count": len(parameters["numbers"])}
        return ToolResponse(text=f"total {total}"), self.bonus, metrics

    async def calc_reward(self, instance_id: str, **kwargs) -> str:
        return self._instance_dict[instance_id]["total"]

    async def release(self, instance_id: str, **kwargs) -> None:
        del self._instance_dict[instance_id]


class OldTool(BaseTool):
    async def create(self, instance_id, suffix, **kwargs):
        self.suffix = suffix
        return instance_id

    async def execute(self, instance_id, parameters, **kwargs) -> tuple[str, float, dict]:
        return parameters["text"] + self.suffix, 0.5, {}


class WrongTool(BaseTool):
    async def execute(self, instance_id, parameters, **kwargs):
        return ToolResponse(text="no reward, no metrics"), 0.5


class FirstTool(BaseTool):
    async def execute(self, text: str, **kwargs):
        return ({"said": text, "given": sorted(kwargs)}, 0.25, {})


class NamedTool(BaseTool):
    async def execute(self, instance_id: str, text: str):
        return {"said": text.upper()}
"""

ADD_SCHEMA = """
    tool_schema:
      type: "function"
      function:
        name: "add"
        description: "Adds numbers."
        parameters:
          type: "object"
          properties:
            numbers:
              type: "array"
              items: {type: "number"}
          required: []
"""
SAY_SCHEMA = """
    tool_schema:
      type: "function"
      function:
        name: "NAME"
        description: "Says something."
        parameters:
          type: "object"
          properties: {text: {type: "string"}}
          required: ["text"]
"""

INTERACTIONS = """
from typing import Any, Optional
from uuid import uuid4

from verl.interactions.base import BaseInteraction


class NumberInteraction(BaseInteraction):
    def __init__(self, config: dict):
        super().__init__(config)
        self._instance_dict = {}

    async def start_interaction(self, instance_id: Optional[str] = None, ground_truth: Optional[str] = None, **kwargs):
        if instance_id is None:
            instance_id = str(uuid4())
        self._instance_dict[instance_id] = {"response": "", "ground_truth": ground_truth, "name": kwargs["name"]}
        return instance_id

    async def generate_response(self, instance_id: str, messages: list[dict[str, Any]], **kwargs):
        content = [message["content"] for message in messages if message["role"] == "assistant"][-1]
        self._instance_dict[instance_id]["response"] = content
        reward = await self.calculate_score(instance_id)
        assert kwargs["ground_truth"] == self._instance_dict[instance_id]["ground_truth"]
        if reward == 1.0:
            return True, "Right.", reward, {}
        return False, "Try again.", reward, {"tries": 1, "note": "text"}

    async def calculate_score(self, instance_id: str, **kwargs) -> float:
        state = self._instance_dict[instance_id]
        return float(state["ground_truth"] in state["response"])

    async def finalize_interaction(self, instance_id: str, **kwargs) -> None:
        del self._instance_dict[instance_id]


class PlainInteraction(BaseInteraction):
    def generate_response(self, instance_id, messages, **kwargs):
        return True, "", None, None


class ShortInteraction(BaseInteraction):
    async def generate_response(self, instance_id, messages, **kwargs):
        return True, "three values", 0.5
"""

LOOPS = '''
import asyncio
from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register
from verl.utils.profiler import simple_timer


@register("twice")
class TwiceLoop(AgentLoopBase):
    """Asks once more, and gives the ids of both answers."""

    def __init__(self, *args, question="Are you sure?", **kwargs):
        super().__init__(*args, **kwargs)
        self.question = question
        self.response_length = self.config.actor_rollout_ref.rollout.response_length

    async def run(self, sampling_params: dict[str, Any], **kwargs) -> AgentLoopOutput:
        messages = list(kwargs["raw_prompt"])
        metrics, request_id = {}, uuid4().hex
        ids = await self.apply_chat_template(messages)
        prompt_length, mask, logprobs = len(ids), [], []
        for turn in range(2):
            with simple_timer("generate_sequences", metrics):
                output = await self.server_manager.generate(
                    request_id=request_id, prompt_ids=ids, sampling_params=sampling_params
                )
            ids = ids + output.token_ids
            mask += [1] * len(output.token_ids)
            logprobs += output.log_probs
            if turn == 0:
                answer = await self.loop.run_in_executor(None, lambda: self.tokenizer.decode(output.token_ids))
                asked = await self.apply_chat_template(
                    [{"role": "user", "content": self.question}], remove_system_prompt=True
                )
                ids, mask, logprobs = ids + asked, mask + [0] * len(asked), logprobs + [0.0] * len(asked)
        return AgentLoopOutput(
            prompt_ids=ids[:prompt_length],
            response_ids=ids[prompt_length:][: self.response_length],
            response_mask=mask[: self.response_length],
            response_logprobs=logprobs[: self.response_length],
            num_turns=4,
            metrics=metrics,
            extra_fields={"answer": answer},
        )


class BestOfLoop(AgentLoopBase):
    """Samples two answers, keeps the longer, does not train on its first token, and scores itself."""

    async def run(self, sampling_params, **kwargs):
        ids = await self.ct_build_initial_tokens(list(kwargs["raw_prompt"]))
        both = await asyncio.gather(*(self.server_manager.generate(
            request_id=uuid4().hex, prompt_ids=ids, sampling_params={**sampling_params, "max_tokens": 12}
        ) for _ in range(2)))
        best = max(both, key=lambda one: len(one.token_ids))
        merged, mask, _ = await self.ct_merge_assistant_token(ids, best.token_ids, [])
        mask[0] = 0
        return AgentLoopOutput(
            prompt_ids=ids, response_ids=merged.token_ids[len(ids):], response_mask=mask,
            reward_score=float(len(best.token_ids)), metrics={}
        )


class ForgingLoop(AgentLoopBase):
    """Writes the answer anew, and says that the policy sampled it."""

    async def run(self, sampling_params, **kwargs):
        ids = await self.apply_chat_template(list(kwargs["raw_prompt"]))
        output = await self.server_manager.generate(request_id="a", prompt_ids=ids, sampling_params=sampling_params)
        new = self.tokenizer.encode("another answer", add_special_tokens=False)
        return AgentLoopOutput(prompt_ids=ids, response_ids=new, response_mask=[1] * len(new), metrics={})


class ShiftedLoop(ForgingLoop):
    """Moves what was sampled behind a word of its own."""

    async def run(self, sampling_params, **kwargs):
        ids = await self.apply_chat_template(list(kwargs["raw_prompt"]))
        output = await self.server_manager.generate(request_id="a", prompt_ids=ids, sampling_params=sampling_params)
        word = self.tokenizer.encode("Well", add_special_tokens=False)
        mask = [0] * len(word) + [1] * len(output.token_ids)
        return AgentLoopOutput(prompt_ids=ids, response_ids=word + output.token_ids, response_mask=mask, metrics={})


class MaskingLoop(AgentLoopBase):
    """Leaves out of the loss those of its sampled tokens that the row names."""

    async def run(self, sampling_params, **kwargs):
        ids = await self.apply_chat_template(list(kwargs["raw_prompt"]))
        output = await self.server_manager.generate(request_id="a", prompt_ids=ids, sampling_params=sampling_params)
        left_out = range(len(output.token_ids))[slice(*kwargs["extra_info"]["left_out"])]
        mask = [int(place not in left_out) for place in range(len(output.token_ids))]
        return AgentLoopOutput(prompt_ids=ids, response_ids=output.token_ids, response_mask=mask, metrics={})


class HotLoop(AgentLoopBase):
    async def run(self, sampling_params, **kwargs):
        ids = await self.apply_chat_template(list(kwargs["raw_prompt"]))
        await self.server_manager.generate("a", prompt_ids=ids, sampling_params={**sampling_params, "temperature": 9.0})
'''

MAIN_LOOPS = '''
from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register
from verl.utils.profiler import simple_timer
from verl.utils.rollout_trace import rollout_trace_op
from verl.workers.rollout.logprobs import SPECIFIED_TOKEN_LOGPROBS_KEY, finalize_specified_token_logprobs
from verl.workers.rollout.replica import TokenOutput


@register("one_turn")
class OneTurnLoop(AgentLoopBase):
    """A loop in the shape of verl main's single turn."""

    @rollout_trace_op
    async def run(self, sampling_params: dict[str, Any], priority: int = 0, **kwargs) -> AgentLoopOutput:
        conversation, timing = list(kwargs["raw_prompt"]), {}
        media = await self.process_multi_modal_info(conversation)
        images, videos, audios = (media.get(kind) for kind in ("images", "videos", "audios"))
        processing = self._get_mm_processor_kwargs(audios)
        self._assert_mm_supported(bool(media))
        prompt = await self.ct_build_initial_tokens(conversation, images=images, videos=videos, audios=audios)
        with simple_timer("generate_sequences", timing):
            answer: TokenOutput = await self.server_manager.generate(
                request_id=uuid4().hex, prompt_ids=prompt, sampling_params=sampling_params, image_data=images,
                audio_data=audios, video_data=videos, mm_processor_kwargs=processing, priority=int(priority),
            )
        timing["num_preempted"] = answer.num_preempted if answer.num_preempted is not None else -1
        extra = {}
        if (wanted := self.rollout_config.get("specified_token_logprobs")) is not None:
            extra[SPECIFIED_TOKEN_LOGPROBS_KEY] = finalize_specified_token_logprobs(answer, wanted)
        merged, mask, logprobs = await self.ct_merge_assistant_token(
            prompt, answer.token_ids, [], [], assistant_logprobs=answer.log_probs
        )
        return AgentLoopOutput(
            prompt_ids=prompt, response_ids=merged.token_ids[len(prompt):], response_mask=mask,
            response_logprobs=logprobs, routed_experts=answer.routed_experts, multi_modal_data=media,
            mm_processor_kwargs=processing, num_turns=2, metrics=timing, extra_fields=answer.extra_fields, **extra,
        )


class RenderingLoop(AgentLoopBase):
    """A loop of verl 0.5 to 0.7: ids are the tokenizer's own."""

    async def run(self, sampling_params, **kwargs):
        conversation = list(kwargs["raw_prompt"])
        ids = await self.loop.run_in_executor(None, lambda: self.tokenizer.apply_chat_template(
            conversation, add_generation_prompt=True, tokenize=True, **self.apply_chat_template_kwargs
        ))
        output = await self.server_manager.generate(request_id="a", prompt_ids=ids, sampling_params=sampling_params)
        mask = [1] * len(output.token_ids)
        return AgentLoopOutput(prompt_ids=ids, response_ids=output.token_ids, response_mask=mask, metrics={})
'''

TOOL_LOOPS = """
import json
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, register
from verl.experimental.agent_loop.tool_agent_loop import AgentData, AgentState, ToolAgentLoop
from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.tools.schemas import ToolResponse


@ToolParser.register("marks")
class MarksParser(ToolParser):
    async def extract_tool_calls(self, responses_ids: list[int]) -> tuple[str, list[FunctionCall]]:
        assert isinstance(self.tokenizer.apply_chat_template([{"role": "user", "content": "a"}])[0], int)
        text = self.tokenizer.decode(responses_ids, skip_special_tokens=True)
        before, mark, numbers = text.partition("ADD ")
        calls = [FunctionCall(name="add", arguments=json.dumps({"numbers": [float(n) for n in numbers.split()]}))]
        return before, calls if mark else []


@register("marked")
class MarkedLoop(ToolAgentLoop):
    def __init__(self, trainer_config, server_manager, tokenizer, processor, **kwargs):
        super().__init__(trainer_config, server_manager, tokenizer, processor, **kwargs)
        self.tool_parser = ToolParser.get_tool_parser("marks", tokenizer)
        self.most = kwargs.get("most", 3)

    async def _handle_generating_state(
        self, agent_data: AgentData, sampling_params: dict[str, Any], ignore_termination: bool = False
    ) -> AgentState:
        state = await super()._handle_generating_state(agent_data, sampling_params, ignore_termination)
        agent_data.extra_fields["answers"] = agent_data.extra_fields.get("answers", 0) + 1
        return AgentState.TERMINATED if agent_data.assistant_turns >= self.most else state


class CountingLoop(ToolAgentLoop):
    async def _call_tool(self, tool_call: FunctionCall, tools_kwargs: dict[str, Any], agent_data: AgentData):
        tool, instance_id = None, None
        try:
            arguments = json.loads(tool_call.arguments)
            tool = self.tools[tool_call.name]
            kwargs = tools_kwargs.get(tool_call.name, {})
            instance_id, _ = await tool.create(create_kwargs=kwargs.get("create_kwargs", {}))
            response, reward, metrics = await tool.execute(instance_id, arguments, agent_data=agent_data)
        except Exception as e:
            return ToolResponse(text=f"Error when executing tool: {e}"), 0.0, {}
        finally:
            if tool and instance_id:
                await tool.release(instance_id)
        return ToolResponse(text=f"[{len(agent_data.messages)}] {response.text}"), reward, metrics


class LostLoop(ToolAgentLoop):
    async def _handle_pending_state(self, agent_data, sampling_params):
        return "generating"
"""

REWARDS = """
from collections import defaultdict

import torch

from verl import DataProto
from verl.workers.reward_manager.abstract import AbstractRewardManager
from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase


def compute_score(data_source, solution_str, ground_truth, extra_info, **kwargs):
    penalty = 0.1 * (extra_info["num_turns"] - 2)
    tools = sum(extra_info["rollout_reward_scores"].get("add", []))
    return {"score": float(str(ground_truth) in solution_str) - penalty, "tools": tools, "pred": "text"}


def batch_score(data_sources, solution_strs, ground_truths, extra_infos, scale=1.0, **kwargs):
    longest = max(map(len, solution_strs))
    return [scale * len(text) / longest for text in solution_strs]


class LengthManager(AbstractRewardManager):
    def __init__(self, tokenizer, num_examine, compute_score=None, reward_fn_key="data_source", most=100) -> None:
        self.tokenizer, self.num_examine, self.compute_score = tokenizer, num_examine, compute_score
        self.reward_fn_key, self.most = reward_fn_key, most

    def __call__(self, data: DataProto, return_dict=False):
        reward_tensor = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
        extra = defaultdict(list)
        for i in range(len(data)):
            item = data[i]
            prompt_length = item.batch["prompts"].shape[-1]
            valid = item.batch["attention_mask"][prompt_length:].sum()
            assert isinstance(self.tokenizer.apply_chat_template([{"role": "user", "content": "a"}])[0], int)
            text = self.tokenizer.decode(item.batch["responses"][:valid], skip_special_tokens=True)
            score = self.compute_score(
                data_source=item.non_tensor_batch[self.reward_fn_key],
                solution_str=text,
                ground_truth=item.non_tensor_batch["reward_model"]["ground_truth"],
                extra_info=item.non_tensor_batch.get("extra_info", {}),
            )
            reward_tensor[i, valid - 1] = score["score"] if isinstance(score, dict) else score
            extra["overlong"].append(float(valid > self.most))
        if return_dict:
            return {"reward_tensor": reward_tensor, "reward_extra_info": extra}
        return reward_tensor


class DenseManager(LengthManager):
    def __call__(self, data, return_dict=False):
        return torch.ones_like(data.batch["responses"], dtype=torch.float32)


class GapManager(LengthManager):
    def __call__(self, data, return_dict=False):
        answer = super().__call__(data, return_dict=True)
        return {**answer, "reward_extra_info": {"acc": [1.0] * (len(data) - 1)}}


class SingleManager(RewardManagerBase):
    async def run_single(self, data: DataProto) -> dict:
        item = data[-1:][0]
        size = item.batch["responses"].shape[-1]
        valid = item.batch["attention_mask"][-size:].sum()
        ids = item.batch["responses"][:valid]
        assert isinstance(self.tokenizer.apply_chat_template([{"role": "user", "content": "a"}])[0], int)
        text = await self.loop.run_in_executor(None, lambda: self.tokenizer.decode(ids, skip_special_tokens=True))
        truth = item.non_tensor_batch["reward_model"]["ground_truth"]
        return {"reward_score": float(truth in text), "reward_extra_info": {"acc": 1.0, "text": text}}
"""


def changed_imports(text: str) -> str:
    """Change the import lines of verl, and nothing else."""
    return re.sub(r"^from verl(?:\.\S+)? import", "from agentrl.verl import", text, flags=re.MULTILINE)


FILES = {
    "verl_tools": TOOLS,
    "verl_talks": INTERACTIONS,
    "verl_loops": LOOPS,
    "verl_rewards": REWARDS,
    "verl_tool_loops": TOOL_LOOPS,
    "verl_main_loops": MAIN_LOOPS,
}
"""By the names of their modules, which no other test has."""


def write(folder: Path) -> None:
    for name, text in FILES.items():
        (folder / f"{name}.py").write_text(changed_imports(text))
