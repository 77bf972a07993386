import Anthropic from "@anthropic-ai/sdk";
import { FORM, PARAMETERS, QUESTIONS, ROOT, STREAM, add } from "./common.mjs";

const client = new Anthropic({ baseURL: ROOT, apiKey: "unused", maxRetries: 0 });
const tool = { name: "add", description: "Add two numbers.", input_schema: PARAMETERS };
const messages = [];
for (const content of QUESTIONS) {
  messages.push({ role: "user", content });
  for (;;) {
    const asked = { model: "policy", max_tokens: 500, messages, tools: [tool] };
    const reply = STREAM ? await client.messages.stream(asked).finalMessage() : await client.messages.create(asked);
    messages.push({ role: "assistant", content: reply.content });
    const calls = reply.content.filter((block) => block.type === "tool_use");
    if (!calls.length) { console.log(reply.content.at(-1).text); break; }
    messages.push({
      role: "user",
      content: calls.map(({ id, input: { a, b } }) => ({ type: "tool_result", tool_use_id: id, content: add(a, b) })),
    });
  }
}
