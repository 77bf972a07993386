import asyncio

from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import ModelFamily
from common import FORM, QUESTIONS, ROOT, STREAM, URL, add

info = {
    "vision": False,
    "function_calling": True,
    "json_output": True,
    "structured_output": True,
    "family": ModelFamily.UNKNOWN,
}
if FORM == "messages":
    from autogen_ext.models.anthropic import AnthropicChatCompletionClient

    client = AnthropicChatCompletionClient(
        model="policy", base_url=ROOT, api_key="unused", model_info=info, max_tokens=500, max_retries=0
    )
else:
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    client = OpenAIChatCompletionClient(
        model="policy", base_url=URL, api_key="unused", model_info=info, max_retries=0, include_name_in_message=False
    )


async def tool(a: int, b: int) -> int:
    return add(a, b)


tool.__name__ = "add"


async def main():
    agent = AssistantAgent(
        "adder",
        model_client=client,
        tools=[tool],
        model_client_stream=STREAM,
        reflect_on_tool_use=True,
        max_tool_iterations=5,
        description="Adds.",
    )
    for question in QUESTIONS:
        result = None
        async for event in agent.run_stream(task=question):
            result = event
        print(result.messages[-1].content)


asyncio.run(main())
