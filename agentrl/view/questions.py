"""Questions to a run's trajectories: SQL conditions, texts and regular expressions, a file at a time.

A child process answers (`agentrl.view.answers`), which the kernel bounds in time and memory. This side defines the
questions, and collects the results.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TypeAlias, cast

from agentrl.errors import DataError
from agentrl.system.json_value import JSON
from agentrl.tool import MALFORMED
from agentrl.view.children import Children, Ended
from agentrl.view.parts import Part
from agentrl.view.run import Run

SECONDS = 20.0
"""Time limit of a question; results until then are shown, and marked as a part."""
MOST_ROWS = 5000
MOST_CHARACTERS = 2000
"""Longest text of a question. DuckDB's parser takes time and memory by the square of a condition's open brackets:
0.6 s for 600.
"""
MEMORY = "1GB"
"""DuckDB's own memory; its child process has twice as much in all."""
TOO_LARGE = f"the question needs more than {MEMORY} of memory: ask for fewer columns, or of fewer steps"
CHILDREN = Children("agentrl.view.answers")
Found: TypeAlias = dict[str, JSON]

_ANSWERS = "list_filter(range(1, len(messages) + 1), lambda i: messages[i].role = 'assistant')"
_TURNS = "coalesce(len(list_filter(turns, lambda t: t.role = 'assistant')), 0)"
PROMPT = (
    f"array_to_string(list_transform(messages[1:coalesce(({_ANSWERS})[greatest(len({_ANSWERS}) - {_TURNS}, 0) + 1] - "
    "1, len(messages))], lambda m: m.role || ': ' || coalesce(m.content, m.other, '')), chr(10))"
)
"""Text of the messages before the policy's first; assistant messages beyond its turns are of the prompt."""
_MALFORMED = ", ".join(f"'{one}'" for one in sorted(MALFORMED))
COLUMNS: Mapping[str, tuple[str, str]] = {
    "uid": ("uid", "the trajectory's name"),
    "group": ('"group"', "trajectories of one prompt share it"),
    "data_source": ("data_source", "where the prompt is from"),
    "agent_name": ("agent_name", "the agent loop"),
    "status": ("status", "how it ended: completed, length, turn_limit, malformed, timeout, aborted, failed"),
    "failure": ("failure", "cause of a failure"),
    "score": ("score", "the scorer's value"),
    "reward": ("reward", "what it was trained on"),
    "num_turns": ("num_turns", "assistant turns"),
    "tokens": (
        'coalesce(list_sum(list_transform(flatten(versions), lambda s: s."end" - s.start)), 0)::BIGINT',
        "tokens that the policy sampled",
    ),
    "length": (
        'greatest(coalesce(list_max(list_transform(turns, lambda t: t."end")), 0), coalesce(prompt_length[1], 0))',
        "tokens of the longest context window, prompt included",
    ),
    "num_calls": ("coalesce(len(calls), 0)", "tool calls"),
    "errors": ("coalesce(len(list_filter(calls, lambda c: c.error is not null)), 0)", "calls that ended in an error"),
    "malformed": (
        f"coalesce(len(list_filter(calls, lambda c: c.error in ({_MALFORMED}))), 0)",
        "calls of an unknown tool, or with unreadable or wrong arguments",
    ),
    "truncated": ("coalesce(len(list_filter(calls, lambda c: c.truncated)), 0)", "calls whose answer was cut"),
    "tool_seconds": ("coalesce(list_max(list_transform(calls, lambda c: c.seconds)), 0)", "longest wait for a tool"),
    "tools": ("list_sort(list_distinct(list_transform(calls, lambda c: c.name)))", "names of the tools called"),
    "kinds": ("list_sort(list_distinct(list_transform(calls, lambda c: c.error)))", "kinds of its calls' errors"),
    "seconds": ("map_extract(metrics, 'generate_seconds')[1]", "time that generating took"),
    "version": ("list_min(list_transform(flatten(versions), lambda s: s.version))", "oldest weights that sampled it"),
}
"""SQL and meaning of the columns of a table of trajectories. In addition, a condition may use the columns of the file.
"""
OF_THE_GROUP: Mapping[str, tuple[str, str]] = {
    "equal_group": (
        "count(reward) over one_group > 1 and min(reward) over one_group = max(reward) over one_group",
        "its group's rewards are all equal, so that it teaches nothing",
    )
}


