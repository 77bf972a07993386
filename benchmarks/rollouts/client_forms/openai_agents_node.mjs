import { Agent, OpenAIProvider, Runner, setTracingDisabled, tool } from "@openai/agents";
import { FORM, PARAMETERS, QUESTIONS, STREAM, URL, add } from "./common.mjs";

setTracingDisabled(true);
const modelProvider = new OpenAIProvider({ baseURL: URL, apiKey: "unused", useResponses: FORM === "responses" });
const tools = [tool({ name: "add", description: "Add two numbers.", parameters: PARAMETERS, execute: async ({ a, b }) => add(a, b) })];
const agent = new Agent({ name: "adder", instructions: "Use tools.", model: "policy", tools });
let items = [];
for (const content of QUESTIONS) {
  items.push({ role: "user", content });
  const result = await new Runner({ modelProvider }).run(agent, items, { stream: STREAM });
  if (STREAM) { for await (const _ of result); await result.completed; }
  console.log(result.finalOutput);
  items = result.history;
}
