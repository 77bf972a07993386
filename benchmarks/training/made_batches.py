"""Batches of random tokens with log-normal lengths, as the answers of policies have them."""

from __future__ import annotations

import torch

from agentrl.trajectory.batch import RaggedBatch

MEDIAN, SIGMA, MOST = 600.0, 0.9, 8192
"""Tokens of a response."""
PROMPT = (50, 400)
"""Least and most tokens of a prompt."""
GROUP = 8


def ragged_batch(sequences: int, seed: int = 1) -> RaggedBatch:
    """Make a batch like those of rollouts."""
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(*PROMPT, (-(-sequences // GROUP),), generator=generator)
    prompts = prompts.repeat_interleave(GROUP)[:sequences]
    normal = torch.randn(sequences, generator=generator, dtype=torch.float64)
    responses = (MEDIAN * (SIGMA * normal).exp()).long().clamp(1, MOST)
    lengths = prompts + responses
    offsets = torch.tensor([0, *lengths.tolist()]).cumsum(0)
    tokens = int(offsets[-1])
    places = torch.arange(tokens) - offsets[:-1].repeat_interleave(lengths)
    mask = places >= prompts.repeat_interleave(lengths)
    return RaggedBatch.from_columns(
        offsets=offsets,
        ids=torch.randint(0, 150_000, (tokens,), generator=generator),
        mask=mask,
        rollout_logprobs=torch.rand(tokens, generator=generator),
        version=mask.int() - 1,
        turn=mask.int() - 1,
        rewards=torch.zeros(tokens),
        group=torch.arange(sequences) // GROUP,
        trajectory=torch.arange(sequences),
        policy=torch.zeros(sequences, dtype=torch.int32),
        policies=("policy",),
    )
