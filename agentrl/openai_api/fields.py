"""The table of fields: the fate of each member of a request, for all three APIs.

A member that a model of `wire.Wire` declares is *used*. Every other one has a row here, or is unknown, and a program's
field of next month is one more row. What changes an answer is obeyed or refused; what only declares or hints is
dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from agentrl.system.json_value import JSON

Api = Literal["chat", "responses", "messages"]
APIS: tuple[Api, ...] = ("chat", "responses", "messages")
ANYWHERE, OTHERS = "*", "*"
"""A row's place that is every place, and its name that is every name which has no row."""


class Fate(StrEnum):
    """The consequence of a member that a request has."""

    USED = "used"
    HINT = "hint"
    """Dropped, counted as `trajectory/openai_dropped_NAME`, and named once in the log."""
    LABEL = "label"
    """Dropped without a word: a name, a mark or a bill, on which no server's answer depends."""
    REFUSED = "refused"
    """400, unless it has the value with which it asks for nothing."""
    ELSEWHERE = "elsewhere"
    """400 that names the path of the API that knows it."""


@dataclass(frozen=True, slots=True)
class Row:
    """Fate of the members `names` (blanks between) at a place of the requests of `apis`.

    A place ending with `.type` stands for the kinds of a list's members: tools, blocks, items, parts.
    """

    apis: str
    place: str
    names: str
    fate: Fate
    why: str
    harmless: tuple[JSON, ...] = ()
    """Values besides null with which a refused member asks for nothing."""
    value: TypeAdapter[object] | None = None
    """Type that a hint's value has; None: any."""


RUN = "the run alone says how the policy is sampled"
AT_LEAST_0: TypeAdapter[object] = TypeAdapter(Annotated[float, Field(ge=0, allow_inf_nan=False)])
SHARE: TypeAdapter[object] = TypeAdapter(Annotated[float, Field(ge=0, le=1)])
FROM_0: TypeAdapter[object] = TypeAdapter(Annotated[int, Field(ge=0)])
FROM_MINUS_1: TypeAdapter[object] = TypeAdapter(Annotated[int, Field(ge=-1)])
ANY_NUMBER: TypeAdapter[object] = TypeAdapter(int)
TEXT: TypeAdapter[object] = TypeAdapter(str)
PROVIDER = "it runs at a provider"
NEUTRAL = "it would change the answer"
CONTENT = "content that the policy would not see"

