// The pages. Each takes what the server answered and returns elements; none reads HTML out of it.
import { h, number, replace, seconds, shown } from "./dom.js";
import { download, get, isExport, link, remember } from "./api.js";
import { curves, histogram, scatter } from "./charts.js";
import { ribbon } from "./ribbon.js";
import { reward, trajectories } from "./tables.js";
import { crumbs, problems, sideBySide } from "./parts.js";
import { editButton, replayButton } from "./replay.js";

const SECTIONS = [
  ["Learning", [["reward/mean"], ["success/rate"], ["val/success_sampled", "val/success_greedy"], ["group/zero_variance", "train/filtered_fraction"], ["train/loss", "val/loss"]]],
  ["Policy", [["actor/entropy"], ["actor/pg_loss"], ["actor/grad_norm", "train/grad_norm"], ["actor/ppo_kl", "actor/kl"], ["actor/clip_frac", "actor/clip_frac_lower"], ["rollout/logprob_gap_mean_abs"], ["rollout/logprob_gap_max_abs"], ["critic/value_loss", "critic/explained_variance"], ["actor/lr", "train/lr"]]],
  ["Trajectories", [["response/sampled_mean", "response/observed_mean"], ["turns/mean", "turns/max"], ["tool/calls_mean", "tool/calls_max"], ["tool/malformed_rate", "tool/error_rate", "tool/truncated_rate"], ["tool/seconds_mean", "tool/seconds_p99"], ["perf/tokens_per_second"]]],
];
const IDLE = /^async\/|staleness|_idle$/;
const FAULTS = /^failure\/|^status\/(failed|timeout|aborted|length|malformed)$|^trajectory\/retries$|^left_out\/|\/fault\/|\/faults$|breaker_open/;

function tile(name, value, title) {
  return h("div", { class: "tile", title }, h("span", {}, name), h("b", {}, value));
}

function alarms(list) {
  if (!list?.length) return null;
  return h(
    "section",
    { class: "alarms" },
    h("h2", {}, `Alarms (${list.length})`),
    [...list].reverse().slice(0, 50).map((one) =>
      h("article", { class: `alarm ${["warn", "stop", "save"].includes(one.severity) ? one.severity : "warn"}` }, h("header", {}, h("b", {}, shown(one.check)), h("span", {}, `step ${number(one.step)}`), h("span", {}, shown(one.severity))), h("p", {}, shown(one.what), one.where ? [" — ", shown(typeof one.where === "string" ? one.where : JSON.stringify(one.where))] : ""), one.why ? h("p", { class: "why" }, shown(one.why)) : null, one.action ? h("p", { class: "action" }, shown(one.action)) : null),
    ),
  );
}

// ---------------------------------------------------------------- runs

/** Minutes of work until the end of each step: of steps, validations and checkpoints. */
function minutesOf({ steps, series }) {
  let sum = 0;
  return steps.map((_, place) => (sum += ["time/step", "time/validation", "time/save"].reduce((all, name) => all + (series[name]?.[place] ?? 0), 0) / 60));
}

/** A button that has charts drawn against the time that runs worked, or against the step. */
function clock(byTime, redrawn) {
  const press = () => {
    remember({ over: byTime ? null : "minutes", x: null });
    redrawn();
  };
  return h("button", { type: "button", "aria-pressed": byTime, title: "draw against the minutes that the run worked", on: { click: press } }, "over minutes");
}

