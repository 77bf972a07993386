"""Turns of frozen roles have no gradient: their tokens, and their log-probs, change no bit of an update."""

from __future__ import annotations

import torch

from agentrl.agent_loop.roles import add_role_scores
from agentrl.algorithms.estimate import Settings, estimate
from agentrl.config.sections.actor import ActorConfig
from agentrl.config.sections.optim import OptimConfig
from agentrl.trajectory import FROZEN, Status, Trajectory, Transcript, Turn
from agentrl.trajectory.batch import RaggedBatch
from agentrl.trajectory.collate import from_trajectories
from tests.algorithms.batches import algorithm
from tests.workers.conftest import WorkerMaker, same_weights

ADAMW = OptimConfig(lr=1e-2)


def game(number: int, with_frozen: bool) -> Trajectory:
    """White is trained and reads what the frozen black says; black has a transcript of its own."""
    white, black = Transcript(role="white"), Transcript(role="black", policy="small")
    white.append_prompt([5, 6, 7])
    white.append_sampled([8, 9 + number], [-1.0, -2.0], 0)
    white.append_observed([20, 21, 22])
    white.append_sampled([11], [-0.5], 0)
    black.append_prompt([5, 6])
    black.append_observed([20, 21])
    turns = [Turn("assistant", "a", 0, 3, 5), Turn("user", "b", 0, 5, 8), Turn("assistant", "c", 0, 8, 9)]
    made = Trajectory(f"t/{number}", 0, transcripts=[white], turns=turns, status=Status.COMPLETED)
    scores = {"white": 1.0 - number}
    if with_frozen:
        made.transcripts.append(black)
        made.turns.insert(1, Turn(FROZEN, "b", 1, 2, 4))
        scores["black"] = number - 1.0
    made.score = add_role_scores(made, scores)
    return made


def batch_of(with_frozen: bool) -> RaggedBatch:
    made = from_trajectories([game(k, with_frozen) for k in range(4)], turn_reward_coef=1.0, columns=["role"])
    made = made.with_fields(old_logprobs=made.rollout_logprobs)
    return made.with_fields(**estimate(made, algorithm("grpo"), Settings(4))[0])


def test_frozen_turns_have_exactly_no_gradient(make_worker: WorkerMaker) -> None:
    config = ActorConfig(ppo_mini_batch_size=4, optim=ADAMW)
    without, with_frozen, disturbed, changed = (make_worker(config) for _ in range(4))
    batch = batch_of(True)
    assert len(batch) == 4 and batch.policies == ("policy",)
    frozen = ~batch.mask
    without.update(batch_of(False), step=1)
    with_frozen.update(batch, step=1)
    assert batch.old_logprobs is not None and batch.advantages is not None
    disturbed.update(
        batch.with_fields(
            old_logprobs=batch.old_logprobs - 3.0 * frozen,
            rollout_logprobs=batch.rollout_logprobs - 3.0 * frozen,
            advantages=batch.advantages + 7.0 * frozen,
        ),
        step=1,
    )
    changed.update(batch.with_fields(old_logprobs=batch.old_logprobs - 0.1 * batch.mask), step=1)
    assert same_weights(without, with_frozen) and same_weights(with_frozen, disturbed)
    assert not same_weights(with_frozen, changed) and not same_weights(with_frozen, make_worker(config))
    assert torch.equal(batch.ids[5:8], torch.tensor([20, 21, 22])) and frozen[5:8].all()
