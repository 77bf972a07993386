import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";
import { FORM, PARAMETERS, QUESTIONS, STREAM, URL, add } from "./common.mjs";

const given = { baseURL: URL, apiKey: "unused" };
const model = {
  compatible: () => createOpenAICompatible({ name: "agentrl", ...given })("policy"),
  chat: () => createOpenAI(given).chat("policy"),
  responses: () => createOpenAI(given).responses("policy"),
  messages: () => createAnthropic(given)("policy"),
}[FORM]();
const tools = { add: tool({ description: "Add two numbers.", inputSchema: jsonSchema(PARAMETERS), execute: async ({ a, b }) => add(a, b) }) };
const messages = [];
for (const content of QUESTIONS) {
  messages.push({ role: "user", content });
  const asked = { model, messages, tools, stopWhen: stepCountIs(6), maxRetries: 0 };
  if (STREAM) {
    const result = streamText(asked);
    await result.consumeStream();
    messages.push(...(await result.response).messages);
    console.log(await result.text);
  } else {
    const result = await generateText(asked);
    messages.push(...result.response.messages);
    console.log(result.text);
  }
}
