import { ChatAnthropic } from "@langchain/anthropic";
import { tool } from "@langchain/core/tools";
import { createReactAgent } from "@langchain/langgraph/prebuilt";
import { ChatOpenAI } from "@langchain/openai";
import { FORM, PARAMETERS, QUESTIONS, ROOT, STREAM, URL, add } from "./common.mjs";

const llm = FORM === "messages"
  ? new ChatAnthropic({ model: "policy", apiKey: "unused", anthropicApiUrl: ROOT, maxTokens: 500, maxRetries: 0 })
  : new ChatOpenAI({ model: "policy", apiKey: "unused", configuration: { baseURL: URL }, maxRetries: 0, useResponsesApi: FORM === "responses" });
const tools = [tool(({ a, b }) => add(a, b), { name: "add", description: "Add two numbers.", schema: PARAMETERS })];
const agent = createReactAgent({ llm, tools });
let messages = [];
for (const content of QUESTIONS) {
  const asked = { messages: [...messages, { role: "user", content }] };
  if (STREAM) {
    for await (const [mode, part] of await agent.stream(asked, { streamMode: ["messages", "values"] }))
      if (mode === "values") ({ messages } = part);
  } else ({ messages } = await agent.invoke(asked));
  const said = messages.at(-1).content;
  console.log(typeof said === "string" ? said : said.at(-1).text);
}
