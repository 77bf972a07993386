from common import FORM, QUESTIONS, STREAM, URL
from smolagents import CodeAgent, LiteLLMModel, OpenAIServerModel, ToolCallingAgent, tool


@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: a number
        b: a number
    """
    return a + b


KIND, _, BY = FORM.partition("-")
given = {"api_base": URL, "api_key": "unused"}
model = LiteLLMModel("openai/policy", **given) if BY == "litellm" else OpenAIServerModel("policy", **given)
agent = (CodeAgent if KIND == "code" else ToolCallingAgent)(
    tools=[add], model=model, stream_outputs=STREAM, verbosity_level=0, max_steps=6
)
for number, question in enumerate(QUESTIONS):
    print(agent.run(question, reset=not number))
