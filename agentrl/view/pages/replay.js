// Replays: what asks for one, and the page of its progress and its result. The server runs them; an export has none.
import { h, replace, seconds, shown } from "./dom.js";
import { get, link, post } from "./api.js";
import { crumbs, problems, sideBySide } from "./parts.js";

const OFTEN = 1000;

/** True where pages may start replays of the run; what a replay made is of no run that is open. */
function canReplay(run) {
  return document.body.dataset.replay === "yes" && Boolean(run?.can_replay);
}

export function replayButton(run, record) {
  if (!canReplay(run) || !record.transcripts.length) return null;
  return h("button", { type: "button", "data-go": "replay", title: "sample it again by the weights that sampled it (key r)", on: { click: () => ask(run, record) } }, "Replay");
}

/** A button to put another text in the place of turn `at`, or of its answer to call `place`; null where none can be. */
export function editButton(run, record, at, place = null) {
  const turn = record.turns[at];
  if (!canReplay(run) || !turn || turn.role === "assistant" || turn.text === null || (place !== null && turn.role !== "tool")) return null;
  const answered = record.turns.slice(0, at).findLast((one) => one.role === "assistant" && one.transcript === turn.transcript && one.end > one.start);
  if (!answered) return null;
  const responses = answered.calls.map((one) => one.response);
  const alone = place !== null && turn.text.startsWith(responses.join("\n"));
  const edit = { turn: at, call: alone ? place : null, text: alone ? responses[place] : turn.text };
  return h("button", { type: "button", class: "plain edit", title: "put another text here, and let the policy go on from it", on: { click: () => ask(run, record, edit) } }, "Edit and continue");
}

/** Ask what is to be replayed, and start it. edit: {turn, call, text} of what stands there. */
async function ask(run, record, edit = null) {
  const failed = h("div", {});
  const options = await get(`/api/run/${run.number}/replay`).catch((error) => ({ checkpoints: [], error: error.message }));
  const text = edit && h("textarea", { rows: 8, spellcheck: "false", "aria-label": "the other text", value: edit.text });
  const weights = h("select", { "aria-label": "weights" }, h("option", { value: "" }, "those that sampled it"), options.checkpoints.map((name) => h("option", { value: name }, shown(name))));
  const device = h("select", { "aria-label": "computed on" }, h("option", { value: "" }, "this machine's CPU"), h("option", { value: "own" }, "the run's device: ", shown(options.device)));
  const start = async () => {
    begin.disabled = true;
    try {
      const body = { place: `${record.run}/${record.part}/${record.row}`, turn: edit?.turn ?? null, call: edit?.call ?? null, text: text?.value ?? "", checkpoint: weights.value || null, own_device: device.value === "own" };
      const { number } = await post("/api/replay", body);
      if (!dialog.open) return await post(`/api/replay/${number}/cancel`); // cancelled while it was being started
      dialog.close();
      location.hash = link(["replay", number]);
    } catch (error) {
      begin.disabled = false;
      replace(failed, problems([error.message]));
    }
  };
  const begin = h("button", { type: "button", class: "primary", on: { click: start } }, edit ? "Continue" : "Replay");
  const keys = (event) => event.key === "Enter" && (event.ctrlKey || event.metaKey) && !begin.disabled && start();
  const dialog = h(
    "dialog",
    { class: "ask", on: { close: () => dialog.remove(), keydown: keys } },
    h("h2", {}, edit ? `Another text in turn ${edit.turn}` : "Sample it again"),
    text,
    h("label", {}, h("span", {}, "weights"), weights),
    options.device === "cpu" ? null : h("label", {}, h("span", {}, "computed on"), device),
    h("p", { class: "help" }, "A process of its own loads the model and the code that the run's config names, at a low priority."),
    h("p", edit && options.tools && options.cassette !== "replay" ? { class: "warning" } : { class: "help" }, edit ? tools(options) : "No tool is called: what tools answered is in the record."),
    failed,
    h("footer", {}, h("button", { type: "button", on: { click: () => dialog.close() } }, "Cancel"), begin),
  );
  if (options.error) replace(failed, problems([options.error]));
  document.body.append(dialog);
  dialog.showModal();
  (text ?? begin).focus();
}

function tools({ tools: path, cassette }) {
  if (!path) return "The run's config names no tools: calls of the policy are answered with an error.";
  if (cassette === "replay") return "Calls that the policy makes from here on are answered from the run's cassette.";
  return ["Calls that the policy makes from here on are really made, by the run's own tools: ", h("code", {}, shown(path))];
}

// ---------------------------------------------------------------- the page of one

const STATES = { running: ["running", "length"], done: ["done", "completed"], failed: ["failed", "failed"], cancelled: ["cancelled", "aborted"] };

export async function replayed(overview, [at]) {
  const first = await get(`/api/replay/${at}`);
  const [number_, part, row] = first.place;
  const one = overview.runs.find((each) => each.number === number_);
  const isEdit = first.turn !== null;
  const state = h("span", { role: "status" });
  const took = h("span", { class: "help" });
  const said = h("pre", { class: "said", tabindex: 0, "aria-label": "what the command says" });
  const result = h("div", {});
  const cancel = h("button", { type: "button", on: { click: () => post(`/api/replay/${at}/cancel`).then(show, fail) } }, "Cancel");
  const original = ["run", number_, "trajectory", part, row];
  const body = h(
    "main",
    { class: "wide" },
    crumbs([one?.name ?? "run", ["run", number_]], [first.uid, original], [isEdit ? `turn ${first.turn} edited` : "replay"]),
    h("header", { class: "top" }, h("h1", { class: "uid" }, shown(first.uid), isEdit ? `, turn ${first.turn} edited` : ", sampled again"), state, took, h("span", { class: "grow" }), cancel),
    result,
    h("h2", {}, "What the command says"),
    said,
  );
  const fail = (error) => replace(result, problems([error.message]));
  const show = async (answer) => {
    const [name, kind] = STATES[answer.state];
    state.className = `status ${kind}`;
    replace(state, name);
    replace(took, seconds(answer.seconds), answer.checkpoint ? [", by ", shown(answer.checkpoint)] : null);
    const follows = said.scrollTop + said.clientHeight >= said.scrollHeight - 8;
    replace(said, answer.said ? shown(answer.said) : "loading …");
    if (follows) said.scrollTop = said.scrollHeight;
    cancel.hidden = !answer.goes_on;
    if (answer.goes_on) setTimeout(poll, OFTEN);
    else if (answer.state === "failed") replace(result, problems([answer.error]));
    else if (answer.result) replace(result, await compared(answer, original));
  };
  const poll = () => body.isConnected && get(`/api/replay/${at}`).then(show).catch(fail);
  await show(first).catch(fail);
  return body;
}

async function compared({ place, result, window, turn, differs }, original) {
  const side = await get(`/api/side?${new URLSearchParams([["m", place.join("/")], ["m", result.join("/")], ["window", window]])}`);
  const verdict = turn !== null ? "It went on from the other text." : differs ? "Another token was sampled: it is marked below, and the turn ends the second column." : "Every token was sampled again.";
  const links = [h("a", { class: "button", href: link(original) }, "The recorded one"), " ", h("a", { class: "button", href: link(["run", result[0], "trajectory", result[1], result[2]]) }, "The other one, with its tokens")];
  const isSame = turn === null && !differs;
  return [h("p", { class: `verdict ${isSame ? "good" : ""}` }, verdict), h("p", {}, links), isSame ? null : sideBySide(side, false, ["recorded", turn === null ? "sampled again" : "edited"])];
}
