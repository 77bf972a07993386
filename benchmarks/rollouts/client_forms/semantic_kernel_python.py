import asyncio

from common import FORM, QUESTIONS, ROOT, STREAM, URL
from semantic_kernel.agents import ChatCompletionAgent, ChatHistoryAgentThread
from semantic_kernel.functions import kernel_function


class Tools:
    @kernel_function(name="add", description="Add two numbers.")
    def add(self, a: int, b: int) -> int:
        return a + b


if FORM == "messages":
    from anthropic import AsyncAnthropic
    from semantic_kernel.connectors.ai.anthropic import AnthropicChatCompletion

    client = AsyncAnthropic(base_url=ROOT, api_key="unused", max_retries=0)
    service = AnthropicChatCompletion(ai_model_id="policy", async_client=client)
else:
    from openai import AsyncOpenAI
    from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion

    client = AsyncOpenAI(base_url=URL, api_key="unused", max_retries=0)
    service = OpenAIChatCompletion(ai_model_id="policy", async_client=client)


async def main():
    agent = ChatCompletionAgent(service=service, name="adder", instructions="Use tools.", plugins=[Tools()])
    thread = ChatHistoryAgentThread()
    for question in QUESTIONS:
        said = ""
        if STREAM:
            async for part in agent.invoke_stream(messages=question, thread=thread):
                said += str(part.message)
        else:
            said = str((await agent.get_response(messages=question, thread=thread)).message)
        print(said)


asyncio.run(main())
