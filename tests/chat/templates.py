"""Chat templates of the shapes that models ship, written small."""

from __future__ import annotations

import re

TOOLS_IN_SYSTEM = """\
{%- if tools %}{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- '# Tools\\n<tools>' }}{%- for tool in tools %}{{- '\\n' + tool | tojson }}{%- endfor %}
{{- '\\n</tools>\\nAnswer with ' }}{{- CALL_HINT }}{{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.reasoning_content is defined %}
            {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {%- if message.content or not loop.first %}{{- '\\n' }}{%- endif %}
            {{- '<tool_call>\\n' }}WRITE_CALL{{- '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

HERMES = TOOLS_IN_SYSTEM.replace("CALL_HINT", "'<tool_call>{...}</tool_call>'").replace(
    "WRITE_CALL",
    """{{- '{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson + '}' }}""",
)
"""Qwen2.5: JSON calls, tool answers inside user turns, a newline behind every turn."""

CODER = TOOLS_IN_SYSTEM.replace("CALL_HINT", "'<tool_call><function=...></function></tool_call>'").replace(
    "WRITE_CALL",
    """{{- '<function=' + call.function.name + '>\\n' }}
    {%- for key, value in call.function.arguments.items() %}
        {{- '<parameter=' + key + '>\\n' }}
        {{- value if value is string else value | tojson }}{{- '\\n</parameter>\\n' }}
    {%- endfor %}{{- '</function>' }}""",
)
"""Qwen3-Coder: calls as tags."""

CODER_MIXED = CODER.replace(
    "value if value is string else value | tojson",
    "value | tojson | safe if value is mapping or (value is sequence and value is not string) else value | string",
)
"""As published: containers as JSON, other values as Python writes them (`True`, `None`)."""

CODER_PYTHON = CODER.replace("value if value is string else value | tojson", "value | string")
"""All values as Python writes them."""

MINIMAX = TOOLS_IN_SYSTEM.replace("CALL_HINT", "'<minimax:tool_call>...</minimax:tool_call>'").replace(
    "{{- '<tool_call>\\n' }}WRITE_CALL{{- '\\n</tool_call>' }}",
    """{{- '<minimax:tool_call>\\n<invoke name="' + call.function.name + '">\\n' }}
    {%- for key, value in call.function.arguments.items() %}
        {{- '<parameter name="' + key + '">' }}
        {{- value if value is string else value | tojson }}{{- '</parameter>\\n' }}
    {%- endfor %}{{- '</invoke>\\n</minimax:tool_call>' }}""",
)
"""MiniMax: calls as tags, a value directly between them."""

STRIPS_REASONING = HERMES.replace(
    "message.reasoning_content is defined", "message.reasoning_content is defined and loop.last"
)
"""Qwen3: reasoning is dropped once another message follows."""

OPENS_REASONING = HERMES.replace(
    "'<|im_start|>assistant\\n' }}{%- endif %}\n", "'<|im_start|>assistant\\n<think>\\n' }}{%- endif %}\n"
)
"""DeepSeek R1, Qwen3 Thinking: the generation prompt begins the reasoning."""

