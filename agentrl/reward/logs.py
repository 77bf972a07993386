"""Answers compared with logged ones that people liked or disliked, as `python -m data_prep.log_rows` writes them.

A logged answer holds an assistant's acts between two messages of its user: its calls, and its last words.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from agentrl.chat.message import content_text
from agentrl.reward.search_qa import f1, normalise
from agentrl.system.json_value import JSON, as_list, as_object
from agentrl.tool.arguments import canonical_call
from agentrl.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class Answer:
    """Calls in their plain form, and the words after them; no words where the log ends with a call."""

    calls: Counter[str]
    text: str

    def equals(self, logged: Answer) -> bool:
        """Say whether both make the same calls, in any order, and end with the same words."""
        return self.calls == logged.calls and (not logged.text or normalise(self.text) == normalise(logged.text))

    def likeness(self, logged: Answer) -> float:
        """Return the mean of two F1 values, of calls and of words; of one of them where the log has the other not."""
        parts = []
        if both := self.calls.total() + logged.calls.total():
            parts.append(2 * (self.calls & logged.calls).total() / both)
        if logged.text:
            parts.append(f1(self.text, [logged.text]))
        return sum(parts) / len(parts) if parts else 0.0


def compute_score(ground_truth: JSON, trajectory: Trajectory) -> dict[str, float]:
    """Score: 1 for a liked answer, 0 for a disliked one; else the likeness to the nearest liked answer less that to the
    nearest disliked one, and at least 0.

    Further numbers: `liked` and `disliked`, 1 for an answer that equals one; `liked_f1` and `disliked_f1`, the
    likeness. Raises ValueError for a ground truth without a liked answer.
    """
    truth = as_object(ground_truth)
    liked, disliked = logged(truth.get("liked")), logged(truth.get("disliked"))
    if not liked:
        raise ValueError(
            "ground_truth must be {liked: [{text: ..., calls: [...]}], disliked: [...]} with a liked answer, found "
            f"{ground_truth!r:.200}; rows without a liked answer need a judge (python -m data_prep.log_rows --judge)"
        )
    given = answer_of(trajectory)
    right, wrong = any(map(given.equals, liked)), any(map(given.equals, disliked))
    near, far = max(map(given.likeness, liked)), max(map(given.likeness, disliked), default=0.0)
    score = 1.0 if right else 0.0 if wrong else max(0.0, near - far)
    return {"score": score, "liked": float(right), "disliked": float(wrong), "liked_f1": near, "disliked_f1": far}


def answer_of(trajectory: Trajectory) -> Answer:
    """Return the policy's acts: all its calls, and its last words."""
    calls = Counter(canonical_call(call.name, call.arguments) for call in trajectory.tool_calls)
    last = trajectory.messages[-1] if trajectory.messages else None
    if last is None or last["role"] != "assistant" or last.get("tool_calls"):
        return Answer(calls, "")
    return Answer(calls, content_text(last.get("content")))


def logged(answers: JSON) -> list[Answer]:
    """Read logged answers: a list of {text, calls}."""
    return [_logged(as_object(answer)) for answer in as_list(answers)]


def _logged(answer: dict[str, JSON]) -> Answer:
    calls = (as_object(call) for call in as_list(answer.get("calls")))
    made = Counter(canonical_call(str(call.get("name")), call.get("arguments")) for call in calls)
    return Answer(made, str(answer.get("text") or ""))
