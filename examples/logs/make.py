"""Write a made-up log of an agent in production: one OpenAI call a line, and what users said of some answers.

    python examples/logs/make.py --out runs/logs/log [--conversations 2000] [--bad 0.12] [--seed 1]

The agent answers the quickstart's questions with its two tools. A share of its conversations is bad: it guesses, asks
a tool for something else, or answers in another form. Users say so of most bad ones, like half of the good ones, and
are wrong now and then. `calls.jsonl` has the requests and responses, `feedback.jsonl` the thumbs, and `truth.jsonl`
which conversations are bad, which no training reads.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

from agentrl.trajectory import Message
from data_prep.files import write_json_lines
from data_prep.made_up import Task, World
from data_prep.transcripts import TOOLS, exchange, final, good, guess, mistaken, number_in, prompt

FLAWS = ("guess", "other argument", "other form")
LIKED, DISLIKED = 0.5, 0.8
"""Shares of good conversations with a thumb up, and of bad ones with a thumb down."""
WRONG = 0.02
"""Share of thumbs that say the opposite."""
BEGAN = datetime(2026, 11, 2, 9, tzinfo=UTC)
COMMENTS = {"guess": "It made the number up.", "other argument": "It looked up something else.", "other form": ""}


def conversation(task: Task, flaw: str | None, world: World, rng: Random) -> list[Message]:
    """Make the messages of a conversation."""
    if flaw == "guess":
        return [*prompt(task), guess(rng)]
    if flaw == "other argument":
        call = mistaken(task.calls[0], world, rng)
        return [*prompt(task), *exchange(call), final(f"#### {number_in(call.answer)}")]
    if flaw == "other form":
        return [*good(task)[:-1], final(f"The answer is {task.answer}.")]
    return good(task)


def calls_of(messages: list[Message], name: str, began: datetime) -> Iterator[dict[str, Any]]:
    """Yield the calls of a conversation, each with all messages before its answer, as an OpenAI client sends them."""
    sent: list[dict[str, Any]] = []
    for number, message in enumerate(messages):
        one: dict[str, Any] = dict(message)
        if "tool_calls" in one:
            one["tool_calls"] = [{"id": f"call_{name}_{number}", **call} for call in message["tool_calls"]]
        if one["role"] == "tool":
            one["tool_call_id"] = sent[-1]["tool_calls"][0]["id"]
        if one["role"] == "assistant":
            choice = {"index": 0, "message": one, "finish_reason": "tool_calls" if "tool_calls" in one else "stop"}
            time = began + timedelta(seconds=2 * number)
            head = {"id": f"chatcmpl-{name}-{number}", "object": "chat.completion", "created": int(time.timestamp())}
            yield {
                "time": time.isoformat(),
                "session_id": name,
                "request": {"model": "agent-1", "messages": list(sent), "tools": TOOLS},
                "response": {**head, "model": "agent-1", "choices": [choice]},
            }
        sent.append(one)


def feedback(response: str, flaw: str | None, rng: Random) -> dict[str, Any] | None:
    """Draw what a user says of an answer; None: nothing."""
    if rng.random() >= (LIKED if flaw is None else DISLIKED):
        return None
    is_up = (flaw is None) != (rng.random() < WRONG)
    said: dict[str, Any] = {"response_id": response, "feedback": "up" if is_up else "down"}
    if flaw is not None and not is_up and COMMENTS[flaw]:
        said["comment"] = COMMENTS[flaw]
    return said


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--conversations", type=int, default=2000)
    parser.add_argument("--bad", type=float, default=0.12, help="share of bad conversations")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    world, rng = World(given.seed), Random(f"log {given.seed}")
    bad = set(rng.sample(range(given.conversations), round(given.bad * given.conversations)))
    calls: list[tuple[str, dict[str, Any]]] = []
    thumbs: list[Mapping[str, Any]] = []
    truth: list[Mapping[str, Any]] = []
    for number, task in enumerate(islice(world.tasks("train", purpose="log"), given.conversations)):
        flaw = rng.choice(FLAWS) if number in bad else None
        made = list(
            calls_of(conversation(task, flaw, world, rng), f"{number:06d}", BEGAN + timedelta(seconds=3 * number))
        )
        calls += [(one["time"], one) for one in made]
        last = made[-1]["response"]["id"]
        if said := feedback(last, flaw, rng):
            thumbs.append(said)
        truth.append({"response_id": last, "flaw": flaw})
    # Conversations overlap, as those of a service do.
    write_json_lines(given.out / "calls.jsonl", [one for _, one in sorted(calls, key=lambda each: each[0])])
    write_json_lines(given.out / "feedback.jsonl", thumbs)
    write_json_lines(given.out / "truth.jsonl", truth)
    ups = sum(one["feedback"] == "up" for one in thumbs)
    print(
        f"{given.out}: {len(calls)} calls of {given.conversations} conversations, {ups} thumbs up and "
        f"{len(thumbs) - ups} down; {len(bad)} conversations are bad"
    )


if __name__ == "__main__":
    main()
