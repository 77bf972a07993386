import OpenAI from "openai";
import { FORM, FUNCTION, QUESTIONS, STREAM, URL, add } from "./common.mjs";

const client = new OpenAI({ baseURL: URL, apiKey: "unused", maxRetries: 0 });
const answer = (text) => { const { a, b } = JSON.parse(text); return add(a, b); };
if (FORM === "chat") {
  const tool = { type: "function", function: { ...FUNCTION, parse: JSON.parse, function: ({ a, b }) => add(a, b) } };
  let messages = [];
  for (const content of QUESTIONS) {
    messages.push({ role: "user", content });
    const runner = client.chat.completions.runTools({ model: "policy", messages, tools: [tool], stream: STREAM });
    console.log(await runner.finalContent());
    messages = runner.messages;
  }
} else {
  const tool = { type: "function", strict: true, ...FUNCTION };
  let items = [];
  for (const content of QUESTIONS) {
    items.push({ role: "user", content });
    for (;;) {
      const asked = { model: "policy", input: items, tools: [tool], store: false };
      const reply = STREAM
        ? await client.responses.stream(asked).finalResponse()
        : await client.responses.create(asked);
      items.push(...reply.output);
      const calls = reply.output.filter((item) => item.type === "function_call");
      if (!calls.length) { console.log(reply.output_text); break; }
      for (const call of calls)
        items.push({ type: "function_call_output", call_id: call.call_id, output: answer(call.arguments) });
    }
  }
}
