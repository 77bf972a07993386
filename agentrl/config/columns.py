"""Columns of the batch by name: agentrl's, and the columns that a user's file registers next to its algorithm."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal, get_args

from agentrl.errors import ConfigError
from agentrl.system.registrations import enter

Make = Callable[..., Sequence[float] | float | None]
"""Function of a `Trajectory` and one of its transcripts. It returns a number for each token of the transcript or, by
sequence, one number; None: the column's default."""
Per = Literal["token", "sequence"]
DType = Literal["float32", "float64", "int32", "int64", "bool", "uint8"]


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a batch."""

    name: str
    per: Per
    purpose: str
    """Its contents in a few words, for messages."""
    dtype: DType = "float32"
    default: float = 0
    """Value of a token that the policy did not sample, and of tokens and sequences to which `make` gives none."""
    make: Make | None = None
    """Makes a user's column from trajectories, in a run whose estimator or policy loss declares it, and `role` where
    the config has roles. None: agentrl makes the column."""


def role_number(role: str) -> int:
    """Hash a role's name to 63 bits, the same in every process; 0 for no role."""
    return int.from_bytes(blake2b(role.encode(errors="surrogatepass"), digest_size=8).digest()) >> 1 if role else 0


COLUMNS = {
    one.name: one
    for one in (
        Column("ids", "token", "tokens", "int64"),
        Column("mask", "token", "the policy sampled the token", "bool"),
        Column("rollout_logprobs", "token", "the engine's log-probs"),
        Column("version", "token", "weights that sampled the token", "int32", -1),
        Column("turn", "token", "index in the trajectory's `turns`", "int32", -1),
        Column("rewards", "token", "rewards, each on a policy token"),
        Column("group", "sequence", "index of the prompt", "int64"),
        Column("trajectory", "sequence", "index of the trajectory, which its sequences share", "int64"),
        Column("policy", "sequence", "index in `policies`; -1 where no policy sampled", "int32"),
        Column(
            *("role", "sequence", "number of the role (`role_number`)", "int64"),
            make=lambda _, transcript: role_number(transcript.role),
        ),
        Column("state", "token", "hash of the state in which the turn was taken", "int64", -1),
        Column("experts", "token", "experts to replay, [T, L, k]", "uint8"),
        Column("old_logprobs", "token", "log-probs before the update"),
        Column("ref_logprobs", "token", "log-probs of the reference policy"),
        Column("values", "token", "values of the critic"),
        Column("entropy", "token", "entropy before the update, in nats"),
        Column("squared_probs", "token", "sum over the vocabulary of the squared probabilities"),
        Column("varentropy", "token", "variance of -log p"),
        Column("advantages", "token", "advantages"),
        Column("returns", "token", "targets of the critic"),
        Column("correction", "token", "factor of the policy's loss"),
        Column("staleness", "token", "age of the weights that sampled the token", "int64"),
        Column("selected", "token", "chosen by the policy's loss", "bool"),
        Column("teacher", "token", "index of the teacher; -1 without a teacher", "int32", -1),
        Column("teacher_scores", "token", "a teacher's numbers, [T, 1 + X]"),
        Column("ratio", "token", "ratio to the proximal policy; NaN: unknown"),
        Column("clipped", "token", "1: the loss bounds the ratio or the weight"),
        Column("correction_clipped", "token", "1: the weight is its bound"),
        Column(
            "greedy_rewards", "sequence", "reward of the prompt's greedy trajectory; NaN: unknown", default=math.nan
        ),
        Column("running_returns", "sequence", "running mean of the returns of the data source's role", "float64"),
        Column("model_rewards", "sequence", "the reward model's part of the trajectory's reward"),
        Column("score_shift", "sequence", "the transcript's own score, less its trajectory's", "float64"),
        Column("success", "sequence", "the trajectory succeeds", "bool"),
        Column("zero_advantage", "sequence", "all advantages are 0", "bool"),
        Column("loss_unit", "sequence", "index of the unit of the loss's mean by sequence", "int64"),
        Column("unit_tokens", "sequence", "policy tokens of the loss's unit", "int64"),
        Column("side", "sequence", "1: preferred or good; -1: rejected or bad; 0: compared with, not learnt", "int32"),
        Column("loss_weight", "sequence", "factor of the sequence's loss", "float64", 1),
        Column("own_tokens", "sequence", "tokens that no earlier transcript of the trajectory begins with", "int64"),
        Column("observed", "sequence", "tokens that the policy read after its first one", "int64"),
        Column("row", "sequence", "index in the batch of the whole step", "int64"),
    )
}
_OURS = frozenset(COLUMNS)
OF_SCORER = "score/"
"""Start of the names of columns with the scorer's numbers of the sequence's trajectory; NaN: no such number."""
_TAKEN = (
    *("as_taught", "asked_by", "batches", "column", "columns", "concat", "cut", "from_columns"),
    *("has", "images", "joined", "lengths", "load", "logprobs", "mapped", "n", "num_tokens", "numbers", "offsets"),
    *("policies", "policy_tokens", "reference_logprobs", "rows", "select", "self", "sequence_ids", "sequences"),
    *("teacher_logprobs", "teacher_prompts", "token_rewards", "tokens", "trainer_logprobs", "uid", "unsampled"),
    *("weights", "weights_clipped", "with_fields"),
)
"""Names that batches, algorithms or records use for something else."""


