// What several pages show: where one is, what went wrong, and trajectories side by side.
import { h, number, shown } from "./dom.js";
import { link } from "./api.js";
import { reward } from "./tables.js";

export function crumbs(...parts) {
  return h("nav", { class: "crumbs", "aria-label": "where" }, h("a", { href: link([]) }, "runs"), parts.map(([name, path]) => [h("span", { class: "sep" }, "/"), path ? h("a", { href: link(path) }, shown(name)) : h("span", {}, shown(name))]));
}

export function problems(list, note) {
  const lines = [...(list ?? []), ...(note ? [note] : [])];
  return lines.length ? h("div", { class: "problems", role: "status" }, lines.map((line) => h("p", {}, shown(line)))) : null;
}

/** Trajectories side by side, as the server compared them. names: titles in place of those of the trajectories. */
export function sideBySide({ members, beginning, common: shared, unit }, withSteps, names = []) {
  return [
    h("details", { class: "beginning" }, h("summary", {}, `Common beginning: ${number(shared)} ${unit}`), piecesOf(beginning)),
    h(
      "div",
      { class: "columns-side" },
      members.map((member, place) =>
        h(
          "article",
          { class: "member" },
          h("header", {}, names[place] ? h("b", {}, names[place], " ") : null, h("a", { class: "uid", href: link(["run", member.run, "trajectory", member.part, member.row]) }, member.uid === null ? `row ${member.row}` : shown(member.uid)), h("div", { class: "facts" }, h("span", {}, "reward ", reward(member.reward ?? member.score)), member.advantage === null ? null : h("span", {}, "advantage ", reward(member.advantage)), h("span", { class: `status ${member.status}` }, shown(member.status)), h("span", {}, `${member.turns} turns, ${member.calls} calls`), withSteps ? h("span", {}, `${member.set} ${member.step}`) : null)),
          place === 0 || member.differs !== null ? null : h("p", { class: "help same-as" }, "the same as the first"),
          piecesOf(member.pieces, place === 0 ? null : member.differs, unit),
        ),
      ),
    ),
  ];
}

const WRITERS = ["prompt", "policy", "tool", "user", "system", "assistant", "template"];

/** Texts by who wrote them; before the piece that begins at `differs`, a mark. */
function piecesOf(pieces, differs = null, unit = "tokens") {
  const mark = () => h("span", { class: "divergence", title: "from here on it differs from the first" }, `differs from ${unit === "tokens" ? "token" : "turn"} ${differs}`);
  const end = differs !== null && !pieces.some((piece) => piece.start === differs) ? mark() : null;
  return h("div", { class: "pieces" }, pieces.map((piece) => [piece.start === differs ? mark() : null, h("span", { class: `piece ${WRITERS.includes(piece.kind) ? piece.kind : "template"}` }, piece.text === null ? h("span", { class: "hidden" }, "left out") : shown(piece.text))]), end);
}
