// Elements made of data. Whatever comes from a run becomes text nodes: no string is ever parsed as HTML.

const INVISIBLE =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\ud800-\udfff\u{e0000}-\u{e0fff}]/u;
const PICTURE = /^data:image\/(png|jpeg|gif|webp|bmp);base64,[A-Za-z0-9+/=]+$/; // formats of pixels alone
const NAMES = { "\r": "␍", "\u001b": "␛", "\u0000": "␀", "\u00ad": "­-", "\ufeff": "BOM", "\u200b": "ZWSP", "\u200d": "ZWJ" };

/** An element. props: class, title, text attributes; `on`: handlers by event; `style`: properties. */
export function h(tag, props, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props ?? {})) {
    if (name.startsWith("aria-")) {
      element.setAttribute(name, String(value));
      continue;
    }
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") for (const [event, handler] of Object.entries(value)) element.addEventListener(event, handler);
    else if (name === "style") for (const [key, one] of Object.entries(value)) element.style.setProperty(key, one);
    else if (name === "href") element.setAttribute("href", address(value));
    else if (name === "class") element.className = value;
    else if (["value", "checked", "selected", "disabled", "open", "indeterminate"].includes(name)) element[name] = value;
    else if (tag === "img" && name === "src" && PICTURE.test(value)) element.setAttribute("src", value);
    else if (name.startsWith("on") || name === "src" || name === "srcdoc") throw new Error(`no attribute ${name} here`);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  append(element, children);
  return element;
}

function append(element, children) {
  for (const child of children) {
    if (child === null || child === undefined || child === false) continue;
    if (Array.isArray(child)) append(element, child);
    else element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

/** Only places in this viewer are linked to. */
function address(value) {
  if (!value.startsWith("#")) throw new Error("links lead to the viewer's own pages only");
  return value;
}

export function replace(element, ...children) {
  element.textContent = "";
  append(element, children);
  return element;
}

/** A text with its invisible characters spelled out. */
export function shown(text) {
  const fragment = document.createDocumentFragment();
  if (text === null || text === undefined) return fragment;
  if (!INVISIBLE.test(text)) {
    fragment.append(String(text));
    return fragment;
  }
  let plain = "";
  for (const character of String(text)) {
    if (!INVISIBLE.test(character)) {
      plain += character;
      continue;
    }
    if (plain) fragment.append(plain);
    plain = "";
    const code = character.codePointAt(0).toString(16).padStart(4, "0").toUpperCase();
    fragment.append(h("span", { class: "invisible", title: `U+${code}` }, NAMES[character] ?? code));
  }
  if (plain) fragment.append(plain);
  return fragment;
}

export function number(value, digits = 3) {
  if (value === null || value === undefined || value === "") return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e7) return value.toLocaleString("en-US");
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(digits - 1);
  return Number(value.toPrecision(digits)).toLocaleString("en-US", { maximumFractionDigits: 6 });
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1e-3) return `${Math.round(value * 1e6)} µs`;
  if (value < 1) return `${number(value * 1000)} ms`;
  return value < 120 ? `${number(value)} s` : `${number(value / 60)} min`;
}
