from agno.agent import Agent
from agno.db.in_memory import InMemoryDb
from common import FORM, QUESTIONS, ROOT, STREAM, URL, add

given = {"id": "policy", "api_key": "unused"}
if FORM == "messages":
    from agno.models.anthropic import Claude

    model = Claude(**given, max_tokens=500, client_params={"base_url": ROOT, "max_retries": 0})
elif FORM == "responses":
    from agno.models.openai import OpenAIResponses

    model = OpenAIResponses(**given, base_url=URL, max_retries=0)
else:
    from agno.models.openai import OpenAIChat

    model = OpenAIChat(**given, base_url=URL, max_retries=0)
agent = Agent(model=model, tools=[add], db=InMemoryDb(), add_history_to_context=True, telemetry=False)
for question in QUESTIONS:
    if STREAM:
        said = "".join(event.content or "" for event in agent.run(question, stream=True) if event.event == "RunContent")
        print(said)
    else:
        print(agent.run(question).content)