TABLE = (
    Row(
        "chat responses messages", ANYWHERE, "cache_control prompt_cache_breakpoint", Fate.LABEL, "a mark of the cache"
    ),
    # The request
    Row("chat responses messages", "request", "temperature", Fate.HINT, RUN, value=AT_LEAST_0),
    Row("chat responses messages", "request", "top_p", Fate.HINT, RUN, value=SHARE),
    Row("chat", "request", "top_k", Fate.HINT, RUN, value=FROM_MINUS_1),
    Row("messages", "request", "top_k", Fate.HINT, RUN, value=FROM_0),
    Row("chat", "request", "min_p", Fate.HINT, RUN, value=SHARE),
    Row("chat", "request", "seed", Fate.HINT, RUN, value=ANY_NUMBER),
    Row("chat", "request", "reasoning_effort verbosity", Fate.HINT, RUN, value=TEXT),
    Row("chat", "request", "reasoning thinking enable_thinking prediction", Fate.HINT, RUN),
    Row("chat", "request", "web_search_options plugins", Fate.HINT, PROVIDER),
    Row("responses", "request", "reasoning", Fate.HINT, RUN),
    Row("responses", "request", "max_tool_calls", Fate.HINT, "a limit on tools that run at a provider"),
    Row("responses", "text", "verbosity", Fate.HINT, RUN),
    Row("messages", "request", "thinking", Fate.HINT, RUN),
    Row("messages", "output_config", "effort task_budget", Fate.HINT, RUN),
    Row("messages", "request", "context_management", Fate.HINT, "no message is taken out of a prompt"),
    Row("messages", "request", "compaction", Fate.REFUSED, "the answer would be a summary"),
    Row("messages", "request", "mcp_servers container", Fate.HINT, PROVIDER),
    Row(
        "chat responses messages",
        "request",
        "user service_tier safety_identifier prompt_cache_key prompt_cache_retention client_metadata",
        Fate.LABEL,
        "a name or a bill",
    ),
    Row("chat messages", "request", "metadata", Fate.LABEL, "a name"),
    Row("chat", "request", "store", Fate.LABEL, "nothing is kept beyond the session"),
    Row("responses", "request", "stream_options", Fate.LABEL, "padding of the stream"),
    Row("messages", "request", "inference_geo speed", Fate.LABEL, "a place or a price"),
    Row("chat", "request", "n best_of", Fate.REFUSED, NEUTRAL, (1,)),
    Row("chat", "request", "logit_bias", Fate.REFUSED, NEUTRAL, ({},)),
    Row("chat", "request", "presence_penalty frequency_penalty min_tokens", Fate.REFUSED, NEUTRAL, (0,)),
    Row("chat", "request", "repetition_penalty length_penalty", Fate.REFUSED, NEUTRAL, (1,)),
    Row("chat responses", "request", "top_logprobs", Fate.REFUSED, "only a sampled token's log-prob is known", (0,)),
    Row("chat", "request", "modalities", Fate.REFUSED, "the policy writes text", (["text"],)),
    Row("chat", "request", "echo ignore_eos continue_final_message", Fate.REFUSED, NEUTRAL, (False,)),
    Row("chat", "request", "add_generation_prompt skip_special_tokens", Fate.REFUSED, NEUTRAL, (True,)),
    Row("chat", "request", "functions function_call audio stop_token_ids", Fate.REFUSED, NEUTRAL, ([],)),
    Row(
        "chat",
        "request",
        "guided_json guided_regex guided_choice guided_grammar structured_outputs regex ebnf json_schema",
        Fate.REFUSED,
        "no sampler is constrained; response_format is checked",
    ),
    Row("chat", "request", "chat_template chat_template_kwargs documents", Fate.REFUSED, "the run's template writes"),
    Row("responses", "request", "background", Fate.REFUSED, "an answer comes with its request", (False,)),
    Row("responses", "request", "conversation prompt", Fate.REFUSED, "it names what a provider keeps"),
    Row("responses", "request", "truncation", Fate.REFUSED, NEUTRAL, ("disabled", "auto")),
    Row("responses", "request", "context_management", Fate.REFUSED, "no item is taken out of a prompt", ([],)),
    Row(
        "chat",
        "request",
        "input instructions previous_response_id max_output_tokens system stop_sequences",
        Fate.ELSEWHERE,
        "a field of another API",
    ),
    Row(
        "responses",
        "request",
        "messages system stop stop_sequences max_tokens max_completion_tokens n response_format logprobs logit_bias",
        Fate.ELSEWHERE,
        "a field of another API",
    ),
    Row(
        "messages",
        "request",
        "input instructions previous_response_id max_output_tokens max_completion_tokens stop n response_format "
        "logprobs logit_bias",
        Fate.ELSEWHERE,
        "a field of another API",
    ),
    # Messages, parts, blocks, items
    Row("chat", "message", "annotations parsed audio function_call id", Fate.LABEL, "a copy of an answer has it"),
    Row("chat", "message", "prefix partial", Fate.REFUSED, "no answer is begun for the policy", (False,)),
    Row("chat", "call", "index", Fate.LABEL, "a copy of a stream has it"),
    Row("chat", "call.function", "parsed_arguments", Fate.LABEL, "a copy of an answer has it"),
    Row("chat", "part", "role reasoning_content tool_calls", Fate.LABEL, "a copy of an answer has it"),
    Row("responses", "item", "parsed_arguments", Fate.LABEL, "a copy of an answer has it"),
    Row("responses", "part", "parsed", Fate.LABEL, "a copy of an answer has it"),
    Row("chat", "part", "annotations detail", Fate.LABEL, "the model's image processor decides on the size"),
    Row(
        "responses",
        ANYWHERE,
        "id status phase annotations logprobs detail internal_chat_message_metadata_passthrough",
        Fate.LABEL,
        "a copy of an answer has it",
    ),
    Row("responses", "part", "file_id", Fate.LABEL, "an image comes in base64"),
    Row("responses", "tool", "format", Fate.LABEL, "no sampler is constrained"),
    Row("messages", ANYWHERE, "citations signature caller", Fate.LABEL, "a copy of an answer has it"),
    Row("messages", "tool", "eager_input_streaming input_examples allowed_callers", Fate.LABEL, "how a call is sent"),
    Row("responses messages", "tool", "strict", Fate.HINT, "no sampler is constrained"),
    # Kinds
    Row(
        "chat responses messages", "tool.type", OTHERS, Fate.HINT, "it runs at a provider, or its kind is unknown here"
    ),
    Row(
        "responses",
        "tool.type",
        "web_search file_search mcp code_interpreter image_generation",
        Fate.HINT,
        PROVIDER,
    ),
    Row("messages", "tool.type", "web_search web_fetch code_execution mcp_toolset", Fate.HINT, PROVIDER),
    Row("messages", "tool.type", "computer", Fate.HINT, "its schema is not offered to the policy"),
    Row("responses", "include", OTHERS, Fate.HINT, "it adds to an answer what no answer here has"),
    Row("messages", "block.type", "redacted_thinking", Fate.HINT, "reasoning that only its provider can read"),
    Row(
        "messages",
        "block.type",
        "server_tool_use web_search_tool_result web_fetch_tool_result code_execution_tool_result "
        "bash_code_execution_tool_result text_editor_code_execution_tool_result tool_search_tool_result mcp_tool_use "
        "mcp_tool_result",
        Fate.HINT,
        "a call that ran at a provider",
    ),
    Row("messages", "block.type", "document search_result container_upload compaction", Fate.REFUSED, CONTENT),
    Row(
        "responses",
        "item.type",
        "web_search_call file_search_call code_interpreter_call image_generation_call mcp_call mcp_list_tools "
        "mcp_approval_request mcp_approval_response ghost_snapshot",
        Fate.HINT,
        "a call that ran at a provider",
    ),
    Row(
        "responses",
        "item.type",
        "compaction compaction_summary computer_call computer_call_output",
        Fate.REFUSED,
        CONTENT,
    ),
    Row("responses", "part.type", "input_file input_audio", Fate.REFUSED, CONTENT),
)
"""All rows; the first that fits a member holds."""

_ROWS = {
    (api, row.place, name): row for row in reversed(TABLE) for api in row.apis.split() for name in row.names.split()
}
USED: dict[tuple[str, str], frozenset[str]] = {}
"""Members that are used, by API and place, as the readers declare them."""


def row_of(api: str, place: str, name: str) -> Row | None:
    """Find the row of a member; None: it is used, or unknown."""
    keys = ((api, place, name), (api, ANYWHERE, name), (api, place, OTHERS))
    return next((_ROWS[key] for key in keys if key in _ROWS), None)


def fields_of(api: str) -> frozenset[str]:
    """Names of all members of a request that an API knows."""
    rows = (row for row in TABLE if row.place == "request" and api in row.apis.split())
    known = {name for row in rows if row.fate is not Fate.ELSEWHERE for name in row.names.split()}
    return USED.get((api, "request"), frozenset()) | known
