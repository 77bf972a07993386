"""One HTML file of chosen trajectories that opens from a disk, without a server or a network.

It holds the viewer's own scripts, and the answers that its pages ask for, compressed. A policy in it allows these
scripts alone, by their hashes.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt
from jinja2 import Environment, PackageLoader

from agentrl.errors import DataError
from agentrl.trajectory import FROZEN
from agentrl.view.questions import MOST_ROWS, Question
from agentrl.view.record import NUMBERS, Record, to_json
from agentrl.view.viewer import Place, Viewer

PAGES = Path(__file__).resolve().parent / "pages"
SCRIPTS = ("dom", "api", "charts", "ribbon", "tables", "parts", "replay", "pages", "app")
"""Modules of the pages; each imports only from modules before it."""
MOST = 512
"""Trajectories that are written into one file."""
BY_ROLE = {
    **{"system": "prompts", "user": "prompts", "prompt": "prompts", "assistant": "responses", "tool": "answers"},
    FROZEN: "responses",
}
TEXTS = ("prompts", "responses", "answers", "truths", "failures", "uids", "sources")
COLUMNS = (*TEXTS, "ids", "scores", *NUMBERS)
"""Columns that an export can leave out; TEXTS can be masked, too."""
MASKED = "█"
DIGITS, LOGPROB_DIGITS = 3, 8
"""Significant digits of the numbers of tokens, and of log-probs, of which pages show small differences."""


@dataclass(frozen=True, slots=True)
class Hidden:
    """Columns that an export does not show: left out, or masked character by character.

    Hidden texts take the ids of their tokens with them, from which they could be read; tokens' numbers stay.
    """

    left_out: frozenset[str] = frozenset()
    masked: frozenset[str] = frozenset()

    @staticmethod
    def from_names(leave_out: Collection[str], mask: Collection[str]) -> Hidden:
        """Check the names. Raises DataError for an unknown name."""
        for name in leave_out:
            if name not in COLUMNS:
                raise DataError(f"leave_out={name}: want one of {', '.join(COLUMNS)}")
        for name in mask:
            if name not in TEXTS:
                raise DataError(f"mask={name}: want one of {', '.join(TEXTS)}; other columns can be left out")
        hidden = Hidden(frozenset(leave_out), frozenset(mask))
        more = set[str]()
        if hidden.texts & {"prompts", "responses", "answers"}:
            more.add("failures")  # they may quote the others
        if hidden.texts & {"responses", "answers"}:
            more.add("truths")  # they may say the same
        if "scores" in hidden.left_out:
            more |= {"advantages", "token_rewards"}  # from which they could be read
        return Hidden(hidden.left_out | more - hidden.masked, hidden.masked)

    @property
    def texts(self) -> frozenset[str]:
        """Texts that are left out or masked."""
        return (self.left_out | self.masked) & frozenset(TEXTS)

    def text(self, column: str, text: object) -> object:
        """Return the replacement of a text."""
        if column in self.left_out:
            return None
        if column in self.masked and isinstance(text, str):
            return re.sub(r"\S", MASKED, text)
        return text


def exported(viewer: Viewer, places: Sequence[Place], hidden: Hidden) -> str:
    """Write the file's text, without the hidden parts. Raises DataError for an invalid place, and for too many."""
    places = list(dict.fromkeys(places))
    if not 0 < len(places) <= MOST:
        raise DataError(f"want 1 to {MOST} trajectories in one file, not {len(places)}")
    routes, tokens = dict[str, object](), dict[str, object]()
    steps: dict[tuple[int, str, int], set[tuple[str, int]]] = defaultdict(set)
    groups: dict[tuple[int, str, object], list[Place]] = defaultdict(list)
    for place in places:
        record = viewer.trajectory(place)
        number, part, row = place
        steps[number, str(record["set"]), cast(int, record["step"])].add((part, row))
        groups[number, part, record["group"]].append(place)
        hide(record, hidden)
        tokens |= cast(dict[str, object], record["tokens"])
        record["tokens"] = None
        routes[f"/api/run/{number}/trajectory/{part}/{row}"] = record
    for (number, name, step), chosen in steps.items():
        answer = viewer.step(number, name, step)
        rows = [one for one in cast(list[Record], answer["rows"]) if (one["part"], one["row"]) in chosen]
        answer |= {"rows": [hide_row(one, hidden) for one in rows], "alarms": [], "problems": [], "steps": [step]}
        routes[f"/api/run/{number}/step/{name}/{step}"] = answer
    for (number, part, group), members in groups.items():
        if len(members) > 1:
            routes[f"/api/run/{number}/group/{part}/{group}"] = hide_side(viewer.side_by_side(members[:64]), hidden)
    routes["/api/runs"] = overview(viewer, {number: None for number, _, _ in places}, steps)
    return _html({"routes": routes, "tokens": tokens})


