import os

os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "False"
from common import FORM, QUESTIONS, ROOT, STREAM, URL
from haystack.components.agents import Agent
from haystack.dataclasses import ChatMessage
from haystack.tools import tool
from haystack.utils import Secret


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


given = {"model": "policy", "api_key": Secret.from_token("unused"), "max_retries": 0}
if FORM == "messages":
    from anthropic import Anthropic
    from haystack_integrations.components.generators.anthropic import AnthropicChatGenerator

    model = AnthropicChatGenerator(**given, generation_kwargs={"max_tokens": 500})
    model.client = Anthropic(base_url=ROOT, api_key="unused")
elif FORM == "responses":
    from haystack.components.generators.chat import OpenAIResponsesChatGenerator

    model = OpenAIResponsesChatGenerator(**given, api_base_url=URL)
else:
    from haystack.components.generators.chat import OpenAIChatGenerator

    model = OpenAIChatGenerator(**given, api_base_url=URL)
agent = Agent(chat_generator=model, tools=[add], streaming_callback=(lambda chunk: None) if STREAM else None)
messages = []
for question in QUESTIONS:
    messages = agent.run(messages=[*messages, ChatMessage.from_user(question)])["messages"]
    print(messages[-1].text)