LLAMA = """\
{{- '<|begin_of_text|>' }}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + message.content | tojson + '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
        {%- if loop.first and tools %}
            {{- 'Call with {"name": ..., "parameters": ...}' }}
            {%- for tool in tools %}{{- '\\n' + tool | tojson }}{%- endfor %}{{- '\\n' }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- if message.tool_calls | length != 1 %}{{- raise_exception('one call a message') }}{%- endif %}
            {%- set call = message.tool_calls[0].function %}
            {{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}' }}
        {%- else %}{{- message.content | trim }}{%- endif %}
        {{- '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""
"""Llama 3: contents stripped, tool answers as JSON, calls without markers, no newline behind a turn."""

ARGUMENTS = (
    "{%- for key, value in call.arguments.items() %}{{- key + '=' + value | tojson }}"
    "{%- if not loop.last %}{{- ', ' }}{%- endif %}{%- endfor %}"
)
PYTHONIC = re.sub(
    r"\{%- if message\.tool_calls \| length != 1.*?'}' }}",
    "{{- '[' }}{%- for called in message.tool_calls %}{%- set call = called.function %}{{- call.name + '(' }}"
    + ARGUMENTS
    + "{{- ')' }}{%- if not loop.last %}{{- ', ' }}{%- endif %}{%- endfor %}{{- ']' }}",
    LLAMA,
    flags=re.DOTALL,
)
"""Llama 3.2: a whole message that is a list of calls as Python writes them."""

JSON_ARRAY = PYTHONIC.replace("call.name + '('", """'{"name": "' + call.name + '", "arguments": '""").replace(
    ARGUMENTS + "{{- ')' }}", "{{- call.arguments | tojson + '}' }}"
)
"""xLAM: a whole message that is a JSON array of calls."""

MISTRAL = """\
{{- '<s>' }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools and messages[loop.index0:] | selectattr('role', 'equalto', 'user') | list | length == 1 %}
            {{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + message.content + '[/INST]' }}
    {%- elif message.role == 'assistant' and message.tool_calls %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {%- if call.id | length != 9 %}{{- raise_exception('ids of nine characters') }}{%- endif %}
            {{- '{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}
            {{- ', "id": "' + call.id + '"}' }}{%- if not loop.last %}{{- ', ' }}{%- endif %}
        {%- endfor %}
        {{- ']</s>' }}
    {%- elif message.role == 'assistant' %}{{- ' ' + message.content + '</s>' }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content | tojson + ', "call_id": "' + message.tool_call_id + '"}' }}
        {{- '[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}
"""
"""Mistral: no header before the assistant, call ids of nine characters, tools before the last user turn."""

MISTRAL_ARGS = re.sub(
    r"'\[TOOL_CALLS\] \[' }}.*?{{- '\]</s>' }}",
    """'' }}{{- message.content }}
        {%- for call in message.tool_calls %}
            {{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + call.function.arguments | tojson }}
        {%- endfor %}
        {{- '</s>' }}""",
    MISTRAL,
    flags=re.DOTALL,
)
"""Mistral since Small 3.2: a marker and the name, then the arguments behind a marker of their own."""

ALWAYS_LISTS_TOOLS = HERMES.replace(
    "{%- if tools %}", "{%- set names = [] %}{%- for tool in tools %}{%- endfor %}{%- if tools %}"
)
"""Hermes 2 Pro, Command R+: the list of tools is gone through without asking whether there is one."""

HISTORY_WITHOUT_REASONING = OPENS_REASONING.replace(
    "{%- if message.reasoning_content is defined %}", "{%- if false %}"
).replace("{{- message.content }}", "{{- message.content.split('</think>')[-1].lstrip('\\n') }}")
"""QwQ: the generation prompt begins the reasoning, and no message of the history shows any."""

HEADER_ENDS_TURN = """\
{{- '[gMASK]<sop>' }}{%- if tools %}{{- '<|system|>\\n' + tools | tojson + ' <tool_call><arg_key>' }}{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.previtem.role != 'tool' %}{{- '<|observation|>' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
    {%- else %}
        {{- '<|' + message.role + '|>\\n' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>' + call.function.name }}
            {%- for key, value in call.function.arguments.items() %}
                {{- '<arg_key>' + key + '</arg_key><arg_value>' }}{{- value if value is string else value | tojson }}
                {{- '</arg_value>' }}
            {%- endfor %}
            {{- '</tool_call>' }}
        {%- endfor %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif %}
"""
"""GLM: a turn ends where the next one's header begins."""

IGNORES_TOOLS = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

HARMONY = """\
{{- '<|start|>system<|message|>Reasoning: medium\\n\\n# Valid channels: analysis, commentary, final.<|end|>' }}
{%- set asked = namespace(name='') %}
{%- if tools %}{{- '<|start|>developer<|message|># Tools\\n\\nnamespace functions {\\n' }}
{%- for tool in tools %}{{- 'type ' + tool.function.name + ' = (_: ' }}
{{- tool.function.parameters | tojson + ') => any;\\n' }}{%- endfor %}{{- '}<|end|>' }}{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {%- if message.thinking %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}{%- set asked.name = call.name %}
        {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
        {{- call.arguments | tojson + '<|call|>' }}
    {%- elif message.role == 'assistant' %}
        {%- set closed = loop.last and not add_generation_prompt %}
        {%- if closed and 'thinking' in message %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
        {%- endif %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + message.content }}
        {{- '<|return|>' if closed else '<|end|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|start|>functions.' + asked.name + ' to=assistant<|channel|>commentary<|message|>' }}
        {{- message.content | tojson + '<|end|>' }}
    {%- else %}
        {{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}
"""
"""gpt-oss: a turn is messages with headers; the last one ends with `<|return|>`, in history with `<|end|>`."""