export async function runs(overview, query, redrawn) {
  const byTime = query.get("over") === "minutes";
  const picked = ["reward/mean", "val/success_sampled", "val/success_greedy", "actor/entropy", "rollout/logprob_gap_mean_abs", "response/sampled_mean", "time/step"];
  const answers = isExport ? [] : await Promise.all(overview.runs.map((run) => get(`/api/run/${run.number}`)));
  const numbers = ["reward/mean", "success/rate", "val/success_sampled", "val/success_greedy", "actor/entropy", "rollout/logprob_gap_max_abs", "tool/malformed_rate", "time/step", "perf/tokens_per_second"].filter((name) => overview.runs.some((run) => run.last[name] !== undefined));
  const table = h(
    "div",
    { class: "scroll" },
    h(
      "table",
      {},
      h("thead", {}, h("tr", {}, h("th", {}, "run"), h("th", {}, "kind"), h("th", { class: "n" }, "steps"), numbers.map((name) => h("th", { class: "n" }, name)), h("th", { class: "n" }, "alarms"))),
      h("tbody", {}, overview.runs.map((run, place) => h("tr", { "data-open": link(["run", run.number]) }, h("td", {}, h("a", { href: link(["run", run.number]) }, h("i", { class: `dot line${(place % 8) + 1}` }), shown(run.name))), h("td", {}, run.kind), h("td", { class: "n" }, number(run.last.step ?? run.steps)), numbers.map((name) => h("td", { class: "n" }, number(run.last[name]))), h("td", { class: `n ${run.alarms ? "bad" : ""}` }, run.alarms)))),
    ),
  );
  const places = answers.map((one) => (byTime ? minutesOf(one) : one.steps));
  const charts = picked
    .map((name) => {
      const steps = [...new Set(places.flat())].sort((a, b) => a - b);
      const lines = overview.runs.map((run, place) => {
        const at = new Map(places[place]?.map((step, index) => [step, answers[place].series[name]?.[index] ?? null]));
        return { name: run.name, color: `line${(place % 8) + 1}`, values: steps.map((step) => at.get(step) ?? null) };
      });
      return lines.some((line) => line.values.some((value) => value !== null)) ? curves({ title: name, steps, lines }) : null;
    })
    .filter(Boolean);
  const keys = Object.entries(overview.differing);
  const differing = keys.length
    ? h("section", {}, h("h2", {}, "Keys that differ"), h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, "key"), overview.runs.map((run) => h("th", {}, shown(run.name))))), h("tbody", {}, keys.map(([key, values]) => h("tr", {}, h("td", {}, shown(key)), values.map((value) => h("td", {}, shown(value === null ? "null" : String(value)))))))))
      )
    : null;
  return h("main", {}, h("header", { class: "top" }, h("h1", {}, overview.runs.length > 1 ? `${overview.runs.length} runs` : "Runs")), table, answers.some((one) => one.series["time/step"]) ? h("div", { class: "bar-above" }, clock(byTime, redrawn)) : null, h("div", { class: "grid" }, charts), differing);
}

// ---------------------------------------------------------------- run

function setsOf(run) {
  const names = Object.keys(run.sets).sort((a, b) => (b === "train") - (a === "train"));
  if (!names.length) return null;
  return h(
    "section",
    { class: "sets" },
    names.map((name) => {
      const steps = run.sets[name];
      const some = steps.length > 60 ? steps.filter((_, place) => place % Math.ceil(steps.length / 60) === 0 || place === steps.length - 1) : steps;
      return h("div", { class: "set" }, h("b", {}, name), h("span", { class: "chips" }, some.map((step) => h("a", { class: "chip", href: link(["run", run.number, "step", name, step]) }, step))), some.length < steps.length ? h("span", { class: "help" }, `${steps.length} steps; a click in a chart opens any`) : null);
    }),
  );
}

