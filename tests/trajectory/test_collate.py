"""Which trajectories are trained on, and which token carries which reward."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from agentrl.trajectory import Image, PlacedImage, Status, Trajectory, Transcript, Turn, VersionSpan
from agentrl.trajectory.collate import from_trajectories, left_out, token_rewards


def transcript(*parts: str) -> Transcript:
    """Parts as text: "s3" three sampled tokens, "o2" two observed ones; a prompt of two tokens comes first."""
    result = Transcript()
    result.append_prompt([100, 101])
    for part in parts:
        ids = [10 * len(result) + at for at in range(int(part[1:]))]
        if part[0] == "s":
            result.append_sampled(ids, [-0.5 - at for at in range(len(ids))], [VersionSpan(3, 0, len(ids))])
        else:
            result.append_observed(ids)
    return result


def trajectory(*transcripts: Transcript, turns: list[Turn] | None = None, **fields: Any) -> Trajectory:
    """Without `turns`, each sampled part is an assistant turn."""
    fields = {"uid": "t", "group": 0, "score": 1.0, **fields}
    said = [
        Turn("assistant", "", number, span.start, span.end)
        for number, one in enumerate(transcripts)
        for span in one.versions
    ]
    return Trajectory(transcripts=list(transcripts), turns=said if turns is None else turns, **fields)


def test_tokens_masks_logprobs_and_ids_are_those_of_the_transcripts() -> None:
    first, second = transcript("s2", "o1", "s1"), transcript("s1")
    batch = from_trajectories([trajectory(first, group=4), trajectory(second, group=7)], turn_reward_coef=1.0)
    assert batch.offsets.tolist() == [0, 6, 9]
    assert batch.ids.tolist() == first.ids + second.ids
    assert batch.mask.tolist() == [False, False, True, True, False, True, False, False, True]
    assert batch.rollout_logprobs.tolist() == pytest.approx([0, 0, -0.5, -1.5, 0, -0.5, 0, 0, -0.5])
    assert (batch.group.tolist(), batch.trajectory.tolist()) == ([4, 7], [0, 1])
    assert batch.rewards.tolist() == [0, 0, 0, 0, 0, 1, 0, 0, 1]
    assert batch.version.tolist() == [-1, -1, 3, 3, -1, 3, -1, -1, 3]
    assert batch.turn.tolist() == [-1, -1, 0, 0, -1, 1, -1, -1, 0]
    assert (batch.policy.tolist(), batch.policies) == ([0, 0], ("policy",))
    assert {batch.version.dtype, batch.turn.dtype, batch.policy.dtype} == {torch.int32}
    dtypes = [batch.offsets.dtype, batch.ids.dtype, batch.mask.dtype, batch.rewards.dtype, batch.rollout_logprobs.dtype]
    assert dtypes == [torch.int64, torch.int64, torch.bool, torch.float32, torch.float32]


def test_own_tokens_are_those_that_no_earlier_transcript_begins_with() -> None:
    whole = transcript("s4", "o2", "s3")
    fork, beginning, equal, other = transcript("s4", "o1", "s2"), transcript("s4"), transcript("s4", "o1"), transcript()
    fork.ids[7] += 1
    other.append_sampled([7, 8], [-1.0, -1.0], [VersionSpan(3, 0, 2)])
    parts = [trajectory(whole, fork, beginning, equal, other), trajectory(transcript("s2"))]
    batch = from_trajectories(parts, turn_reward_coef=1.0)
    assert batch.sequences["own_tokens"].tolist() == [11, 2, 0, 0, 2, 4]


def test_a_baseline_is_not_trained_on_and_keeps_its_place() -> None:
    parts = [trajectory(transcript("s1")), trajectory(transcript("s1"), baseline=True), trajectory(transcript("s1"))]
    assert from_trajectories(parts, turn_reward_coef=1.0, first=3).trajectory.tolist() == [3, 5]


def test_the_state_of_a_turn_is_its_name_or_what_was_observed_before_it() -> None:
    def played(*seen: str | None, named: str | None = None) -> Trajectory:
        """Turn after turn, with what is observed between; None: another transcript."""
        transcripts, turns = [transcript("s1")], [Turn("assistant", "", 0, 2, 3)]
        for text in seen:
            if text is None:
                transcripts.append(Transcript())
                transcripts[-1].append_prompt([5])
            else:
                at = len(transcripts[-1])
                transcripts[-1].append_observed([6])
                turns.append(Turn("user", text, len(transcripts) - 1, at, at + 1))
            at = len(transcripts[-1])
            transcripts[-1].append_sampled([7, 8], [-1.0, -1.0], 3)
            turns.append(Turn("assistant", "", len(transcripts) - 1, at, at + 2, state=named))
        return trajectory(*transcripts, turns=turns)

    games = [played("hall", "cellar", "hall"), played("cellar", None), played("no such door", named="hall")]
    batch = from_trajectories(games, turn_reward_coef=1.0, columns=["state"])
    assert batch.state is not None and batch.state.dtype == torch.int64
    assert batch.state[~batch.mask].eq(-1).all() and batch.state[batch.mask].ge(0).all()
    start, *found = batch.state[batch.mask].tolist()
    hall, cellar, note = found[0], found[2], found[9]
    assert len({start, hall, cellar, note}) == 4
    assert found == [hall, hall, cellar, cellar, hall, hall, start, cellar, cellar, note, note, start, hall, hall]
    assert from_trajectories(games, turn_reward_coef=1.0).state is None


def test_the_score_is_not_on_a_trailing_tool_token() -> None:
    assert token_rewards(trajectory(transcript("s2", "o3"), score=0.7), 1.0) == [[0, 0, 0, 0.7, 0, 0, 0]]


def test_the_score_is_in_the_last_transcript_with_policy_tokens_and_others_are_left_out() -> None:
    item = trajectory(transcript("s1"), transcript("s2", "o1"), transcript("o4"))
    assert token_rewards(item, 1.0) == [[0, 0, 0], [0, 0, 0, 1, 0], [0] * 6]
    batch = from_trajectories([item, trajectory(transcript("s1"))], turn_reward_coef=1.0)
    assert batch.lengths.tolist() == [3, 5, 3]
    assert batch.trajectory.tolist() == [0, 0, 1]
    assert batch.rewards.tolist() == [0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 1]


def test_a_turn_reward_is_on_the_last_policy_token_of_its_turn() -> None:
    # tokens:       0 1 | 2 3 | 4 5 6 | 7 8 | 9
    turns = [
        Turn("assistant", "", 0, 2, 4, reward=0.5),
        Turn("tool", "", 0, 4, 7),
        Turn("assistant", "", 0, 7, 9, reward=2.0),
    ]
    item = trajectory(transcript("s2", "o3", "s2", "o1"), turns=turns, score=1.0)
    assert token_rewards(item, 0.1) == [[0, 0, 0, pytest.approx(0.05), 0, 0, 0, 0, pytest.approx(1.2), 0]]
    assert token_rewards(item, 0.0) == [[0, 0, 0, 0, 0, 0, 0, 0, 1.0, 0]]


def test_an_assistant_turn_that_ends_with_template_tokens_or_against_another_keeps_its_reward() -> None:
    # The first turn's span takes in an observed token; the second and third have no token between them.
    turns = [
        Turn("assistant", "", 0, 2, 4, reward=1.0),
        Turn("assistant", "", 0, 4, 6, reward=2.0),
        Turn("assistant", "", 0, 6, 7, reward=4.0),
    ]
    assert token_rewards(trajectory(transcript("s1", "o1", "s3"), turns=turns, score=0.0), 1.0) == [
        [0, 0, 1.0, 0, 0, 2.0, 4.0]
    ]


def test_a_reward_of_an_observed_turn_belongs_to_the_policy_turn_before_it() -> None:
    turns = [Turn("user", "", 0, 4, 6, reward=0.5), Turn("user", "", 1, 0, 2, reward=0.25)]
    item = trajectory(transcript("s2", "o2"), transcript("s1"), turns=turns, score=0.0)
    # The second stands at the beginning of a new transcript; the policy's turn before it is in the old one.
    assert token_rewards(item, 1.0) == [[0, 0, 0, 0.75, 0, 0], [0, 0, 0]]


def test_a_reward_from_before_the_policy_wrote_is_on_its_first_token() -> None:
    turns = [Turn("user", "", 0, 0, 2, reward=0.5)]
    assert token_rewards(trajectory(transcript("s2"), turns=turns, score=0.0), 1.0) == [[0, 0, 0.5, 0]]


def test_what_failed_or_has_no_score_or_no_policy_token_is_left_out_and_counted() -> None:
    good = trajectory(transcript("s1"), group=2, score=0.0)
    trajectories = [
        trajectory(transcript("s1"), status=Status.FAILED, failure="engine: died"),
        trajectory(transcript("s1"), score=None),
        trajectory(transcript("o1")),
        trajectory(),
        good,
        trajectory(transcript("s2"), status=Status.TIMEOUT, score=0.5),
    ]
    batch = from_trajectories(trajectories, turn_reward_coef=1.0)
    assert batch.trajectory.tolist() == [4, 5]
    assert batch.rewards.sum().item() == 0.5
    assert left_out(trajectories) == {"failed": 1, "unscored": 1, "no_policy_tokens": 2}
    with pytest.raises(ValueError, match="unscored"):
        token_rewards(trajectories[1], 1.0)


def test_nothing_left_is_an_empty_batch() -> None:
    batch = from_trajectories([], turn_reward_coef=1.0)
    assert len(batch) == 0 and batch.num_tokens == 0 and batch.offsets.tolist() == [0]
    assert len(batch.select([])) == 0


def test_what_a_loop_leaves_out_is_as_if_it_were_not_there() -> None:
    """A whole transcript, and the end of one: rows, rewards and lengths are those of the rest."""
    main, side = transcript("s2", "o1", "s1", "o2", "s3"), transcript("s4", "o1", "s5")
    main.trained_to, side.trained_to = 6, 0
    turns = [
        Turn("assistant", "title", 0, 2, 6),
        Turn("assistant", "a", 1, 2, 4),
        Turn("assistant", "b", 1, 5, 6),
        Turn("assistant", "tail", 1, 8, 11, reward=0.25),
        Turn("assistant", "title", 0, 7, 12),
    ]
    marked = trajectory(side, main, turns=turns)
    plain = trajectory(
        transcript("s2", "o1", "s1"), turns=[Turn("assistant", "", 0, 2, 4), Turn("assistant", "", 0, 5, 6)]
    )
    plain.turns[-1].reward = 0.25
    batches = [from_trajectories([one], turn_reward_coef=2.0) for one in (marked, plain)]
    for name in ("offsets", "mask", "rollout_logprobs", "version", "rewards", "group", "trajectory", "policy"):
        assert torch.equal(*(getattr(batch, name) for batch in batches)), name
    assert batches[0].ids.tolist() == main.ids[:6]
    assert batches[0].rewards.sum() == 1.0 + 2 * 0.25, "a reward of a turn that is left out is paid before it"
    one, other = marked.outline(), plain.outline()
    lengths = ("prompt_length", "response_length", "num_sampled", "assistant_turns", "turn_reward")
    assert [getattr(one, name) for name in lengths] == [getattr(other, name) for name in lengths]
    assert one.reward(2.0) == other.reward(2.0)
    assert (main.sampled_length, side.sampled_length) == (6, 9), "the record keeps them"


def test_a_trajectory_of_which_all_is_left_out_is_counted() -> None:
    one = transcript("s2")
    one.trained_to = 0
    assert len(from_trajectories([trajectory(one)], turn_reward_coef=1.0)) == 0
    assert left_out([trajectory(one)])["no_policy_tokens"] == 1


def test_images_and_experts_end_where_training_ends() -> None:
    one = Transcript()
    one.append_prompt([1, 2])
    one.append_sampled([3, 4], [-1.0, -1.0], 0, np.arange(3, dtype=np.uint8).reshape(3, 1, 1))
    image = Image(np.zeros((1, 1), np.float32), (1, 1, 1), 1, b"d", b"")
    one.append_observed([5, 6], [PlacedImage(0, image)])
    one.append_sampled([7], [-1.0], 1, np.arange(6, dtype=np.uint8).reshape(6, 1, 1))
    one.trained_to = 4
    part = one.trained_part()
    assert part is not None and (part.ids, part.images, part.versions) == ([1, 2, 3, 4], [], [VersionSpan(0, 2, 4)])
    assert part.experts is not None and part.experts.shape == (4, 1, 1)
    one.trained_to = None
    assert one.trained_part() is one, "a run that leaves nothing out copies nothing"
