"""Calls of Qwen3-Coder, Qwen3.5 and Nemotron 3: tags for the function and each parameter in `<tool_call>`.

Seed-OSS has them in `<seed:tool_call>`, values directly between their tags.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from agentrl.chat.formats.arguments import Tags
from agentrl.chat.formats.parsers import CallFormat, Found
from agentrl.tool import ToolSchema

TAGS = Tags("<parameter=", ">", "", "</parameter>", around="\n")


def read_tagged(tags: Tags, body: str, tools: Sequence[ToolSchema]) -> list[Found]:
    """Read `<function=NAME>PARAMETERS</function>`, its parameters by `tags`."""
    before, _, call = body.partition("<function=")
    name, opened, rest = call.partition(">")
    if not opened or before.strip():
        return [Found(error="the call has no <function=name> at its beginning")]
    # Some models leave the closing tag out.
    return [tags.read(name.strip(), rest.rstrip().removesuffix("</function>"), tools)]


FORMAT = CallFormat(
    "<tool_call>",
    "</tool_call>",
    partial(read_tagged, TAGS),
    signs=("<tool_call>", "<function="),
    families=("prime-qwen3", "qwen3.5", "qwen3.6", "qwen3.8", "nemotron-3", "nemotron-3-ultra", "nemotron-3.5"),
)
SEED_OSS = CallFormat(
    "<seed:tool_call>",
    "</seed:tool_call>",
    partial(read_tagged, Tags("<parameter=", ">", "", "</parameter>")),
    reasoning=("<seed:think>", "</seed:think>"),
    signs=("<seed:tool_call>", "<function=", "<parameter="),
)
