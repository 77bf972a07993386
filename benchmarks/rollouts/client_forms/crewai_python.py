import os

os.environ |= {"CREWAI_DISABLE_TELEMETRY": "true", "OTEL_SDK_DISABLED": "true", "CREWAI_TRACING_ENABLED": "false"}
from common import FORM, QUESTIONS, ROOT, STREAM, URL
from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool


@tool("add")
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


if FORM == "messages":
    model = LLM(model="anthropic/claude-policy", base_url=ROOT, api_key="unused", max_tokens=500, stream=STREAM)
else:
    model = LLM(model="openai/gpt-4o", base_url=URL, api_key="unused", stream=STREAM)
agent = Agent(role="Adder", goal="Add", backstory="You add.", tools=[add], llm=model, max_retry_limit=0)
tasks = [Task(description=question, expected_output="A sum", agent=agent) for question in QUESTIONS]
Crew(agents=[agent], tasks=tasks).kickoff()
for task in tasks:
    print(task.output.raw)
