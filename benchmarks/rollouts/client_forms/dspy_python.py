import asyncio

import dspy
from common import QUESTIONS, STREAM, URL, add

dspy.configure(lm=dspy.LM("openai/policy", api_base=URL, api_key="unused", cache=False, num_retries=0))
agent = dspy.ReAct("question -> answer", tools=[add], max_iters=5)


async def streamed(question):
    listener = dspy.streaming.StreamListener(signature_field_name="answer", predict=agent.extract.predict)
    said = None
    async for one in dspy.streamify(agent, stream_listeners=[listener])(question=question):
        said = one
    return said


for question in QUESTIONS:
    print((asyncio.run(streamed(question)) if STREAM else agent(question=question)).answer)
