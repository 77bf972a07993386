"""Judges a finished run by its files: is a prompt lost, is a fault trained on, is the update another one?"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.exact.recompute import differences, recorded, rows_of, scores_of, sequences_of, survives
from labs.fault_matrix.assets import GRAIN, HIGHEST, LOWEST, PROMPTS, STEPS, N, question

POISON = "POISON"
"""Word in everything that a faulty tool's server says."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Judgement of a run's files."""

    problems: list[str]
    """Empty: all of it holds."""
    left_out: int
    """Trajectories that are not trained on."""


def judge(run: Path, policy: Path, bound: int, *, judged: bool) -> Verdict:
    """Judge a run. `bound`: most versions that a token may be older; `judged`: a model scored, not the scorer."""
    rows = [rows_of(run, step) for step in range(1, STEPS + 1)]
    problems = lost(run, rows, bound) + poisoned(rows, bound, judged=judged)
    problems += [] if problems else differences(run, policy, STEPS)
    return Verdict(problems, sum(not survives(row) for step in rows for row in step))


def lost(run: Path, steps: Sequence[Sequence[Mapping[str, Any]]], bound: int) -> list[str]:
    """Count prompts and trajectories: every prompt of the data in one step, with all its trajectories."""
    problems: list[str] = []
    seen: Counter[str] = Counter()
    for number, rows in enumerate(steps, 1):
        of_step = Counter(asked(row) for row in rows)
        if len({row["uid"] for row in rows}) != len(rows):
            problems.append(f"step {number} has two trajectories of one name")
        if {*of_step.values()} != {N} or len(of_step) != PROMPTS:
            problems.append(f"step {number} has {dict(of_step)}; expected {PROMPTS} prompts, {N} trajectories each")
        if bound == 0 and (drawn := {question(one) for one in range((number - 1) * PROMPTS, number * PROMPTS)}) != {
            *of_step
        }:
            problems.append(f"step {number} has {sorted(of_step)}; drawn were {sorted(drawn)}")
        seen.update(of_step.keys())
    whole = Counter(question(one) for one in range(PROMPTS * STEPS))
    if seen != whole:
        problems.append(f"prompts in no step: {sorted(whole - seen)}; in two: {sorted(seen - whole)}")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    if [line["step"] for line in lines if line["step"] > 0] != list(range(1, STEPS + 1)):
        problems.append(f"metrics.jsonl has the steps {[line['step'] for line in lines]}")
    if bound:
        problems += ledger_problems(run)
    return problems


def ledger_problems(run: Path) -> list[str]:
    """Count the statuses in the ledger: one for each prompt, of a batch for each step."""
    batches = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]
    found: Counter[int] = Counter()
    for batch in batches:
        for status, spans in batch.items():
            if status not in ("step", "version"):
                found.update(one for first, end in spans for one in range(first, end))
    problems = []
    if [batch["step"] for batch in batches] != list(range(1, STEPS + 1)):
        problems.append(f"the ledger has the steps {[batch['step'] for batch in batches]}")
    if found != Counter(range(PROMPTS * STEPS)):
        problems.append(f"the ledger's statuses are {dict(found)}; expected one for each of {PROMPTS * STEPS} prompts")
    return problems


def poisoned(steps: Sequence[Sequence[Mapping[str, Any]]], bound: int, *, judged: bool) -> list[str]:
    """Hold each trajectory's score, and what the update made of it, against how it ended."""
    problems: list[str] = []
    for version, rows in enumerate(steps):
        for row in rows:
            name, score = f"step {version + 1}, {row['uid']}", row["score"]
            if row["status"] in ("failed", "timeout", "aborted") and score is not None:
                problems.append(f"{name} is {row['status']} and has the score {score}")
            scores = {} if score is None else {"": score} if judged else scores_of(row)
            for role, one in scores.items():
                if not (0 < one <= 1 if judged else is_of_the_scorer(one)):
                    problems.append(f"{name} has the score {one} {role}, which no scorer gives")
            if any(scores) and sum(scores.values()) != score:
                problems.append(f"{name} has the score {score}, which is not the sum of {scores}")
            if survives(row) and any(POISON in (turn["text"] or "") for turn in row["turns"]):
                problems.append(f"{name} was told what a faulty server says, and is trained on")
            for sequence in sequences_of(row):
                trained = recorded(sequence, "advantages") is not None
                if trained != survives(row):
                    problems.append(f"{name} is {row['status']} with score {score}, and trained on: {trained}")
                if trained and min(sequence.versions) < version - bound:
                    problems.append(f"{name} has tokens of version {min(sequence.versions)}, trained on at {version}")
    return problems


def is_of_the_scorer(score: float) -> bool:
    place = (score - LOWEST) / GRAIN
    return LOWEST <= score <= HIGHEST and place == round(place)


def asked(row: Mapping[str, Any]) -> str:
    """Find the question that a trajectory answers."""
    texts = [message["content"] or "" for message in row["messages"]]
    return next((question(one) for one in range(PROMPTS * STEPS) if any(question(one) in text for text in texts)), "?")
