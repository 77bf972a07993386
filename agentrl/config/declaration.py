"""Declarations of algorithms, made where they are defined and read before a model is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, ParamSpec, TypeVar, get_args

from agentrl.config.columns import is_users
from agentrl.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

Score = Literal["entropy", "squared_probs"]
"""Numbers of the distribution that a token was drawn from, given by the pass that computes log-probs."""
Rows = Literal["pairs", "single", "mismatched"]
"""Argument of a loss of preferences: `Pairs`; or `Judged`, conversations that are good or bad by themselves, alone or
with mismatched ones next to them (see `agentrl.algorithms.pair_losses`)."""
Computed = Score | Literal["varentropy"]
"""Everything that the pass can give; the checks alone read `varentropy`."""
ADDITIONAL = (
    *(*get_args(Score), "ref_logprobs", "values", "greedy_rewards", "state", "numbers", "teacher_logprobs"),
    "running_returns",
)
"""Columns of agentrl that are computed only for algorithms that declare them."""

OF_ESTIMATORS = ("values", "greedy_rewards", "numbers", "teacher_logprobs", "running_returns")
"""Columns of them that are computed only for an estimator that declares them. A loss is given the first two then."""

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Declaration:
    """Needs of an algorithm in addition to the basic columns."""

    columns: frozenset[str] = frozenset()
    """Columns that it is given, of `ADDITIONAL` or registered by a user. `values` makes a critic, `ref_logprobs` a
    reference policy, and `greedy_rewards` (an estimator's) has one more trajectory of each prompt drawn, greedily.
    `state` (an estimator's) identifies the state in which each turn was taken; `numbers` (an estimator's) are the
    scorer's further numbers of each trajectory. `teacher_logprobs` (an estimator's) are the log-probs by the teachers
    of `distillation`, which then do nothing else to the advantages. `running_returns` (an estimator's) are running
    means of the returns by data source and role, which the checkpoint keeps."""
    keys: frozenset[str] = frozenset()
    """Keys of its config section (`algorithm`, `actor_rollout_ref.actor`) that it reads. With an algorithm that
    does not read a key that only some do, the key is refused, as it would have no effect."""
    compares_group: bool = False
    """An estimator: advantages are relative to the other trajectories of the prompt, so a group of equal rewards has no
    advantage (see algorithm.filter_groups)."""
    by_reward: bool = False
    """An estimator: an advantage depends on nothing but the whole rewards of the prompt's trajectories. A transcript
    may then have a score of its own (`Transcript.score`)."""
    advantage_only: bool = False
    """A policy loss: tokens whose advantage is 0 have no gradient, so that sequences of such tokens alone need not be
    computed (see algorithm.filter_groups)."""
    select: Callable[..., Tensor] | None = None
    """A policy loss: chooses tokens once a step, by the whole batch; see `declare`."""
    rows: Rows = "pairs"
    """A loss of preferences: the rows that it learns from."""

    @property
    def scores(self) -> list[Score]:
        """The subset of `columns` that the pass which computes log-probs gives."""
        return [name for name in get_args(Score) if name in self.columns]


def declare(
    *columns: str,
    keys: tuple[str, ...] = (),
    compares_group: bool = False,
    by_reward: bool = False,
    advantage_only: bool = False,
    select: Callable[..., Tensor] | None = None,
    rows: Rows = "pairs",
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate an estimator or a loss with its `Declaration`; one without needs nothing more.

    Raises ConfigError for a column that is neither one of `ADDITIONAL` nor registered.

    select: for a loss that treats some tokens otherwise by how they compare with the others. A loss sees a micro-batch,
    and its result must not depend on how the batch is cut. So this function, of (columns, config, seed, options), is
    called once a step before the update, on all tokens and without the declared scores. columns.logprobs are the
    policy's then; seed differs by step. It returns [T] bool, which the loss is given as columns.selected.
    """
    if wrong := [name for name in columns if name not in ADDITIONAL and not is_users(name)]:
        raise ConfigError(
            f"@declare({wrong[0]!r}): expected one of {', '.join(ADDITIONAL)}, or a column that "
            f"register_column({wrong[0]!r}, ...) has registered above it (docs/extending.md)"
        )
    declaration = Declaration(
        frozenset(columns), frozenset(keys), compares_group, by_reward, advantage_only, select, rows
    )

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        function.declaration = declaration  # type: ignore[attr-defined]
        return function

    return decorate


def declaration_of(algorithm: object) -> Declaration:
    """Return the declaration of an estimator or a loss."""
    found = getattr(algorithm, "declaration", None)
    return found if isinstance(found, Declaration) else Declaration()
