"""Answers of the viewer as JSON values: one method a page, served by `server` and written into files by `export`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TypeAlias, cast

from agentrl.errors import DataError
from agentrl.system.json_value import JSON, as_list
from agentrl.view.parts import Part
from agentrl.view.questions import (
    COLUMNS,
    OF_THE_GROUP,
    OF_THE_UPDATE,
    READY,
    SECONDS,
    Question,
    ask,
    prompt_of,
    step_question,
)
from agentrl.view.record import Record, common_beginning, length, mean_of, of_window, pieces, trajectory
from agentrl.view.run import Run

Place: TypeAlias = tuple[int, str, int]
"""Number of a run, name of a part, row."""
MOST_SIDE_BY_SIDE = 64


class Viewer:
    """All viewed runs; a requested run is looked up, never taken as a path."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self._runs = list(runs)
        self._kept: list[Run] = []

    def keep(self, run: Run) -> int:
        """Take the result of a replay, so that it can be shown by the returned number; it is not among the runs."""
        self._kept.append(run)
        return len(self._runs) + len(self._kept) - 1

    def overview(self) -> Record:
        """Runs with their sets, newest numbers and versions, and the possible questions."""
        return {
            "runs": [self._summary(number, run) for number, run in enumerate(self._runs)],
            "differing": self._differing(),
            "ready": [{"name": name, "where": where, "order": order} for name, where, order in READY],
            "columns": {
                **{name: meaning for name, (_, meaning) in {**COLUMNS, **OF_THE_GROUP}.items()},
                **{name: meaning for name, (_, _, meaning) in OF_THE_UPDATE.items()},
            },
        }

    def _summary(self, number: int, run: Run) -> Record:
        run.refresh()
        sets: dict[str, list[int]] = {}
        for part in run.parts:
            steps = sets.setdefault(part.set, [])
            if not steps or steps[-1] != part.step:
                steps.append(part.step)
        return {
            "number": number,
            "name": run.name,
            "url": run.url,
            "kind": run.kind,
            "can_replay": run.can_replay,
            "version": run.version,
            "sets": sets,
            "steps": len(run.metrics.rows),
            "last": {**run.metrics.newest},
            "alarms": len(run.alarms.rows),
            "numbers": run.numbers,
        }

    def _differing(self) -> dict[str, list[JSON]]:
        """Keys of the configs and versions of the last writers that differ between runs, with the value of each run."""
        settings = [{**run.config, **_last_versions(run)} for run in self._runs]
        found = [one for one in settings if one]
        if len(found) < 2:
            return {}
        keys = {key: None for one in found for key in one}
        return {
            key: [one.get(key) for one in settings] for key in keys if len({str(one.get(key)) for one in found}) > 1
        }

    def curves(self, number: int) -> Record:
        """Every metric of a run by step, its alarms, and why it ended before its last step."""
        run = self.run(number)
        by_step = {row["step"]: row for row in run.metrics.rows if isinstance(row.get("step"), int)}
        steps = sorted(cast(int, step) for step in by_step)
        names = sorted({name for row in by_step.values() for name in row} - {"step"})
        series = {name: [by_step[step].get(name) for step in steps] for name in names}
        return {
            "steps": steps,
            "series": series,
            "alarms": run.alarms.rows[-500:],
            "ended": (run.folder.read("ended.txt", end=1000) or b"").decode(errors="replace").strip(),
            "unreadable": run.metrics.unreadable,
            "config": run.config,
            "writers": [one.model_dump() for one in run.writers],
        }

    def step(self, number: int, set: str, step: int) -> Record:
        """All trajectories of a step, as a table."""
        run = self.run(number)
        parts = run.of_step(set, step)
        answer = ask(run, parts, step_question(parts))
        alarms = [one for one in run.alarms.rows if one.get("step") == step]
        steps = sorted({one.step for one in run.parts if one.set == set})
        return {"set": set, "step": step, "steps": steps, "alarms": alarms, **asdict(answer)}

    def search(self, number: int, question: Question, set: str, first: int | None, last: int | None) -> Record:
        """Trajectories that meet a question, of the newest steps first."""
        run = self.run(number)
        parts = [
            part
            for part in reversed(run.parts)
            if (not set or part.set == set)
            and (first is None or part.step >= first)
            and (last is None or part.step <= last)
        ]
        return {**asdict(ask(run, parts, question)), "seconds": SECONDS}

    def trajectory(self, place: Place) -> Record:
        """One trajectory, and its neighbouring rows."""
        number, name, row = place
        run = self.run(number)
        return {"run": number, **trajectory(run, run.part(name), row)}

    def same_prompt(self, place: Place) -> Record:
        """Trajectories of the run that began with the same prompt."""
        number, name, row = place
        run = self.run(number)
        question = Question(prompt=prompt_of(run, run.part(name), row), limit=500)
        return {**asdict(ask(run, run.parts, question)), "seconds": SECONDS}

    def group(self, number: int, name: str, group: int) -> Record:
        """Trajectories of one prompt of a step, side by side."""
        run = self.run(number)
        part = run.part(name)
        parts = [one for one in run.of_step(part.set, part.step) if one.batch == part.batch]
        answer = ask(run, parts, Question(where=f'"group" = {group}', limit=MOST_SIDE_BY_SIDE))
        if not answer.rows:
            raise DataError(answer.problems[0] if answer.problems else f"{name}: there is no group {group}")
        return self.side_by_side([(number, str(row["part"]), cast(int, row["row"])) for row in answer.rows])

    def first_other_window(self, place: Place, other: Place) -> int:
        """Number of the first context window that is not the same in two trajectories; 0 where all are."""
        one, two = self.trajectory(place), self.trajectory(other)
        count = len(as_list(cast(JSON, one["transcripts"])))
        pairs = ((of_window(one, window), of_window(two, window)) for window in range(count))
        return next((window for window, pair in enumerate(pairs) if common_beginning(*pair) is not None), 0)

    def side_by_side(self, places: Sequence[Place], window: int | None = None) -> Record:
        """Trajectories with their common part separated from where they differ.

        window: number of the context window to show, alone; None: the first.
        """
        if not 0 < len(places) <= MOST_SIDE_BY_SIDE:
            raise DataError(f"want 1 to {MOST_SIDE_BY_SIDE} trajectories side by side, not {len(places)}")
        records = [self.trajectory(place) for place in places]
        if window is not None:
            records = [of_window(record, window) for record in records]
        differs = [common_beginning(records[0], other) for other in records[1:]]
        has_tokens = all(record["transcripts"] for record in records)
        alike = length(records[0]) if differs else 0
        common = min((place for place in differs if place is not None), default=alike)
        run = self.run(places[0][0])
        return {
            "common": common,
            "unit": "tokens" if has_tokens else "turns",
            "beginning": [one for one in pieces(run, records[0], 0, common) if cast(int, one["start"]) < common],
            "members": [
                self._member(record, common, place) for record, place in zip(records, [None, *differs], strict=True)
            ],
        }

    def _member(self, record: Record, common: int, differs: int | None) -> Record:
        """One of several: from where all have in common on, and where it begins to differ from the first."""
        run = self.run(cast(int, record["run"]))
        names = (
            *("run", "part", "set", "step", "row", "uid", "group", "status", "failure", "score", "reward"),
            "data_source",
        )
        turns = cast(list[dict[str, object]], record["turns"])
        return {
            **{name: record[name] for name in names},
            "advantage": mean_of(record, "advantages"),
            "turns": len([turn for turn in turns if turn["role"] == "assistant"]),
            "calls": sum(len(cast(list[object], turn["calls"])) for turn in turns),
            "differs": differs,
            "pieces": pieces(run, record, common, differs),
        }

    def part(self, number: int, name: str) -> Part:
        """Look up a part of a run. Raises DataError for an unknown part."""
        return self.run(number).part(name)

    def run(self, number: int) -> Run:
        """Look a run up. Raises DataError for an unknown number."""
        found = [*self._runs, *self._kept]
        if not 0 <= number < len(found):
            raise DataError(f"there is no run {number}: {len(self._runs)} are open")
        found[number].refresh()
        return found[number]


def _last_versions(run: Run) -> dict[str, JSON]:
    """The versions that wrote a run last, by `versions/` and the package's name."""
    return {f"versions/{name}": found for one in run.writers[-1:] for name, found in one.versions.items()}
