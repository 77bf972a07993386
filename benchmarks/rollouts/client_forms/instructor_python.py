import instructor
from common import FORM, QUESTIONS, ROOT, STREAM, URL
from pydantic import create_model

# A stream's model is called Partial..., and so is the tool.
Result = create_model("Result" if STREAM else "PartialResult", sum=(int, ...), __doc__="A sum.")


if FORM == "messages":
    import anthropic

    client = instructor.from_anthropic(anthropic.Anthropic(base_url=ROOT, api_key="unused", max_retries=0))
else:
    import openai

    mode = instructor.Mode.JSON_SCHEMA if FORM == "chat-json" else instructor.Mode.TOOLS
    client = instructor.from_openai(openai.OpenAI(base_url=URL, api_key="unused", max_retries=0), mode=mode)

messages = []
for question in [*QUESTIONS, "And twice that?"]:
    messages.append({"role": "user", "content": question})
    given = {"model": "policy", "messages": messages, "response_model": Result, "max_retries": 1}
    given |= {"max_tokens": 200} if FORM == "messages" else {}
    result = (
        list(client.chat.completions.create_partial(**given))[-1] if STREAM else client.chat.completions.create(**given)
    )
    messages.append({"role": "assistant", "content": f"The sum is {result.sum}."})
    print(result.sum)
