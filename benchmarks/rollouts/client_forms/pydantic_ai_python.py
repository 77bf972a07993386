import asyncio

from common import FORM, QUESTIONS, ROOT, STREAM, URL, add
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput


class Result(BaseModel):
    sum: int


if FORM == "messages":
    from anthropic import AsyncAnthropic
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.providers.anthropic import AnthropicProvider

    client = AsyncAnthropic(base_url=ROOT, api_key="unused", max_retries=0)
    model = AnthropicModel("policy", provider=AnthropicProvider(anthropic_client=client))
else:
    from openai import AsyncOpenAI
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(openai_client=AsyncOpenAI(base_url=URL, api_key="unused", max_retries=0))
    model = (OpenAIResponsesModel if FORM == "responses" else OpenAIChatModel)("policy", provider=provider)

agent = Agent(model, instructions="Use tools.", tools=[add])


async def read(context, events):
    async for _ in events:
        pass


async def main():
    history = []
    for number, question in enumerate(QUESTIONS):
        output = NativeOutput(Result) if number and FORM != "messages" else str
        given = {"message_history": history, "output_type": output}
        result = await agent.run(question, event_stream_handler=read if STREAM else None, **given)
        history = result.all_messages()
        print(result.output)


asyncio.run(main())
