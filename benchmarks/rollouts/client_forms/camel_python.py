from camel.agents import ChatAgent
from camel.models import ModelFactory
from camel.types import ModelPlatformType
from common import QUESTIONS, STREAM, URL, add

model = ModelFactory.create(
    model_platform=ModelPlatformType.OPENAI_COMPATIBLE_MODEL,
    model_type="policy",
    url=URL,
    api_key="unused",
    model_config_dict={"stream": True} if STREAM else {},
)
agent = ChatAgent("Use tools.", model=model, tools=[add])
for question in QUESTIONS:
    reply = agent.step(question)
    if STREAM:
        reply = list(reply)[-1]
    print(reply.msgs[0].content)
