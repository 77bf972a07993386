// What every client's program has: its session, its mode, its questions and its tool.
export const [URL, FORM, MODE] = process.argv.slice(2);
export const ROOT = URL.replace(/\/v1$/, "");
export const STREAM = MODE === "stream";
export const QUESTIONS = ["What is 2 + 3?", "And twice that?"];
export const PARAMETERS = {
  type: "object",
  properties: { a: { type: "integer" }, b: { type: "integer" } },
  required: ["a", "b"],
  additionalProperties: false,
};
export const FUNCTION = { name: "add", description: "Add two numbers.", parameters: PARAMETERS };
export const add = (a, b) => String(a + b);
