import anthropic
from anthropic import beta_tool
from common import DESCRIPTION, FORM, PARAMETERS, QUESTIONS, RESULT, ROOT, STREAM, add, answer

client = anthropic.Anthropic(base_url=ROOT, api_key="unused", max_retries=0)
TOOL = {"name": "add", "description": DESCRIPTION, "input_schema": PARAMETERS}


def messages():
    talk = []
    for number, question in enumerate(QUESTIONS):
        talk.append({"role": "user", "content": question})
        while True:
            given = {"model": "policy", "messages": talk, "tools": [TOOL]}
            counted = client.messages.count_tokens(**given).input_tokens
            given |= {"max_tokens": 500, "thinking": {"type": "enabled", "budget_tokens": 1024}}
            given |= {"output_config": {"format": {"type": "json_schema", "schema": RESULT}}} if number else {}
            if STREAM:
                with client.messages.stream(**given) as stream:
                    for _ in stream:
                        pass
                    reply = stream.get_final_message()
            else:
                reply = client.messages.create(**given)
            assert counted == reply.usage.input_tokens + (reply.usage.cache_read_input_tokens or 0)
            talk.append({"role": "assistant", "content": reply.content})
            calls = [block for block in reply.content if block.type == "tool_use"]
            if not calls:
                break
            results = [{"type": "tool_result", "tool_use_id": call.id, "content": answer(call.input)} for call in calls]
            talk.append({"role": "user", "content": results})
        print(reply.content[-1].text)


def runner():
    """The runner of tools."""

    @beta_tool(name="add", description=DESCRIPTION, input_schema=PARAMETERS)
    def tool(a: int, b: int) -> str:
        return str(add(a, b))

    talk = []
    for question in QUESTIONS:
        talk.append({"role": "user", "content": question})
        running = client.beta.messages.tool_runner(
            model="policy", max_tokens=500, messages=talk, tools=[tool], stream=STREAM
        )
        for one in running:
            if STREAM:
                for _ in one:
                    pass
                one = one.get_final_message()
            talk.append({"role": "assistant", "content": one.content})
            if (results := running.generate_tool_call_response()) is not None:
                talk.append(results)
        print(one.content[-1].text)


messages() if FORM == "messages" else runner()
