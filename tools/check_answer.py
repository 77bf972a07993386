"""A check of answers that the policy may ask before it gives one: right or wrong, by the row's ground truth."""

from __future__ import annotations

from typing import Any, Literal

import pydantic

from agentrl.errors import DataError
from agentrl.reward import gsm8k, math
from agentrl.system.call_journal import OnResume
from agentrl.tool import Tool, ToolResponse, ToolSchema


class CheckAnswerConfig(pydantic.BaseModel):
    """Config of the check."""

    model_config = pydantic.ConfigDict(extra="forbid")

    scorer: Literal["gsm8k", "math"] = "gsm8k"
    """Reading of the answer. gsm8k: the number that it states; math: the formula or number, which has to be a value."""
    penalty: float = pydantic.Field(0.05, ge=0)
    """Taken from the turn whose answer is no better than the best one before."""


class CheckAnswerTool(Tool):
    """Tool `check_answer(answer)`.

    Row: `tools_kwargs: {check_answer: {create_kwargs: {ground_truth: "72"}}}`. A right answer earns the turn nothing,
    as the row's scorer pays it; one that improves nothing costs `penalty`.
    """

    on_resume: OnResume = "calls"  # the same answers are judged the same, and the best one is known again
    config_model = CheckAnswerConfig
    options: CheckAnswerConfig
    default_schema = {
        "type": "function",
        "function": {
            "name": "check_answer",
            "description": "Tell whether an answer is right.",
            "parameters": {
                "type": "object",
                "properties": {"answer": {"type": "string", "description": "The answer, a number or formula."}},
                "required": ["answer"],
            },
        },
    }

    def __init__(self, config: dict[str, Any] | None = None, schema: ToolSchema | None = None) -> None:
        super().__init__(config, schema)
        self._ground_truth: dict[str, str] = {}
        self._best: dict[str, float] = {}

    @property
    def remembers(self) -> bool:
        return True

    async def create(self, instance_id: str, **create_kwargs: Any) -> None:
        """Keep the row's answer. Raises DataError without a ground truth."""
        ground_truth = create_kwargs.get("ground_truth")
        if ground_truth is None:
            raise DataError(f"tools_kwargs of {self.name}: expected create_kwargs: {{ground_truth: ...}}, found none")
        self._ground_truth[instance_id], self._best[instance_id] = str(ground_truth), 0.0

    async def execute(self, instance_id: str, arguments: dict[str, Any]) -> ToolResponse:
        answer, ground_truth = str(arguments["answer"]), self._ground_truth[instance_id]
        if self.options.scorer == "gsm8k":
            score = gsm8k.compute_score("gsm8k", answer, ground_truth, method="flexible")
        else:
            score = (await math.compute_score("math", answer, ground_truth))["score"]
        right = float(score == 1.0)
        improved = right > self._best[instance_id]
        self._best[instance_id] = max(right, self._best[instance_id])
        text = f"{answer[:100]} is {'right' if right else 'wrong'}."
        return ToolResponse(text, reward=0.0 if improved else -self.options.penalty)

    async def release(self, instance_id: str) -> None:
        self._ground_truth.pop(instance_id, None)
        self._best.pop(instance_id, None)