def _pairs(left: str, right: str, value: str) -> str:
    """SQL list of `value` of z[1] and z[2], the numbers of two columns at each token that has both."""
    both = f"list_zip(flatten({left}), flatten({right}))"
    return f"list_transform(list_filter({both}, lambda z: z[1] is not null and z[2] is not null), lambda z: {value})"


OF_THE_UPDATE: Mapping[str, tuple[str, tuple[str, ...], str]] = {
    "gap_max": (
        f"list_max({_pairs('logprobs', 'trainer_logprobs', 'abs(z[1] - z[2])')})",
        ("trainer_logprobs",),
        "largest difference of the engine's and the trainer's log-probs",
    ),
    "gap_mean": (
        f"list_avg({_pairs('logprobs', 'trainer_logprobs', 'abs(z[1] - z[2])')})",
        ("trainer_logprobs",),
        "mean difference of the engine's and the trainer's log-probs",
    ),
    "entropy_mean": ("list_avg(flatten(entropy))", ("entropy",), "mean entropy of its tokens"),
    "advantage": ("list_avg(flatten(advantages))", ("advantages",), "mean advantage of its tokens"),
    "weight_max": ("list_max(flatten(weights))", ("weights",), "largest importance weight"),
    "clipped_share": (
        "list_avg(list_transform(flatten(clipped), lambda c: c::INT))",
        ("clipped",),
        "share of its tokens whose ratio was clipped",
    ),
}
"""SQL, columns of the update's file that it needs, and meaning."""
READY: Sequence[tuple[str, str, str]] = (
    ("Largest engine-trainer gap", "gap_max is not null", "-gap_max"),
    ("Malformed calls", "malformed > 0", "-malformed"),
    ("Groups of equal reward", "equal_group", ""),
    ("Longest tool wait", "num_calls > 0", "-tool_seconds"),
    ("Cut answers", "status = 'length' or truncated > 0", ""),
    ("Failed", "status in ('failed', 'timeout', 'aborted')", ""),
    ("Longest", "", "-tokens"),
    ("Right answers without a call", "score >= 1 and num_calls = 0", ""),
)
"""Name, condition and order of questions that are asked often."""


CONDITIONS: Mapping[str, str] = {
    "status": "status = ?",
    "tool": "list_contains(tools, ?)",
    "error": "list_contains(kinds, ?)",
    "source": "data_source = ?",
    "prompt": "prompt = ?",
}
"""SQL of the options that are one value."""


@dataclass(frozen=True, slots=True)
class Question:
    """Conditions that must all hold."""

    where: str = ""
    """SQL over COLUMNS, OF_THE_GROUP, OF_THE_UPDATE and the file's own columns."""
    text: str = ""
    """Is found in a message, turn, call or answer; capitals count as small letters."""
    regex: str = ""
    """The same as a regular expression (RE2)."""
    status: str = ""
    tool: str = ""
    error: str = ""
    source: str = ""
    reward_from: float | None = None
    reward_to: float | None = None
    prompt: str = ""
    """The prompt's whole text, as PROMPT has it."""
    order: str = ""
    """A column's name, with - before it descending; empty: as in the files."""
    limit: int = 200

    @property
    def asked(self) -> str:
        """Text of the question as its user wrote it."""
        return self.where or self.regex or self.text

    def too_long(self, seconds: float) -> str:
        """Write the error that the question takes too long before any file is read."""
        return f"the question {self.asked!r:.200} alone takes more than {seconds:.0f} seconds"

    @property
    def words(self) -> set[str]:
        """Names in the condition, and names that its other conditions read."""
        read = [
            name for option in CONDITIONS if getattr(self, option) for name in re.findall(r"\w+", CONDITIONS[option])
        ]
        others = ["reward", "score", "uid", "failure"]
        return {*re.findall(r"[A-Za-z_]\w*", f"{self.where} {self.order}".lower()), *read, *others}


