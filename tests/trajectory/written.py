"""Trajectories written by hand, token by token: a token is a character, its id the character's code point."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.trajectory import Status, ToolAnswer, ToolCallRecord, Trajectory, Transcript, Turn

VOCAB_SIZE = 0x110000


def decode(ids: Sequence[int]) -> str:
    return "".join(map(chr, ids))


class Ending:
    """Ends the trajectory that a subclass has written."""

    trajectory: Trajectory

    def ends(
        self,
        score: float | None,
        status: Status = Status.COMPLETED,
        failure: str | None = None,
        cause: str | None = None,
    ) -> Trajectory:
        self.trajectory.score, self.trajectory.status, self.trajectory.failure = score, status, failure
        self.trajectory.failure_cause = cause
        return self.trajectory


class Writer(Ending):
    """Appends to one trajectory as an agent loop would."""

    def __init__(self, prompt: str, uid: str = "u", group: int = 0, source: str = "unknown") -> None:
        self.transcript = Transcript()
        self.transcript.append_prompt(_ids(prompt))
        self.trajectory = Trajectory(uid, group, source, "tool_agent", [self.transcript])
        self.trajectory.messages.append({"role": "user", "content": prompt})

    def says(self, text: str, *calls: ToolCallRecord, reward: float | None = None, version: int = 3) -> Writer:
        start = len(self.transcript)
        # Quarters are exact in float32, as the log-probs of a real engine are.
        logprobs = [-0.25 * (1 + place % 3) for place in range(len(text))]
        self.transcript.append_sampled(_ids(text), logprobs, version)
        self._turn("assistant", text, start, list(calls), reward)
        return self

    def hears(self, text: str, role: str = "tool") -> Writer:
        start = len(self.transcript)
        self.transcript.append_observed(_ids(text))
        self._turn(role, text, start, [], None)
        return self

    def _turn(self, role: str, text: str, start: int, calls: list[ToolCallRecord], reward: float | None) -> None:
        self.trajectory.turns.append(
            Turn(role, text, 0, start, len(self.transcript), calls, "stop" if role == "assistant" else None, reward)
        )
        self.trajectory.messages.append({"role": role, "content": text})


def tool_trajectory() -> Trajectory:
    """Prompt, a call, its answer, a final answer; one turn reward of 0.5 and the score 1."""
    call = ToolCallRecord("calculator", {"expression": "17*3"}, ToolAnswer("51", seconds=0.125))
    writer = Writer("What is 17*3?", uid="train/1/0/0", source="quickstart/calculator")
    writer.says('<tool_call>{"name": "calculator"}</tool_call>', call, reward=0.5).hears("51").says("It is 51.")
    return writer.ends(1.0)


def _ids(text: str) -> list[int]:
    return [ord(character) for character in text]
