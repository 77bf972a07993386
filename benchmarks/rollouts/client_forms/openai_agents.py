import asyncio

import agents
from common import FORM, QUESTIONS, STREAM, URL, add
from pydantic import BaseModel


class Result(BaseModel):
    sum: int


agents.set_tracing_disabled(True)
agents.set_default_openai_client(agents.AsyncOpenAI(base_url=URL, api_key="unused", max_retries=0))
agents.set_default_openai_api("responses" if FORM == "responses" else "chat_completions")
tool = agents.function_tool(add)


async def main():
    items = []
    for output in (str, Result):
        agent = agents.Agent(
            name="adder",
            instructions="Use tools.",
            tools=[tool],
            model="policy",
            output_type=None if output is str else output,
        )
        items = [*items, {"role": "user", "content": QUESTIONS[output is Result]}]
        if STREAM:
            result = agents.Runner.run_streamed(agent, items)
            async for _ in result.stream_events():
                pass
        else:
            result = await agents.Runner.run(agent, items)
        items = result.to_input_list()
        print(result.final_output)


asyncio.run(main())
