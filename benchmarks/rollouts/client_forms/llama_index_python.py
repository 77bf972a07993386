import asyncio

from common import FORM, QUESTIONS, ROOT, STREAM, URL, add
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.memory import ChatMemoryBuffer

if FORM == "messages":
    from llama_index.llms.anthropic import Anthropic

    class Served(Anthropic):
        @property
        def metadata(self):
            from llama_index.core.llms import LLMMetadata

            return LLMMetadata(
                is_chat_model=True, is_function_calling_model=True, context_window=99999, model_name="policy"
            )

    model = Served(model="claude-sonnet-4-0", base_url=ROOT, api_key="unused", max_tokens=500, max_retries=0)
elif FORM == "responses":
    from llama_index.llms.openai import OpenAIResponses

    model = OpenAIResponses(model="gpt-4.1", api_base=URL, api_key="unused", max_retries=0)
else:
    from llama_index.llms.openai_like import OpenAILike

    model = OpenAILike(
        model="policy",
        api_base=URL,
        api_key="unused",
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=99999,
        max_retries=0,
    )
agent = FunctionAgent(tools=[add], llm=model, system_prompt="Use tools.", streaming=STREAM)


async def main():
    memory = ChatMemoryBuffer.from_defaults(token_limit=30000)
    for question in QUESTIONS:
        handler = agent.run(question, memory=memory)
        async for _ in handler.stream_events():
            pass
        print(await handler)


asyncio.run(main())
