import asyncio

from common import QUESTIONS, STREAM, URL, add
from google.adk.agents import Agent
from google.adk.agents.run_config import RunConfig, StreamingMode
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.genai import types


async def main():
    model = LiteLlm(model="openai/policy", api_base=URL, api_key="unused")
    runner = InMemoryRunner(agent=Agent(name="adder", model=model, instruction="Use tools.", tools=[add]))
    session = await runner.session_service.create_session(app_name=runner.app_name, user_id="u")
    mode = RunConfig(streaming_mode=StreamingMode.SSE if STREAM else StreamingMode.NONE)
    for question in QUESTIONS:
        message = types.Content(role="user", parts=[types.Part(text=question)])
        async for event in runner.run_async(user_id="u", session_id=session.id, new_message=message, run_config=mode):
            if event.is_final_response():
                said = event.content.parts[-1].text
        print(said)


asyncio.run(main())
