"""Tools whose answers are in the data row, recorded when a conversation was logged (`python -m data_prep.log_rows`)."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import pydantic

from agentrl.errors import DataError
from agentrl.system.call_journal import OnResume
from agentrl.tool import Metrics, Tool, ToolError, ToolResponse, ToolSchema
from agentrl.tool.arguments import canonical_call


class RecordedConfig(pydantic.BaseModel):
    """Config of a recorded tool."""

    model_config = pydantic.ConfigDict(extra="forbid")

    missing: str = "No answer to this call was recorded. Use the answers that you have, or another call."
    """The error that the policy reads where the row has no answer to its call."""


class RecordedTool(Tool):
    """Tool that gives a row's recorded answers; its schema is the YAML's `tool_schema`.

    Row: `tools_kwargs: {NAME: {create_kwargs: {answers: [{arguments: '{"city": "Rome"}', text: "18 degrees"}]}}}`.
    Calls are compared by their meaning (`canonical_call`). A call that is made again gets the next recorded answer to
    it, and the last one from then on.
    """

    on_resume: OnResume = "calls"
    config_model = RecordedConfig
    options: RecordedConfig

    def __init__(self, config: dict[str, Any] | None = None, schema: ToolSchema | None = None) -> None:
        super().__init__(config, schema)
        self._answers: dict[str, dict[str, list[str]]] = {}
        self._asked: dict[str, Counter[str]] = {}
        self._metrics = Metrics()

    @property
    def remembers(self) -> bool:
        return True

    async def create(self, instance_id: str, **create_kwargs: Any) -> None:
        """Keep the row's answers; a row without any may call, too. Raises DataError for answers of another form."""
        found = defaultdict[str, list[str]](list)
        try:
            for answer in create_kwargs.get("answers") or ():
                found[canonical_call(self.name, answer["arguments"])].append(str(answer["text"]))
        except (TypeError, KeyError) as error:
            expected = '{answers: [{arguments: "JSON text", text: "..."}]}'
            raise DataError(f"tools_kwargs of {self.name}: expected create_kwargs: {expected} ({error!r})") from error
        self._answers[instance_id], self._asked[instance_id] = found, Counter()

    async def execute(self, instance_id: str, arguments: dict[str, Any]) -> ToolResponse:
        call = canonical_call(self.name, arguments)
        answers, asked = self._answers[instance_id].get(call), self._asked[instance_id]
        self._metrics.mean("not_recorded", float(answers is None))
        if answers is None:
            raise ToolError(self.options.missing)
        asked[call] += 1
        return ToolResponse(answers[min(asked[call], len(answers)) - 1])

    async def release(self, instance_id: str) -> None:
        self._answers.pop(instance_id, None)
        self._asked.pop(instance_id, None)

    def take_metrics(self) -> Metrics:
        """Return the share of calls that had no recorded answer."""
        taken, self._metrics = self._metrics, Metrics()
        return taken