export async function run(overview, [number_], query, redrawn) {
  const one = overview.runs.find((each) => String(each.number) === number_);
  if (!one) throw new Error(`There is no run ${number_}.`);
  if (isExport) return h("main", {}, crumbs([one.name]), h("header", { class: "top" }, h("h1", {}, shown(one.name))), setsOf(one));
  const answer = await get(`/api/run/${number_}`);
  const { steps, series } = answer;
  const byTime = query.get("over") === "minutes";
  const across = byTime ? minutesOf(answer) : steps;
  const asked = query.get("x")?.split(",").map(Number);
  const range = asked?.length === 2 && asked.every(Number.isFinite) ? asked : null;
  const zoomed = (wanted) => {
    remember({ x: wanted ? wanted.map((value) => value.toFixed(2)).join(",") : null });
    redrawn();
  };
  const opened = (place) => {
    const step = steps[place];
    const set = one.sets.train?.includes(step) ? "train" : Object.keys(one.sets).find((name) => one.sets[name].includes(step));
    if (set) location.hash = link(["run", number_, "step", set, step]);
  };
  const marks = [...new Set(answer.alarms.map((alarm) => across[steps.indexOf(alarm.step)]))].filter((at) => at !== undefined);
  const chart = (names, more = {}) => {
    const found = names.filter((name) => series[name]?.some((value) => value !== null && value !== undefined));
    if (!found.length) return null;
    return curves({ title: more.title ?? (common(found) || found.join(", ")), steps: across, lines: found.map((name) => ({ name: more.short ? name.replace(/^[^/]*\//, "") : rest(name, found), values: series[name] })), range, zoomed, opened, marks, ...more });
  };
  const section = (name, charts) => (charts.some(Boolean) ? h("section", {}, h("h2", {}, name), h("div", { class: "grid" }, charts)) : null);
  const all = Object.keys(series);
  const times = all.filter((name) => name.startsWith("time/") && name !== "time/step");
  const idle = all.filter((name) => IDLE.test(name));
  const faults = all.filter((name) => FAULTS.test(name) && series[name].some(Boolean));
  const checks = all.filter((name) => name.startsWith("checks/"));
  const searched = h("div", { class: "grid" });
  const find = h("input", { type: "search", placeholder: `find among ${all.length} metrics`, "aria-label": "find a metric", value: query.get("metric") ?? "" });
  const list = () => {
    const words = find.value.toLowerCase().split(/\s+/).filter(Boolean);
    remember({ metric: find.value });
    replace(searched, words.length ? all.filter((name) => words.every((word) => name.toLowerCase().includes(word))).slice(0, 24).map((name) => chart([name])) : []);
  };
  find.addEventListener("input", list);
  const last = one.last;
  const tiles = [["step", last.step], ["reward", last["reward/mean"]], ["success", last["success/rate"]], ["validation", last["val/success_sampled"] ?? last["val/success_greedy"]], ["entropy", last["actor/entropy"]], ["gap", last["rollout/logprob_gap_mean_abs"]], ["loss", last["train/loss"]], ["s/step", last["time/step"]], ["tokens/s", last["perf/tokens_per_second"]], ["minutes spent", last["budget/minutes"]], ["cost", last["budget/cost"]], ["steps left", last["budget/steps_left"]]].filter(([, value]) => value !== undefined);
  const scores = Object.entries(one.numbers);
  const body = h(
    "main",
    {},
    crumbs([one.name]),
    h("header", { class: "top" }, h("h1", {}, shown(one.name)), h("span", { class: "kind" }, one.kind), h("span", { class: "grow" }), Object.keys(one.sets).length ? h("a", { class: "button", href: link(["run", number_, "search"]) }, "Search trajectories") : null),
    tiles.length ? h("div", { class: "tiles" }, tiles.map(([name, value]) => tile(name, number(value)))) : null,
    problems([], answer.unreadable ? `${answer.unreadable} lines of metrics.jsonl are no JSON objects and are left out.` : null),
    answer.ended ? h("p", { class: "help" }, shown(answer.ended)) : null,
    alarms(answer.alarms),
    setsOf(one),
    scores.length ? numbersTable(scores) : null,
    all.length ? h("div", { class: "bar-above" }, find, series["time/step"] ? clock(byTime, redrawn) : null, h("span", { class: "help" }, range ? h("button", { type: "button", on: { click: () => zoomed(null) } }, "show all steps") : "drag in a chart to zoom all; click to open a step")) : null,
    searched,
    SECTIONS.map(([name, groups]) => section(name, groups.map((names) => chart(names)))),
    section("Time of the stages", [chart(times, { title: "seconds, stacked", stacked: true, short: true }), chart(["time/step"])]),
    section("Idle and staleness", idle.map((name) => chart([name]))),
    section("Faults", faults.map((name) => chart([name]))),
    section("Checks", checks.map((name) => chart([name]))),
    !all.length && !Object.keys(one.sets).length && !scores.length ? h("p", { class: "empty" }, "Nothing is recorded yet.") : null,
    answer.writers.length ? details("Versions", answer.writers.map((one) => `after step ${one.after_step}: ${Object.entries(one.versions).map(([name, value]) => `${name} ${value}`).join(", ")}`)) : null,
    Object.keys(answer.config).length ? details("Config", Object.entries(answer.config).map(([key, value]) => `${key}=${value}`)) : null,
  );
  if (find.value) list();
  return body;
}

function details(name, lines) {
  return h("details", { class: "config" }, h("summary", {}, name), h("pre", {}, shown(lines.join("\n"))));
}

function numbersTable(scores) {
  const names = [...new Set(scores.flatMap(([, values]) => Object.keys(values).filter((name) => typeof values[name] === "number")))];
  return h("section", {}, h("h2", {}, "Scores"), h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, "source"), names.map((name) => h("th", { class: "n" }, shown(name))))), h("tbody", {}, scores.map(([source, values]) => h("tr", {}, h("td", {}, shown(source)), names.map((name) => h("td", { class: "n" }, number(values[name])))))))));
}

/** What names have in common up to a / or _. */
function common(names) {
  let prefix = names[0];
  while (prefix && !names.every((name) => name === prefix || name.startsWith(`${prefix}/`) || name.startsWith(`${prefix}_`))) prefix = prefix.replace(/(^|[/_])[^/_]*$/, "");
  return prefix;
}

function rest(name, names) {
  return names.length === 1 ? name : name.slice(common(names).length).replace(/^[/_]/, "") || name;
}

// ---------------------------------------------------------------- step

export async function step(overview, [number_, , set, at], query) {
  const one = overview.runs.find((each) => String(each.number) === number_);
  const answer = await get(`/api/run/${number_}/step/${encodeURIComponent(set)}/${at}`);
  const { rows, steps } = answer;
  const place = steps.indexOf(Number(at));
  const mean = (name) => {
    const values = rows.map((row) => row[name]).filter((value) => typeof value === "number");
    return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
  };
  const table = trajectories({ rows, columns: overview.columns, run: number_, query });
  const open = (index) => (location.hash = link(["run", number_, "trajectory", rows[index].part, rows[index].row]));
  const values = (name) => rows.map((row) => row[name]);
  const score = rows.some((row) => row.reward !== null) ? "reward" : "score";
  const narrow = (name) => (low, high, isLast) => (location.hash = link(["run", number_, "search"], { where: `${name} >= ${low} and ${name} ${isLast ? "<=" : "<"} ${high}`, set, first: at, last: at }));
  const groups = new Set(rows.map((row) => `${row.batch}/${row.group}`)).size;
  const go = (to, name) => (to === undefined ? null : h("a", { class: "button", href: link(["run", number_, "step", set, to]), title: name === "‹" ? "the step before (key [)" : "the next step (key ])", "data-go": name }, name));
  return h(
    "main",
    {},
    crumbs([one?.name ?? `run ${number_}`, ["run", number_]], [`${set} ${at}`]),
    h("header", { class: "top" }, go(steps[place - 1], "‹"), h("h1", {}, `${set === "train" ? "Step" : set} ${at}`), go(steps[place + 1], "›"), h("span", { class: "grow" }), isExport ? null : h("a", { class: "button", href: link(["run", number_, "search"], { set, first: at, last: at }) }, "Search"), exportButton(table)),
    h("div", { class: "tiles" }, tile("trajectories", number(rows.length)), tile("groups", number(groups)), tile("reward", number(mean("reward"))), tile("score", number(mean("score"))), tile("tokens", number(mean("tokens"))), tile("turns", number(mean("num_turns"))), tile("calls", number(mean("num_calls"))), tile("errors", number(mean("errors"))), mean("gap_max") === null ? null : tile("largest gap", number(Math.max(...values("gap_max").filter(Number.isFinite))))),
    problems(answer.problems, answer.is_cut ? `Only the first ${rows.length} trajectories are shown; search finds the others.` : answer.searched < answer.parts ? `${answer.searched} of ${answer.parts} files were read within the time limit.` : null),
    alarms(answer.alarms),
    h(
      "div",
      { class: "grid" },
      scatter({ title: `${score} against tokens`, xs: values("tokens"), ys: values(score), names: rows.map((row) => row.uid ?? row.row), opened: open }),
      histogram({ title: score, values: values(score), chosen: isExport ? null : narrow(score) }),
      histogram({ title: "tokens sampled", values: values("tokens"), chosen: isExport ? null : narrow("tokens") }),
      histogram({ title: "turns", values: values("num_turns"), chosen: isExport ? null : narrow("num_turns") }),
      histogram({ title: "longest call (s)", values: values("tool_seconds"), chosen: isExport ? null : narrow("tool_seconds") }),
      histogram({ title: "largest gap", values: values("gap_max"), chosen: isExport ? null : narrow("gap_max") }),
      histogram({ title: "advantage", values: values("advantage"), chosen: isExport ? null : narrow("advantage") }),
    ),
    table,
  );
}

// ---------------------------------------------------------------- search

const FIELDS = [
  ["text", "text", "in prompts, answers, calls"],
  ["regex", "regex", "RE2, e.g. (?i)sorry|cannot"],
  ["where", "where (SQL)", "e.g. reward = 0 and num_calls > 2"],
  ["tool", "tool", "name"],
  ["error", "error", "kind, e.g. timeout"],
  ["source", "data source", ""],
  ["reward_from", "reward from", ""],
  ["reward_to", "reward to", ""],
  ["first", "first step", ""],
  ["last", "last step", ""],
];

export async function search(overview, [number_], query) {
  const one = overview.runs.find((each) => String(each.number) === number_);
  const fields = Object.fromEntries(FIELDS.map(([name, , hint]) => [name, h("input", { name, type: "search", placeholder: hint, value: query.get(name) ?? "", spellcheck: "false", autocomplete: "off" })]));
  const options = (name, values) => h("select", { name, "aria-label": name }, ["", ...values].map((value) => h("option", { value, selected: (query.get(name) ?? "") === value }, value || "any")));
  const status = options("status", ["completed", "length", "turn_limit", "malformed", "timeout", "aborted", "failed"]);
  const set = options("set", Object.keys(one?.sets ?? {}));
  const form = h(
    "form",
    {
      class: "search",
      on: {
        submit: (event) => {
          event.preventDefault();
          const wanted = Object.fromEntries([...new FormData(form)].filter(([, value]) => value !== ""));
          location.hash = link(["run", number_, "search"], { ...wanted, order: query.get("order") ?? "", go: 1 });
        },
      },
    },
    FIELDS.map(([name, label]) => h("label", { class: name }, h("span", {}, label), fields[name])),
    h("label", {}, h("span", {}, "status"), status),
    h("label", {}, h("span", {}, "set"), set),
    h("button", { type: "submit", class: "primary" }, "Search"),
  );
  const ready = h("div", { class: "ready" }, overview.ready.map((each) => h("a", { class: "chip", title: [each.where, each.order && `by ${each.order}`].filter(Boolean).join(", "), href: link(["run", number_, "search"], { where: each.where, order: each.order, go: 1 }) }, each.name)));
  const names = [...FIELDS.map(([name]) => name), "status", "set", "order"].filter((name) => query.get(name));
  let found = null;
  if (names.length) {
    const asked = new URLSearchParams(names.map((name) => [name, query.get(name)]));
    try {
      const answer = await get(`/api/run/${number_}/search?${asked}`);
      const table = trajectories({ rows: answer.rows, columns: overview.columns, run: number_, query, many: true });
      const stopped = answer.searched < answer.parts;
      const note = stopped && answer.rows.length < 200 ? `The time limit of ${answer.seconds} s was reached after ${answer.searched} of ${answer.parts} files: narrow the steps to search the others.` : null;
      const first = answer.is_cut || (stopped && !note) ? `the first ${answer.rows.length}` : answer.rows.length;
      found = h("section", {}, h("header", { class: "top" }, h("h2", {}, `${first} found`), query.get("order") ? h("span", { class: "help" }, `by ${query.get("order")}`) : null, h("span", { class: "grow" }), answer.rows.length ? exportButton(table) : null), problems(answer.problems, note), answer.rows.length ? table : h("p", { class: "empty" }, "No trajectory meets this."));
    } catch (error) {
      found = problems([error.message]);
    }
  }
  const help = h("details", { class: "columns" }, h("summary", {}, "Columns for where"), h("dl", {}, Object.entries(overview.columns).map(([name, meaning]) => h("div", {}, h("dt", {}, h("code", {}, name === "group" ? '"group"' : name)), h("dd", {}, meaning)))), h("p", {}, "Lists too: list_contains(tools, 'search'). The file's own columns: messages, turns, calls, score_extra, metrics, ..."));
  return h("main", {}, crumbs([one?.name ?? "run", ["run", number_]], ["search"]), h("header", { class: "top" }, h("h1", {}, "Search")), ready, form, help, found);
}

// ---------------------------------------------------------------- side by side

export async function side(overview, path, query) {
  const isGroup = path.length === 4;
  const answer = await get(isGroup ? `/api/run/${path[0]}/group/${encodeURIComponent(path[2])}/${path[3]}` : `/api/side?${new URLSearchParams(query.getAll("m").map((one) => ["m", one]))}`);
  const { members } = answer;
  const first = members[0];
  const one = overview.runs.find((each) => each.number === first.run);
  const rewards = members.map((member) => member.reward ?? member.score).filter((value) => value !== null);
  const equal = rewards.length > 1 && rewards.every((value) => value === rewards[0]);
  const table = { places: () => members.map((member) => `${member.run}/${member.part}/${member.row}`) };
  return h(
    "main",
    { class: "wide" },
    crumbs([one?.name ?? "run", ["run", first.run]], [`${first.set} ${first.step}`, ["run", first.run, "step", first.set, first.step]], [isGroup ? `group ${first.group}` : "side by side"]),
    h("header", { class: "top" }, h("h1", {}, isGroup ? `Group ${first.group}` : "Side by side"), h("span", { class: "help" }, `${members.length} trajectories`), equal ? h("span", { class: "status length" }, "equal rewards: nothing to learn") : null, h("span", { class: "grow" }), exportButton(table)),
    sideBySide(answer, !isGroup),
  );
}

// ---------------------------------------------------------------- trajectory

/** `asked`: the overview on its way, so that one answer does not wait for the other. */
export async function trajectory(asked, [number_, , part, row], query) {
  const [overview, record] = await Promise.all([asked, get(`/api/run/${number_}/trajectory/${encodeURIComponent(part)}/${row}`)]);
  const one = overview.runs.find((each) => String(each.number) === number_);
  const windows = record.transcripts.map((window, index) => ({ ...window, index }));
  const at = Math.min(windows.length - 1, Number(query.get("window") ?? 0));
  const tokens = windows.length ? ribbon({ record, window: windows[at], query }) : h("p", { class: "empty" }, "No tokens are recorded of it.");
  const table = { places: () => [`${number_}/${part}/${row}`] };
  const score = (name, value) => (value === null || value === undefined ? null : tile(name, number(value)));
  const sampled = windows.reduce((sum, window) => sum + window.mask.reduce((count, mask) => count + mask, 0), 0);
  const truth = plain(record.ground_truth);
  const same = h("span", {});
  const body = h(
    "main",
    { class: "wide" },
    crumbs([one?.name ?? "run", ["run", number_]], [`${record.set} ${record.step}`, ["run", number_, "step", record.set, record.step]], [record.uid ?? `row ${row}`]),
    h(
      "header",
      { class: "top" },
      h("h1", { class: "uid" }, record.uid === null ? `row ${row}` : shown(record.uid)),
      record.status ? h("span", { class: `status ${record.status}` }, shown(record.status)) : null,
      record.baseline ? h("span", { class: "status" }, "baseline: not trained on") : null,
      h("span", { class: "grow" }),
      h("a", { class: "button", href: link(["run", number_, "group", part, record.group]), "data-go": "group" }, "Group"),
      isExport ? null : h("button", { type: "button", on: { click: () => samePrompt(same, number_, part, row) } }, "Same prompt at other steps"),
      replayButton(one, record),
      exportButton(table),
    ),
    same,
    record.failure ? problems([record.failure]) : null,
    truth && truth.length > SHORT ? details("Ground truth", [truth]) : null,
    h("div", { class: "tiles" }, score("reward", record.reward), score("score", record.score), score("model reward", record.model_reward), ...Object.entries(record.reward_parts ?? {}).map(([name, value]) => score(`reward: ${name}`, value)), ...Object.entries(record.score_extra ?? {}).map(([name, value]) => score(name, value)), tile("tokens", number(sampled)), tile("turns", number(record.num_turns)), tile("calls", number(record.turns.reduce((sum, turn) => sum + turn.calls.length, 0))), truth && truth.length <= SHORT ? tile("ground truth", shown(truth)) : null, record.data_source ? tile("source", shown(record.data_source)) : null, record.agent_name ? tile("agent", shown(record.agent_name)) : null, ...Object.entries(record.metrics ?? {}).map(([name, value]) => tile(name, /seconds$/.test(name) ? seconds(value) : number(value)))),
    record.tokenizer.known || !windows.length ? null : h("p", { class: "help" }, "Ids are shown in place of texts: ", shown(record.tokenizer.origin), "."),
    h(
      "div",
      { class: "both" },
      h("section", { class: "conversation" }, h("h2", {}, "Conversation"), conversation(one, record, tokens, windows[at])),
      h("section", { class: "tokens-of" }, h("h2", {}, "Tokens", windows.length > 1 ? windows.map((window) => h("a", { class: "chip", href: link(["run", number_, "trajectory", part, row], { window: window.index }), "aria-current": window.index === at }, window.role ? `${window.role}${window.policy && window.policy !== "policy" ? ` (${window.policy})` : ""}` : `window ${window.index + 1}`, window.trained_to === 0 ? " (not trained on)" : "", window.score === null || window.score === undefined ? "" : [" · score ", reward(window.score)])) : null), tokens),
    ),
  );
  body.choose = (place) => tokens.choose?.(place);
  return body;
}

const SHORT = 60;

/** A text out of its JSON; other values as they are written. */
function plain(text) {
  try {
    const value = JSON.parse(text);
    return typeof value === "string" ? value : text;
  } catch {
    return text;
  }
}

async function samePrompt(holder, number_, part, row) {
  replace(holder, h("p", { class: "help" }, "searching …"));
  try {
    const answer = await get(`/api/run/${number_}/prompt/${encodeURIComponent(part)}/${row}`);
    const others = answer.rows.filter((one) => !(one.part === part && String(one.row) === row));
    const me = `${number_}/${part}/${row}`;
    replace(holder, h("div", { class: "same" }, h("b", {}, others.length ? `${others.length} trajectories began with this prompt:` : "No other trajectory began with this prompt."), others.slice(0, 200).map((one) => h("a", { class: "chip", href: `${link(["side"])}?${new URLSearchParams([["m", me], ["m", `${number_}/${one.part}/${one.row}`]])}`, title: `side by side with ${one.uid}` }, `${one.set} ${one.step} `, reward(one.reward ?? one.score)))), problems(answer.problems, answer.searched < answer.parts ? `${answer.searched} of ${answer.parts} files were searched within the time limit.` : null));
  } catch (error) {
    replace(holder, problems([error.message]));
  }
}

/** Says whether a loop left the turn out of training. */
function isNotTrained(record, turn) {
  const end = record.transcripts[turn.transcript]?.trained_to;
  return end !== null && end !== undefined && turn.end > end;
}

const ROLES = ["assistant", "user", "tool", "system"];

function conversation(run, record, tokens, window) {
  const messages = record.messages ?? [];
  const answers = messages.flatMap((message, place) => (message.role === "assistant" ? [place] : []));
  // Assistant messages beyond the policy's turns are of the prompt.
  const given = Math.max(0, answers.length - record.turns.filter((turn) => turn.role === "assistant").length);
  const prompt = messages.slice(0, answers[given]);
  return [
    prompt.map((message) => h("article", { class: `turn ${ROLES.includes(message.role) ? message.role : "user"}` }, h("header", {}, h("b", {}, shown(message.role)), h("span", {}, "prompt")), h("div", { class: "text" }, message.content === null ? contents(message.other, record.pictures) : shown(message.content), message.tool_calls ? h("pre", { class: "arguments" }, shown(message.tool_calls)) : null))),
    record.turns.map((turn, index) =>
      // A tool's turn is shown by the cards of the calls that it answers.
      turn.role === "tool" && record.turns[index - 1]?.calls.length ? null : h(
        "article",
        { class: `turn ${ROLES.includes(turn.role) ? turn.role : "user"}`, "data-turn": index },
        h("header", {}, h("b", {}, shown(turn.role)), record.transcripts[turn.transcript]?.role ? h("span", { class: "of-role" }, shown(record.transcripts[turn.transcript].role)) : null, isNotTrained(record, turn) ? h("span", {}, "not trained on") : null, turn.finish_reason ? h("span", {}, shown(turn.finish_reason)) : null, turn.seconds ? h("span", {}, seconds(turn.seconds)) : null, turn.end > turn.start ? h("button", { type: "button", class: "plain", title: "show its tokens", on: { click: () => window && turn.transcript === window.index && tokens.reveal?.(turn.start) } }, `tokens ${turn.start}–${turn.end}`) : null, turn.reward === null || turn.reward === undefined ? null : h("span", {}, "reward ", reward(turn.reward)), editButton(run, record, index)),
        h("div", { class: "text" }, turn.text === null ? h("span", { class: "hidden" }, "left out") : shown(turn.text)),
        turn.calls.map((one, place) => call(one, editButton(run, record, index + 1, place))),
      ),
    ),
    images(record),
  ];
}

function contents(other, pictures) {
  let list = null;
  try {
    list = JSON.parse(other)?.content;
  } catch {
    // shown as it is
  }
  if (!Array.isArray(list)) return shown(other);
  const known = (one) => picture(pictures?.[/ ([0-9a-f]+)>$/.exec(one?.image ?? "")?.[1]]);
  return list.map((one) => (typeof one?.text === "string" ? h("span", {}, shown(one.text)) : known(one) ?? h("span", { class: "image" }, `${one?.type ?? "part"} `, h("code", {}, shown(JSON.stringify(one))))));
}

function picture(source) {
  if (!source) return null;
  return h("img", { class: "picture", src: source, alt: "recorded image", loading: "lazy" });
}

function images(record) {
  const found = record.transcripts.flatMap((window, index) => (window.images ?? []).map((image) => ({ ...image, window: index })));
  return found.map((image) => h("article", { class: "turn image" }, h("header", {}, h("b", {}, "image"), h("span", {}, `tokens ${image.start}–${image.start + image.tokens}`)), h("div", { class: "text" }, `${(image.grid ?? []).join(" × ")} patches, digest `, h("code", {}, shown(image.digest)), picture(record.pictures?.[image.digest]) ?? ". Its file is not there, or no picture that is shown.")));
}

/** edit: a button to put another answer in the place of this one. */
function call(one, edit) {
  let pretty = one.arguments;
  try {
    pretty = JSON.stringify(JSON.parse(one.arguments), null, 1).replace(/\n\s*/g, " ");
  } catch {
    // shown as it is
  }
  return h(
    "div",
    { class: `call ${one.error ? "error" : ""}` },
    h("header", {}, h("b", {}, shown(one.name || "(no name)")), h("span", {}, seconds(one.seconds)), one.error ? h("span", { class: "status failed" }, shown(one.error)) : null, one.truncated ? h("span", { class: "status length" }, "cut") : null, one.reward === null || one.reward === undefined ? null : h("span", {}, "reward ", reward(one.reward)), edit),
    h("pre", { class: "arguments" }, one.arguments === null ? h("span", { class: "none" }, "arguments could not be read, or are left out") : shown(pretty)),
    h("pre", { class: "response" }, one.response === null ? h("span", { class: "hidden" }, "left out") : shown(one.response)),
  );
}

// ---------------------------------------------------------------- export

const EXPORT_TEXTS = [["prompts", "prompts"], ["responses", "what the policy wrote"], ["answers", "tools' answers"], ["truths", "ground truths"], ["failures", "failures"], ["uids", "names"], ["sources", "data sources"]];
const EXPORT_OTHERS = [["ids", "token ids"], ["scores", "rewards and scores"], ["logprobs", "engine's log-probs"], ["trainer_logprobs", "trainer's log-probs"], ["advantages", "advantages"]];

export function exportButton(table) {
  if (isExport) return null;
  const open = () => {
    const most = h("input", { type: "number", min: 1, max: 512, value: 64, "aria-label": "how many" });
    const choices = EXPORT_TEXTS.map(([name, label]) => [name, h("select", { "aria-label": label }, ["shown", "masked", "left out"].map((value) => h("option", { value }, value))), label]);
    const others = EXPORT_OTHERS.map(([name, label]) => [name, h("input", { type: "checkbox", checked: true }), label]);
    const wrong = h("div", { role: "alert" });
    const write = async () => {
      const asked = new URLSearchParams();
      table.places(Number(most.value) || 64).slice(0, 512).forEach((one) => asked.append("m", one));
      for (const [name, choice] of choices) if (choice.value !== "shown") asked.append(choice.value === "masked" ? "mask" : "leave_out", name);
      for (const [name, choice] of others) if (!choice.checked) asked.append("leave_out", name);
      try {
        await download(`/export?${asked}`, "trajectories.html");
        dialog.close();
      } catch (error) {
        replace(wrong, h("p", { class: "problems" }, shown(error.message)));
      }
    };
    const dialog = h(
      "dialog",
      { class: "export", on: { close: () => dialog.remove() } },
      h("h2", {}, "Export to one HTML file"),
      h("p", { class: "help" }, "It opens without a server or a network. The chosen rows, or else the first of the table."),
      table.narrow ? h("label", {}, h("span", {}, "rows at most"), most) : null,
      h("h3", {}, "Texts"),
      choices.map(([, choice, label]) => h("label", {}, h("span", {}, label), choice)),
      h("h3", {}, "Numbers"),
      others.map(([, choice, label]) => h("label", {}, h("span", {}, label), choice)),
      h("p", { class: "help" }, "Ids of tokens whose texts are hidden are left out too."),
      wrong,
      h("footer", {}, h("button", { type: "button", on: { click: () => dialog.close() } }, "Cancel"), h("button", { type: "button", class: "primary", on: { click: write } }, "Save")),
    );
    document.body.append(dialog);
    dialog.showModal();
  };
  return h("button", { type: "button", "data-go": "export", title: "write these into one HTML file (key e)", on: { click: open } }, "Export");
}