def overview(viewer: Viewer, numbers: Collection[int], steps: Collection[tuple[int, str, int]]) -> Record:
    """Return the overview without the parts that the file lacks: paths, numbers of other steps, configs."""
    whole = viewer.overview()
    runs = []
    for run in cast(list[Record], whole["runs"]):
        if run["number"] in numbers:
            sets: dict[str, list[int]] = defaultdict(list)
            for number, name, step in sorted(steps):
                if number == run["number"]:
                    sets[name].append(step)
            few = {name: run[name] for name in ("number", "name", "kind")}
            runs.append(
                {**few, "sets": sets, "steps": 0, "last": {}, "alarms": 0, "numbers": {}, "version": 0, "url": ""}
            )
    return {"runs": runs, "differing": {}, "ready": [], "columns": whole["columns"]}


def hide(record: Record, hidden: Hidden) -> None:
    """Remove the hidden parts from a trajectory, and round its tokens' numbers."""
    hide_row(record, hidden)
    record["ground_truth"] = hidden.text("truths", record["ground_truth"])
    for message in cast(list[Record], record["messages"] or []):
        column = BY_ROLE.get(str(message["role"]), "prompts")
        for name in ("content", "tool_calls", "other"):
            message[name] = hidden.text(column, message.get(name))
        if message["role"] == "tool":
            message["other"] = hidden.text("responses", message["other"])  # the name of the tool that was called
    turns = cast(list[Record], record["turns"] or [])
    for turn in turns:
        _hide_turn(turn, hidden)
    if hidden.texts & {"prompts", "answers"}:
        record["pictures"] = {}
    record["tokenizer"] = {**cast(Record, record["tokenizer"]), "origin": "the run's tokenizer was not found"}
    left = set[int]()
    for number, window in enumerate(cast(list[Record], record["transcripts"])):
        ids = _hidden_ids(number, window, [turn for turn in turns if turn["transcript"] == number], hidden)
        window["ids"] = ids
        window["score"] = None if "scores" in hidden.left_out else window["score"]
        left |= {*ids.tolist()}
        values = cast(dict[str, npt.NDArray[np.float32]], window["values"])
        window["values"] = {
            name: [
                float(f"{one:.{LOGPROB_DIGITS if name.endswith('logprobs') else DIGITS}g}") if one == one else None
                for one in numbers.tolist()
            ]
            for name, numbers in values.items()
            if name not in hidden.left_out
        }
    tokens = cast(dict[str, object], record["tokens"])
    record["tokens"] = {id: text for id, text in tokens.items() if int(id) in left}


def _hide_turn(turn: Record, hidden: Hidden) -> None:
    """Remove the hidden parts from a turn and its calls."""
    calls = cast(list[Record], turn["calls"])
    turn["text"] = hidden.text(BY_ROLE.get(str(turn["role"]), "prompts"), turn["text"])
    for call in calls:
        call["arguments"] = hidden.text("responses", call["arguments"])
        call["response"] = hidden.text("answers", call["response"])
        if "responses" in hidden.texts:
            call["name"] = hidden.text("responses", call["name"])
    if "scores" in hidden.left_out:
        for one in (turn, *calls):
            one["reward"] = None


