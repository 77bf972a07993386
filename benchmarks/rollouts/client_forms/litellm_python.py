import litellm
from common import DESCRIPTION, FORM, FUNCTION, PARAMETERS, QUESTIONS, ROOT, STREAM, URL, answer

litellm.num_retries = 0
messages = []
if FORM == "chat":
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        while True:
            given = {"model": "openai/policy", "api_base": URL, "api_key": "unused", "messages": messages}
            reply = litellm.completion(**given, tools=[{"type": "function", "function": FUNCTION}], stream=STREAM)
            if STREAM:
                reply = litellm.stream_chunk_builder(list(reply), messages=messages)
            message = reply.choices[0].message
            messages.append(message.model_dump())
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                text = answer(call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
        print(message.content)
elif FORM == "messages":
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        while True:
            tool = {"name": "add", "description": DESCRIPTION, "input_schema": PARAMETERS}
            given = {"model": "anthropic/policy", "api_base": ROOT, "api_key": "unused", "max_tokens": 500}
            given |= {"messages": [{"role": "system", "content": "Use tools."}, *messages]}
            tools = [{"type": "function", "function": FUNCTION}]
            reply = litellm.completion(**given, tools=tools, stream=STREAM)
            if STREAM:
                reply = litellm.stream_chunk_builder(list(reply), messages=messages)
            message = reply.choices[0].message
            messages.append(message.model_dump())
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                text = answer(call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
        print(message.content)
elif FORM == "responses":
    items = []
    for question in QUESTIONS:
        items.append({"role": "user", "content": question})
        while True:
            given = {"model": "openai/policy", "api_base": URL, "api_key": "unused", "input": items}
            reply = litellm.responses(**given, tools=[{"type": "function", **FUNCTION}], stream=STREAM)
            if STREAM:
                reply = next(event.response for event in reply if event.type == "response.completed")
            output = [item if isinstance(item, dict) else item.model_dump() for item in reply.output]
            items += output
            calls = [item for item in output if item["type"] == "function_call"]
            for call in calls:
                text = answer(call["arguments"])
                items.append({"type": "function_call_output", "call_id": call["call_id"], "output": text})
            if not calls:
                break
        print(output[-1]["content"][0]["text"])
