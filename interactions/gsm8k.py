"""Feedback on GSM8K answers: a wrong or missing answer is sent back, a right one ends the dialogue."""

from __future__ import annotations

from typing import Any

import pydantic

from agentrl.interaction import Interaction, InteractionResponse
from agentrl.reward.gsm8k import compute_score, extract
from agentrl.trajectory import Message

RIGHT = "Your response is correct!"
WRONG = "Your response is incorrect. Check your reasoning and answer again."
NO_ANSWER = "I could not find your answer. End your response with a line like `#### 42`."


class NoOptions(pydantic.BaseModel):
    """Config without any keys."""

    model_config = pydantic.ConfigDict(extra="forbid")


class Gsm8kRow(pydantic.BaseModel):
    """A row's `interaction_kwargs`, beside `name`."""

    ground_truth: str | int | float
    """The right answer."""


class Gsm8kInteraction(Interaction):
    """Interaction that asks again until the answer is right.

    Row: `interaction_kwargs: {name: gsm8k, ground_truth: "72"}`; further keys are ignored.

    Turns have no score: answers are judged by the row's scorer, and a right one is paid once. Score of the dialogue:
    that of the last answer (1, 0.1 or 0).
    """

    on_resume = "calls"
    config_model = NoOptions
    row_model = Gsm8kRow

    def __init__(self, config: dict[str, Any], name: str) -> None:
        super().__init__(config, name)
        self._ground_truth: dict[str, str] = {}
        self._score: dict[str, float] = {}

    async def start_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """Keep the row's answer. Raises DataError without a ground truth."""
        self.check_row(kwargs)
        self._ground_truth[instance_id] = str(kwargs["ground_truth"])
        self._score[instance_id] = 0.0

    async def generate_response(self, instance_id: str, messages: list[Message]) -> InteractionResponse:
        answer = next((str(m.get("content") or "") for m in reversed(messages) if m["role"] == "assistant"), "")
        score = compute_score("gsm8k", answer, self._ground_truth[instance_id])
        self._score[instance_id] = score
        if score == 1.0:
            return InteractionResponse(should_end=True, text=RIGHT)
        text = WRONG if extract(answer) is not None else NO_ANSWER
        return InteractionResponse(should_end=False, text=text)

    async def calculate_score(self, instance_id: str) -> float:
        return self._score[instance_id]

    async def finalize_interaction(self, instance_id: str) -> None:
        self._ground_truth.pop(instance_id, None)
        self._score.pop(instance_id, None)
