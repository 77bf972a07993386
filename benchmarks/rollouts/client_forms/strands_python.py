import asyncio

from common import FORM, QUESTIONS, ROOT, URL
from strands import Agent, tool


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


if FORM == "messages":
    from strands.models.anthropic import AnthropicModel

    model = AnthropicModel(client_args={"api_key": "unused", "base_url": ROOT}, model_id="policy", max_tokens=500)
elif FORM == "litellm":
    from strands.models.litellm import LiteLLMModel

    model = LiteLLMModel(client_args={"api_key": "unused", "api_base": URL}, model_id="openai/policy")
elif FORM == "responses":
    from strands.models.openai_responses import OpenAIResponsesModel

    model = OpenAIResponsesModel(client_args={"api_key": "unused", "base_url": URL}, model_id="policy")
else:
    from strands.models.openai import OpenAIModel

    model = OpenAIModel(client_args={"api_key": "unused", "base_url": URL}, model_id="policy")
agent = Agent(model=model, tools=[add], callback_handler=None)


async def main():
    for question in QUESTIONS:
        print(await agent.invoke_async(question))


asyncio.run(main())  # One loop: a client's connections do not outlive theirs.
