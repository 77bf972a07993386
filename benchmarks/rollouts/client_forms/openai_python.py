import asyncio
import json

import openai
from common import FORM, FUNCTION, QUESTIONS, RESULT, STREAM, URL, answer
from pydantic import BaseModel


class Result(BaseModel):
    sum: int


client = openai.OpenAI(base_url=URL, api_key="unused", max_retries=0)
TOOL = {"type": "function", "function": FUNCTION}
FORMAT = {"type": "json_schema", "json_schema": {"name": "result", "schema": RESULT, "strict": True}}


def joined(chunks):
    """Put a message together from its deltas, as people do by hand."""
    text, calls = "", {}
    for chunk in chunks:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            for call in choice.delta.tool_calls or []:
                known = calls.setdefault(
                    call.index, {"id": call.id, "type": "function", "function": {"name": "", "arguments": ""}}
                )
                known["function"]["name"] += call.function.name or ""
                known["function"]["arguments"] += call.function.arguments or ""
    return {"role": "assistant", "content": text or None, **({"tool_calls": list(calls.values())} if calls else {})}


def chat():
    messages = []
    for number, question in enumerate(QUESTIONS):
        messages.append({"role": "user", "content": question})
        while True:
            given = {"model": "policy", "messages": messages, "tools": [TOOL]}
            given |= {"response_format": FORMAT} if number else {}
            if STREAM:
                options = {"stream": True, "stream_options": {"include_usage": True}}
                message = joined(client.chat.completions.create(**given, **options))
            else:
                message = client.chat.completions.create(**given).choices[0].message.model_dump(exclude_none=True)
            messages.append(message)
            if not message.get("tool_calls"):
                break
            for call in message["tool_calls"]:
                text = answer(call["function"]["arguments"])
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})
        print(message["content"])


def parse():
    """The helpers with types: parsed arguments, a parsed answer."""
    messages = []
    tool = openai.pydantic_function_tool(
        type("add", (BaseModel,), {"__annotations__": {"a": int, "b": int}, "__doc__": FUNCTION["description"]})
    )
    for number, question in enumerate(QUESTIONS):
        messages.append({"role": "user", "content": question})
        while True:
            given = {"model": "policy", "messages": messages, "tools": [tool]}
            given |= {"response_format": Result} if number else {}
            if STREAM:
                with client.chat.completions.stream(**given) as stream:
                    for _ in stream:
                        pass
                    message = stream.get_final_completion().choices[0].message
            else:
                message = client.chat.completions.parse(**given).choices[0].message
            messages.append(message)
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                parsed = call.function.parsed_arguments
                messages.append({"role": "tool", "tool_call_id": call.id, "content": str(parsed.a + parsed.b)})
        print(message.parsed.model_dump_json() if number else message.content)


def responses(stored: bool):
    tool = {"type": "function", "strict": True, **FUNCTION}
    items, before = [], None
    for number, question in enumerate(QUESTIONS):
        items.append({"role": "user", "content": question})
        while True:
            given = {"model": "policy", "input": items, "tools": [tool]}
            if stored:
                given |= {"previous_response_id": before} if before else {}
            else:
                given |= {"store": False, "include": ["reasoning.encrypted_content"]}
            if number and stored:
                given |= {"text_format": Result}
            elif number:
                given |= {"text": {"format": {"type": "json_schema", "name": "result", "schema": RESULT}}}
            if STREAM:
                with client.responses.stream(**given) as stream:
                    for _ in stream:
                        pass
                    reply = stream.get_final_response()
            else:
                reply = (client.responses.parse if stored else client.responses.create)(**given)
            before = reply.id
            items = [] if stored else items + list(reply.output)
            calls = [item for item in reply.output if item.type == "function_call"]
            items += [
                {"type": "function_call_output", "call_id": call.call_id, "output": answer(call.arguments)}
                for call in calls
            ]
            if not calls:
                break
        print(reply.output_text)


async def raw():
    """Plain HTTP: server-sent events read line by line."""
    import httpx

    messages = []
    async with httpx.AsyncClient(timeout=60) as http:
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            while True:
                body = {"model": "policy", "messages": messages, "tools": [TOOL], "stream": STREAM}
                if STREAM:
                    chunks = []
                    async with http.stream("POST", f"{URL}/chat/completions", json=body) as reply:
                        async for line in reply.aiter_lines():
                            if line.startswith("data: {"):
                                chunks.append(json.loads(line.removeprefix("data: ")))
                    message = joined(map(openai.types.chat.ChatCompletionChunk.model_validate, chunks))
                else:
                    reply = await http.post(f"{URL}/chat/completions", json=body)
                    message = reply.json()["choices"][0]["message"]
                messages.append(message)
                if not message.get("tool_calls"):
                    break
                for call in message["tool_calls"]:
                    text = answer(call["function"]["arguments"])
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})
            print(message["content"])


match FORM:
    case "chat":
        chat()
    case "parse":
        parse()
    case "responses":
        responses(True)
    case "responses-items":
        responses(False)
    case "raw":
        asyncio.run(raw())