def _hidden_ids(number: int, window: Record, turns: Sequence[Record], hidden: Hidden) -> npt.NDArray[np.int32]:
    """Ids of context window `number`, -1 in the place of tokens whose texts are hidden."""
    ids = np.array(window["ids"], np.int32)
    if "ids" in hidden.left_out:
        return np.full_like(ids, -1)
    mask = np.asarray(window["mask"]).astype(bool)
    # The prompt of a later window repeats turns of earlier ones.
    if hidden.texts & ({"prompts", "responses", "answers"} if number else {"prompts"}):
        ids[: cast(int, window["prompt_length"])] = -1
    if "responses" in hidden.texts:
        ids[mask] = -1
    for turn in turns:
        if turn["role"] != "assistant" and BY_ROLE.get(str(turn["role"]), "prompts") in hidden.texts:
            ids[cast(int, turn["start"]) : cast(int, turn["end"])] = -1
    return ids


def hide_row(row: Record, hidden: Hidden) -> Record:
    """Remove the hidden parts from the row of a table, in place, and return it."""
    for column, name in (("uids", "uid"), ("sources", "data_source"), ("failures", "failure")):
        row[name] = hidden.text(column, row.get(name))
    if "responses" in hidden.texts and "tools" in row:
        row["tools"] = None  # the policy wrote the names of the tools that it called
    if "scores" in hidden.left_out:
        scores = (
            "score",
            "reward",
            "reward_parts",
            "model_reward",
            "turn_rewards",
            "score_extra",
            "advantage",
            "equal_group",
        )
        row |= {name: None for name in scores if name in row}
    return row


def hide_side(side: Record, hidden: Hidden) -> Record:
    """Remove the hidden parts from trajectories side by side."""
    for piece in _pieces(side):
        kind = str(piece["kind"])
        column = "responses" if kind in ("policy", "assistant") else BY_ROLE.get(kind, "prompts")
        is_left_out = "ids" in hidden.left_out or column in hidden.left_out
        piece["text"] = None if is_left_out else hidden.text(column, piece["text"])
    for member in cast(list[Record], side["members"]):
        hide_row(member, hidden)
    return side


def _pieces(side: Record) -> Iterator[Record]:
    yield from cast(list[Record], side["beginning"])
    for member in cast(list[Record], side["members"]):
        yield from cast(list[Record], member["pieces"])


def _html(data: object) -> str:
    """Put scripts, styles and data into one page."""
    vendor = PAGES / "vendor"
    scripts = [_text(vendor / "uplot.js"), "\n".join(map(_inlined, SCRIPTS))]
    styles = [_text(vendor / "uplot.css") + "\n" + _text(PAGES / "style.css")]
    packed = base64.b64encode(gzip.compress(to_json(data), 9, mtime=0)).decode()
    template = Environment(loader=PackageLoader("agentrl.view", "pages"), autoescape=True).get_template("export.html")
    return template.render(
        script_hashes=" ".join(map(_hash, scripts)),
        style_hashes=" ".join(map(_hash, styles)),
        chart=scripts[0],
        script=scripts[1],
        style=styles[0],
        data=packed,
    )


def _inlined(name: str) -> str:
    """Return a module's text without its imports and exports: all of them become one module."""
    text = re.sub(r'^import .*?from "\./\w+\.js";\n', "", _text(PAGES / f"{name}.js"), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"^export (?=function|const|async|let|class)", "", text, flags=re.MULTILINE)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8").replace("</script", "<\\/script")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def chosen(viewer: Viewer, number: int, where: str, steps: Sequence[int], limit: int) -> list[Place]:
    """Choose trajectories of a run by a condition and by steps, the newest first.

    Raises DataError where no trajectory matches.
    """
    found = list[Place]()
    asked: Sequence[int | None] = steps or [None]
    for step in asked:
        question = Question(where=where, limit=min(limit, MOST_ROWS))
        answer = viewer.search(number, question, "", step, step)
        found += [(number, str(row["part"]), cast(int, row["row"])) for row in cast(list[Record], answer["rows"])]
    if not found:
        raise DataError(f"no trajectory of run {number} is meant by where={where!r} and steps={list(steps)}")
    return found[:limit]
