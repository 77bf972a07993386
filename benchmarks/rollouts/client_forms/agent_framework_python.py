import asyncio

from common import FORM, QUESTIONS, ROOT, STREAM, URL, add

if FORM == "messages":
    from agent_framework.anthropic import AnthropicClient
    from anthropic import AsyncAnthropic

    client = AnthropicClient(model="policy", anthropic_client=AsyncAnthropic(base_url=ROOT, api_key="unused"))
else:
    from agent_framework.openai import OpenAIChatClient, OpenAIChatCompletionClient

    made = OpenAIChatClient if FORM == "responses" else OpenAIChatCompletionClient
    client = made(model="policy", base_url=URL, api_key="unused")


async def main():
    agent = client.as_agent(name="adder", instructions="Use tools.", tools=[add])
    session = agent.create_session()
    for question in QUESTIONS:
        if STREAM:
            said = ""
            async for update in agent.run(question, session=session, stream=True):
                said += update.text or ""
            print(said)
        else:
            print((await agent.run(question, session=session)).text)


asyncio.run(main())
