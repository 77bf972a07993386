// The frame around the pages: addresses, keys, themes, and following a run that goes on.
import { h, replace, shown } from "./dom.js";
import { get, isExport, save, saved, state } from "./api.js";
import { redraw } from "./charts.js";
import { replayed } from "./replay.js";
import { run, runs, search, side, step, trajectory } from "./pages.js";

const POLL = 2000;
const KEYS = [["j, k", "next, previous row or trajectory"], ["Enter", "open the row"], ["u", "up one page"], ["[, ]", "previous, next step"], ["/", "search or filter"], ["1 … 9", "colour the tokens by"], ["← →", "token by token (in the ribbon)"], ["e", "export"], ["r", "replay"], ["t", "theme"], ["?", "this help"]];
const app = document.getElementById("app");
const live = h("span", { class: "live", hidden: true, title: "follows the run" }, "live");
const holder = h("div", { class: "page", "aria-live": "off" });
let page = null;
let drawing = 0;
let known = null;

function theme(wanted) {
  const value = wanted ?? saved("theme") ?? "auto";
  document.documentElement.dataset.theme = value;
  if (wanted) save("theme", wanted);
  redraw();
}

function nextTheme() {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const now = document.documentElement.dataset.theme;
  theme(now === "auto" ? (dark ? "light" : "dark") : now === "dark" ? "light" : "dark");
}

async function draw({ quiet = false } = {}) {
  const mine = (drawing += 1);
  const { path, query } = state();
  if (!quiet) holder.classList.add("waiting");
  let made;
  try {
    const asked = get("/api/runs");
    made = path[2] === "trajectory" ? await trajectory(asked, path.slice(1), query) : await choose(await asked, path, query);
    known = versions(await asked);
  } catch (error) {
    made = h("main", {}, h("div", { class: "problems", role: "alert" }, h("p", {}, shown(error.message))));
  }
  if (mine !== drawing) return;
  holder.classList.remove("waiting");
  const top = quiet ? scrollY : 0;
  page = made;
  replace(holder, made);
  scrollTo(0, top);
  document.title = `${holder.querySelector("h1")?.textContent ?? "agentrl"} · agentrl`;
}

function choose(overview, path, query) {
  const [kind, number, what] = path;
  if (kind === "replay") return replayed(overview, [number]);
  if (kind === "side") return side(overview, [], query);
  if (kind !== "run") return overview.runs.length === 1 && !path.length ? run(overview, [String(overview.runs[0].number)], query, () => draw({ quiet: true })) : runs(overview, query, () => draw({ quiet: true }));
  const rest = path.slice(1);
  if (what === "step") return step(overview, rest, query);
  if (what === "group") return side(overview, rest, query);
  if (what === "search") return search(overview, [number], query);
  return run(overview, [number], query, () => draw({ quiet: true }));
}

function versions(overview) {
  return overview.runs.map((one) => one.version).join();
}

async function follow() {
  try {
    const overview = await get("/api/runs");
    live.classList.remove("lost");
    const now = versions(overview);
    // Whoever reads or types is not interrupted: pages of what does not change stay, and those with a field in use.
    const { path } = state();
    const busy = ["trajectory", "group", "search"].includes(path[2]) || ["side", "replay"].includes(path[0]) || document.activeElement?.matches("input, select") || document.querySelector("dialog");
    if (known !== null && now !== known && !busy) await draw({ quiet: true });
    live.classList.toggle("news", now !== known);
  } catch {
    live.classList.add("lost");
  }
  setTimeout(follow, POLL);
}

function rows() {
  return [...holder.querySelectorAll("tr[data-open]")];
}

function move(by) {
  const all = rows();
  if (!all.length) return;
  const now = all.indexOf(document.activeElement?.closest("tr[data-open]"));
  const next = all[Math.max(0, Math.min(all.length - 1, now + by))];
  next.tabIndex = 0;
  next.focus();
  next.scrollIntoView({ block: "nearest" });
}

async function neighbour(by) {
  const { path } = state();
  const [, number, , part, row] = path;
  const to = Number(row) + by;
  if (to < 0) return;
  try {
    await get(`/api/run/${number}/trajectory/${encodeURIComponent(part)}/${to}`);
    location.hash = location.hash.replace(/\/\d+(\?|$)/, `/${to}$1`).replace(/([?&])token=\d+/, "$1");
  } catch {
    // it was the last one
  }
}

function up() {
  const links = [...holder.querySelectorAll(".crumbs a")];
  if (links.length) location.hash = links[links.length - 1].getAttribute("href");
}

function help() {
  const dialog = h("dialog", { class: "help-keys", on: { close: () => dialog.remove(), click: () => dialog.close() } }, h("h2", {}, "Keys"), h("dl", {}, KEYS.map(([key, what]) => h("div", {}, h("dt", {}, h("kbd", {}, key)), h("dd", {}, what)))));
  document.body.append(dialog);
  dialog.showModal();
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, select, textarea") || document.querySelector("dialog")) {
    if (event.key === "Escape") event.target.blur?.();
    return;
  }
  const inTrajectory = state().path[2] === "trajectory";
  const actions = {
    j: () => (inTrajectory ? neighbour(1) : move(1)),
    k: () => (inTrajectory ? neighbour(-1) : move(-1)),
    u: up,
    t: nextTheme,
    "?": help,
    "/": () => (holder.querySelector("input[type=search]")?.focus() ?? null),
    "[": () => holder.querySelector("[data-go='‹']")?.click(),
    "]": () => holder.querySelector("[data-go='›']")?.click(),
    e: () => holder.querySelector("[data-go=export]")?.click(),
    r: () => holder.querySelector("[data-go=replay]")?.click(),
    g: () => holder.querySelector("[data-go=group]")?.click(),
    Enter: () => event.target.matches("tr[data-open]") && (location.hash = event.target.dataset.open),
  };
  const digit = Number(event.key);
  const action = digit >= 1 && digit <= 9 ? () => page?.choose?.(digit - 1) : actions[event.key];
  if (!action || (event.key === "Enter" && !event.target.matches("tr[data-open]"))) return;
  event.preventDefault();
  action();
});
holder.addEventListener("click", (event) => {
  const row = event.target.closest("tr[data-open]");
  if (row && !event.target.closest("a, input, button") && !String(getSelection())) location.hash = row.dataset.open;
});
addEventListener("hashchange", () => draw());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => redraw());

replace(
  app,
  h("header", { class: "frame" }, h("a", { class: "brand", href: "#/" }, "agentrl"), h("span", { class: "grow" }), isExport ? h("span", { class: "kind" }, "exported") : live, h("button", { type: "button", class: "plain", title: "theme (key t)", "aria-label": "theme", on: { click: nextTheme } }, "◐"), h("button", { type: "button", class: "plain", title: "keys (key ?)", "aria-label": "keys", on: { click: help } }, "?")),
  holder,
);
theme();
draw();
if (document.body.dataset.follow === "yes") {
  live.hidden = false;
  setTimeout(follow, POLL);
}
