from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl.observe.invariants import check_trajectory
from agentrl.trajectory import Status, ToolAnswer, ToolCallRecord, Trajectory, Turn, VersionSpan
from agentrl.trajectory.parquet import read_trajectories, write_trajectories
from tests.trajectory.written import VOCAB_SIZE, Writer, tool_trajectory


def test_a_sound_trajectory_has_no_violation() -> None:
    assert check_trajectory(tool_trajectory(), VOCAB_SIZE) == []


def test_adjacent_assistant_turns_and_several_versions_are_sound() -> None:
    trajectory = Writer("p").says("ab", version=1).says("cd", version=2).ends(0.0)
    assert check_trajectory(trajectory, VOCAB_SIZE) == []


def test_a_completed_trajectory_whose_sampled_tokens_its_loop_masks_is_sound() -> None:
    masked = Writer("p").hears("what the policy said").ends(0.0)
    assert masked.status is Status.COMPLETED and check_trajectory(masked, VOCAB_SIZE) == []
    empty = Writer("p").says("").ends(0.0)
    (text,) = check_trajectory(empty, VOCAB_SIZE)
    assert text.endswith("it is completed, and no token of its assistant turns is sampled")


def test_a_failed_trajectory_without_tokens_is_sound() -> None:
    assert check_trajectory(Trajectory("u", 0, status=Status.FAILED, failure="EngineError: x"), 10) == []


def test_what_was_written_to_disk_is_still_sound(tmp_path: Path) -> None:
    (back,) = read_trajectories(
        write_trajectories(tmp_path, [tool_trajectory()], step=1, split="train", turn_reward_coef=1.0)
    )
    assert check_trajectory(back, VOCAB_SIZE) == []


def put(one: object, **values: object) -> None:
    for name, value in values.items():
        setattr(one, name, value)


def of_token(trajectory: Trajectory, *, sampled: bool, **values: float) -> None:
    """Change the first token after the prompt with that mask."""
    transcript = trajectory.transcripts[0]
    index = transcript.mask.index(int(sampled), transcript.prompt_length)
    for name, value in values.items():
        getattr(transcript, name)[index] = value


def span_over_observed(trajectory: Trajectory) -> None:
    first = trajectory.transcripts[0].versions[0]
    trajectory.transcripts[0].versions[0] = VersionSpan(first.version, first.start, first.end + 1)


def overlapping_spans(trajectory: Trajectory) -> None:
    trajectory.transcripts[0].versions.insert(1, trajectory.transcripts[0].versions[0])


VIOLATIONS: list[tuple[Callable[[Trajectory], object], str]] = [
    (lambda t: t.transcripts[0].mask.pop(), "69 ids, 68 mask entries"),
    (lambda t: t.transcripts[0].logprobs.pop(), "68 log-probs"),
    (lambda t: of_token(t, sampled=True, mask=2), "has the mask 2"),
    (lambda t: of_token(t, sampled=False, logprobs=-0.5), "observed token 58 has the log-prob -0.5"),
    (lambda t: of_token(t, sampled=True, logprobs=0.1), "sampled token 13 has the log-prob 0.1"),
    (lambda t: of_token(t, sampled=True, logprobs=-math.inf), "log-prob -inf"),
    (lambda t: of_token(t, sampled=True, logprobs=math.nan), "log-prob nan"),
    (lambda t: of_token(t, sampled=True, ids=VOCAB_SIZE), "token 13 has the id 1114112, outside the vocabulary"),
    (lambda t: of_token(t, sampled=True, ids=-1), "token 13 has the id -1"),
    (lambda t: put(t.transcripts[0], prompt_length=0), "prompt length 0"),
    (lambda t: put(t.transcripts[0], prompt_length=14), "the mask is 1 in the prompt"),
    (lambda t: t.transcripts[0].versions.pop(), "version spans and sampled tokens disagree on token 60"),
    (span_over_observed, "version spans and sampled tokens disagree on token 58"),
    (overlapping_spans, "version span [13, 58) is empty, out of order"),
    (lambda t: put(t.turns[-1], end=70), "assistant turn [60, 70) is out of order or outside"),
    (lambda t: put(t.turns[0], end=57), "assistant turns and sampled tokens disagree on token 57"),
    (lambda t: put(t.turns[1], role="assistant"), "assistant turns and sampled tokens disagree on token 58"),
    (lambda t: put(t.turns[1], start=57), "tool turn [57, 60) is out of order"),
    (lambda t: t.turns.append(Turn("user", "", 1, 0, 0)), "turn 3: it stands in transcript 1 of 1"),
    (
        lambda t: put(t, status=Status.FAILED, failure="EngineError: x"),
        "it failed and yet has the score 1.0",
    ),
    (lambda t: put(t, status=Status.FAILED, score=None), "it failed without a cause"),
    (lambda t: put(t, transcripts=[], turns=[]), "it is completed and has no transcript"),
    (lambda t: put(t, score=math.nan), "its score is nan"),
    (lambda t: put(t.turns[0], reward=math.inf), "its reward is inf"),
    (lambda t: t.turns[1].calls.append(ToolCallRecord("t", {})), "a tool turn has tool calls"),
    (lambda t: put(t.turns[0].calls[0], answer=ToolAnswer(error="oops")), "unknown error kind 'oops'"),
]


@pytest.mark.parametrize(("violate", "said"), VIOLATIONS)
def test_each_violation_is_told(violate: Callable[[Trajectory], object], said: str) -> None:
    trajectory = tool_trajectory()
    violate(trajectory)
    violations = check_trajectory(trajectory, VOCAB_SIZE)
    assert any(said in text for text in violations), violations
    assert all(text.startswith("train/1/0/0: ") for text in violations)
