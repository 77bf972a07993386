// Tables of trajectories: sorted by a click on a column's name, filtered by words, opened by a click or Enter.
import { h, number, replace, seconds, shown } from "./dom.js";
import { link, remember } from "./api.js";

const SHOWN = 200;
const FORMATS = { tool_seconds: seconds, seconds, tools: (value) => (value ?? []).map((name) => name || "?").join(", "), kinds: (value) => (value ?? []).filter(Boolean).join(", ") };
const TEXT = new Set(["uid", "data_source", "agent_name", "status", "failure", "tools", "kinds", "set"]);
// Reward and score come early: a phone shows the first columns only.
const ORDER = ["step", "uid", "reward", "score", "group", "data_source", "status", "advantage", "num_turns", "tokens", "length", "num_calls", "errors", "malformed", "truncated", "tool_seconds", "tools", "kinds", "gap_max", "gap_mean", "entropy_mean", "weight_max", "clipped_share", "version", "equal_group", "failure"];
const TITLES = { num_turns: "turns", num_calls: "calls", data_source: "source", tool_seconds: "longest call", gap_max: "largest gap", gap_mean: "mean gap", entropy_mean: "entropy", weight_max: "largest weight", clipped_share: "clipped", equal_group: "equal group" };

export function format(name, value) {
  if (value === null || value === undefined) return "–";
  if (FORMATS[name]) return FORMATS[name](value) || "–";
  if (typeof value === "boolean") return value ? "yes" : "no";
  return typeof value === "number" ? number(value) : String(value);
}

/** rows: as the server gives them; columns: meanings by name; run: number; many: show the step, too. */
export function trajectories({ rows, columns, run, query, many, chosen }) {
  const names = ORDER.filter((name) => (many || name !== "step") && rows.some((row) => row[name] !== null && row[name] !== undefined && !(Array.isArray(row[name]) && !row[name].some(Boolean))));
  let sort = query.get("sort") ?? "";
  let words = query.get("filter") ?? "";
  let most = SHOWN;
  let visible = [];
  const head = h("tr", {});
  const body = h("tbody", {});
  const count = h("span", { class: "count" });
  const more = h("button", { type: "button", class: "more", on: { click: () => ((most += 500), draw()) } }, "show more");
  const picks = new Set();
  const key = (row) => `${run}/${row.part}/${row.row}`;

  const draw = () => {
    const wanted = words.toLowerCase().split(/\s+/).filter(Boolean);
    const text = (row) => names.map((name) => format(name, row[name])).join(" ").toLowerCase();
    visible = rows.filter((row) => wanted.every((word) => text(row).includes(word)));
    const name = sort.replace(/^-/, "");
    if (name) {
      const sign = sort.startsWith("-") ? -1 : 1;
      const value = (row) => (typeof row[name] === "boolean" ? Number(row[name]) : Array.isArray(row[name]) ? row[name].join() : row[name]);
      visible.sort((a, b) => {
        const [left, right] = [value(a), value(b)];
        if (left === right) return 0;
        if (left === null || left === undefined) return 1;
        if (right === null || right === undefined) return -1;
        return (left < right ? -1 : 1) * sign;
      });
    }
    replace(count, visible.length === rows.length ? `${rows.length}` : `${visible.length} of ${rows.length}`);
    replace(
      head,
      h("th", { class: "pick" }),
      names.map((one) =>
        h(
          "th",
          { class: TEXT.has(one) ? "" : "n", "aria-sort": name === one ? (sort.startsWith("-") ? "descending" : "ascending") : "none" },
          h("button", { type: "button", title: columns[one] ?? "", on: { click: () => order(one) } }, TITLES[one] ?? one, name === one ? (sort.startsWith("-") ? " ↓" : " ↑") : ""),
        ),
      ),
    );
    replace(body, visible.slice(0, most).map(line));
    more.hidden = visible.length <= most;
  };
  const order = (name) => {
    const turns = TEXT.has(name) ? [name, `-${name}`, ""] : [`-${name}`, name, ""];
    sort = turns[(turns.indexOf(sort) + 1) % 3];
    remember({ sort });
    draw();
  };
  const cell = (row, name) => {
    const value = row[name];
    if (name === "uid") return h("td", {}, h("a", { href: link(["run", run, "trajectory", row.part, row.row]), class: "uid" }, value === null ? `row ${row.row}` : shown(value)));
    if (name === "group") return h("td", { class: "n" }, h("a", { href: link(["run", run, "group", row.part, value]), title: "its group side by side" }, value));
    if (name === "step") return h("td", { class: "n" }, h("a", { href: link(["run", run, "step", row.set, row.step]) }, row.set === "train" ? row.step : `${row.set} ${row.step}`));
    if (name === "status") return h("td", {}, h("span", { class: `status ${value}` }, shown(value)));
    if (name === "reward" || name === "score") return h("td", { class: "n" }, reward(value));
    return h("td", { class: TEXT.has(name) ? "wide" : "n" }, value === null || value === undefined ? h("span", { class: "none" }, "–") : shown(format(name, value)));
  };
  const line = (row) =>
    h(
      "tr",
      { tabindex: -1, "data-open": link(["run", run, "trajectory", row.part, row.row]) },
      h("td", { class: "pick" }, h("input", { type: "checkbox", "aria-label": "choose", checked: picks.has(key(row)), on: { change: (event) => (event.target.checked ? picks.add(key(row)) : picks.delete(key(row)), chosen?.(picks.size)) } })),
      names.map((name) => cell(row, name)),
    );
  const filter = h("input", { type: "search", class: "filter", placeholder: "filter these rows", value: words, "aria-label": "filter these rows", on: { input: (event) => ((words = event.target.value), remember({ filter: words }), draw()) } });
  draw();
  const element = h("div", { class: "trajectories" }, h("div", { class: "bar-above" }, filter, count), h("div", { class: "scroll" }, h("table", {}, h("thead", {}, head), body)), more);
  element.places = (limit) => (picks.size ? [...picks] : visible.slice(0, limit).map(key));
  element.narrow = (text) => {
    words = text;
    filter.value = text;
    draw();
  };
  return element;
}

export function reward(value) {
  if (value === null || value === undefined) return h("span", { class: "none" }, "–");
  return h("span", { class: `reward ${value > 0 ? "good" : value < 0 ? "bad" : "zero"}` }, number(value));
}