def column(name: str) -> Column:
    """Look up a column. Raises ConfigError where there is no column of this name."""
    if name.startswith(OF_SCORER):
        return Column(name, "sequence", "a number of the scorer", "float64", math.nan)
    if name not in COLUMNS:
        raise ConfigError(
            f"{name!r} is no column of a batch, which has {', '.join(sorted(COLUMNS))}. To add it, call "
            f"agentrl.algorithms.register_column({name!r}, ...) in the file of the algorithm that reads it "
            "(docs/extending.md)"
        )
    return COLUMNS[name]


def is_users(name: str) -> bool:
    """Say whether a column was registered by a user."""
    return name in COLUMNS and name not in _OURS


def described(name: str) -> str:
    """Write the name of a column, which may be unknown, with its purpose."""
    return f"{name!r} ({COLUMNS[name].purpose})" if name in COLUMNS else repr(name)


def _place(one: Column) -> str:
    """Name the function of a user's column."""
    return ".".join(str(getattr(one.make, name, "")) for name in ("__module__", "__qualname__"))


def register_column(
    name: str, *, per: Per, make: Make, purpose: str, dtype: DType = "float32", default: float = 0
) -> None:
    """Register a column of a user, which an estimator or a policy loss declares.

    A function of the same module and name replaces its former column, as when a cell of a notebook runs again. Raises
    ConfigError for a name that agentrl uses, or under which another function was registered.
    """
    new, former = Column(name, per, purpose, dtype, default, make), COLUMNS.get(name)
    for what, value, known in (("per", per, get_args(Per)), ("dtype", dtype, get_args(DType))):
        if value not in known:
            raise ConfigError(f"register_column({name!r}): expected {what} among {', '.join(known)}, found {value!r}")
    if not callable(make) or isinstance(default, str):
        raise ConfigError(
            f"register_column({name!r}): expected a function as make and a number as default, found {make!r:.100} and "
            f"{default!r:.100}"
        )
    if not name.isidentifier() or name.startswith("_"):
        raise ConfigError(f"register_column: expected a Python name without a leading _, found {name!r}")
    if name in _TAKEN or name in _OURS:
        raise ConfigError(f"register_column: agentrl has something of the name {name!r}; choose another name")
    if former is not None and _place(former) != _place(new):
        raise ConfigError(
            f"register_column: {name!r} is registered by {_place(former)} ({former.purpose}), and again by "
            f"{_place(new)} ({purpose}); rename one of them"
        )
    enter(COLUMNS, name, new)
