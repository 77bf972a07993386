"""Advantages, policy losses and KL on ragged tensors: pure functions of named columns.

Legend: T tokens of N sequences in a row, `offsets` [N + 1] int64 says where each begins
(`agentrl.trajectory.batch.RaggedBatch`). `mask` [T] bool is True where the policy sampled the token; only such tokens
have rewards. Nothing is padded; the log-probs, values and losses of the other tokens, even NaN, change no result and no
gradient.

An estimator is a function of `EstimatorColumns` and `AlgorithmConfig` that returns `Advantages`, a policy loss one of
`LossColumns` and `ActorConfig` that returns a `TokenLoss`. Both may have a parameter `options` annotated with a
pydantic model, and `declare` further columns next to the basic ones. Configs name them by the registries in
`agentrl.config.registries`. Nothing here imports torch before an algorithm is used.
"""

from agentrl.algorithms.columns import Advantages, EstimatorColumns, LossColumns, TokenLoss
from agentrl.config.columns import register_column
from agentrl.config.declaration import Declaration, declaration_of, declare

__all__ = [
    "Advantages",
    "Declaration",
    "EstimatorColumns",
    "LossColumns",
    "TokenLoss",
    "declaration_of",
    "declare",
    "register_column",
]