@dataclass(slots=True)
class Answer:
    """Rows that were found, and how much was searched."""

    rows: list[Found]
    searched: int
    parts: int
    problems: list[str]
    """Files that could not be read."""
    is_cut: bool = False
    """There may be more rows than the limit."""


def ask(run: Run, parts: Sequence[Part], question: Question) -> Answer:
    """Ask the parts in their order. Raises DataError, in words, for a condition that is no SQL or has no meaning."""
    check(question)
    answer, has_meaning, error = Answer([], 0, len(parts), []), False, ""
    try:
        for said in CHILDREN.ask({**_place(run, parts), "question": asdict(question)}, SECONDS):
            has_meaning, error = True, str(said.get("error", ""))
            if "problem" in said:
                answer.problems.append(str(said["problem"]))
            if "problem" in said or "rows" in said:
                answer.rows += cast(list[Found], said.get("rows", []))
                answer.searched += 1
                _keep_best(answer, question)
    except Ended as ended:
        if not ended.is_late:
            raise DataError(TOO_LARGE) from ended
        if not has_meaning:
            raise DataError(question.too_long(SECONDS)) from ended
    if error:
        raise DataError(error)
    return answer


def check(question: Question) -> None:
    """Raise DataError for an unknown order, a limit out of bounds, and a text that is too long to be read."""
    known = {*COLUMNS, *OF_THE_GROUP, *OF_THE_UPDATE}
    if question.order and question.order.removeprefix("-") not in known:
        raise DataError(
            f"order={question.order:.200}: want one of {', '.join(sorted(known))}, perhaps with - before it"
        )
    if not 0 < question.limit <= MOST_ROWS:
        raise DataError(f"limit={question.limit}: want a number from 1 to {MOST_ROWS}")
    for name in ("where", "text", "regex", *(option for option in CONDITIONS if option != "prompt")):
        if len(text := getattr(question, name)) > MOST_CHARACTERS:
            raise DataError(f"{name}={text:.50}...: want at most {MOST_CHARACTERS} characters, not {len(text)}")


def prompt_of(run: Run, part: Part, row: int) -> str:
    """Return the text of a trajectory's prompt. Raises DataError without a prompt."""
    found: dict[str, JSON] = {}
    try:
        for said in CHILDREN.ask({**_place(run, [part]), "row": row}, SECONDS):
            found |= said
    except Ended as ended:
        raise DataError(f"{part.name}, row {row}: its prompt takes too much time or memory to be read") from ended
    if "error" in found:
        raise DataError(str(found["error"]))
    return str(found["prompt"])


def _place(run: Run, parts: Sequence[Part]) -> dict[str, object]:
    folder = run.folder
    return {"folder": folder.path if folder.is_local else folder.url, "parts": [asdict(part) for part in parts]}


def _keep_best(answer: Answer, question: Question) -> None:
    """Sort by the requested order, and keep the first rows."""
    if question.order:
        name = question.order.removeprefix("-")
        known = [row for row in answer.rows if row[name] is not None]
        none = [row for row in answer.rows if row[name] is None]
        known.sort(key=lambda row: _sortable(row[name]), reverse=question.order.startswith("-"))
        answer.rows = known + none
    answer.is_cut |= len(answer.rows) > question.limit
    del answer.rows[question.limit :]


def _sortable(value: JSON) -> tuple[float, str]:
    return (float(value), "") if isinstance(value, int | float) else (0.0, str(value))


def step_question(parts: Sequence[Part]) -> Question:
    """Ask for all of a step's trajectories, with the update's numbers where a file of them is there."""
    names = [*OF_THE_UPDATE] if any(part.update for part in parts) else []
    condition = " or ".join(f"{name} is null or true" for name in ["equal_group", *names])
    return replace(Question(), where=condition, limit=MOST_ROWS)
