"""Inputs and results of estimators and policy losses. See the package on T, N, offsets and mask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, NamedTuple

from agentrl.config.columns import COLUMNS, described, is_users
from agentrl.config.declaration import ADDITIONAL
from agentrl.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


class NoColumn(ConfigError, AttributeError):
    """A column that an algorithm is not given; `hasattr` and `getattr` with a default take it for a missing one."""


class _Columns(SimpleNamespace):
    """A view of columns by name, for one algorithm: the basic ones, and the ones that it declares."""

    asked_by: str = ""
    """Names the algorithm in messages."""

    def __getattr__(self, name: str) -> Tensor:
        if name.startswith("_"):
            raise AttributeError(name)
        asked = f"{self.asked_by or 'this algorithm'} reads the column {described(name)}"
        if name in COLUMNS and name not in ADDITIONAL and not is_users(name):
            raise NoColumn(f"{asked}, which it is not given here; it has {', '.join(sorted(vars(self)))}")
        do = "" if name in COLUMNS or name in ADDITIONAL else f"register it by register_column({name!r}, ...) and "
        raise NoColumn(
            f"{asked}, and does not declare it: {do}write @declare({name!r}) above its function (docs/extending.md)"
        )


class EstimatorColumns(_Columns):
    """A step's tokens, as an advantage estimator sees them. The columns from `ref_logprobs` on are there if declared.

    Columns that a user registered are there, too, if they are declared.
    """

    rewards: Tensor  # [T] float32, each on a policy token
    mask: Tensor  # [T] bool
    offsets: Tensor  # [N + 1] int64
    group: Tensor  # [N] int64, the prompt
    trajectory: Tensor  # [N] int64, sequences of one trajectory share it
    turn: Tensor  # [T] int32, index of the assistant turn in its trajectory's turns; -1 where mask is False
    version: Tensor  # [T] int32, of the weights that sampled the token; -1 where mask is False
    old_logprobs: Tensor  # [T] float32, the policy's before the update
    rollout_logprobs: Tensor  # [T] float32, the engine's
    n: int  # trajectories requested for each prompt; failed ones are not here
    correction: Tensor | None  # [T] float32, the token's weight in the loss; None: the loss is not weighed
    ref_logprobs: Tensor  # [T] float32, the reference policy's
    values: Tensor  # [T] float32, the critic's, of the state before each token
    entropy: Tensor  # [T] float32 in nats, of the policy before the update
    squared_probs: Tensor  # [T] float32, sum over the vocabulary of its squared probabilities
    state: Tensor  # [T] int64, equal for turns taken in the same state; -1 where mask is False
    greedy_rewards: Tensor  # [N] float32, of the prompt's greedy trajectory; NaN where that failed
    numbers: Sequence[Mapping[str, float]]
    """By sequence, the numbers that its trajectory's scorer gave, `score` among them."""
    teacher_logprobs: Tensor  # [T] float32, the teacher's; NaN where the token has no teacher
    running_returns: Tensor  # [N] float64, running mean of the returns of the data source's role


class Advantages(NamedTuple):
    """Result of an estimator; entries where mask is False do not count."""

    advantages: Tensor  # [T] float
    returns: Tensor  # [T] float, the critic's targets
    metrics: Mapping[str, float | Tensor] = MappingProxyType({})
    """Numbers of the step, logged as `estimator/<name>`."""


class LossColumns(_Columns):
    """A micro-batch, as a policy loss sees it. The columns from `ref_logprobs` on are there if declared.

    Float columns by token are 0 where mask is False. `logprobs`, `entropy` and `squared_probs` carry the gradient.
    Columns that a user registered are there, too, if they are declared.
    """

    logprobs: Tensor  # [T] float32, the policy's
    old_logprobs: Tensor  # [T] float32, the proximal policy's: before the update
    rollout_logprobs: Tensor  # [T] float32, the engine's: the policy that sampled
    advantages: Tensor  # [T] float32
    mask: Tensor  # [T] bool
    offsets: Tensor  # [N + 1] int64
    turn: Tensor  # [T] int32, index of the assistant turn in its trajectory's turns; -1 where mask is False
    version: Tensor  # [T] int32, of the weights that sampled the token; -1 where mask is False
    ref_logprobs: Tensor  # [T] float32, the reference policy's
    entropy: Tensor  # [T] float32 in nats
    squared_probs: Tensor  # [T] float32, sum over the vocabulary of the squared probabilities
    selected: Tensor  # [T] bool, by the function that the loss declares as `select`


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """Result of a policy loss; entries where mask is False do not count."""

    by_token: Tensor  # [T] float with gradient; see `aggregate` for how it becomes a scalar
    sums: Mapping[str, Tensor] = field(default_factory=dict)
    """By metric, without `actor/`: scalars without gradient, e.g. counts of tokens. Each is added up over the update
    and divided by the number of policy tokens whose advantage is not 0."""
    clipped: Tensor | None = None
    """[T] bool: a bound holds the token's ratio or its weight; None: the loss has no bounds. It is recorded."""
