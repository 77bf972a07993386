// The token ribbon: every token of a context window, coloured by one of its numbers.
import { h, number, replace, shown } from "./dom.js";
import { remember } from "./api.js";

const CHUNK = 400;
const LINE = 70; // characters; by it the room is guessed of a chunk that is not drawn yet
const LEVELS = 9;

/** Each colouring: its name, the number at a token, whether it has two sides, and whether its levels go by the root. */
export function colourings(window) {
  const at = (name) => window.values[name];
  const has = (...names) => names.every((name) => at(name)?.length);
  const difference = (left, right) => at(left).map((value, place) => (value === null || at(right)[place] === null ? null : value - at(right)[place]));
  const all = [
    { key: "mask", name: "who wrote it", shown: true, kinds: true, help: "sampled by the policy, given in the prompt, observed from tools and users" },
    { key: "logprob", name: "log-prob", shown: has("logprobs"), values: () => at("logprobs").map((value) => (value === null ? null : -value)), top: 4, help: "darker: less likely under the engine" },
    { key: "entropy", name: "entropy", shown: has("entropy"), values: () => at("entropy"), help: "of the trainer's distribution" },
    { key: "gap", name: "engine–trainer gap", shown: has("trainer_logprobs", "logprobs"), values: () => difference("trainer_logprobs", "logprobs"), sides: true, root: true, least: 1e-4, help: "trainer's log-prob minus the engine's" },
    { key: "advantage", name: "advantage", shown: has("advantages"), values: () => at("advantages"), sides: true, help: "green: made more likely" },
    { key: "weight", name: "importance weight", shown: has("weights"), values: () => at("weights").map((value) => (value === null ? null : value - 1)), sides: true, root: true, least: 0.01, clipped: "weights_clipped", help: "of the correction; clipped tokens are underlined" },
    { key: "ratio", name: "policy ratio", shown: has("ratio"), values: () => at("ratio").map((value) => (value === null ? null : value - 1)), sides: true, root: true, least: 0.01, clipped: "clipped", help: "of the policy in the update to the one before it; clipped tokens are underlined" },
    { key: "version", name: "version of the weights", shown: window.versions?.length > 0, versions: true, help: "of the weights that sampled it" },
    { key: "teacher", name: "teacher's gap", shown: has("teacher_logprobs", "logprobs"), values: () => difference("teacher_logprobs", has("trainer_logprobs") ? "trainer_logprobs" : "logprobs"), sides: true, root: true, help: "teacher's log-prob minus the policy's" },
    { key: "reference", name: "reference's gap", shown: has("reference_logprobs", "logprobs"), values: () => difference("reference_logprobs", has("trainer_logprobs") ? "trainer_logprobs" : "logprobs"), sides: true, root: true, help: "reference's log-prob minus the policy's" },
    { key: "reward", name: "token reward", shown: has("token_rewards"), values: () => at("token_rewards"), sides: true, help: "what the token was paid" },
  ];
  return all.filter((one) => one.shown);
}

/** A function from a token's place to its CSS class. */
function painter(window, colouring) {
  if (colouring.kinds) return (place) => (window.mask[place] ? "k-policy" : place < window.prompt_length ? "k-prompt" : "k-observed");
  if (colouring.versions) {
    const marks = new Array(window.ids.length).fill("");
    const versions = [...new Set(window.versions.map((span) => span.version))].sort((a, b) => a - b);
    for (const span of window.versions) marks.fill(`n${versions.indexOf(span.version) % 6}`, span.start, span.end);
    return (place) => marks[place];
  }
  const values = colouring.values();
  const sizes = values.filter((value) => value !== null).map(Math.abs).sort((a, b) => a - b);
  const typical = sizes[Math.floor((sizes.length - 1) * (colouring.root ? 1 : 0.99))] ?? 0;
  const top = Math.max(colouring.top ?? typical, colouring.least ?? 1e-9);
  colouring.scale = top;
  const clipped = window.values[colouring.clipped];
  return (place) => {
    const value = values[place];
    if (value === null || value === undefined) return "";
    const part = Math.min(1, Math.abs(value) / top);
    const level = Math.round((colouring.root ? Math.sqrt(part) : part) * LEVELS);
    return `${colouring.sides ? (value < 0 ? "m" : "p") : "s"}${level}${clipped?.[place] ? " clipped" : ""}`;
  };
}

/** Text of a token: ids stand for those without one. */
function face(tokens, id) {
  const known = tokens[id];
  if (id < 0) return [h("span", { class: "hidden" }, "█")];
  if (!known) return [h("span", { class: "id" }, `#${id}`)];
  const [text, bytes, special] = known;
  if (!text && bytes) return [h("span", { class: "bytes" }, bytes.replace(/../g, "\\x$&"))];
  if (special) return [h("span", { class: "special" }, shown(text))];
  if (!text.includes("\n")) return [shown(text)];
  return text.split("\n").flatMap((line, place) => (place ? [h("span", { class: "newline" }, "↵"), "\n", shown(line)] : [shown(line)]));
}

