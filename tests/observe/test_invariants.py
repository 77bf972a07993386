from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl.observe.invariants import check_trajectory
from agentrl.trajectory import Status, ToolCallRecord, Trajectory, Transcript, Turn, VersionSpan
from agentrl.trajectory.parquet import read_trajectories, write_trajectories
from tests.trajectory.written import VOCAB_SIZE, Writer, tool_trajectory


def test_a_sound_trajectory_has_no_violation() -> None:
    assert check_trajectory(tool_trajectory(), VOCAB_SIZE) == []


def test_adjacent_assistant_turns_and_several_versions_are_sound() -> None:
    trajectory = Writer("p").says("ab", version=1).says("cd", version=2).ends(0.0)
    assert check_trajectory(trajectory, VOCAB_SIZE) == []


def test_a_failed_trajectory_without_tokens_is_sound() -> None:
    assert check_trajectory(Trajectory("u", 0, status=Status.FAILED, failure="EngineError: x"), 10) == []


def test_what_was_written_to_disk_is_still_sound(tmp_path: Path) -> None:
    (back,) = read_trajectories(
        write_trajectories(tmp_path, [tool_trajectory()], step=1, split="train", turn_reward_coef=1.0)
    )
    assert check_trajectory(back, VOCAB_SIZE) == []


def token(trajectory: Trajectory, *, sampled: bool) -> tuple[Transcript, int]:
    """The first token after the prompt with that mask."""
    transcript = trajectory.transcripts[0]
    return transcript, transcript.mask.index(int(sampled), transcript.prompt_length)


def shorten_mask(trajectory: Trajectory) -> None:
    trajectory.transcripts[0].mask.pop()


def shorten_logprobs(trajectory: Trajectory) -> None:
    trajectory.transcripts[0].logprobs.pop()


def mask_of_two(trajectory: Trajectory) -> None:
    transcript, index = token(trajectory, sampled=True)
    transcript.mask[index] = 2


def observed_logprob(trajectory: Trajectory) -> None:
    transcript, index = token(trajectory, sampled=False)
    transcript.logprobs[index] = -0.5


def positive_logprob(trajectory: Trajectory) -> None:
    transcript, index = token(trajectory, sampled=True)
    transcript.logprobs[index] = 0.1


def infinite_logprob(trajectory: Trajectory) -> None:
    transcript, index = token(trajectory, sampled=True)
    transcript.logprobs[index] = -math.inf


def nan_logprob(trajectory: Trajectory) -> None:
    transcript, index = token(trajectory, sampled=True)
    transcript.logprobs[index] = math.nan


def id_outside(trajectory: Trajectory) -> None:
    trajectory.transcripts[0].ids[3] = VOCAB_SIZE


def negative_id(trajectory: Trajectory) -> None:
    trajectory.transcripts[0].ids[3] = -1


def no_prompt(trajectory: Trajectory) -> None:
    trajectory.transcripts[0].prompt_length = 0


def sampled_prompt(trajectory: Trajectory) -> None:
    trajectory.transcripts[0].prompt_length += 1


def missing_span(trajectory: Trajectory) -> None:
    trajectory.transcripts[0].versions.pop()


def span_over_observed(trajectory: Trajectory) -> None:
    first = trajectory.transcripts[0].versions[0]
    trajectory.transcripts[0].versions[0] = VersionSpan(first.version, first.start, first.end + 1)


def overlapping_spans(trajectory: Trajectory) -> None:
    trajectory.transcripts[0].versions.insert(1, trajectory.transcripts[0].versions[0])


def turn_past_the_end(trajectory: Trajectory) -> None:
    trajectory.turns[-1].end += 1


def turn_too_short(trajectory: Trajectory) -> None:
    trajectory.turns[0].end -= 1


def observed_as_assistant(trajectory: Trajectory) -> None:
    trajectory.turns[1].role = "assistant"


def overlapping_turns(trajectory: Trajectory) -> None:
    trajectory.turns[1].start -= 1


def no_such_transcript(trajectory: Trajectory) -> None:
    trajectory.turns.append(Turn("user", "", 1, 0, 0))


def failed_with_score(trajectory: Trajectory) -> None:
    trajectory.status, trajectory.failure = Status.FAILED, "EngineError: x"


def failed_without_cause(trajectory: Trajectory) -> None:
    trajectory.status, trajectory.score = Status.FAILED, None


def nothing_sampled(trajectory: Trajectory) -> None:
    trajectory.transcripts, trajectory.turns = [], []


def score_nan(trajectory: Trajectory) -> None:
    trajectory.score = math.nan


def reward_infinite(trajectory: Trajectory) -> None:
    trajectory.turns[0].reward = math.inf


def tool_turn_with_calls(trajectory: Trajectory) -> None:
    trajectory.turns[1].calls.append(ToolCallRecord("t", {}, ""))


def unknown_error_kind(trajectory: Trajectory) -> None:
    trajectory.turns[0].calls[0].error = "oops"


@pytest.mark.parametrize(
    ("violate", "said"),
    [
        (shorten_mask, "69 ids, 68 mask entries"),
        (shorten_logprobs, "68 log-probs"),
        (mask_of_two, "has the mask 2"),
        (observed_logprob, "observed token 58 has the log-prob -0.5"),
        (positive_logprob, "sampled token 13 has the log-prob 0.1"),
        (infinite_logprob, "log-prob -inf"),
        (nan_logprob, "log-prob nan"),
        (id_outside, "token 3 has the id 1114112, outside the vocabulary"),
        (negative_id, "token 3 has the id -1"),
        (no_prompt, "prompt length 0"),
        (sampled_prompt, "the mask is 1 in the prompt"),
        (missing_span, "version spans and sampled tokens disagree on token 60"),
        (span_over_observed, "version spans and sampled tokens disagree on token 58"),
        (overlapping_spans, "version span [13, 58) is empty, out of order"),
        (turn_past_the_end, "assistant turn [60, 70) is out of order or outside"),
        (turn_too_short, "assistant turns and sampled tokens disagree on token 57"),
        (observed_as_assistant, "assistant turns and sampled tokens disagree on token 58"),
        (overlapping_turns, "tool turn [57, 60) is out of order"),
        (no_such_transcript, "turn 3: it stands in transcript 1 of 1"),
        (failed_with_score, "it failed and yet has the score 1.0"),
        (failed_without_cause, "it failed without a cause"),
        (nothing_sampled, "the policy sampled nothing"),
        (score_nan, "its score is nan"),
        (reward_infinite, "its reward is inf"),
        (tool_turn_with_calls, "a tool turn has tool calls"),
        (unknown_error_kind, "unknown error kind 'oops'"),
    ],
)
def test_each_violation_is_told(violate: Callable[[Trajectory], None], said: str) -> None:
    trajectory = tool_trajectory()
    violate(trajectory)
    violations = check_trajectory(trajectory, VOCAB_SIZE)
    assert any(said in text for text in violations), violations
    assert all(text.startswith("train/1/0/0: ") for text in violations)
