// Answers: of the server, or, in an exported file, of the data in it. And the state of the page, which is its address.

const packed = document.getElementById("data");
let exported = null;

export const isExport = packed !== null;

// The token of the address the command printed stays here, and goes into a header: no other port gets to see it.
const given = isExport ? null : new URLSearchParams(location.search).get("token");
if (given) {
  save("token", given);
  history.replaceState(null, "", `${location.pathname}${location.hash}`);
}

function withToken(options) {
  return { ...options, headers: { ...options.headers, Authorization: `Bearer ${saved("token") ?? given}` } };
}

/** The answer to a path. Errors have a message for people. */
export async function get(path) {
  if (isExport) {
    exported ??= await unpack(packed.textContent);
    const answer = exported.routes[path];
    if (answer === undefined) throw new Error("This is not in the exported file.");
    if (answer.tokens === null) answer.tokens = exported.tokens;
    return answer;
  }
  return answerTo(path, { headers: { Accept: "application/json" } });
}

/** The answer to a request that does more than read. */
export async function post(path, body = {}) {
  return answerTo(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
}

/** Save the file that a path answers with. */
export async function download(path, name) {
  const file = URL.createObjectURL(await (await fetched(path, {})).blob());
  const anchor = document.createElement("a");
  anchor.href = file;
  anchor.download = name;
  anchor.click();
  setTimeout(() => URL.revokeObjectURL(file), 60_000);
}

async function answerTo(path, options) {
  return (await fetched(path, options)).json();
}

async function fetched(path, options) {
  let response;
  try {
    response = await fetch(path, withToken(options));
  } catch {
    throw new Error("The viewer's server does not answer. Was the command ended?");
  }
  if (response.status === 403) throw new Error("Open the address that the command printed, which ends in ?token=...: this browser has no token of it.");
  if (response.ok) return response;
  const answer = await response.json().catch(() => ({ error: `The viewer's server failed (${response.status}): its terminal shows why.` }));
  throw new Error(answer.error ?? JSON.stringify(answer.detail ?? answer));
}

async function unpack(text) {
  const bytes = Uint8Array.from(atob(text.trim()), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

/** {path: ["run", "0", ...], query: URLSearchParams} of the address. */
export function state() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  return { path: path.split("/").filter(Boolean).map(decodeURIComponent), query: new URLSearchParams(query ?? "") };
}

export function link(path, query = {}) {
  const text = new URLSearchParams(Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== "")).toString();
  return `#/${path.map((one) => encodeURIComponent(one)).join("/")}${text ? `?${text}` : ""}`;
}

/** Change values of the address in place; the page is not drawn again. */
export function remember(changes) {
  const { path, query } = state();
  for (const [name, value] of Object.entries(changes)) {
    if (value === null || value === undefined || value === "") query.delete(name);
    else query.set(name, value);
  }
  history.replaceState(null, "", link(path, Object.fromEntries(query)));
}

export function saved(name) {
  try {
    return localStorage.getItem(`agentrl.${name}`);
  } catch {
    return null;
  }
}

export function save(name, value) {
  try {
    localStorage.setItem(`agentrl.${name}`, value);
  } catch {
    // a file that may not store anything: the choice holds until it is closed
  }
}