export function ribbon({ record, window, query }) {
  const possible = colourings(window);
  let current = possible.find((one) => one.key === query.get("color")) ?? possible[0];
  let paint = painter(window, current);
  let focus = -1;
  const total = window.ids.length;
  const body = h("div", { class: "tokens", tabindex: 0, role: "group", "aria-label": "tokens" });
  const details = h("dl", { class: "inspector", "aria-live": "off" });
  const legend = h("div", { class: "scale" });
  const chunks = [];

  const fill = (chunk) => {
    if (chunk.filled) return;
    chunk.filled = true;
    const spans = [];
    for (let place = chunk.start; place < chunk.end; place += 1) {
      spans.push(h("span", { class: `t ${paint(place)}`, "data-place": place }, face(record.tokens, window.ids[place])));
    }
    replace(chunk.element, spans);
  };
  const seen = new IntersectionObserver(
    (entries) => entries.filter((entry) => entry.isIntersecting).forEach((entry) => fill(entry.target.chunk)),
    { rootMargin: "600px" },
  );
  for (let start = 0; start < total; start += CHUNK) {
    const chunk = { start, end: Math.min(total, start + CHUNK), filled: false, element: h("span", { class: "chunk" }) };
    const stands = window.ids.slice(chunk.start, chunk.end).reduce((sum, id) => sum + (record.tokens[id]?.[0].length || 4), 0);
    chunk.element.append(h("span", { class: "unread", style: { height: `${Math.ceil(stands / LINE) * 1.75}em` } }));
    chunk.element.chunk = chunk;
    chunks.push(chunk);
    seen.observe(chunk.element);
    body.append(chunk.element);
  }

  const span = (place) => body.querySelector(`[data-place="${place}"]`);
  const turn = (place) => record.turns.findIndex((one) => one.transcript === window.index && one.start <= place && place < one.end);
  const select = (place, scroll) => {
    if (place < 0 || place >= total) return;
    span(focus)?.classList.remove("focus");
    focus = place;
    fill(chunks[Math.floor(place / CHUNK)]);
    const element = span(place);
    element.classList.add("focus");
    if (scroll) element.scrollIntoView({ block: "nearest" });
    inspect(place);
  };
  const inspect = (place) => {
    const id = window.ids[place];
    const [text, bytes, special] = record.tokens[id] ?? ["", "", false];
    const spanOf = window.versions?.find((one) => one.start <= place && place < one.end);
    const found = turn(place);
    const rows = [
      ["token", h("code", {}, text ? shown(text.replaceAll("\n", "↵")) : "–", special ? " (special)" : "")],
      ["id", id < 0 ? "hidden" : id],
      ["bytes", bytes ? bytes.replace(/../g, "$& ").trim() : "–"],
      ["position", `${place} of ${total}`],
      ["turn", found < 0 ? (place < window.prompt_length ? "prompt" : "template") : `${found} (${record.turns[found].role})`],
      ["sampled", window.mask[place] ? "yes" : "no"],
    ];
    if (spanOf) rows.push(["version", spanOf.version]);
    for (const [name, values] of Object.entries(window.values)) {
      if (values[place] !== null && values[place] !== undefined) rows.push([name.replaceAll("_", " "), name.endsWith("clipped") ? (values[place] ? "yes" : "no") : number(values[place], 5)]);
    }
    const { logprobs, trainer_logprobs } = window.values;
    if (window.mask[place] && logprobs?.length && (trainer_logprobs?.[place] ?? null) !== null) rows.push(["gap", number(trainer_logprobs[place] - logprobs[place], 4)]);
    replace(details, rows.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
  };
  body.addEventListener("mouseover", (event) => {
    const place = event.target.closest?.("[data-place]")?.dataset.place;
    if (place !== undefined) inspect(Number(place));
  });
  body.addEventListener("click", (event) => {
    const place = event.target.closest?.("[data-place]")?.dataset.place;
    if (place !== undefined) {
      select(Number(place), false);
      remember({ token: place });
    }
  });
  body.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1, PageDown: 50, PageUp: -50 }[event.key];
    if (!step) return;
    event.preventDefault();
    select(Math.max(0, Math.min(total - 1, focus + step)), true);
    remember({ token: focus });
  });

  const scaleOf = () => {
    if (current.kinds) return ["policy", "prompt", "observed"].map((kind) => h("span", { class: `t k-${kind}` }, kind));
    if (current.versions) return [...new Set(window.versions.map((one) => one.version))].sort((a, b) => a - b).map((version, place) => h("span", { class: `t n${place % 6}` }, version));
    const levels = [1, 3, 5, 7, 9];
    const marks = current.sides
      ? [...levels].reverse().map((level) => h("span", { class: `t m${level}` }, " ")).concat(levels.map((level) => h("span", { class: `t p${level}` }, " ")))
      : levels.map((level) => h("span", { class: `t s${level}` }, " "));
    return [current.sides ? number(-current.scale) : "0", ...marks, number(current.scale)];
  };
  const choose = (key) => {
    current = possible.find((one) => one.key === key) ?? current;
    paint = painter(window, current);
    for (const chunk of chunks.filter((one) => one.filled)) {
      for (const element of chunk.element.children) element.className = `t ${paint(Number(element.dataset.place))}`;
    }
    replace(legend, scaleOf(), h("span", { class: "help" }, current.help));
    for (const button of buttons.children) button.setAttribute("aria-pressed", button.dataset.key === current.key);
    remember({ color: current.key === "mask" ? null : current.key });
  };
  const buttons = h(
    "div",
    { class: "choices", role: "group", "aria-label": "colour tokens by" },
    possible.map((one, place) =>
      h("button", { type: "button", "data-key": one.key, title: `${one.help} (key ${place + 1})`, "aria-pressed": one === current, on: { click: () => choose(one.key) } }, one.name),
    ),
  );
  replace(legend, scaleOf(), h("span", { class: "help" }, current.help));
  const asked = query.get("token");
  const first = asked === null ? window.mask.indexOf(1) : Number(asked);
  inspect(Math.max(0, first));
  const element = h("section", { class: "ribbon" }, buttons, legend, body, details);
  element.choose = (place) => possible[place] && choose(possible[place].key);
  element.reveal = (place) => {
    select(place, false);
    span(place)?.scrollIntoView({ block: "center" });
  };
  if (asked !== null) requestAnimationFrame(() => element.isConnected && element.reveal(Number(asked)));
  return element;
}
