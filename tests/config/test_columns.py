"""Columns that a user registers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.config.columns import COLUMNS, column, register_column
from agentrl.errors import CodeError, ConfigError
from agentrl.runtime.ray.stored import StoredBatch
from agentrl.trajectory import Trajectory, Transcript, Turn
from agentrl.trajectory.batch import RaggedBatch
from agentrl.trajectory.collate import from_trajectories
from tests.config.loading import load
from tests.naming import Names, naming


@pytest.fixture(autouse=True)
def forgets() -> Iterator[None]:
    before = dict(COLUMNS)
    yield
    COLUMNS.clear()
    COLUMNS.update(before)


def one(trajectory: Trajectory, transcript: Transcript) -> list[float]:
    return [1.5] * len(transcript)


def other(trajectory: Trajectory, transcript: Transcript) -> None:
    return None


def register(name: str = "mine", **changes: Any) -> None:
    register_column(name, **{"per": "token", "make": one, "purpose": "a test", **changes})


@pytest.mark.parametrize("name", sorted({n for kind in (RaggedBatch, StoredBatch) for n in dir(kind) if n[0] != "_"}))
def test_no_column_hides_a_member_of_a_batch(name: str) -> None:
    with naming(ConfigError, f"'{name}'"):
        register(name)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"per": "sequences"}, "found 'sequences'"),
        ({"dtype": "floaty"}, ("float32", "found 'floaty'")),
        ({"make": None}, ("function", "make")),
        ({"name": "a b"}, "Python"),
        ({"name": "self"}, "another name"),
    ],
)
def test_wrong_arguments_name_the_column(changes: dict[str, Any], says: Names) -> None:
    with naming(ConfigError, says):
        register(**changes)


def test_the_same_lines_may_be_loaded_twice_and_another_function_is_refused() -> None:
    register(default=float("nan"))
    register(default=float("nan"))
    with naming(ConfigError, "'mine'", "again"):
        register(default=math.nan, make=other)


def test_a_column_that_is_registered_again_is_replaced() -> None:
    """As a cell of a notebook does, after a change."""
    register()
    register(per="sequence", dtype="int64", purpose="another")
    assert (column("mine").per, column("mine").dtype, column("mine").purpose) == ("sequence", "int64", "another")


def batch() -> RaggedBatch:
    transcript = Transcript()
    transcript.append_prompt([1, 2])
    transcript.append_sampled([3, 4], [-0.1, -0.2], 0)
    turns = [Turn("assistant", "", 0, start=2, end=4)]
    trajectory = Trajectory("train/1/0/0", 0, transcripts=[transcript], turns=turns, score=1.0)
    return from_trajectories([trajectory], turn_reward_coef=1.0, columns=["mine"])


def test_tokens_that_were_not_sampled_have_the_default() -> None:
    register(default=7)
    assert batch().tokens["mine"].tolist() == [7.0, 7.0, 1.5, 1.5] and column("mine").make is one


def test_numbers_that_the_dtype_cannot_hold_are_refused_by_name() -> None:
    register(dtype="int64")
    with naming(CodeError, "column mine", "int64", "train/1/0/0"):
        batch()


def test_a_tensor_with_a_gradient_is_taken_without_it() -> None:
    register(make=lambda trajectory, transcript: torch.ones(len(transcript), requires_grad=True))
    assert not batch().tokens["mine"].requires_grad


LOSSES = """
from agentrl.algorithms import TokenLoss, declare

@declare("values")
def by_values(columns, config): ...

@declare("numbers", "ref_logprobs")
def by_numbers(columns, config): ...
"""


def test_a_loss_that_declares_what_is_computed_for_estimators_alone_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "losses.py").write_text(LOSSES)
    mode = f"actor_rollout_ref.actor.policy_loss.loss_mode={tmp_path}/losses.py"
    says = r"by_values declares the column 'values' \(values of the critic\), .*adv_estimator=grpo does not: .*gae$"
    with pytest.raises(ConfigError, match=says):
        load(f"{mode}:by_values", "algorithm.adv_estimator=grpo")
    load(f"{mode}:by_values", "algorithm.adv_estimator=gae")
    for estimator in ("grpo", "gdpo"):
        with naming(ConfigError, "by_numbers", "column 'numbers'"):
            load(f"{mode}:by_numbers", f"algorithm.adv_estimator={estimator}")
